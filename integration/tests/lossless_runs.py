"""Runs with keys that code messages without loss, beside the same runs without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import zero_core
from tests.scenarios import outcome
from zero_core.testing import (
    Case,
    SimulatedRanks,
    batch,
    late_device,
    make_model,
    simulate,
    train_unread,
)

WIDTH = 98
"""Of the model: its shards are long enough to be coded."""


def changes_no_bit(
    ranks: SimulatedRanks | None,
    name: str,
    dtype: str,
    stage: int,
    folder: Path,
    zero: Mapping[str, Any],
) -> None:
    """Compare losses, norms and values of a scenario with and without the keys of ``zero``."""
    options: dict[str, Any] = {"stage": stage, "width": WIDTH}
    plain = outcome(ranks, name, {}, dtype, folder / "plain", **options)
    ours = outcome(ranks, name, zero, dtype, folder / "lossless", **options)
    torch.testing.assert_close(ours, plain, rtol=0.0, atol=0.0, equal_nan=True)


def _train_unread(ranks: SimulatedRanks, case: Case) -> Any:
    engine = zero_core.build(make_model(WIDTH), case.config(), process_group=ranks)
    return train_unread(engine, ranks.rank, ranks.device, steps=3, accumulation=1)


def on_late_device(
    per_node: int, cases: Sequence[tuple[int, str, float]], zero: Mapping[str, Any], top: Any
) -> None:
    """Compare runs of four ranks on an accelerator made of threads.

    ``cases``: stage, dtype and clipping of each.
    """
    late_device.load()
    for stage, dtype, clipping in cases:
        late_device.set_delays(seed=stage, kernel_s=5e-5, copy_s=2e-3)
        plain, lossless = (
            simulate(
                _train_unread,
                4,
                Case(stage=stage, dtype=dtype, zero=keys, clipping=clipping, top=top, width=WIDTH),
                device="late",
                ranks_per_node=per_node,
            )
            for keys in ({}, zero)
        )
        for (losses, values), (exact_losses, exact_values) in zip(lossless, plain, strict=True):
            assert losses == exact_losses
            torch.testing.assert_close(values, exact_values, rtol=0.0, atol=0.0)


def _train_invariant(ranks: SimulatedRanks, zero: Mapping[str, Any]) -> Any:
    steps = 4 // ranks.size
    case = Case(dtype="bf16", zero=zero, accumulation=steps, clipping=0.5, width=WIDTH)
    config = {**case.config(), "world_size_invariant": True}
    engine = zero_core.build(make_model(WIDTH), config, process_group=ranks)
    losses = {}
    for step in range(3):
        for micro in range(steps):
            number = micro * ranks.size + ranks.rank
            losses[step, number] = (loss := engine(**batch(step, number, 0))["loss"]).item()
            engine.backward(loss)
            engine.step()
    return losses, engine.full_state_dict(dtype=torch.float32)


def keeps_the_bits_of_one_rank(zero: Mapping[str, Any]) -> None:
    """Compare an invariant run of four ranks on two nodes with that of one."""
    ((expected, values),) = simulate(_train_invariant, 1, {"stage": zero["stage"]})
    found = simulate(_train_invariant, 4, zero, ranks_per_node=2)
    assert dict(pair for losses, _ in found for pair in losses.items()) == expected
    for _, own in found:
        torch.testing.assert_close(own, values, rtol=0.0, atol=0.0)
