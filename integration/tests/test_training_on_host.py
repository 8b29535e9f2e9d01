"""Training with states on the host, in cases that test_equalities.py does not cover."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from support.fake_cuda.simulated import simulate_on_devices
from torch import Tensor, nn

import zero_core
from tests.support.lm_models import make_lm
from zero_core.sharded import snapshot
from zero_core.testing import (
    Case,
    GatedRanks,
    SimulatedRanks,
    Trace,
    batch,
    check_left_anywhere,
    make_model,
    on_ranks,
    run_alone,
    run_ddp,
    run_engine,
    run_on_processes,
    simulate,
    train,
)
from zero_core.testing.equal import micro_step
from zero_core.testing.readers import AFTER, BEFORE, Watched, check_truth, read_everywhere
from zero_core.testing.training import assert_same

STEPS = 3
# The host kernel rounds differently from torch, by an ulp per step in fp32. DDP sums bf16 gradients
# in bf16, the engine in fp32.
LOSS = {"fp32": 4e-6, "bf16": 0.07}
VALUE = {"fp32": 2e-6, "bf16": 0.04}
RATIOS = (1.0, 0.4, 1.0, 0.4)  # by stage


def _train(
    ranks: SimulatedRanks, dtype: str, accumulation: int, clipping: float
) -> tuple[list[Trace], Trace]:
    cases = [
        Case(stage, dtype, accumulation, clipping, zero={"offload_optimizer": host})
        for stage, ratio in enumerate(RATIOS)
        for host in [{"device": "cpu", "ratio": ratio}]
    ]
    found = [run_engine(case, ranks.rank, STEPS, process_group=ranks) for case in cases]
    return found, run_ddp(cases[0], ranks.rank, STEPS, ranks)


@pytest.mark.parametrize(
    ("dtype", "accumulation", "clipping"), [("fp32", 1, 0.5), ("bf16", 2, 0.0)]
)
def test_offloaded_steps_follow_ddp(dtype: str, accumulation: int, clipping: float) -> None:
    for (first, *others), expected in simulate(_train, 3, dtype, accumulation, clipping):
        for other in others:
            assert other.losses == first.losses
            torch.testing.assert_close(other.values, first.values, rtol=0.0, atol=0.0)
        torch.testing.assert_close(first.losses, expected.losses, rtol=0.0, atol=LOSS[dtype])
        torch.testing.assert_close(first.values, expected.values, rtol=0.0, atol=VALUE[dtype])


UNDECIDED: dict[str, Any] = {"check_grad_overflow": False}  # allows updates in backward
HOST = {"offload_optimizer": {"device": "cpu"}}
EARLY_ON_HOST = {"offload_optimizer": {"device": "cpu", "update_in_backward": True}}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("num_moments", [20, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(1, zero=HOST), marks=pytest.mark.slow),
        Case(2, "bf16", zero={"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
        Case(3, zero=HOST, top=UNDECIDED),
        Case(2, "bf16", clipping=1e6, zero=EARLY_ON_HOST),
        Case(3, zero={**HOST, "offload_param": {"device": "cpu"}}),
    ],
    ids=["host", "half on the host", "in backward", "undone", "parameters too"],
)
def test_offloaded_training_left_at_any_moment_goes_on_or_the_engine_says_how(
    case: Case, num_moments: int, tmp_path: Path
) -> None:
    packages = ("zero_core", "zero_offload", "cpu_adam")
    check_left_anywhere(case.config(), tmp_path, num_moments, packages)


SHARDED = "parameter blocks.1.inner.weight was read where stage 3 holds only"
EARLY = "parameter blocks.1.inner.weight was read between backward and step()"


@pytest.mark.parametrize(
    ("stage", "dtype", "is_early"),  # stages 2 and 3 have all pairs of dtype and is_early
    [
        *((0, "bf16", True), (1, "fp32", False), (2, "fp32", True)),
        *((2, "bf16", False), (3, "fp32", False), (3, "bf16", True)),
    ],
)
@on_ranks(2)
def test_each_reader_has_the_value_or_an_error_at_each_moment(ranks, stage, dtype, is_early):
    offload = {"device": "cpu", "ratio": 0.5 if dtype == "bf16" else 1.0}
    offload |= {"update_in_backward": True} if is_early else {}
    case = Case(stage, dtype, zero={"offload_optimizer": offload})
    config = {**case.config(), "check_grad_overflow": not is_early}
    engine = zero_core.build(Watched(), config, process_group=ranks)
    found, _ = read_everywhere(engine, ranks.rank, 2)
    here = {"forward of block 1", "forward of block 1, evaluating", BEFORE, AFTER}
    refused = {moment for moment, _ in found} - here if stage == 3 else set()
    refusals = dict.fromkeys(refused, SHARDED)
    if is_early and stage < 3:
        refusals["before the step"] = EARLY
    check_truth(found, refusals)


OFFLOADED = {
    "host": HOST,
    "twin": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "in backward": EARLY_ON_HOST,
    "bf16 moments": {"offload_optimizer": {"device": "cpu", "state_dtype": "bfloat16"}},
}


def _train_followed(
    ranks: SimulatedRanks, stage: int, zero: dict[str, object], *, is_followed: bool
) -> dict[str, torch.Tensor]:
    top = {**UNDECIDED, **({"weight_patches": {}} if is_followed else {})}
    case = Case(stage, "bf16", zero=zero, top=top)
    engine = zero_core.build(make_model(), case.config(), process_group=ranks)
    receiver = make_model().bfloat16()
    version = 0
    for step in range(4):
        train(engine, [batch(step, 0, ranks.rank)])
        if is_followed and step % 2:
            patch = engine.weight_patch(since=version)
            if ranks.rank == 0:
                zero_core.apply_patch(receiver, patch, version=None if version else 0)
            version = patch.version
            found = receiver.state_dict()
            for name, value in engine.full_state_dict(rank=0).items():
                assert torch.equal(found[name].view(torch.int16), value.view(torch.int16)), name
    return engine.full_state_dict()


def _check_followed(stage: int, zero: dict[str, object]) -> None:
    followed, alone = (
        simulate(partial(_train_followed, is_followed=is_followed), 2, stage, zero)[0]
        for is_followed in (True, False)
    )
    torch.testing.assert_close(followed, alone, rtol=0.0, atol=0.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", OFFLOADED)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_receiver_follows_an_offloaded_training_that_stays_the_same(stage, kind):
    _check_followed(stage, OFFLOADED[kind])


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_receiver_follows_a_training_whose_parameters_rest_elsewhere(tmp_path, device):
    place = {"device": device, "nvme_path": str(tmp_path)}
    _check_followed(3, {"offload_param": {**place, "max_in_cpu": 0}, "offload_optimizer": place})


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "BLOCK_NUMEL", 61)


def _train_between(engine: zero_core.Engine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(**batch(step, 0, engine.rank))["loss"])
        engine.step(client_state={"step": step + 1})


def _restart(
    ranks: SimulatedRanks, folder: Path, config: dict[str, Any]
) -> tuple[int, dict[str, torch.Tensor]]:
    """Run a program that resumes at step 6 if it finds copies in memory."""
    gated = GatedRanks(**vars(ranks))
    engine = zero_core.build(make_model(), config, process_group=gated)
    first = (engine.resume(folder / "beside") or {"step": 0})["step"]
    if first:
        gated.gate.set()
    else:
        # Later steps change the states before the save of step 3 has written a file.
        _train_between(engine, 0, 3)
        pending = engine.async_save(folder / "beside")
        _train_between(engine, 3, 5)
        threading.Timer(0.01, gated.gate.set).start()
        _train_between(engine, 5, 6)
        pending.result()
    has_copies = "memory_checkpoint" in config
    if first or not has_copies:
        again = engine.async_save(folder / "beside")
        _train_between(engine, 6, 8)
        again.result()
    values = engine.full_state_dict()
    with engine.rewriting() if has_copies else nullcontext():  # waits for the last copy
        pass
    engine.close()
    return first, values


def _straight(ranks: SimulatedRanks, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    engine = zero_core.build(make_model(), config, process_group=ranks)
    for first, last in ((0, 3), (3, 6)):
        _train_between(engine, first, last)
        engine.save_checkpoint(folder / "at-once")
    _train_between(engine, 6, 8)
    return engine.full_state_dict()


@pytest.mark.parametrize(
    ("world_size", "stage", "dtype", "offload", "has_copies"),
    [
        (1, 3, "bf16", {"device": "cpu", "state_dtype": "bfloat16"}, False),
        (2, 1, "fp32", {"device": "cpu", "ratio": "auto"}, False),
        (2, 3, "bf16", {"device": "nvme"}, False),
        (2, 3, "fp32", {}, True),
        (1, 2, "bf16", {"device": "cpu", "ratio": 0.5}, True),
    ],
)
def test_a_save_that_updates_overtake_has_the_bytes_of_one_at_once(
    tmp_path, world_size, stage, dtype, offload, has_copies
):
    """With copies in memory, a restart continues from step 6."""
    block = offload and {"nvme_path": str(tmp_path), **offload}
    config = Case(stage, dtype, zero={"offload_optimizer": block}).config()
    copies = {"memory_checkpoint": {"path": str(tmp_path / "memory")}} if has_copies else {}
    for first in (0, 6)[: 1 + has_copies]:
        found = simulate(_restart, world_size, tmp_path, config | copies)
        assert {step for step, _ in found} == {first}
    assert_same([values for _, values in found], simulate(_straight, world_size, tmp_path, config))
    for tag in ("step-3", "step-6"):
        at_once = sorted((tmp_path / "at-once" / tag).iterdir())
        assert len(at_once) > 3
        for file in at_once:
            if file.name != "manifest.json" or not has_copies:
                assert (tmp_path / "beside" / tag / file.name).read_bytes() == file.read_bytes()


FOUR_BIT = {
    "zero_quantized_weights": True,
    "zero_quantized_weights_format": "int4_difference",
    "zero_hpz_partition_size": 2,
    "zero_quantized_gradients": True,
    "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 2},
}
ZERO: list[tuple[int, dict[str, Any]]] = [
    (2, {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
    (2, {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}),
    (4, {"stage": 3, **FOUR_BIT}),
]
KINDS = {"quantized weights", "secondary shards", "message buffers", "error feedback"}


def _train_asleep(
    ranks: Any, zero: dict[str, Any], sleeps: bool, done: Barrier
) -> tuple[dict[str, Tensor], set[str]]:
    config = Case(dtype="bf16", accumulation=2).config() | {"zero_optimization": zero}
    engine = zero_core.build(make_model(64), config, process_group=ranks)
    kinds: set[str] = set()
    for micro in range(4):
        micro_step(engine, micro // 2, micro % 2)
        if sleeps:
            kinds |= KINDS & engine.memory_report().keys()
            before = torch.accelerator.memory_allocated(ranks.device)
            engine.offload_states()
            done.wait()
            # Only tiny tensors remain on the device.
            assert torch.accelerator.memory_allocated(ranks.device) < 0.3 * before
            engine.reload_states()
            done.wait()
    values = engine.full_state_dict()
    engine.close()
    return values, kinds


def _compare_asleep() -> None:
    seen: set[str] = set()
    for world_size, zero in ZERO:
        done = Barrier(world_size)
        run = partial(simulate_on_devices, _train_asleep, world_size, zero, ranks_per_node=2)
        expected, found = run(False, done), run(True, done)
        for (values, kinds), (exact, _) in zip(found, expected, strict=True):
            torch.testing.assert_close(values, exact, rtol=0, atol=0)
            seen |= kinds
    assert seen == KINDS


@pytest.mark.cuda
def test_training_goes_on_with_the_same_bits() -> None:
    run_alone(_compare_asleep)


DROPOUT = {
    "gpt2": {"n_layer": 3, "resid_pdrop": 0.1, "attn_pdrop": 0.1},
    "t5": {"dropout_rate": 0.1},
}


def _model(kind: str, *, is_checkpointed: bool = False) -> nn.Module:
    """Make a model in training mode, with the settings in `DROPOUT`."""
    model: Any = make_lm(kind, **DROPOUT.get(kind, {})).train()
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _batches(step: int, rank: int, number: int) -> list[dict[str, Any]]:
    found = []
    for micro in range(number):
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
        size = (2 + (step + micro) % 2, 6 + micro)
        ids = torch.randint(2, 61, size, generator=generator)
        mask = torch.ones_like(ids)
        mask[0, : 1 + micro] = 0
        labels = ids.masked_fill(mask == 0, -100)
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        found.append({**inputs, "use_cache": False})
    return found


def _same_bits(ranks: Any, make: Callable[[], nn.Module], cases: list[Case]) -> None:
    for case, schedule in itertools.product(cases, ("horizontal", "vertical")):
        config = case.config() | {"accumulation_schedule": schedule}
        engine = zero_core.build(make(), config, process_group=ranks)
        found = [engine.train_batch(_batches(n, ranks.rank, 3)).item() for n in range(2)]
        values = engine.full_state_dict(dtype=torch.float32)
        engine.close()
        if schedule == "horizontal":
            expected = found, values
        else:
            torch.testing.assert_close((found, values), expected, rtol=0.0, atol=0.0)


RECOMPUTED = {"activation_checkpointing": {}}
THREE = [
    Case(stage, dtype, 3, 1.0, top=RECOMPUTED)
    for stage, dtype in ((2, "fp32"), (3, "fp32"), (3, "bf16"))
]


@pytest.mark.parametrize(
    ("world_size", "make", "cases"),
    [
        (2, partial(_model, "gpt2"), THREE[::2]),
        (1, partial(_model, "gpt2", is_checkpointed=True), [Case(3, "fp32", 3, 1.0)]),
        *(
            pytest.param(2, partial(_model, kind), THREE, marks=pytest.mark.slow)
            for kind in ("t5", "llama")
        ),
    ],
)
def test_bits_are_those_of_the_horizontal_schedule(world_size, make, cases):
    run_on_processes(_same_bits, world_size, make, cases)
