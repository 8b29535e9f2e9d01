"""Host kernels for every update rule, for optimizer objects, and with compact states."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zero_core
from cpu_adam import reference
from tests.support.host_optimizers import OPTIMIZERS
from zero_core import Engine, plugins
from zero_core.testing import Case, assert_same, batch, make_model, on_ranks, train
from zero_offload.rules import compact


def make_config(name: str, stage: int, dtype: str, **offload: Any) -> dict[str, Any]:
    optimizer = {"type": name, "params": OPTIMIZERS[name]}
    zero = {"offload_optimizer": {"device": "cpu", **offload}}
    return Case(stage, dtype, zero=zero, top={"optimizer": optimizer}).config()


def batches(rank: int, steps: range) -> list[dict[str, Any]]:
    return [batch(step, 0, rank) for step in steps]


def test_codes_are_those_of_the_kernels_definition() -> None:
    torch.manual_seed(0)
    numel = 128 * 500 + 37
    scale = torch.exp(2 * torch.randn(501)).repeat_interleave(128)[:numel]
    exp_avg = torch.randn(numel) * torch.exp(torch.randn(numel)) * scale
    exp_avg_sq = exp_avg.square()
    expected = reference.quantize_moments(exp_avg.numpy(), np.sqrt(exp_avg_sq.numpy()))
    found = (*compact.encode_exp_avg(exp_avg), *compact.encode_exp_avg_sq(exp_avg_sq))
    for one, other in zip((found[0], found[2], found[1], found[3]), expected, strict=True):
        assert torch.equal(one, torch.from_numpy(other))
    first, _, scales, _ = expected
    decoded = compact.decode_exp_avg(found[0], found[1])
    torch.testing.assert_close(
        decoded, torch.from_numpy(reference.dequantize_exp_avg(first, scales)), rtol=2e-7, atol=0
    )
    roots = torch.from_numpy(reference.dequantize_exp_avg_sq_root(expected[1], expected[3]))
    assert torch.equal(compact.decode_exp_avg_sq(found[2], found[3]), roots.square())
    param, remainder = compact.split_master(exp_avg)
    upper, lower = reference.split_master(exp_avg.numpy())
    assert torch.equal(param.view(torch.int16), torch.from_numpy(upper.view(np.int16)))
    assert torch.equal(remainder, torch.from_numpy(lower))


@pytest.mark.parametrize(
    ("optimizer", "offload", "match"),
    [
        ("SGD", {"state_dtype": "int8"}, "state_dtype = 'int8' is served for Adam and AdamW"),
        ("AdamW", {"state_dtype": "int4"}, r"offload_optimizer\.state_dtype"),
        ("AdamW", {"device": "none", "state_dtype": "int8"}, "state_dtype needs device 'cpu'"),
    ],
)
def test_state_dtypes_that_are_not_served_are_refused_by_key(optimizer, offload, match):
    with pytest.raises(zero_core.ConfigError, match=match):
        zero_core.build(make_model(), make_config(optimizer, 1, "fp32", **offload))


Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Subclass(torch.optim.AdamW):
    is_elementwise = True


class Declared(torch.optim.AdamW):
    is_elementwise = True
    has_host_kernel = True
    update_rule = "adam"


HOST = {"offload_optimizer": {"device": "cpu"}}
ADAMW = ("AdamW", {"lr": 1e-2, "weight_decay": 0.1})
TORCH = torch.optim
OBJECTS: dict[str, tuple[Make, tuple[str, dict[str, Any]]]] = {
    "AdamW": (partial(TORCH.AdamW, **ADAMW[1]), ADAMW),
    "fused AdamW": (partial(TORCH.AdamW, fused=True, **ADAMW[1]), ADAMW),
    "AdamW that says so": (partial(Declared, **ADAMW[1]), ADAMW),
    "Adam": (partial(TORCH.Adam, **ADAMW[1]), ("Adam", {"adam_w_mode": False, **ADAMW[1]})),
    **{
        name: (partial(kind, **options), (name, options))
        for name, kind, options in (
            ("Adagrad", TORCH.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.01}),
            ("SGD", TORCH.SGD, {"lr": 1e-2, "momentum": 0.9}),
            ("Lion", zero_core.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
        )
    },
}


def _build(stage: int, dtype: str, named: tuple[str, Any] = ADAMW, **kwargs: Any) -> Engine:
    optimizer = {"type": named[0], "params": named[1]}
    config = Case(stage, dtype, zero=HOST, top={"optimizer": optimizer}).config()
    return zero_core.build(kwargs.pop("model", None) or make_model(), config, **kwargs)


def _of_object(make: Make, stage: int, dtype: str, **kwargs: Any) -> Engine:
    model = make_model()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    return _build(stage, dtype, model=model, optimizer=optimizer, **kwargs)


def _kernels(engine: Engine) -> set[bool]:
    tier: Any = engine.sharded_state.tier
    return {part.tier.has_kernel for part in tier.report()}


def _values(engine: Engine, rank: int) -> Any:
    train(engine, batches(rank, range(2)))
    return engine.full_state_dict(dtype=torch.float32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp32"), (3, "bf16")])
@on_ranks(2)
def test_an_object_has_the_bits_of_the_same_optimizer_by_name(ranks, name, stage, dtype):
    make, named = OBJECTS[name]
    engine = _of_object(make, stage, dtype, process_group=ranks)
    other = _build(stage, dtype, named=named, process_group=ranks)
    assert _kernels(engine) == {True}
    assert_same(_values(engine, ranks.rank), _values(other, ranks.rank))
    for each in (engine, other):
        each.close()


@pytest.mark.parametrize(
    "make", [Subclass, partial(TORCH.AdamW, amsgrad=True)], ids=["a subclass", "amsgrad"]
)
def test_what_no_kernel_is_known_to_compute_is_torchs(make):
    assert _kernels(_of_object(make, 1, "fp32")) == {False}


def test_without_a_kernel_torch_computes_an_object_and_the_log_says_so(monkeypatch, caplog):
    monkeypatch.setattr(plugins, "has_part", lambda group, name: False)
    with caplog.at_level(logging.INFO, "zero_core"):
        engine = _of_object(TORCH.AdamW, 1, "fp32")
    assert _kernels(engine) == {False}
    assert "'cpu' with an object of AdamW: torch's own update runs on the host" in caplog.text
