"""Weights that travel as lossless differences change no bit, whatever a run does.

The oracle is the engine without them, which zero-core's tests hold against DDP. Ranks are simulated
and fall behind at random; four are two nodes of two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.lossless_runs import WIDTH, changes_no_bit, keeps_the_bits_of_one_rank, on_late_device
from tests.scenarios import OTHER_WEIGHTS, SCENARIOS, build, micro_step
from zero_core.testing import (
    SimulatedRanks,
    make_model,
    run_alone,
    simulate,
    spawn,
)

LOSSLESS = {"zero_lossless_weights": True}
STAGES = (1, 2, 3)


CASES = [
    (name, ("bf16", "fp16", "fp32")[(number + stage) % 3], stage)
    for number, name in enumerate(SCENARIOS)
    for stage in (1, 3)  # stage 2 publishes as 1 does
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "dtype", "stage"), CASES)
def test_lossless_weights_change_no_bit_when_a_run(
    name: str, dtype: str, stage: int, tmp_path: Path
) -> None:
    weights = {n: 0.5 * p.detach() for n, p in make_model(WIDTH).named_parameters()}
    save_file(weights, tmp_path / OTHER_WEIGHTS)
    simulate(changes_no_bit, 4, name, dtype, stage, tmp_path, LOSSLESS, ranks_per_node=2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("ranks", "per_node"), [(2, 1), (3, 1)])
@pytest.mark.parametrize("stage", STAGES)
def test_lossless_weights_change_no_bit_on_nodes(
    ranks: int, per_node: int, stage: int, tmp_path: Path
) -> None:
    arguments = ("trains", "bf16", stage, tmp_path, LOSSLESS)
    simulate(changes_no_bit, ranks, *arguments, ranks_per_node=per_node)


def test_lossless_weights_with_secondary_shards_change_no_bit(tmp_path: Path) -> None:
    zero = {**LOSSLESS, "zero_hpz_partition_size": 2}
    simulate(changes_no_bit, 4, "trains", "bf16", 3, tmp_path, zero, ranks_per_node=2)


def _on_processes(rank: int, world_size: int, folder: str) -> None:
    for stage in STAGES:
        changes_no_bit(None, "trains", "bf16", stage, Path(folder), LOSSLESS)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [1, 2])
def test_lossless_weights_change_no_bit_on_a_late_device(per_node: int) -> None:
    cases = [(stage, "bf16", 0.0) for stage in STAGES]
    top = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
    run_alone(on_late_device, per_node, cases, LOSSLESS, top)


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
    keeps_the_bits_of_one_rank(zero)
