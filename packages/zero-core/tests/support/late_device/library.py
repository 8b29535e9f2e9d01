"""Simulated ranks with a late device each, and collectives among them with NCCL's rules.

A communicator has its own stream on each rank. A collective first waits for the stream that is
current at its launch, and ends when every rank has read its peers' values. ``wait`` blocks the
current stream, never the host. Collectives of one communicator run in launch order. If ranks launch
different collectives, every rank fails with an error that names both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from support.late_device import NAME, load
from zero_core.comm.control import ControlGroup, DeviceLibrary, Exchange, Lane
from zero_core.comm.groups import Ranks
from zero_core.protocols import Work
from zero_core.testing.simulated import Network
from zero_core.watch.watch import Watch

_numbers = itertools.count()


class LateWorld(Network):
    def __init__(self, world_size: int, timeout_s: float) -> None:
        super().__init__(world_size, timeout_s)
        load()
        torch.ops.late.drain()  # waits for jobs of an earlier failed simulation
        torch.ops.late.forget_errors()
        self.number = next(_numbers)

    def ranks(self, rank: int, per_node: int) -> LateRanks:
        device = torch.device(NAME, rank)
        torch.accelerator.set_device_index(rank)
        size = self.world_size
        base = LateLibrary(self, "ranks", range(size), rank, device)
        return LateRanks(None, rank, size, device, per_node, base=base)

    def fail(self, rank: int) -> None:
        """Fail every current and future collective, because ``rank`` has failed."""
        if self.failed is None:
            self.failed = rank
        torch.ops.late.fail_world(self.number, f"rank {rank} failed")


class LateLibrary:
    """`zero_core.comm.control.DeviceLibrary` over late devices."""

    def __init__(
        self, world: LateWorld, name: str, members: Sequence[int], rank: int, device: torch.device
    ) -> None:
        """``members`` are ranks of the simulation. ``rank`` is this rank's index in ``members``."""
        self.rank = rank
        self.world_size = len(members)
        self._simulation = world
        self._name = name
        self._members = list(members)
        self._device = device
        self._stream = torch.Stream(device, priority=-1)
        self._number = torch.ops.late.communicator(world.number, name, len(members))
        self._num_subgroups = 0

    def all_gather(self, out: Tensor, shard: Tensor) -> Work:
        return self._start("all_gather", out, shard)

    def all_to_all(self, out: Tensor, parts: Tensor) -> Work:
        return self._start("all_to_all", out, parts)

    def exchange(
        self, out: Tensor, parts: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Work:
        """See `DeviceLibrary`. Implemented as an all-to-all of slices padded to the longest."""
        size, own = self.world_size, max(*sent, *received)
        longests = torch.zeros(size, dtype=torch.int64, device=self._device)
        # Keep a reference until the job has read the tensor.
        given = torch.tensor([own], dtype=torch.int64, device=self._device)
        self.all_gather(longests, given).wait()
        torch.accelerator.synchronize(self._device)
        longest = int(longests.max())
        padded, arrived = (
            torch.zeros(size, longest, dtype=parts.dtype, device=self._device) for _ in range(2)
        )
        for row, part in zip(padded, torch.split(parts, list(sent)), strict=True):
            row[: part.numel()] = part
        work = self.all_to_all(arrived.view(-1), padded.view(-1))
        work.wait()
        for slot, row in zip(torch.split(out, list(received)), arrived, strict=True):
            slot.copy_(row[: slot.numel()])
        return work

    def all_reduce(self, values: Tensor) -> Work:
        """See `DeviceLibrary`. The sum is taken in rank order."""
        return self._start("all_reduce", values, values)

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        return self._start("broadcast", tensor, tensor, source)

    def subgroup(self, ranks: Sequence[int], lane: Lane) -> LateLibrary:
        self._num_subgroups += 1
        members = [self._members[r] for r in ranks]
        name = f"{self._name}.{self._num_subgroups} ({lane.value} of {members})"
        rank = list(ranks).index(self.rank)
        return LateLibrary(self._simulation, name, members, rank, self._device)

    def close(self) -> None:
        """See `DeviceLibrary.close`. Communicators end with the process."""

    def _start(self, kind: str, out: Tensor, given: Tensor, source: int = 0) -> Work:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        torch.ops.late.collective(
            self._number,
            kind,
            self.rank,
            out.detach(),
            given.detach(),
            source,
            self._stream.stream_id,
            self._simulation.timeout_s,
        )
        return _Started(self._stream.record_event(), self._device)


@dataclass(frozen=True, eq=False)
class _Started:
    done: torch.Event
    device: torch.device

    def wait(self) -> None:
        torch.accelerator.current_stream(self.device).wait_event(self.done)


@dataclass(frozen=True)
class LateRanks(Ranks):
    base: LateLibrary = field(kw_only=True)

    def connect(self, named_within_s: float | None = None) -> ControlGroup:
        return ControlGroup(self.base, self.device)

    def exchange_beside(self, watch: Watch | None) -> Exchange:
        return self.connect()

    def library(self) -> DeviceLibrary:
        return self.base
