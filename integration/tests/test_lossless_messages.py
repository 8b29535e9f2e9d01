"""Weights and gradients that travel without loss: fewer bytes, and any number of ranks.

That they change no bit is a row of test_equalities.py. Four simulated ranks are two nodes of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import zero_core
from tests.support.delayed import build
from zero_comm.values.message import GradientMessages
from zero_core.testing import (
    Case,
    SimulatedRanks,
    batch,
    late_device,
    make_model,
    run_alone,
    simulate,
    train,
    train_unread,
)
from zero_core.testing.scenarios import micro_step

WIDTH = 98
"""Width of the model: its shards are long enough to be coded."""
WEIGHTS = {"zero_lossless_weights": True}
GRADIENTS = {"zero_lossless_gradients": True}
BOTH = {**WEIGHTS, **GRADIENTS}
SMALL_STEPS = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}


def _sent(
    ranks: SimulatedRanks, stage: int, dtype: str, zero: dict[str, Any], content: str, top: Any
) -> tuple[list[int], dict[str, int]]:
    """Return calls, bytes within a node and between nodes of the last of four steps, and memory."""
    engine = build(ranks, dtype, zero, stage=stage, width=WIDTH, **top)
    train(engine, [batch(step, 0, ranks.rank) for step in range(4)])
    rows = [row for row in engine.comm_report() if row.content == content]
    numbers = [(r.num_calls, r.within_node_bytes, r.between_nodes_bytes) for r in rows]
    memory = dict(engine.memory_report())
    engine.close()
    return [sum(column) for column in zip(*numbers, strict=True)], memory


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lossless_weights_send_less_between_nodes(stage: int) -> None:
    plain, lossless = (
        simulate(_sent, 4, stage, "bf16", zero, "parameters", SMALL_STEPS, ranks_per_node=2)
        for zero in ({}, WEIGHTS)
    )
    for (whole, _), (sent, memory) in zip(plain, lossless, strict=True):
        assert sent[2] < whole[2] / 3
        assert ("published weights" in memory) == (stage < 3)


@pytest.mark.parametrize(("stage", "dtype", "share"), [(1, "fp32", 0.9), (3, "bf16", 0.8)])
def test_lossless_gradients_send_less_between_nodes(stage: int, dtype: str, share: float) -> None:
    plain, lossless = (
        simulate(_sent, 4, stage, dtype, zero, "gradients", {}, ranks_per_node=2)
        for zero in ({}, GRADIENTS)
    )
    config = Case(stage, dtype, zero=GRADIENTS).config()
    planned = zero_core.plan(make_model(WIDTH), config, 4, ranks_per_node=2, device_type="cpu")
    for (whole, _), (sent, memory) in zip(plain, lossless, strict=True):
        assert sent[:2] == whole[:2]
        assert sent[2] <= share * whole[2]
        assert memory["exchange buffers"] == planned.memory.device["exchange buffers"]


def _train_unread(ranks: SimulatedRanks, case: Case) -> Any:
    engine = zero_core.build(make_model(WIDTH), case.config(), process_group=ranks)
    return train_unread(engine, ranks.rank, ranks.device, steps=3, accumulation=1)


def _on_late_device(per_node: int) -> None:
    late_device.load()
    for stage, dtype, clipping, zero, top in (
        *((stage, "bf16", 0.0, WEIGHTS, SMALL_STEPS) for stage in (1, 2, 3)),
        (1, "fp32", 0.5, BOTH, {}),
        (3, "bf16", 0.5, BOTH, {}),
    ):
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


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [1, 2])
def test_lossless_messages_change_no_bit_on_a_late_device(per_node: int) -> None:
    run_alone(_on_late_device, per_node)


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 1, **WEIGHTS},
        {"stage": 3, **WEIGHTS},
        {"stage": 1, **GRADIENTS},
        {"stage": 3, **BOTH},
        {"stage": 3, "zero_hpz_partition_size": 2},
        {"stage": 3, **WEIGHTS, "zero_hpz_partition_size": 2},
    ],
    ids=str,
)
def test_exact_messages_keep_the_bits_of_one_rank(zero: dict[str, Any]) -> None:
    ((expected, values),) = simulate(_train_invariant, 1, {"stage": zero["stage"]})
    found = simulate(_train_invariant, 4, zero, ranks_per_node=2)
    assert dict(pair for losses, _ in found for pair in losses.items()) == expected
    for _, own in found:
        torch.testing.assert_close(own, values, rtol=0.0, atol=0.0)


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
