"""Weights that travel as lossless differences change no bit, whatever a run does.

The oracle is the engine without them, which zero-core's tests hold against DDP. Ranks are simulated
and fall behind at random; four are two nodes of two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import zero_core
from tests.scenarios import OTHER_WEIGHTS, SCENARIOS, build, micro_step, outcome
from zero_core.testing import (
    Case,
    SimulatedRanks,
    batch,
    late_device,
    make_model,
    run_alone,
    simulate,
    spawn,
    train_unread,
)

LOSSLESS = {"zero_lossless_weights": True}
WIDTH = 98
"""Of the model: its shards are long enough for differences."""
STAGES = (1, 2, 3)


def _changes_no_bit(
    ranks: SimulatedRanks | None,
    name: str,
    dtype: str,
    stage: int,
    folder: Path,
    zero: dict[str, Any],
) -> None:
    options: dict[str, Any] = {"stage": stage, "width": WIDTH}
    plain = outcome(ranks, name, {}, dtype, folder / "plain", **options)
    ours = outcome(ranks, name, {**LOSSLESS, **zero}, dtype, folder / "lossless", **options)
    torch.testing.assert_close(ours, plain, rtol=0.0, atol=0.0, equal_nan=True)


CASES = [
    (name, ("bf16", "fp16", "fp32")[(number + stage) % 3], stage)
    for number, name in enumerate(SCENARIOS)
    for stage in (1, 3)  # stage 2 publishes as 1 does
]


@pytest.mark.parametrize(("name", "dtype", "stage"), CASES)
def test_lossless_weights_change_no_bit_when_a_run(
    name: str, dtype: str, stage: int, tmp_path: Path
) -> None:
    weights = {n: 0.5 * p.detach() for n, p in make_model(WIDTH).named_parameters()}
    save_file(weights, tmp_path / OTHER_WEIGHTS)
    simulate(_changes_no_bit, 4, name, dtype, stage, tmp_path, {}, ranks_per_node=2)


@pytest.mark.parametrize(("ranks", "per_node"), [(2, 1), (3, 1)])
@pytest.mark.parametrize("stage", STAGES)
def test_lossless_weights_change_no_bit_on_nodes(
    ranks: int, per_node: int, stage: int, tmp_path: Path
) -> None:
    arguments = ("trains", "bf16", stage, tmp_path, {})
    simulate(_changes_no_bit, ranks, *arguments, ranks_per_node=per_node)


def test_lossless_weights_with_secondary_shards_change_no_bit(tmp_path: Path) -> None:
    zero = {"zero_hpz_partition_size": 2}
    simulate(_changes_no_bit, 4, "trains", "bf16", 3, tmp_path, zero, ranks_per_node=2)


def _on_processes(rank: int, world_size: int, folder: str) -> None:
    for stage in STAGES:
        _changes_no_bit(None, "trains", "bf16", stage, Path(folder), {})


def test_lossless_weights_change_no_bit_on_processes(tmp_path: Path) -> None:
    spawn(_on_processes, 4, str(tmp_path), ranks_per_node=2)


def _sends_less(ranks: SimulatedRanks, stage: int) -> None:
    sent = {}
    for name, zero in (("plain", {}), ("lossless", LOSSLESS)):
        optimizer = {"type": "AdamW", "params": {"lr": 1e-5}}
        engine = build(ranks, "bf16", zero, stage=stage, width=WIDTH, optimizer=optimizer)
        for step in range(4):
            micro_step(engine, step)
        rows = [row for row in engine.comm_report() if row.content == "parameters"]
        sent[name] = sum(row.between_nodes_bytes for row in rows)
        assert ("published weights" in engine.memory_report()) == (name == "lossless" and stage < 3)
        engine.close()
    assert sent["lossless"] < sent["plain"] / 3


@pytest.mark.parametrize("stage", STAGES)
def test_lossless_weights_send_less_between_nodes(stage: int) -> None:
    simulate(_sends_less, 4, stage, ranks_per_node=2)


def _train_unread(ranks: SimulatedRanks, stage: int, zero: dict[str, Any]) -> Any:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-5}}
    case = Case(stage=stage, dtype="bf16", zero=zero, top={"optimizer": optimizer}, width=WIDTH)
    engine = zero_core.build(make_model(WIDTH), case.config(), process_group=ranks)
    return train_unread(engine, ranks.rank, ranks.device, steps=3, accumulation=1)


def _on_late_device(per_node: int) -> None:
    late_device.load()
    for stage in STAGES:
        late_device.set_delays(seed=stage, kernel_s=5e-5, copy_s=2e-3)
        plain, lossless = (
            simulate(_train_unread, 4, stage, zero, device="late", ranks_per_node=per_node)
            for zero in ({}, LOSSLESS)
        )
        for (losses, values), (exact_losses, exact_values) in zip(lossless, plain, strict=True):
            assert losses == exact_losses
            torch.testing.assert_close(values, exact_values, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("per_node", [1, 2])
def test_lossless_weights_change_no_bit_on_a_late_device(per_node: int) -> None:
    run_alone(_on_late_device, per_node)


def _train_invariant(ranks: SimulatedRanks, zero: dict[str, Any]) -> Any:
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


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 1, **LOSSLESS},
        {"stage": 3, **LOSSLESS},
        {"stage": 3, "zero_hpz_partition_size": 2},
        {"stage": 3, **LOSSLESS, "zero_hpz_partition_size": 2},
    ],
    ids=str,
)
def test_exact_gathers_keep_the_bits_of_one_rank(zero: dict[str, Any]) -> None:
    ((expected, values),) = simulate(_train_invariant, 1, {"stage": zero["stage"]})
    found = simulate(_train_invariant, 4, zero, ranks_per_node=2)
    assert dict(pair for losses, _ in found for pair in losses.items()) == expected
    for _, own in found:
        torch.testing.assert_close(own, values, rtol=0.0, atol=0.0)
