"""An Adam kernel's own optimizer class, as CPUAdam, in place of a torch class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels import ReferenceAdam, cpu_adam
from support.models import loop, make_model, weights
from support.tiers import BF16, FP32, RATIOS
from torch import nn, optim

from zero_offload import OffloadedOptimizer


class _Front(optim.Optimizer):
    """An optimizer over a kernel, with CPUAdam's settings."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adamw_mode: bool = True,
        state_dtype: str = "float32",
        master_dtype: str | None = None,
        num_threads: int | None = None,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        modes = {"bias_correction": bias_correction, "adamw_mode": adamw_mode}
        dtypes = {"state_dtype": state_dtype, "master_dtype": master_dtype}
        super().__init__(params, {**settings, **modes, **dtypes})


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ReferenceAdam:
    """The kernel that the class declares."""
    kernel = ReferenceAdam()
    monkeypatch.setattr(_Front, "host_kernel", kernel, raising=False)
    return kernel


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = model.parameters()
    return [{"params": [first], "weight_decay": 0.1}, {"params": rest, "adamw_mode": False}]


@pytest.mark.parametrize(("ratio", "dtype"), [(0.0, BF16), (0.3, FP32), (0.3, BF16), (1.0, BF16)])
@pytest.mark.parametrize(
    "settings", [{}, {"adamw_mode": False, "weight_decay": 0.1}, {"bias_correction": False}]
)
def test_cpu_adam_class_offloaded_equals_itself_bit_for_bit(
    dtype: torch.dtype, settings: dict[str, Any], ratio: float
) -> None:
    """Also with the state of the class itself, after two steps."""
    cls, plain, ours, late = cpu_adam().CPUAdam, *(make_model(dtype) for _ in range(3))
    source = cls(_groups(plain), lr=1e-2, **settings)
    optimizer = OffloadedOptimizer(cls, _groups(ours), lr=1e-2, ratio=ratio, **settings)
    target = OffloadedOptimizer(cls, _groups(late), lr=1e-3, ratio=ratio, **settings)
    first = range(2)
    assert loop(ours, optimizer, steps=first) == loop(plain, source, steps=first)
    late.load_state_dict(plain.state_dict())
    target.load_state_dict(source.state_dict())
    expected = loop(plain, source, steps=range(2, 4))
    for model, each in ((ours, optimizer), (late, target)):
        assert loop(model, each, steps=range(2, 4)) == expected
        assert torch.equal(weights(model), weights(plain))


@pytest.mark.parametrize("moments", ["int8", "bfloat16"])
def test_its_states_of_other_widths_are_not_misread(moments: str) -> None:
    cls, plain, ours = cpu_adam().CPUAdam, make_model(BF16), make_model(BF16)
    source = cls(plain.parameters(), lr=1e-2, state_dtype=moments)
    loop(plain, source, steps=range(2))
    target = OffloadedOptimizer(cls, ours.parameters(), lr=1e-3)
    with pytest.raises(ValueError, match=r"no (state|scalars).*(scale|remainder)"):
        target.load_state_dict(source.state_dict())


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_packages_own_kernel_does_the_update(package: ReferenceAdam, ratio: float) -> None:
    plain, ours = make_model(), make_model()
    loop(plain, OffloadedOptimizer(optim.AdamW, plain.parameters(), adam_kernel=ReferenceAdam()))
    # torch's AdamW has another default weight decay
    optimizer = OffloadedOptimizer(_Front, ours.parameters(), weight_decay=1e-2, ratio=ratio)
    loop(ours, optimizer)
    assert torch.equal(weights(ours), weights(plain))
    assert package.calls
    assert set(optimizer.param_groups[0]) >= {"adamw_mode", "bias_correction", "state_dtype"}


def test_a_kernel_that_is_passed_wins(package: ReferenceAdam) -> None:
    model, other = make_model(), ReferenceAdam()
    loop(model, OffloadedOptimizer(_Front, model.parameters(), adam_kernel=other))
    assert other.calls
    assert not package.calls


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"state_dtype": "int8"}, "state_dtype = 'int8'"),
        ({"master_dtype": "split"}, "master_dtype = 'split'"),
        ({"num_threads": 3}, "num_threads = 3"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused_by_name(
    package: ReferenceAdam, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        OffloadedOptimizer(_Front, make_model().parameters(), **settings)


def test_what_only_the_host_computes_is_refused_on_an_accelerator(package: ReferenceAdam) -> None:
    params = [nn.Parameter(torch.ones(4, device="meta"))]
    with pytest.raises(ValueError, match="bias_correction = False"):
        OffloadedOptimizer(_Front, params, ratio=0.5, bias_correction=False)


def test_parameters_that_the_kernel_has_no_update_for_are_refused(package: ReferenceAdam) -> None:
    with pytest.raises(ValueError, match="not float64"):
        OffloadedOptimizer(_Front, make_model(torch.float64).parameters())


def test_a_class_that_declares_no_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="_Front cannot be offloaded"):
        OffloadedOptimizer(_Front, make_model().parameters())
