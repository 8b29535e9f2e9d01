"""Gradients with an offloaded optimizer: accumulation in the tier, reads, clipping and dropping.

The reference rounds each micro-step's reduced gradient to ``rounded`` and sums in fp32.
"""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import cpu_adam
import zero_core
from zero_core import Engine
from zero_core.testing import (
    LR,
    WEIGHT_DECAY,
    Case,
    SimulatedRanks,
    batch,
    make_model,
    make_tower,
    on_ranks,
    rows,
    simulate,
    train,
)

WIDTH, STEPS = 13, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _batch(step: int, micro_step: int, rank: int, dtype: torch.dtype) -> Tensor:
    return rows(10 * step + micro_step, rank, WIDTH).to(dtype) * 4.0 ** (micro_step % 3)


def _config(
    stage: int, dtype: str, accumulation: int, ratio: float, clipping: float = 0.0, **top: Any
) -> dict[str, Any]:
    zero = {"offload_optimizer": {"device": "cpu", "ratio": ratio}}
    return Case(stage, dtype, accumulation, clipping, zero=zero, top=top).config()


def _build(config: dict[str, Any], ranks: SimulatedRanks) -> Engine:
    return zero_core.build(make_tower(3, WIDTH), config, process_group=ranks)


def _reference(
    dtype: torch.dtype, accumulation: int, clipping: float, world_size: int, *, rounded: torch.dtype
) -> tuple[dict[str, Tensor], list[float]]:
    """Return the final master weights and the norm of each step, computed without an engine."""
    model = make_tower(3, WIDTH)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    states = {name: (torch.zeros_like(m), torch.zeros_like(m)) for name, m in masters.items()}
    model.to(dtype)
    norms = []
    for step in range(STEPS):
        sums: dict[str, Tensor] = {}
        for micro_step in range(accumulation):
            reduced = {name: torch.zeros_like(m) for name, m in masters.items()}
            for rank in range(world_size):
                model.zero_grad()
                (model(_batch(step, micro_step, rank, dtype)) / accumulation).backward()
                for name, param in model.named_parameters():
                    assert param.grad is not None
                    reduced[name] += (param.grad * (1.0 / world_size)).float()
            for name, grad in reduced.items():
                term = grad.to(rounded).float()
                sums[name] = sums[name] + term if name in sums else term
        norms.append(math.sqrt(sum(s.double().square().sum().item() for s in sums.values())))
        scale = min(1.0, clipping / (norms[-1] + 1e-6)) if clipping else 1.0
        for name, param in model.named_parameters():
            cpu_adam.adam_step(
                masters[name],
                sums[name],
                *states[name],
                step=step + 1,
                lr=LR,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                weight_decay=WEIGHT_DECAY,
                grad_scale=scale,
                out=param.detach(),
            )
    return masters, norms


def _micro_steps(engine: Engine, step: int, count: int, rank: int, dtype: torch.dtype) -> None:
    for micro_step in range(count):
        engine.backward(engine(_batch(step, micro_step, rank, dtype)))
        if micro_step + 1 < count:
            engine.step()


def _train(
    ranks: SimulatedRanks, config: dict[str, Any], dtype: torch.dtype
) -> tuple[Engine, list[float]]:
    engine = _build(config, ranks)
    norms = []
    for step in range(STEPS):
        _micro_steps(engine, step, engine.gradient_accumulation_steps, ranks.rank, dtype)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return engine, norms


@pytest.mark.parametrize(
    ("world_size", "dtype", "accumulation", "clipping", "summed"),
    [
        (1, "bf16", 5, 0.1, None),
        *((2, dtype, *how, None) for dtype in ("bf16", "fp32") for how in ((2, 0.0), (5, 0.1))),
        (2, "bf16", 4, 0.0, "fp32"),  # fp32 sums get unrounded gradients
    ],
)
@on_ranks()
def test_every_stage_and_ratio_has_the_bits_of_plain_torch(
    ranks: SimulatedRanks, dtype: str, accumulation: int, clipping: float, summed: str | None
) -> None:
    expected, expected_norms = _reference(
        DTYPES[dtype], accumulation, clipping, ranks.size, rounded=DTYPES[summed or dtype]
    )
    for stage, ratio in ((0, 1.0), (1, 1.0 if summed else 0.0), (2, 0.4), (3, 1.0)):
        top = {"data_types": {"grad_accum_dtype": summed}} if summed else {}
        config = _config(stage, dtype, accumulation, ratio, clipping, **top)
        engine, norms = _train(ranks, config, DTYPES[dtype])
        found = engine.full_state_dict(dtype=torch.float32)
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
        assert norms == pytest.approx(expected_norms, rel=1e-6), (stage, ratio)


@pytest.mark.parametrize(
    ("stage", "ratio", "name"),
    [(2, 0.4, "first.weight"), (3, 1.0, "blocks.1.0.weight")],  # shards on both ranks, and on one
)
@on_ranks(2)
def test_gradients_are_read_clipped_and_dropped(ranks, stage, ratio, name):
    config = _config(stage, "fp32", 4, ratio, check_grad_overflow=True)
    engine, fresh, plain = _build(config, ranks), _build(config, ranks), make_tower(3, WIDTH)
    for micro_step, rank in itertools.product(range(4), range(ranks.size)):
        (plain(_batch(0, micro_step, rank, torch.float32)) / 4 / ranks.size).backward()
    _micro_steps(engine, 0, 4, ranks.rank, torch.float32)
    grads = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    torch.testing.assert_close(engine.states.get_full(name, "grad"), grads[name])
    largest = max(g.abs().max().item() for g in grads.values())
    assert float(engine.clip_grad_norm_(1e-3, math.inf)) == pytest.approx(largest, rel=1e-5)
    engine.optimizer.zero_grad()
    engine.step()
    for each in (engine, fresh):
        _micro_steps(each, 1, 4, ranks.rank, torch.float32)
    for key in (name, "blocks.1.0.weight", "head.bias"):
        found, expected = (each.states.get_full(key, "grad") for each in (engine, fresh))
        assert torch.equal(found, expected), key


def _in_order_of_micro_batches(
    ranks: SimulatedRanks, stage: int, ratio: float
) -> tuple[dict[str, Tensor], list[float | None]]:
    top = {"train_batch_size": 8, "world_size_invariant": True}
    config = _config(stage, "bf16", 4 // ranks.size, ratio, 0.1, **top)
    engine = _build(config, ranks)
    norms = []
    for step in range(STEPS):
        micros = range(ranks.rank, 4, ranks.size)
        train(engine, [_batch(step, micro, 0, torch.bfloat16) for micro in micros])
        norms.append(engine.get_global_grad_norm())
    return engine.full_state_dict(dtype=torch.float32), norms


def test_the_bits_are_those_of_one_rank_when_asked() -> None:
    values, norms = simulate(_in_order_of_micro_batches, 1, 1, 1.0)[0]
    for world_size, stage, ratio in ((2, 2, 0.4), (4, 3, 1.0), (4, 0, 0.4)):
        for found in simulate(_in_order_of_micro_batches, world_size, stage, ratio):
            assert found[1] == norms
            assert all(torch.equal(found[0][name], value) for name, value in values.items())


def test_a_gradient_that_an_update_in_backward_has_used_is_told_as_missing(caplog):
    case = Case(
        zero={"offload_optimizer": {"device": "cpu", "update_in_backward": True}},
        top={"check_grad_overflow": False},
    )
    engine = zero_core.build(make_model(), case.config())
    engine.backward(engine(**batch(0, 0, 0))["loss"])
    with caplog.at_level(logging.WARNING):
        assert all(p.grad is None for p in engine.module.parameters())
    (record,) = (r for r in caplog.records if "param.grad" in r.message)
    assert "update_in_backward to false" in record.message
    param = next(p for p in engine.module.parameters() if p.requires_grad)
    with pytest.raises(RuntimeError, match="is not kept where units are updated"):
        param.grad = torch.ones_like(param)
