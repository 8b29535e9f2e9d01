"""The order in which ranks launch collectives: equal per communicator, and where it is for all."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core.comm.device import make_transport
from zero_core.comm.meter import Meter
from zero_core.protocols import TransportCollectives, Work
from zero_core.testing import SimulatedRanks, seeded, simulate

WIDTH, DEPTH, STEPS = 7, 4, 4
LEFT_OUT = [{3}, {0, 2}, set(range(DEPTH))]
"""Per step: blocks whose branch the last rank leaves out."""
SKIPPED = [{3}, {0, 2}, {1, 2}, set(range(DEPTH))]
"""Per step: blocks that the last rank skips."""


class Launch(NamedTuple):
    """A collective, as a rank launches it."""

    communicator: str
    op: str
    unit: int
    numel: int
    dtype: torch.dtype


class _Recording:
    """The engine's own collectives, and a log of the launches."""

    def __init__(self, native: TransportCollectives, log: list[Launch]) -> None:
        self.native = native
        self.log = log

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        self.log.append(Launch("gathers", "all_gather", unit, out.numel(), out.dtype))
        return self.native.all_gather(out, shard, unit=unit, version=version, backward=backward)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        self.log.append(Launch("reductions", "reduce_scatter", unit, full.numel(), full.dtype))
        return self.native.reduce_scatter(out, full, unit=unit)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, has_branch: bool | None) -> Tensor:
        if has_branch is None:
            return x
        x = x + torch.tanh(self.always(x))
        return x + self.branch(x) if has_branch else x


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.blocks = nn.ModuleList(_Block() for _ in range(DEPTH))
            self.out = nn.Linear(WIDTH, 1)
            self.start = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, left_out: set[int], skipped: set[int]) -> Tensor:
        x = x + self.start
        for index, block in enumerate(self.blocks):
            x = block(x, None if index in skipped else index not in left_out)
        loss: Tensor = self.out(x).square().mean()
        return loss


def _train(
    ranks: SimulatedRanks,
    config: dict[str, Any],
    left_out: list[set[int]],
    skipped: list[set[int]] | None = None,
) -> list[Launch]:
    """Train for some steps. ``left_out`` and ``skipped`` are those of the last rank."""
    log: list[Launch] = []

    def recording(native: TransportCollectives, **settings: Any) -> Any:
        return _Recording(native, log)

    engine = zero_core.build(_Net(), config, process_group=ranks, collectives=recording)
    for step in range(STEPS):
        for _ in range(engine.gradient_accumulation_steps):
            generator = torch.Generator().manual_seed(10 * step + ranks.rank)
            x = torch.randn(2, WIDTH, generator=generator)
            is_apart = ranks.rank == ranks.size - 1
            own = [
                sets[step] if is_apart and sets is not None and step < len(sets) else set()
                for sets in (left_out, skipped)
            ]
            loss = engine(x, *own)
            engine.backward(loss)
            engine.step()
    engine.full_state_dict()
    engine.close()
    return log


def _config(stage: int, accumulation: int, is_recomputed: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    return {**config, "activation_checkpointing": {}} if is_recomputed else config


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_recomputed", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_without_branches_all_ranks_launch_everything_in_one_order(
    stage: int, accumulation: int, is_recomputed: bool
) -> None:
    """NCCL asks for it: communicators may share a hardware queue."""
    config = _config(stage, accumulation, is_recomputed)
    first, *others = simulate(_train, 3, config, [])
    assert {launch.communicator for launch in first} >= {"reductions"}
    assert others == [first] * 2


@pytest.mark.parametrize("is_recomputed", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("stage", range(4))
def test_ranks_that_leave_out_parts_of_blocks_launch_in_the_order_of_the_others(
    stage: int, is_recomputed: bool
) -> None:
    first, *others = simulate(_train, 3, _config(stage, 1, is_recomputed), LEFT_OUT)
    assert [_short(log) for log in others] == [_short(first)] * 2
    assert others == [first] * 2


@pytest.mark.parametrize("stage", range(4))
def test_ranks_that_skip_blocks_launch_in_the_order_of_the_others(stage: int) -> None:
    first, *others = simulate(_train, 3, _config(stage, 1, False), [], SKIPPED)
    assert [_short(log) for log in others] == [_short(first)] * 2
    assert others == [first] * 2


def _short(log: list[Launch]) -> str:
    return " ".join(f"{launch.communicator[0]}{launch.unit}" for launch in log)


def _connect(ranks: SimulatedRanks) -> None:
    on_cuda = dataclasses.replace(ranks, device=torch.device("cuda", 0))
    make_transport(on_cuda, 2, None, Meter())


@pytest.mark.parametrize("connections", ["1", "8", None])
def test_one_hardware_queue_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, connections: str | None
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    simulate(_connect, 2)
    assert ("CUDA_DEVICE_MAX_CONNECTIONS is 1" in caplog.text) == (connections == "1")
