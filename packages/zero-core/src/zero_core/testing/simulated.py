"""Simulated ranks: threads of one process in place of processes, for tests of partitioning.

A rank is a thread that builds an engine over `SimulatedRanks`. The engine's transport, layout,
runtime and optimizer run as they are. Only what carries bytes between ranks is replaced: messages
between single ranks (`zero_core.comm.p2p.Messages`) and an accelerator's library
(`zero_core.comm.control.DeviceLibrary`). Memory shared between processes, process groups and
signals are not simulated; tests of those start processes (`spawn`).

Threads share torch's global generator, so a program draws its model in one thread at a time
(`zero_core.testing.make_model` does).
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
from zero_core.errors import CollectiveError
from zero_core.protocols import Work
from zero_core.testing.ranks import of_size
from zero_core.watch.watch import Watch

_T = TypeVar("_T")
_COLLECT_S = 0.5
"""Seconds from one look at the garbage to the next."""
_MOST_UNCOLLECTED = 50_000
"""Objects made since the last collection. Python's own limit is 700."""

TIMEOUT_S = 120.0
"""Longest wait for another rank, unless `simulate` is given another."""

_turns = itertools.count(os.getpid())  # processes that begin together take different cores


class Network:
    """Mailboxes between the ranks of a simulation, by sender, receiver and tag."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size = world_size  # number of ranks
        self.timeout_s = timeout_s  # longest wait of a rank for another
        self._arrived = [threading.Condition() for _ in range(world_size)]
        self._boxes: dict[tuple[int, int, Any], deque[Tensor]] = defaultdict(deque)
        self.failed: int | None = None  # the rank that failed first

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
        """Return the ranks as ``rank`` sees them, ``per_node`` of them on a node."""
        size, device = self.world_size, torch.device("cpu")
        carrier = _SimulatedMessages(self, range(size), rank)
        return SimulatedRanks(None, rank, size, device, per_node, carrier=carrier)

    def fail(self, rank: int) -> None:
        """Wake every rank that waits, because ``rank`` has failed."""
        for arrived in self._arrived:
            with arrived:
                if self.failed is None:
                    self.failed = rank
                arrived.notify_all()


@dataclass(eq=False)
class _Message:
    """A message to arrive in ``into``. None: it was sent, or has arrived."""

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
    members: Sequence[int]  # ranks of the network
    rank: int  # this one of them
    key: Any = None  # messages of another key are others
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
        """Return messages of their own among some ``members``."""
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
        """See `DeviceLibrary.close`. There is nothing to end."""


@dataclass(frozen=True)
class SimulatedRanks(Ranks):
    """The ranks of a simulation, seen from one of them: ``build(..., process_group=ranks)``."""

    carrier: _SimulatedMessages = field(kw_only=True)

    def connect(self, named_within_s: float | None = None) -> ControlGroup:
        return super().connect()

    def exchange_beside(self, watch: Watch | None) -> Exchange:
        channel = self.carrier.next_channel()
        library = HostLibrary(self.carrier, rank=self.rank, world_size=self.size, channel=channel)
        return ControlGroup(library, self.device)

    def messages(self) -> Messages:
        return self.carrier

    def library(self) -> DeviceLibrary:
        key = ("library", self.carrier.next_channel())
        return SimulatedLibrary(self.carrier.among(range(self.size), key))


def device_collectives(ranks: SimulatedRanks, meter: Meter | None = None) -> DeviceCollectives:
    """Return the collectives that accelerators use, for simulated ranks. Each of them calls it.

    ``meter`` counts what is sent, over the links of such ranks.
    """
    links = Links(ranks.size, ranks.per_node or ranks.size, is_ring=True)
    return DeviceCollectives(ranks.library(), HostQueues(), meter or Meter(links))


@dataclass(frozen=True)
class GatedRanks(SimulatedRanks):
    """Simulated ranks whose asynchronous saves begin to write when ``gate`` is set."""

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
    """Run ``program(ranks, *args)`` on simulated ranks and return their results in order.

    ``ranks`` are `SimulatedRanks`, or those of a subclass of `Network`. Ranks must not change
    ``args``. An error is that of the rank that failed first.
    """
    per_node = ranks_per_node or world_size
    network = network or Network(world_size, timeout_s)
    results: dict[int, _T] = {}
    errors: dict[int, BaseException] = {}
    turn = next(_turns)

    def run(rank: int) -> None:
        torch.set_num_threads(1)  # as `spawn`: a sum's rounding depends on the threads
        try:
            if sys.platform == "linux":
                # Each operation of torch hands the interpreter's lock to another rank, which costs
                # several times as much across cores. Threads that a rank starts stay on its core.
                cores = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(0, {cores[turn % len(cores)]})
            results[rank] = program(network.ranks(rank, per_node), *args)
        except BaseException as error:  # raised in the caller's thread
            errors[rank] = error
            network.fail(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"simulated rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    num_threads = torch.get_num_threads()
    renew_autograd_after_fork()
    # Torch holds the lock of its random generator while it allocates a tensor for the generator's
    # state. If that starts a collection, and a tensor in the garbage gives up the interpreter's
    # lock, another rank may wait for the generator with the interpreter's lock: both wait for ever.
    # So no other thread than this one collects garbage.
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
    """Run a test on simulated ranks, each of which is its first argument once.

    ``world_size``: number of ranks; None: the test is parametrized by "world_size". The others are
    those of `simulate`.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(size: int, arguments: dict[str, Any]) -> None:
            program = functools.partial(test, **arguments)
            simulate(program, size, ranks_per_node=ranks_per_node, timeout_s=timeout_s)

        return of_size(test, world_size, run)

    return decorate
