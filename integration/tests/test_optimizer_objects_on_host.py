"""An optimizer object whose state is offloaded is computed by the same kernel as one named."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zero_core
from zero_core import Engine, plugins
from zero_core.testing import LR, Case, batch, make_model, on_ranks
from zero_core.testing.training import assert_same

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Subclass(torch.optim.AdamW):
    """May update otherwise than its base, for all that the engine knows."""

    is_elementwise = True


class Declared(torch.optim.AdamW):
    """Says that a kernel computes it, and which."""

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
    """Return whether a kernel computes the update of each part, and not torch."""
    tier: Any = engine.sharded_state.tier
    return {part.tier.has_kernel for part in tier.report()}


def _values(engine: Engine, rank: int, counts: tuple[int, ...] = (1, 1, 1)) -> Any:
    for step, count in enumerate(counts):
        for micro in range(count):
            engine.set_gradient_accumulation_boundary(micro == count - 1)
            engine.backward(engine(**batch(step, micro, rank))["loss"], over=count)
            engine.step()
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
    "make",
    [Subclass, partial(TORCH.AdamW, amsgrad=True)],
    ids=["a subclass", "amsgrad"],
)
def test_what_no_kernel_is_known_to_compute_is_torchs(make):
    assert _kernels(_of_object(make, 1, "fp32")) == {False}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@on_ranks(2)
def test_declared_micro_steps_add_up_where_none_are_configured(ranks, dtype):
    """The tier keeps gradients, and the loop declares boundaries."""
    counts = (3, 1, 2)

    def values(case: Case) -> Any:
        return _values(
            zero_core.build(make_model(), case.config(), process_group=ranks), ranks.rank, counts
        )

    expected = values(Case(2, dtype, accumulation=3, zero=HOST))
    found = values(Case(2, dtype, zero=HOST))
    if dtype == "fp32":
        assert_same(found, expected)
    else:
        # Configured micro-steps are rounded one by one, declared ones once they are added.
        gaps = [(found[name] - value).abs().mean() for name, value in expected.items()]
        assert max(gaps) < LR / 50
    engine = _build(3, dtype, process_group=ranks)
    assert_same(_values(engine, ranks.rank, counts), found)
    before = engine.memory_report()
    _values(engine, ranks.rank, counts)
    assert engine.memory_report() == before  # no buffer is lost


def test_without_a_kernel_torch_computes_an_object_and_the_log_says_so(monkeypatch, caplog):
    monkeypatch.setattr(plugins, "has_part", lambda group, name: False)
    with caplog.at_level(logging.INFO, "zero_core"):
        engine = _of_object(TORCH.AdamW, 1, "fp32")
    assert _kernels(engine) == {False}
    assert "'cpu' with an object of AdamW: torch's own update runs on the host" in caplog.text
