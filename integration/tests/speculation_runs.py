"""Trainings whose units are updated in backward with an undo log, beside late ones.

The oracle is the late update, which waits for the decision: not a bit may differ, of parameters,
master weights, states and scalars.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import zero_core
from tests.host_optimizers import OPTIMIZERS
from zero_core.testing import SimulatedRanks, batch, make_model

SPOILT = 2
OUTLIER = 256.0


@dataclass(frozen=True)
class Run:
    """One training, by both schedules."""

    stage: int = 3
    dtype: str = "fp32"
    optimizer: str = "AdamW"
    clipping: float = 0.0
    accumulation: int = 1
    num_backwards: int = 1
    spoilt_rank: int | None = None
    """A rank whose loss is NaN in step `SPOILT`."""
    offload: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    outliers: int = 0
    """Every so many steps the loss is `OUTLIER` times as large; 0 is never."""
    pace: int = 2
    """Every so many steps the host has begun all that it can before the decision."""

    def config(self, *, is_early: bool) -> dict[str, Any]:
        offload = {"device": "cpu", "update_in_backward": is_early, **self.offload}
        if not is_early:
            offload.pop("undo_buffer_size", None)
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "bf16": {"enabled": self.dtype == "bf16"},
            "fp16": {"enabled": self.dtype == "fp16", "hysteresis": 1, "initial_scale_power": 20},
            "optimizer": {"type": self.optimizer, "params": OPTIMIZERS[self.optimizer]},
            "zero_optimization": {"stage": self.stage, "offload_optimizer": offload, **self.zero},
            **self.top,
        }


@dataclass
class Result:
    """What a training gave on one rank, and how many elements its log kept and undid."""

    losses: list[float]
    norms: list[float]
    states: dict[str, Tensor]
    scalars: list[dict[str, float]]
    num_skipped: int
    num_kept: int
    num_undone: int


def states_of(engine: zero_core.Engine) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Return all that this rank has: states, the shards' values, and scalars."""
    tier: Any = engine.sharded_state.tier
    numel, count = tier.geometry.numel, len(tier.geometry.pieces)
    found = {name: tier.read_state(name, 0, numel) for name in tier.state_names()}
    for flat in engine.sharded_state.params:
        found[f"shard {flat.segment.index}"] = flat.read_shard().cpu().clone()
    return found, [dict(tier.read_scalars(i)) for i in range(count)]


def one_step(engine: zero_core.Engine, run: Run, step: int, rank: int) -> float:
    loss = torch.zeros(())
    for micro in range(run.accumulation):
        for _ in range(run.num_backwards):
            loss = engine(**batch(step, micro, rank))["loss"] / run.num_backwards
            if step == SPOILT and rank == run.spoilt_rank:
                loss = loss * float("nan")
            if run.outliers and step % run.outliers == 0:
                loss = loss * OUTLIER
            engine.backward(loss)
        if step % run.pace == 0:
            drain(engine)
        engine.step()
    return loss.item()


def drain(engine: zero_core.Engine) -> None:
    """Wait until the host has begun what it can."""
    tier: Any = engine.sharded_state.tier
    for part in tier.parts:
        part.drain()


def train(run: Run, ranks: SimulatedRanks, steps: int, *, is_early: bool) -> Result:
    config = run.config(is_early=is_early)
    engine = zero_core.build(make_model(), config, process_group=ranks)
    losses, norms = [], []
    for step in range(steps):
        losses.append(one_step(engine, run, step, ranks.rank))
        norms.append(engine.get_global_grad_norm() or 0.0)
    states, scalars = states_of(engine)
    tier: Any = engine.sharded_state.tier
    reports = [part.tier for part in tier.report() if part.is_host]
    result = Result(
        losses,
        norms,
        states,
        scalars,
        engine.skipped_steps,
        sum(report.num_kept for report in reports),
        sum(report.num_undone for report in reports),
    )
    engine.close()
    return result


def assert_same(found: Result, expected: Result, what: object) -> None:
    assert same_numbers(found.losses, expected.losses), what
    assert same_numbers(found.norms, expected.norms), what
    assert found.scalars == expected.scalars, what
    assert found.num_skipped == expected.num_skipped, what
    assert found.states.keys() == expected.states.keys(), what
    for name, value in expected.states.items():
        assert torch.equal(bits(found.states[name]), bits(value)), (what, name)


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def same_numbers(one: list[float], other: list[float]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def both(run: Run, ranks: SimulatedRanks, steps: int) -> Result:
    """Return the early one, after comparison."""
    expected = train(run, ranks, steps, is_early=False)
    found = train(run, ranks, steps, is_early=True)
    assert expected.num_kept == expected.num_undone == 0
    assert_same(found, expected, run)
    return found
