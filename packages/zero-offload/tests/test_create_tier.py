"""Configurations, optimizers and kernels that `create_tier` accepts or refuses."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels import ReferenceAdam, ReferenceKernel
from support.tiers import (
    ADAM,
    CPU,
    Space,
    group_of,
    make_tier,
    offer,
    snapshot,
    train,
    workers,
)
from torch import Tensor, nn, optim

from zero_offload import ELEMENTWISE, OffloadedOptimizer
from zero_offload.protocols import StateTier
from zero_offload.rules.resolve import GROUP, resolve_kernel
from zero_offload.settings import OffloadSettings
from zero_offload.tier import make_device_tier

FILES = {"device": "nvme"}


def _block(**keys: Any) -> OffloadSettings:
    return OffloadSettings.from_config({"offload_optimizer": keys})


def test_deepspeeds_block_is_read() -> None:
    ignored = {"buffer_count": 4, "pipeline_read": False, "pipeline_write": False}
    block = {"ratio": 0.4, "pin_memory": False, "nvme_path": None, "fast_init": False, **ignored}
    assert _block(device="cpu", **block) == OffloadSettings(ratio=0.4, pin_memory=False)
    keys = {"buffer_count": 5, "fast_init": True, "pipeline_read": True}
    settings = _block(device="nvme", nvme_path="/local_nvme", **keys)
    assert (settings.nvme_path, settings.buffer_count) == ("/local_nvme", 5)
    for config in ({}, {"offload_optimizer": None}, {"offload_optimizer": {"device": "none"}}):
        assert OffloadSettings.from_config(config) == OffloadSettings(ratio=1.0, pin_memory=True)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"device": "cuda"}, r"offload_optimizer\.device"),
        ({"ratio": 1.5}, r"offload_optimizer\.ratio"),
        ({"ratio": -0.1}, r"offload_optimizer\.ratio"),
        ({"ratio": float("nan")}, r"offload_optimizer\.ratio"),
        ({"ratio": "some"}, r"offload_optimizer\.ratio"),
        ({"parameters": ["*"]}, r"offload_optimizer\.ratio and offload_optimizer\.parameters"),
        ({"device_budget": 1}, r"offload_optimizer\.ratio and offload_optimizer\.device_budget"),
        ({"ratio": None, "parameters": "*"}, r"offload_optimizer\.parameters must be a list"),
        ({"ratio": None, "parameters": []}, r"offload_optimizer\.parameters must be a list"),
        ({"ratio": None, "parameters": ["*"]}, "of 5 parameters are named"),
        ({"ratio": None, "device_budget": -1}, r"offload_optimizer\.device_budget"),
        ({"ratio": None, "device_budget": True}, r"offload_optimizer\.device_budget"),
        ({"ratio": None, "device_budget": "1GB"}, r"offload_optimizer\.device_budget"),
        ({"ratio": True}, r"offload_optimizer\.ratio"),
        ({"pin_memory": 1}, r"offload_optimizer\.pin_memory"),
        ({"state_dtype": "int4"}, r"offload_optimizer\.state_dtype"),
        ({"state_dtype": "int8"}, r"offload_optimizer\.state_dtype.*not SGD"),
        ({**FILES}, r"needs offload_optimizer\.nvme_path"),
        ({**FILES, "nvme_path": ""}, r"needs offload_optimizer\.nvme_path"),
        ({**FILES, "nvme_path": "/no/such/folder"}, "'/no/such/folder' does not exist"),
        ({**FILES, "nvme_path": "/tmp", "buffer_count": 0}, r"offload_optimizer\.buffer_count"),
        ({**FILES, "nvme_path": "/tmp", "buffer_count": True}, r"offload_optimizer\.buffer_count"),
    ],
)
def test_settings_that_are_not_served_are_refused_by_name(keys: dict[str, Any], match: str) -> None:
    kernel = ReferenceKernel() if "device" in keys else None
    with pytest.raises(ValueError, match=match):
        make_tier(
            Space(), optim.SGD, [group_of(optim.SGD)], kernel=kernel, **{"ratio": 1.0, **keys}
        )


@pytest.mark.parametrize(
    "cls", [optim.LBFGS, optim.SparseAdam, optim.Adafactor, optim.Muon, optim.Optimizer]
)
def test_optimizers_that_are_not_elementwise_are_refused_by_name(cls: Any) -> None:
    with pytest.raises(ValueError, match=f"{cls.__name__} cannot be offloaded"):
        make_tier(Space(), cls, [{"lr": 0.1}])
    with pytest.raises(ValueError, match="cannot be offloaded"):
        make_device_tier(
            numel=0, pieces=[], params=[], device=CPU, optimizer_class=cls, groups=[{"lr": 0.1}]
        )


def test_every_torch_optimizer_is_known_to_be_one_or_the_other() -> None:
    """A new torch optimizer fails this test until it is added to one of the two sets."""
    found = {
        cls
        for cls in vars(optim).values()
        if inspect.isclass(cls) and issubclass(cls, optim.Optimizer)
    }
    others = {optim.Optimizer, optim.LBFGS, optim.SparseAdam, optim.Adafactor}
    others |= {getattr(optim, "Muon", optim.Optimizer)}
    assert found == ELEMENTWISE | others


class _Tuned(optim.SGD):
    """Subclass without ``is_elementwise``, whose update may not be elementwise."""


class _Vouched(optim.SGD):
    is_elementwise = True


class _Liar(optim.Optimizer):
    """Optimizer that claims to be elementwise but keeps a state of row means."""

    is_elementwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["row"] = torch.zeros(3)


def test_a_class_of_ones_own_vouches_for_itself() -> None:
    make_tier(Space(), _Vouched, [group_of(_Vouched)])
    with pytest.raises(ValueError, match="is_elementwise = True"):
        make_tier(Space(), _Tuned, [group_of(_Tuned)])
    with pytest.raises(ValueError, match="not elementwise"):
        make_tier(Space(), _Liar, [{"lr": 0.1}])
    with pytest.raises(ValueError, match="not RMSprop"):  # no kernel has RMSprop
        make_tier(Space(), optim.RMSprop, [group_of(optim.RMSprop)], kernel=ReferenceAdam())


def test_kernels_are_found_by_name_object_or_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("tested", "support.kernels:ReferenceAdam", GROUP)
    broken = importlib.metadata.EntryPoint("zzz_broken", "no_such_module:kernel", GROUP)
    installed = [importlib.metadata.EntryPoints([broken, entry])]
    monkeypatch.setattr(
        "zero_offload.rules.resolve.entry_points", lambda **wanted: installed[0].select(**wanted)
    )
    kernel = ReferenceAdam()
    assert resolve_kernel(kernel, optim.Adam) is kernel
    assert resolve_kernel(None, optim.Adam) is None
    expected: object = ReferenceAdam
    assert resolve_kernel("tested", optim.AdamW) is expected
    assert resolve_kernel("auto", optim.AdamW) is expected  # does not load the broken one
    assert resolve_kernel("auto", optim.SGD) is expected
    assert resolve_kernel("auto", optim.RMSprop) is None
    with pytest.raises(ValueError, match="'other' is installed"):
        resolve_kernel("other", optim.Adam)
    with pytest.raises(ValueError, match="needs a function adam_step"):
        resolve_kernel(object(), optim.Adam)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not RMSprop"):
        resolve_kernel("tested", optim.RMSprop)
    installed[0] = importlib.metadata.EntryPoints([])
    assert resolve_kernel("auto", optim.Adam) is None


def _empty(params: list[tuple[int, Tensor]], numel: int = 0, pieces: Any = ()) -> Space:
    space = Space()
    space.numel, space.pieces, space.params = numel, list(pieces), params
    space.initial = torch.zeros(numel)
    return space


@pytest.mark.parametrize("params", [[], [(0, torch.zeros(0))]])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_ranks_without_elements_have_a_tier_too(
    ratio: float, params: list[tuple[int, Tensor]]
) -> None:
    tier = make_tier(_empty(params), ratio=ratio)
    tier.step(ADAM, [], grad_scale=1.0)
    tier.wait_params(0, 0)
    assert tier.state_names()[0] == "master_weight"
    assert tier.read_state("master_weight", 0, 0).numel() == 0
    assert isinstance(tier, StateTier)


@pytest.mark.parametrize(
    ("pieces", "params", "match"),
    [
        ([(0, 4, 0), (3, 6, 0)], [(0, torch.zeros(8))], r"pieces\[1\].*overlaps"),
        ([(2, 2, 0)], [(0, torch.zeros(8))], r"pieces\[0\].*empty"),
        ([(0, 4, 1)], [(0, torch.zeros(8))], r"names group 1"),
        ([(2, 6, 0)], [(0, torch.zeros(4)), (4, torch.zeros(4))], "inside one tensor"),
        ([], [(0, torch.zeros(4)), (3, torch.zeros(4))], r"params\[1\].*overlaps"),
        ([], [(0, torch.zeros(9))], "leaves the flat space"),
        ([], [(0, torch.zeros(2, 2))], "1-D"),
        ([], [(0, torch.zeros(2, dtype=torch.int8))], "floating point"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(
    pieces: list[tuple[int, int, int]], params: list[tuple[int, Tensor]], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        make_tier(_empty(params, 8, pieces))


def test_no_thread_is_started_before_the_first_step() -> None:
    before = workers()
    optimizer = OffloadedOptimizer(optim.SGD, [weight := nn.Parameter(torch.ones(2))], lr=0.1)
    assert workers() == before
    weight.grad = torch.ones(2)
    optimizer.step()
    assert len(workers() - before) == 1


@pytest.mark.filterwarnings("ignore:.*(fork|direct I/O)")
@pytest.mark.parametrize("use", ["step", "square_sum", "read_state"])
def test_a_use_in_a_process_forked_after_the_first_is_refused(use: str, tmp_path: Path) -> None:
    space, place = Space(), {"device": "nvme", "nvme_path": str(tmp_path)}
    place = place if use == "read_state" else {}
    tier = make_tier(space, kernel=ReferenceAdam(), micro_steps=1, **place)
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: train(tier, space, steps=range(1)),
        "square_sum": lambda: tier.square_sum(0, space.numel)(),
        "read_state": lambda: snapshot(tier, space),
    }
    offer(tier, space, 0)
    calls[use]()
    if not (child := os.fork()):
        signal.alarm(30)  # ends a process that hangs
        try:
            calls[use]()
        except RuntimeError as error:
            os._exit(7 if "was forked" in str(error) else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
def test_float64_parameters_beside_others_are_refused_by_dtype(other: torch.dtype) -> None:
    space = Space()
    (first, values), (second, rest) = space.params
    space.params = [(first, values.double()), (second, rest.to(other))]
    with pytest.raises(ValueError, match=rf"torch\.float64 parameters beside \['{other}'\]"):
        make_tier(space, optim.AdamW, [group_of(optim.AdamW)])
