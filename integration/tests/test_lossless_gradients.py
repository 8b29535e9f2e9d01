"""Gradients that are coded without loss between nodes change no bit, whatever a run does.

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
from tests.lossless_runs import WIDTH, changes_no_bit, keeps_the_bits_of_one_rank, on_late_device
from tests.scenarios import OTHER_WEIGHTS, SCENARIOS, build, micro_step
from zero_comm.values.message import GradientMessages
from zero_core.testing import (
    Case,
    SimulatedRanks,
    make_model,
    run_alone,
    simulate,
    spawn,
)

LOSSLESS = {"zero_lossless_gradients": True}
BOTH = {**LOSSLESS, "zero_lossless_weights": True}
DTYPES = ("bf16", "fp16", "fp32")


CASES = [
    (name, DTYPES[(number + 1) % 3], (3, 1, 2, 0)[number % 4], (LOSSLESS, BOTH)[number % 4 < 2])
    for number, name in enumerate(SCENARIOS)
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "dtype", "stage", "zero"), CASES)
def test_lossless_gradients_change_no_bit_when_a_run(
    name: str, dtype: str, stage: int, zero: dict[str, Any], tmp_path: Path
) -> None:
    weights = {n: 0.5 * p.detach() for n, p in make_model(WIDTH).named_parameters()}
    save_file(weights, tmp_path / OTHER_WEIGHTS)
    simulate(changes_no_bit, 4, name, dtype, stage, tmp_path, zero, ranks_per_node=2)


@pytest.mark.parametrize(("ranks", "per_node"), [(2, 1), (3, 1), (2, 2)])
def test_lossless_gradients_change_no_bit_on_nodes(
    ranks: int, per_node: int, tmp_path: Path
) -> None:
    for stage, dtype in ((0, "fp32"), (3, "bf16")):
        arguments = ("trains", dtype, stage, tmp_path, LOSSLESS)
        simulate(changes_no_bit, ranks, *arguments, ranks_per_node=per_node)


def _on_processes(rank: int, world_size: int, folder: str) -> None:
    for stage in (1, 3):
        changes_no_bit(None, "trains", "bf16", stage, Path(folder), BOTH)


@pytest.mark.slow
def test_lossless_gradients_change_no_bit_on_processes(tmp_path: Path) -> None:
    spawn(_on_processes, 4, str(tmp_path), ranks_per_node=2)


def _sends_less(ranks: SimulatedRanks, stage: int, dtype: str, share: float) -> None:
    sent = {}
    for name, zero in (("plain", {}), ("lossless", LOSSLESS)):
        engine = build(ranks, dtype, zero, stage=stage, width=WIDTH)
        for step in range(3):
            micro_step(engine, step)
        (row,) = [r for r in engine.comm_report() if r.collective == "reduce_scatter"]
        sent[name] = row
        if zero:
            config = Case(stage=stage, dtype=dtype, zero=zero).config()
            sizes = {"world_size": 4, "ranks_per_node": 2, "device_type": "cpu"}
            planned = zero_core.plan(make_model(WIDTH), config, **sizes)
            held = engine.memory_report()["exchange buffers"]
            assert held == planned.memory.device["exchange buffers"]
        engine.close()
    plain, lossless = sent["plain"], sent["lossless"]
    assert lossless.num_calls == plain.num_calls
    assert lossless.within_node_bytes == plain.within_node_bytes
    assert lossless.between_nodes_bytes <= share * plain.between_nodes_bytes


@pytest.mark.parametrize(("stage", "dtype", "share"), [(1, "fp32", 0.9), (3, "bf16", 0.8)])
def test_lossless_gradients_send_less_between_nodes(stage: int, dtype: str, share: float) -> None:
    simulate(_sends_less, 4, stage, dtype, share, ranks_per_node=2)


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [1, 2])
def test_lossless_gradients_change_no_bit_on_a_late_device(per_node: int) -> None:
    run_alone(on_late_device, per_node, [(1, "fp32", 0.5), (3, "bf16", 0.5)], BOTH, {})


@pytest.mark.parametrize("zero", [{"stage": 1, **LOSSLESS}, {"stage": 3, **BOTH}], ids=str)
def test_coded_gradients_keep_the_bits_of_one_rank(zero: dict[str, Any]) -> None:
    keeps_the_bits_of_one_rank(zero)


class _Damaging(GradientMessages):
    """Packs messages with a bit that is wrong."""

    def pack(self, values: torch.Tensor, message: torch.Tensor) -> int:
        nbytes = super().pack(values, message)
        message[100] ^= 1
        return nbytes


def _damaging_collectives(native: Any, **_: Any) -> Any:
    return native.coded(_Damaging())


def _reads_damaged_messages(ranks: SimulatedRanks) -> str:
    config = Case(stage=3, dtype="bf16").config()
    engine = zero_core.build(
        make_model(WIDTH), config, collectives=_damaging_collectives, process_group=ranks
    )
    with pytest.raises(RuntimeError) as caught:
        micro_step(engine, 0)
    return str(caught.value)


def test_a_damaged_message_is_refused_with_its_sender() -> None:
    for rank, text in enumerate(simulate(_reads_damaged_messages, 2, ranks_per_node=1)):
        assert f"message of gradients of rank {1 - rank} is damaged" in text
        assert "checksum does not match" in text
