"""Ranks as threads of one process, each with a fake device, and the fake NCCL's collectives.

Each rank runs each communicator's collectives on a separate stream, which first waits for the
launching stream. ``Work.wait`` makes the current stream wait, and does not block the host.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from support.fake_cuda import nccl
from zero_core.comm.control import ControlGroup, DeviceLibrary, Exchange, Lane
from zero_core.comm.groups import Ranks
from zero_core.comm.watch import Watch
from zero_core.protocols import Work
from zero_core.testing.ranks import alone, of_size
from zero_core.testing.simulated import TIMEOUT_S, Network, simulate

_T = TypeVar("_T")
_UINT8 = 1
"""NCCL's number for uint8. All collectives except all_reduce send their data as uint8."""
_TYPES = {torch.float64: 8, torch.float32: 7, torch.int64: 4, torch.int32: 2, torch.uint8: _UINT8}


class _UniqueId(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char * 128)]


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"NCCL: {nccl().ncclGetErrorString(result).decode()}")


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


class DeviceNetwork(Network):
    """Connects the ranks of one simulation, each of which has its own fake device."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        super().__init__(world_size, timeout_s)
        nccl().fake_nccl_set_limit(timeout_s)
        self._lock = threading.Lock()
        self._ids: dict[str, _UniqueId] = {}
        self._communicators: list[ctypes.c_void_p] = []

    def join(self, name: str, size: int, rank: int) -> ctypes.c_void_p:
        """Join the communicator ``name`` and return its handle. Blocks until all ranks join."""
        with self._lock:
            if name not in self._ids:
                self._ids[name] = _UniqueId()
                nccl().ncclGetUniqueId(ctypes.byref(self._ids[name]))
        made = ctypes.c_void_p()
        _check(nccl().ncclCommInitRank(ctypes.byref(made), size, self._ids[name], rank))
        self._communicators.append(made)
        return made

    def ranks(self, rank: int, per_node: int) -> DeviceRanks:
        device = torch.device("cuda", rank)
        torch.accelerator.set_device_index(rank)
        size = self.world_size
        base = CommunicatorLibrary(self, "ranks", range(size), rank, device)
        return DeviceRanks(None, rank, size, device, per_node, base=base)

    def fail(self, rank: int) -> None:
        """Abort all communicators, because ``rank`` has failed."""
        if self.failed is None:
            self.failed = rank
        for communicator in self._communicators:
            nccl().ncclCommAbort(communicator)


class CommunicatorLibrary:
    """`zero_core.comm.control.DeviceLibrary` over a communicator of the fake NCCL."""

    def __init__(
        self,
        network: DeviceNetwork,
        name: str,
        members: Sequence[int],
        rank: int,
        device: torch.device,
    ) -> None:
        """``members``: the group's ranks in the simulation. ``rank``: this rank's index there."""
        self.rank = rank
        self.world_size = len(members)
        self._network = network
        self._name = name
        self._members = list(members)
        self._device = device
        self._stream = torch.Stream(device, priority=-1)
        self._communicator = network.join(name, len(members), rank)
        self._num_subgroups = 0

    def all_gather(self, out: Tensor, shard: Tensor) -> Work:
        return self._start("ncclAllGather", shard, out, shard.nbytes, _UINT8)

    def all_to_all(self, out: Tensor, parts: Tensor) -> Work:
        return self._start("ncclAlltoAll", parts, out, parts.nbytes // self.world_size, _UINT8)

    def all_reduce(self, values: Tensor) -> Work:
        """See `DeviceLibrary`. The fake NCCL sums in rank order."""
        kind, reduction = _TYPES[values.dtype], 0
        return self._start("ncclAllReduce", values, values, values.numel(), kind, reduction)

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        return self._start("ncclBroadcast", tensor, tensor, tensor.nbytes, _UINT8, source)

    def exchange(
        self, out: Tensor, parts: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Work:
        def enqueue(stream: ctypes.c_void_p) -> None:
            nccl().ncclGroupStart()
            for tensor, sizes, call in ((parts, sent, "ncclSend"), (out, received, "ncclRecv")):
                for peer, part in enumerate(torch.split(tensor, list(sizes))):
                    size = ctypes.c_size_t(part.nbytes)
                    given = (_pointer(part), size, _UINT8, peer, self._communicator, stream)
                    _check(getattr(nccl(), call)(*given))
            nccl().ncclGroupEnd()

        return self._enqueue(enqueue)

    def subgroup(self, ranks: Sequence[int], lane: Lane) -> CommunicatorLibrary:
        self._num_subgroups += 1
        members = [self._members[r] for r in ranks]
        name = f"{self._name}.{self._num_subgroups} ({lane.value} of {members})"
        rank = list(ranks).index(self.rank)
        return CommunicatorLibrary(self._network, name, members, rank, self._device)

    def close(self) -> None:
        """Do nothing. Communicators end with the process."""

    def _start(self, call: str, given: Tensor, out: Tensor, size: int, *more: int) -> Work:
        def enqueue(stream: ctypes.c_void_p) -> None:
            addresses = (_pointer(given), _pointer(out), ctypes.c_size_t(size))
            _check(getattr(nccl(), call)(*addresses, *more, self._communicator, stream))

        return self._enqueue(enqueue)

    def _enqueue(self, enqueue: Callable[[ctypes.c_void_p], None]) -> Work:
        stream = self._stream
        handle = torch.cuda.Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        enqueue(ctypes.c_void_p(handle.cuda_stream))
        return _Started(self._stream.record_event(), self._device)


@dataclass(frozen=True, eq=False)
class _Started:
    done: torch.Event
    device: torch.device

    def wait(self) -> None:
        torch.accelerator.current_stream(self.device).wait_event(self.done)


@dataclass(frozen=True)
class DeviceRanks(Ranks):
    """One rank's view of the ranks of a simulation on devices."""

    base: CommunicatorLibrary = field(kw_only=True)

    def connect(self, named_within_s: float | None = None) -> ControlGroup:
        return ControlGroup(self.base, self.device)

    def exchange_beside(self, watch: Watch | None) -> Exchange:
        return self.connect()

    def library(self) -> DeviceLibrary:
        return self.base


def simulate_on_devices(
    program: Callable[..., _T],
    world_size: int,
    *args: Any,
    ranks_per_node: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> list[_T]:
    """Run ``program`` as `simulate` does, with `DeviceRanks`. Call it in a separate process."""

    def run(ranks: DeviceRanks) -> _T:
        result = program(ranks, *args)
        torch.accelerator.synchronize(ranks.device)  # raises the errors of jobs
        return result

    network = DeviceNetwork(world_size, timeout_s)
    return simulate(run, world_size, ranks_per_node=ranks_per_node, network=network)


def on_device_rank(test: Callable[..., None]) -> Callable[..., None]:
    """Make ``test`` run on one rank with a device, with `DeviceRanks` as first argument."""

    def run(size: int, arguments: dict[str, Any]) -> None:
        simulate_on_devices(functools.partial(test, **arguments), size)

    return alone(of_size(test, 1, run))
