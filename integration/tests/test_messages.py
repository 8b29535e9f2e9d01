"""Quantized and lossless messages in the engine: bits, bytes, restarts and damaged messages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fake_cuda
from support.fake_cuda.simulated import simulate_on_devices
from torch import nn

import zero_core
from tests.support.delayed import build
from zero_comm.lossless.message import Checks, GradientMessages
from zero_core.testing import (
    Case,
    SimulatedRanks,
    Trace,
    alone,
    batch,
    make_model,
    make_tower,
    rows,
    run_engine,
    simulate,
    train,
)

WIDTH = 33  # shards have a few whole quantization blocks and a partial one
QWZ = {"zero_quantized_weights": True}
QGZ = {"zero_quantized_gradients": True}


def hpz(size: int) -> dict[str, Any]:
    return {"zero_hpz_partition_size": size}


def four_bits(size: int) -> dict[str, Any]:
    return {
        **QWZ,
        **QGZ,
        **hpz(size),
        "zero_quantized_weights_format": "int4_difference",
        "zero_quantized_gradients_within_node": "int8",
        "zero_quantized_gradients_hadamard": True,
    }


def _run(case: Case, ranks: SimulatedRanks) -> Trace:
    return run_engine(case, ranks.rank, 3, process_group=ranks)


def _relative_gap(found: Trace, exact: Trace) -> float:
    losses = zip(found.losses, exact.losses, strict=True)
    return max(abs(a - b) / b for a, b in losses)


def _compare_stages(ranks: SimulatedRanks) -> None:
    accumulated = {"accumulation": 2, "is_local": True, "clipping": 0.5}
    for dtype, stages, more in (("fp32", (1,), {}), ("bf16", (2, 0), accumulated)):
        case = Case(3, dtype, zero=QGZ, width=WIDTH, **more)
        expected = _run(case, ranks)
        # Four-bit gradients change the weights by a relative gap of 0.02 in the first steps.
        assert 1e-6 < _relative_gap(expected, _run(replace(case, zero={}), ranks)) < 0.06
        for stage in stages:
            found = _run(replace(case, stage=stage), ranks)
            assert found.losses == expected.losses, (stage, dtype)
            torch.testing.assert_close(found.values, expected.values, rtol=0.0, atol=0.0)


def test_quantized_gradients_give_the_same_bits_at_every_stage() -> None:
    simulate(_compare_stages, 4, ranks_per_node=2)


def _run_odd(ranks: SimulatedRanks) -> None:
    size = ranks.size
    for dtype in ("fp32", "fp16"):
        expected = _run(Case(3, dtype, width=WIDTH, clipping=1.0), ranks)
        for mode in ({**QWZ, **QGZ}, {**QWZ, **QGZ, **hpz(size)}, four_bits(size)):
            found = _run(Case(3, dtype, zero=mode, width=WIDTH, clipping=1.0), ranks)
            assert found.num_skipped == expected.num_skipped
            assert _relative_gap(found, expected) < 0.06, (mode, dtype)


@pytest.mark.parametrize(
    ("world_size", "per_node"),
    [
        pytest.param(1, 1, marks=pytest.mark.slow),
        (3, 1),
        pytest.param(3, 3, marks=pytest.mark.slow),
    ],
)
def test_one_rank_one_node_and_odd_numbers_of_nodes_work(world_size: int, per_node: int) -> None:
    simulate(_run_odd, world_size, ranks_per_node=per_node)


KEPT = {
    "qwZ": QWZ,
    "qwZ, hpZ": {**QWZ, **hpz(2)},
    "qgZ": QGZ,
    "qgZ, error feedback": {**QGZ, "zeropp_loco_param": {}},
    "stochastic": {**QGZ, "zero_quantized_stochastic_rounding": True},
    "4-bit": four_bits(2),
}
# A save drops the errors of gradients, and 4-bit differences start anew after it.
UNEQUAL = {"qgZ, error feedback": "unsaved", "4-bit": "unsaved"}


def _goes_on(ranks: SimulatedRanks, name: str, folder: Path) -> None:
    before, after = ([batch(n, 0, ranks.rank) for n in steps] for steps in (range(2), range(2, 4)))
    straight, resumed, unsaved = (build(ranks, "bf16", KEPT[name]) for _ in range(3))
    for engine in (straight, unsaved):
        train(engine, before)
    straight.save_checkpoint(folder)
    resumed.load_checkpoint(folder)
    losses, wanted = train(straight, after), straight.full_state_dict()
    for kind, engine in {"resumed": resumed, "unsaved": unsaved}.items():
        is_equal = train(engine, after) == losses
        values = engine.full_state_dict()
        is_equal = is_equal and all(torch.equal(values[key], wanted[key]) for key in wanted)
        assert is_equal == (UNEQUAL.get(name) != kind), kind
    for engine in (straight, resumed, unsaved):
        engine.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", KEPT)
def test_run_that_saved_and_goes_on_equals_the_one_that_resumes(name: str, tmp_path: Path) -> None:
    """It equals a run without a save, too, but for kept errors and 4-bit differences."""
    simulate(_goes_on, 4, name, tmp_path, ranks_per_node=2)


CODED = 98
"""Width of a model whose shards are large enough for lossless coding."""
WEIGHTS = {"zero_lossless_weights": True}
GRADIENTS = {"zero_lossless_gradients": True}
BOTH = {**WEIGHTS, **GRADIENTS}
NUM_CODED = 3
"""Units of the model of width `CODED` whose gradients are coded."""
SMALL_STEPS = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}


def _sent(
    ranks: SimulatedRanks, stage: int, dtype: str, zero: dict[str, Any], content: str, top: Any
) -> tuple[list[int], dict[str, int]]:
    """Return calls and bytes of ``content`` in the last step, and the memory report."""
    engine = build(ranks, dtype, zero, stage=stage, width=CODED, **top)
    train(engine, [batch(step, 0, ranks.rank) for step in range(3)])
    rows = [row for row in engine.comm_report() if row.content == content]
    numbers = [(r.num_calls, r.within_node_bytes, r.between_nodes_bytes) for r in rows]
    memory = dict(engine.memory_report())
    engine.close()
    return [sum(column) for column in zip(*numbers, strict=True)], memory


@pytest.mark.parametrize(
    ("stage", "dtype", "zero", "share"),
    [
        *((stage, "bf16", WEIGHTS, 1 / 3) for stage in (1, 2, 3)),
        (1, "fp32", GRADIENTS, 0.9),
        (3, "bf16", GRADIENTS, 0.8),
    ],
)
def test_lossless_messages_send_less_between_nodes(stage, dtype, zero, share):
    content, top = ("parameters", SMALL_STEPS) if zero is WEIGHTS else ("gradients", {})
    plain, lossless = (
        simulate(_sent, 4, stage, dtype, keys, content, top, ranks_per_node=2)
        for keys in ({}, zero)
    )
    config = Case(stage, dtype, zero=zero, top=top).config()
    planned = zero_core.plan(make_model(CODED), config, 4, ranks_per_node=2, device_type="cpu")
    for (whole, _), (sent, memory) in zip(plain, lossless, strict=True):
        assert sent[2] <= share * whole[2]
        rows = [row for row in planned.traffic if row.content == content]
        assert sent[2] / 2 < sum(row.between_nodes_bytes for row in rows) <= sent[2]
        assert ("published weights" in memory) == (zero is WEIGHTS and stage < 3)
        if zero is GRADIENTS:
            assert sent[:2] == whole[:2]
            assert memory["exchange buffers"] == planned.memory.device["exchange buffers"]


def _train_invariant(ranks: SimulatedRanks, zero: Mapping[str, Any]) -> Any:
    steps = 4 // ranks.size
    case = Case(dtype="bf16", zero=zero, accumulation=steps, clipping=0.5, width=CODED)
    config = {**case.config(), "world_size_invariant": True}
    engine = zero_core.build(make_model(CODED), config, process_group=ranks)
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
    def pack(self, values: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
        nbytes = super().pack(values, message)
        message[100] ^= 1
        return nbytes


def _reads_damaged_messages(ranks: SimulatedRanks) -> str:
    codec = _Damaging(Checks())
    engine = zero_core.build(
        make_model(CODED),
        Case(stage=3, dtype="bf16").config(),
        collectives=lambda native, **_: native.coded(codec),
        process_group=ranks,
    )

    def ends(act: Callable[[], None]) -> str:
        with pytest.raises(RuntimeError) as caught:
            act()
        return str(caught.value)

    loss = engine(**_batch(ranks, 0))["loss"]
    if ranks.device.type == "cpu":
        return ends(lambda: engine.backward(loss))
    engine.backward(loss)
    return ends(engine.step)


def _batch(ranks: SimulatedRanks, step: int, rank: int | None = None) -> dict[str, Any]:
    inputs = batch(step, 0, ranks.rank if rank is None else rank)
    return {**inputs, "ids": inputs["ids"].to(ranks.device)}


def test_a_damaged_message_is_refused_with_its_sender() -> None:
    for rank, text in enumerate(simulate(_reads_damaged_messages, 2, ranks_per_node=1)):
        assert f"message of gradients of rank {1 - rank} is damaged" in text
        assert "checksum does not match" in text


@pytest.mark.cuda
@alone
def test_no_rank_updates_after_a_message_was_damaged_on_a_device() -> None:
    for text in simulate_on_devices(_reads_damaged_messages, 2, ranks_per_node=1):
        for rank in range(2):
            named = (
                rf"on rank {rank}, unit \d.*: the message of gradients of rank {1 - rank} is dam"
            )
            assert re.search(named, text), text


def _counts_waits(ranks: SimulatedRanks, case: Case, after: str) -> Any:
    engine = case.build(ranks, model := make_model(CODED))
    losses, waits = [], []
    inputs = [_batch(ranks, step, 0) for step in range(6)]
    for step in range(4):  # equal batches, so that all ranks use the same parameters
        before = Counter(fake_cuda.counters(ranks.device.index).syncs)
        losses.append(engine(**inputs[step])["loss"])
        engine.backward(losses[-1])
        if after == "no_sync" and step == 2:
            with engine.no_sync():
                engine.backward(engine(**inputs[5])["loss"])
        engine.step()
        waits.append(Counter(fake_cuda.counters(ranks.device.index).syncs) - before)
        if after == "write":
            with torch.no_grad():
                for param in model.parameters():
                    param.clamp_(-1e3, 1e3)
    values = {name: value.cpu() for name, value in engine.full_state_dict().items()}
    engine.close()
    return [loss.item() for loss in losses], values, waits


@pytest.mark.cuda
@pytest.mark.parametrize(("stage", "after"), [(2, ""), (3, ""), (2, "write"), (2, "no_sync")])
@alone
def test_lossless_messages_on_a_device_have_few_waits_and_the_bits_of_plain_ones(
    stage: int, after: str
) -> None:
    # One host wait for the statistics, one for all weights' lengths, one for each coded reduction.
    most = {"": 1, "weights": 2, "gradients": 1 + NUM_CODED, "both": 2 + NUM_CODED}
    ways = {"": {}, "weights": WEIGHTS, **({} if after else {"gradients": GRADIENTS, "both": BOTH})}
    found = {}
    for name, zero in ways.items():
        case = Case(stage, "bf16", zero=zero, top=SMALL_STEPS)
        found[name] = simulate_on_devices(_counts_waits, 4, case, after, ranks_per_node=2)
        for own, (exact, expected, _) in zip(found[name], found[""], strict=True):
            losses, values, waits = own
            assert losses == exact
            torch.testing.assert_close(values, expected, rtol=0.0, atol=0.0)
            assert after or all(of.total() == most[name] for of in waits[2:]), (name, waits)


UNIT_WIDTH = 64
KINDS = ("secondary shards", "quantized weights", "message buffers", "error feedback")


def make_config(stage: int, gradient_accumulation_steps: int = 1, **zero: Any) -> dict[str, Any]:
    return Case(stage, "bf16", gradient_accumulation_steps, zero=zero).config()


CONFIGS = [
    *[make_config(stage, **way) for stage in range(4) for way in ({}, QGZ)],
    make_config(3, **hpz(2)),
    make_config(3, **hpz(2), gradient_accumulation_steps=2),
    make_config(3, zero_hpz_partition_size=4, **QWZ),
    *[
        make_config(3, zero_quantized_weights_format=kind, **QWZ, **further)
        for kind, further in (("int8", {}), ("e5m2", hpz(2)), ("int4_difference", {}))
    ],
    make_config(3, zero_quantized_nontrainable_weights=True),
    make_config(3, zero_quantized_nontrainable_weights=True, **hpz(2)),
    make_config(3, zeropp_loco_param={}, **QWZ, **QGZ, **hpz(2)),
    make_config(3, **four_bits(2), gradient_accumulation_steps=2),
    make_config(2, **QGZ, zeropp_loco_param={}, zero_quantized_checksum=True),
]


def make_net() -> nn.Module:
    model = make_tower(3, UNIT_WIDTH)
    model.blocks[1].requires_grad_(False)
    return model


def report_of(config: dict[str, Any], ranks: SimulatedRanks | None = None) -> dict[str, Any]:
    engine = zero_core.build(make_net(), config, process_group=ranks)
    # The first step has no earlier values for lossless differences.
    train(engine, [rows(0, 0, UNIT_WIDTH).bfloat16()] * (2 * engine.gradient_accumulation_steps))
    memory = engine.memory_report()
    return {
        "sent": [asdict(row) for row in engine.comm_report()],
        "held": {kind: memory[kind] for kind in KINDS if memory.get(kind)},
    }


def served_by(world_size: int) -> list[dict[str, Any]]:
    key = "zero_hpz_partition_size"
    return [c for c in CONFIGS if world_size % c["zero_optimization"].get(key, 1) == 0]


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node"),
    [(4, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((3, 1), (2, 2)))],
)
def test_an_engine_sends_and_keeps_what_was_planned(world_size: int, ranks_per_node: int) -> None:
    served = served_by(world_size)
    found = simulate(
        lambda ranks: [report_of(config, ranks) for config in served],
        world_size,
        ranks_per_node=ranks_per_node,
    )
    plans = [
        zero_core.plan(make_net(), c, world_size, ranks_per_node=ranks_per_node, device_type="cpu")
        for c in served
    ]
    for of_rank in found:
        for config, planned, row in zip(served, plans, of_rank, strict=True):
            zero, device = config["zero_optimization"], planned.memory.device
            assert [asdict(t) for t in planned.traffic] == row["sent"], zero
            assert {kind: device[kind] for kind in KINDS if kind in device} == row["held"], zero
