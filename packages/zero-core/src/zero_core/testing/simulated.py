"""Simulated ranks for tests of partitioning: threads of one process instead of processes.

Each rank is a thread. Its `SimulatedRanks` replace point-to-point messages
(`zero_core.comm.p2p.Messages`) and an accelerator's library
(`zero_core.comm.control.DeviceLibrary`). An engine over them runs its usual code otherwise. Shared
memory, process groups and signals are not simulated: their tests start processes (`spawn`).

Threads share torch's global random generator, so only one thread at a time may initialize a model
(`zero_core.testing.make_model` takes a lock).
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from zero_core._torch import renew_autograd_after_fork
from zero_core.comm.control import ControlGroup, DeviceLibrary, Exchange, Lane
from zero_core.comm.device import DeviceCollectives
from zero_core.comm.groups import Ranks
from zero_core.comm.host import HostLibrary
from zero_core.comm.meter import Links, Meter
from zero_core.comm.p2p import Messages
from zero_core.comm.queues import HostQueues
from zero_core.comm.watch import Watch
from zero_core.errors import CollectiveError
from zero_core.protocols import Work
from zero_core.testing.ranks import of_size

_T = TypeVar("_T")
_COLLECT_S = 0.5
"""Seconds between two checks for garbage."""
_MOST_UNCOLLECTED = 50_000
"""Minimum ``gc.get_count()[0]``, objects created minus objects deleted, for a collection."""

TIMEOUT_S = 120.0
"""Default of ``timeout_s``, the longest wait for a message."""

# Number of the next simulation, which selects its core. Counting from the process id makes it
# likely that concurrent processes use different cores.
_turns = itertools.count(os.getpid())


class Network:
    """Messages between the ranks of a simulation, by sender, receiver and tag."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._arrived = [threading.Condition() for _ in range(world_size)]
        self._boxes: dict[tuple[int, int, Any], deque[Tensor]] = defaultdict(deque)
        self.failed: int | None = None  # the first rank that failed

    def send(self, source: int, target: int, tag: Any, tensor: Tensor) -> None:
        with torch.inference_mode(False):
            copy = tensor.detach().clone()
        with self._arrived[target]:
            self._boxes[source, target, tag].append(copy)
            self._arrived[target].notify_all()

    def receive(self, source: int, target: int, tag: Any) -> Tensor:
        with self._arrived[target]:
            box = self._boxes[source, target, tag]
            is_there = self._arrived[target].wait_for(
                lambda: bool(box) or self.failed is not None, self.timeout_s
            )
            if box:
                return box.popleft()
        if is_there:
            raise CollectiveError(
                f"rank {target} waits for rank {source}: rank {self.failed} failed"
            )
        raise CollectiveError(
            f"rank {target} got nothing from rank {source} under tag {tag} in "
            f"{self.timeout_s:.0f} s: the ranks took different branches"
        )

    def ranks(self, rank: int, per_node: int) -> Ranks:
        """Return the `SimulatedRanks` of ``rank``, with ``per_node`` ranks on each node."""
        size, device = self.world_size, torch.device("cpu")
        carrier = _SimulatedMessages(self, range(size), rank)
        return SimulatedRanks(None, rank, size, device, per_node, carrier=carrier)

    def fail(self, rank: int) -> None:
        """Record the first failed rank, and wake all waiting ranks."""
        for arrived in self._arrived:
            with arrived:
                if self.failed is None:
                    self.failed = rank
                arrived.notify_all()


@dataclass(eq=False)
class _Message:
    """Handle of a message that was sent (``into`` is None), or that `wait` copies to ``into``."""

    network: Network
    address: tuple[int, int, Any]  # sender, receiver and tag
    into: Tensor | None = None

    def wait(self) -> None:
        into, self.into = self.into, None
        if into is None:
            return
        found = self.network.receive(*self.address)
        if found.nbytes != into.nbytes:
            raise CollectiveError(f"expected a message of {into.nbytes} bytes, got {found.nbytes}")
        into.view(-1).view(torch.uint8).copy_(found.view(-1).view(torch.uint8))


@dataclass(eq=False)
class _SimulatedMessages:
    """`zero_core.comm.p2p.Messages` of one simulated rank."""

    network: Network
    members: Sequence[int]  # ranks in the network, indexed by ``target`` and ``source``
    rank: int  # this rank in the network
    key: Any = None  # added to each tag, so that groups do not receive each other's messages
    num_channels: int = 0

    def isend(self, tensor: Tensor, target: int, tag: int) -> Work:
        address = self.rank, self.members[target], (self.key, tag)
        self.network.send(*address, tensor)
        return _Message(self.network, address)

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        return _Message(self.network, (self.members[source], self.rank, (self.key, tag)), tensor)

    def next_channel(self) -> int:
        self.num_channels += 1
        return self.num_channels

    def among(self, members: Sequence[int], key: Any) -> _SimulatedMessages:
        """Return messages among the ranks ``members``, separate from those with other keys."""
        chosen = [self.members[member] for member in members]
        return _SimulatedMessages(self.network, chosen, self.rank, (self.key, key))


class SimulatedLibrary(HostLibrary):
    """`zero_core.comm.control.DeviceLibrary` of one simulated rank."""

    def __init__(self, carrier: _SimulatedMessages) -> None:
        rank, size = carrier.members.index(carrier.rank), len(carrier.members)
        super().__init__(carrier, rank=rank, world_size=size)
        self._carrier = carrier
        self._num_subgroups = 0

    def all_to_all(self, out: Tensor, parts: Tensor) -> Work:
        equal = [parts.numel() // self.world_size] * self.world_size
        return self.exchange(out, parts, equal, equal)

    def subgroup(self, ranks: Sequence[int], lane: Lane) -> SimulatedLibrary:
        self._num_subgroups += 1
        return SimulatedLibrary(self._carrier.among(ranks, (self._num_subgroups, lane)))

    def close(self) -> None:
        """Do nothing: a simulated library has no resources."""


@dataclass(frozen=True)
class SimulatedRanks(Ranks):
    """`Ranks` of one simulated rank, for ``build(..., process_group=ranks)``."""

    carrier: _SimulatedMessages = field(kw_only=True)

    def connect(self, named_within_s: float | None = None) -> ControlGroup:
        return super().connect()

    def exchange_beside(self, watch: Watch | None) -> Exchange:
        return ControlGroup(self.library(), self.device)

    def messages(self) -> Messages:
        return self.carrier

    def library(self) -> DeviceLibrary:
        key = ("library", self.carrier.next_channel())
        return SimulatedLibrary(self.carrier.among(range(self.size), key))


def device_collectives(ranks: SimulatedRanks, meter: Meter | None = None) -> DeviceCollectives:
    """Return collectives that simulate an accelerator's. Every rank must call it.

    ``meter`` counts the bytes sent.
    """
    links = Links(ranks.size, ranks.per_node or ranks.size, is_ring=True)
    return DeviceCollectives(ranks.library(), HostQueues(), meter or Meter(links))


@dataclass(frozen=True)
class GatedRanks(SimulatedRanks):
    """Simulated ranks whose asynchronous saves wait for ``gate`` before they write."""

    gate: threading.Event = field(default_factory=threading.Event)

    def exchange_beside(self, watch: Watch | None) -> Exchange:
        exchange = super().exchange_beside(watch)
        gather = exchange.gather_bytes

        def gather_bytes(data: bytes) -> list[bytes]:
            assert self.gate.wait(120)
            return gather(data)

        exchange.gather_bytes = gather_bytes  # type: ignore[method-assign]
        return exchange


def simulate(
    program: Callable[..., _T],
    world_size: int,
    *args: Any,
    ranks_per_node: int | None = None,
    timeout_s: float = TIMEOUT_S,
    network: Network | None = None,
) -> list[_T]:
    """Run ``program(ranks, *args)`` on simulated ranks and return the results in rank order.

    ``ranks`` are `SimulatedRanks`, or what ``network.ranks`` returns. ``timeout_s`` has no effect
    with ``network``. Ranks share ``args``, and must not change them. If ranks fail, the first
    failed rank's exception is raised.
    """
    per_node = ranks_per_node or world_size
    network = network or Network(world_size, timeout_s)
    results: dict[int, _T] = {}
    errors: dict[int, BaseException] = {}
    turn = next(_turns)

    def run(rank: int) -> None:
        torch.set_num_threads(1)  # as in `spawn`: the number of threads may change a sum's rounding
        try:
            if sys.platform == "linux":
                # Run all ranks on one core, because passing the GIL between cores is slower.
                cores = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(0, {cores[turn % len(cores)]})
            results[rank] = program(network.ranks(rank, per_node), *args)
        except BaseException as error:  # the caller's thread raises the first one
            errors[rank] = error
            network.fail(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"simulated rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    num_threads = torch.get_num_threads()
    renew_autograd_after_fork()
    # Only this thread may collect garbage, to avoid a deadlock. Torch holds its generator's lock
    # while it allocates a tensor for the generator's state. If this allocation triggers a
    # collection, and a collected tensor releases the GIL, another rank can take the GIL and keep it
    # while it waits for the generator's lock.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_COLLECT_S)
                if was_enabled and gc.get_count()[0] > _MOST_UNCOLLECTED:
                    gc.collect(1)
    finally:
        if was_enabled:
            gc.enable()
    torch.set_num_threads(num_threads)
    if network.failed is not None:
        raise errors[network.failed]
    return [results[rank] for rank in range(world_size)]


def on_ranks(
    world_size: int | None = None,
    *,
    ranks_per_node: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test run on simulated ranks. Its first argument is the rank's `SimulatedRanks`.

    ``world_size`` is as in `of_size`, and the other arguments as in `simulate`.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(size: int, arguments: dict[str, Any]) -> None:
            program = functools.partial(test, **arguments)
            simulate(program, size, ranks_per_node=ranks_per_node, timeout_s=timeout_s)

        return of_size(test, world_size, run)

    return decorate
