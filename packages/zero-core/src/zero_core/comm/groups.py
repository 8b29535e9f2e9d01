"""Process groups of engines: creation, sharing between engines, and destruction.

[Note: groups that cannot hang]
torch creates a process group in one of three ways, each with a condition:

- ``new_group(ranks)`` must be called by *every* rank of the job, member or not, in the same order.
  The group's name is a counter of these calls. Since torch 2.15 (pytorch#189073) the counter also
  counts calls of the second way, which non-members do not make. With a device bound to the default
  group (``init_process_group(device_id=...)``), non-members take part in NCCL's split.
- ``new_group(ranks, use_local_synchronization=True)`` is called by the members alone. The group's
  name is a hash of the ranks and of the *number of groups* that the calling rank is in (since torch
  2.15: of the counter). If these numbers differ, the members use different names and hang. A group
  with a reused name may read data that a destroyed group left in the store. With a bound device,
  NCCL's split waits for non-members, which never call ``new_group``.
- ``split_group(parent, ...)`` is called by all ranks of ``parent`` and needs a bound device. Names
  are formed as in the second way.

An engine over all ranks of the job uses the first way, after all ranks have set their counter to
the highest counter of any rank. An engine over some of the ranks uses the third way if a device is
bound and otherwise the second. Its ranks first agree on a number that none of them has used for a
group before (`zero_core._torch.counting_groups`).

[Note: shared groups]
A group with the same backend, ranks and lane (see `Lane`) is reused by other subgroups of the same
engine (ZeRO++'s two exchanges have equal subgroups) and by later engines. The members first agree
on whether the group still exists, because an engine may have been closed on some of them only. A
rank aborts a group when the group's last user on that rank is closed. The rank does not wait for
other ranks, and no collective may be pending on the group. Groups that end together are aborted in
one call, because NCCL's aborts of several communicators may wait for each other (pytorch#119797).

If a `ProcessLibrary` is dropped without `close`, its groups end when another `ProcessLibrary`
requests a group or is closed. Finalizers would run at different times on the ranks.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero_core._torch import (
    abort_groups,
    begin_group_names_at,
    clone_store,
    count_groups,
    counting_groups,
    group_names_begin_at,
    set_timeout,
    store_address,
    timeout_of,
)
from zero_core.comm.control import ControlGroup, DeviceLibrary, Exchange, Lane
from zero_core.comm.host import HostLibrary
from zero_core.comm.p2p import Messages, ProcessMessages
from zero_core.comm.place import Place
from zero_core.comm.queues import Pending
from zero_core.comm.watch import DeviceWaits, ThreadedBoard, Watch, start
from zero_core.errors import CollectiveError, ConfigError
from zero_core.protocols import Work

_LEAVE_S = 30.0  # longest wait in `StoreExchange.leave` for ranks that have not read the last keys
_LOOK_S = 1.0  # interval at which a waiting `StoreExchange` checks that the other ranks are alive

# torch 2.13 renamed the tensor collectives and deprecated the old names.
_all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class Ranks:
    """The data-parallel ranks, and the position of this process among them."""

    group: dist.ProcessGroup | None  # None: the default group, or no group if ``size`` is 1
    rank: int  # this rank's number within the group
    size: int
    device: torch.device  # device on which this rank computes
    per_node: int | None = None  # ranks per node, if a mesh defines the nodes
    timeout_s: float | None = None  # longest wait for another rank; None: the group's timeout

    @property
    def has_own_device(self) -> bool:
        """Whether each rank needs its own accelerator. With gloo and MPI, ranks can share one."""
        if self.size == 1 or self.device.type == "cpu" or not dist.is_initialized():
            return False
        return backend_on(self.group, self.device) not in ("gloo", "mpi")

    def limited(self, timeout_s: float | None) -> Self:
        """Return these ranks with ``timeout_s`` as the longest wait for another rank."""
        if timeout_s is not None and self.has_own_device:
            set_timeout(self.group, timeout_s)  # in the backend, because ``wait`` does not block
        return replace(self, timeout_s=timeout_s)

    def connect(self, named_within_s: float | None = None) -> ControlGroup:
        """Return the control group of these ranks.

        Between processes, a `Watch` lets errors name the rank that caused them, unless
        ``named_within_s`` is None. A wait longer than a positive ``named_within_s`` is logged with
        the ranks that are waited for.
        """
        place, watch = Place(), None
        has_group = dist.is_available() and dist.is_initialized()
        if self.size > 1 and named_within_s is not None and has_group:
            number = _next_of(self.group, "beats")
            store = known_group(self.group).get_group_store()
            host, address = "the store of the process group", store_address(store)
            if address is not None:
                is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
                who = "torchrun's agent" if is_agents else "rank 0 of the job"
                host = f"{who} (it hosts {host} at {address})"
            keys = [f"zero_core beats {number} of rank {r}" for r in range(self.size)]
            device_waits = DeviceWaits(self.device, self.timeout_s) if self.has_own_device else None
            watch = Watch(
                # A connection serves one blocking call at a time: the watch needs a separate one.
                ThreadedBoard(clone_store(store), host, keys, self.rank),
                place,
                rank=self.rank,
                world_size=self.size,
                within_s=min(named_within_s, self.timeout_s or named_within_s),
                device_waits=device_waits,
            )
            if named_within_s:
                start(watch)
        if self.device.type != "cpu":
            return ControlGroup(self.library(), self.device, place, watch)
        hosts = HostLibrary(self.messages(), rank=self.rank, world_size=self.size)
        return ControlGroup(hosts, self.device, place, watch)

    def exchange_beside(self, watch: Watch | None) -> Exchange:
        """Return an exchange for a background thread. All ranks must call it in the same order."""
        return StoreExchange(self, "a save beside training", watch)

    def messages(self) -> Messages:
        return ProcessMessages(self.group, self.timeout_s)

    def library(self) -> DeviceLibrary:
        return ProcessLibrary(replace(self, timeout_s=None) if self.has_own_device else self)


class ProcessLibrary:
    """`DeviceLibrary` over a process group of torch.distributed.

    Tensors are sent as bytes, except in `all_reduce`, because NCCL lacks int16 and complex dtypes.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.rank = ranks.rank
        self.world_size = ranks.size
        self._group = ranks.group
        self._ranks = ranks

    def all_gather(self, out: Tensor, shard: Tensor) -> Work:
        return self._start(_all_gather_single, _bytes(out), _bytes(shard))

    def all_to_all(self, out: Tensor, parts: Tensor) -> Work:
        return self._start(dist.all_to_all_single, _bytes(out), _bytes(parts))

    def exchange(
        self, out: Tensor, parts: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Work:
        arriving, leaving = ([n * parts.itemsize for n in numels] for numels in (received, sent))
        return self._start(dist.all_to_all_single, _bytes(out), _bytes(parts), arriving, leaving)

    def all_reduce(self, values: Tensor) -> Work:
        return self._start(dist.all_reduce, values)

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        return self._start(dist.broadcast, _bytes(tensor), group_src=source)

    def _start(self, collective: Any, *tensors: Any, **options: Any) -> Work:
        work = collective(*tensors, group=self._group, async_op=True, **options)
        timeout_s = self._ranks.timeout_s
        if timeout_s is None:
            return cast(Work, work)
        return Pending(partial(work.wait, timedelta(seconds=timeout_s)))

    def subgroup(self, ranks: Sequence[int], lane: Lane) -> ProcessLibrary:
        device, members = self._ranks.device, dist.get_process_group_ranks(self._group)
        backend = backend_on(self._group, device)
        assert backend is not None, "the group exchanges tensors of the device"
        own, chosen = tuple(ranks), tuple(members[r] for r in ranks)
        known, key = _of_job().shared, (backend, chosen, lane)
        shared = next((s for s in reversed(known) if s.key == key and s.users), None)
        name = "" if shared is None else shared.group.group_name
        is_everybody = len(members) == dist.get_world_size()
        number = group_names_begin_at() if is_everybody else _next_number()
        cards = ControlGroup(self, device).gather_json([own, lane.value, name, number])
        given, lanes, names, numbers = zip(*cards, strict=True)
        parts = list(dict.fromkeys(map(tuple, given)))
        is_partition = sorted(r for part in parts for r in part) == list(range(self.world_size))
        is_own = all(rank in part for rank, part in enumerate(given))
        if not is_partition or not is_own or len(set(lanes)) > 1:
            found = "; ".join(f"rank {r}: {lanes[r]} of {part}" for r, part in enumerate(given))
            raise ConfigError(
                "subgroup: every rank gives the subgroup that it is in, for the same lane; "
                f"together they are all ranks, each once; found {found}"
            )
        # Make groups for subgroups where a member lacks the group, or members know different ones.
        to_make = [p for p in parts if not names[p[0]] or len({names[r] for r in p}) > 1]
        made = self._make(to_make, own, lane, max(numbers))
        if made is not None:
            shared = _SharedGroup(made, key)
            known.append(shared)
        assert shared is not None
        rank, size = own.index(self.rank), len(own)
        library = ProcessLibrary(replace(self._ranks, group=shared.group, rank=rank, size=size))
        shared.users.add(self)
        _end_unused()
        if made is not None:  # connect the new group's ranks, so that connection errors occur here
            sent = torch.full((1,), rank, dtype=torch.int64, device=device)
            arrived = torch.empty(size, dtype=torch.int64, device=device)
            if lane is Lane.GATHERS:
                library.all_gather(arrived, sent).wait()
            else:
                library.all_to_all(arrived, sent.repeat(size)).wait()
            assert arrived.tolist() == list(range(size))
        return library

    def _make(
        self, parts: Sequence[tuple[int, ...]], own: tuple[int, ...], lane: Lane, number: int
    ) -> dist.ProcessGroup | None:
        """Create groups of ``parts``. Return that of ``own``: [Note: groups that cannot hang]."""
        members = dist.get_process_group_ranks(self._group)
        backend = backend_on(self._group, self._ranks.device)
        options: dict[str, Any] = {
            "timeout": timeout_of(self._group, self._ranks.device),
            "pg_options": None,
            "group_desc": f"zero_core {lane.value}",
        }
        if backend == "nccl":
            # At normal priority, NCCL's few thread blocks wait until those of large matmuls finish.
            nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            nccl._timeout = options["timeout"]  # torch 2.14 warns if it differs
            options["pg_options"] = nccl

        def make(part: Sequence[int], **how: Any) -> dist.ProcessGroup:
            ranks = [members[r] for r in part]
            if ranks != sorted(ranks):
                how["sort_ranks"] = False  # torch 2.10 lacks this parameter
            group: dist.ProcessGroup = dist.new_group(ranks, backend=backend, **how, **options)
            return group

        if len(members) == dist.get_world_size():
            begin_group_names_at(number)
            return dict(zip(parts, map(make, parts), strict=True)).get(own)
        if not parts:
            return None
        _of_job().next_number = number + 1
        with counting_groups(number):
            if known_group(None).bound_device_id is None:
                return make(own, use_local_synchronization=True) if own in parts else None
            if any(list(part) != sorted(part) for part in parts):
                raise ConfigError(
                    f"subgroups {[list(part) for part in parts]}: expected ascending ranks, as "
                    "torch splits a group with a bound device in that order"
                )
            group = dist.split_group(self._group, [list(part) for part in parts], **options)
            return group if own in parts else None

    def close(self) -> None:
        """End the groups whose last user was this library. See [Note: shared groups]."""
        if dist.is_initialized():  # otherwise destroy_process_group() has ended all groups already
            for shared in _of_job().shared:
                shared.users.discard(self)
            _end_unused()


def group_of_mesh(mesh: DeviceMesh, device: torch.device) -> dist.ProcessGroup:
    """Return a process group over the ranks of a 2-D mesh that does not cover the whole job."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    made = _of_job().of_meshes
    if tuple(ranks) in made:
        return made[tuple(ranks)]
    if known_group(None).bound_device_id is not None:
        raise ConfigError(
            f"build(mesh=...) of two dimensions over ranks {ranks} alone, with a device bound by "
            "init_process_group(device_id=...): NCCL makes their group with all ranks of the job; "
            f"on all of them, call group = torch.distributed.new_group({ranks}), and build("
            "process_group=group) on these"
        )
    numbers = torch.tensor([_next_number()])
    for dim in (1, 0):  # take the maximum within each row, then over the rows
        line = Ranks(mesh.get_group(dim), mesh.get_local_rank(dim), mesh.size(dim), device)
        numbers = ControlGroup(ProcessLibrary(line), device).gather(numbers)
    number = int(numbers.max())
    _of_job().next_number = number + 1
    with counting_groups(number):
        made[tuple(ranks)] = dist.new_group(ranks, use_local_synchronization=True)
    return made[tuple(ranks)]


class StoreExchange(Exchange):
    """Exchange through the store of a process group instead of by collectives.

    Before the ranks' devices are checked, a collective of NCCL could fail. On a thread that runs
    during training, collectives would be launched in a different order on each rank.
    """

    def __init__(self, ranks: Ranks, what: str, watch: Watch | None = None) -> None:
        """Create an exchange. All ranks must create a process group's exchanges in the same order.

        ``what`` names the purpose in error messages. A wait for a rank that ``watch`` finds dead
        fails before the timeout.
        """
        self.rank = ranks.rank
        self.world_size = ranks.size
        self.place = Place()
        self.longest_wait_s = 0.0
        self._watch = watch
        self._group = ranks.group
        self._what = what
        self._num_uses = 0
        self._num_rounds = 0
        self._is_broken = False
        self._store: Any = None  # a clone, because a connection serves one blocking call at a time
        self._number = 0
        if ranks.size > 1:
            self._number = _next_of(ranks.group, "exchange")
            self.longest_wait_s = timeout_of(ranks.group, ranks.device).total_seconds()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return all ranks' ``data`` (ASCII). Raises CollectiveError if a rank is dead or late."""
        if self.world_size == 1:
            return [data]
        keys, before = self._keys(self._num_rounds), self._keys(self._num_rounds - 1)
        self._num_rounds += 1
        try:
            if self._store is None:
                self._store = clone_store(known_group(self._group).get_group_store())
            self._store.set(keys[self.rank], data.decode())
            began = asked = time.monotonic()
            missing = list(range(self.world_size))
            while missing and not self._store.check([keys[rank] for rank in missing]):
                now = time.monotonic()
                if now - asked >= _LOOK_S:
                    asked = now
                    missing = [r for r in missing if not self._store.check([keys[r]])]
                    dead = "" if self._watch is None else self._watch.find_dead(missing)
                    if dead or now - began >= self.longest_wait_s:
                        raise RuntimeError(dead or f"no answer of ranks {missing[:4]} in time")
                time.sleep(min(max((now - began) / 4, 0.001), _LOOK_S))
            rows = [self._store.get(key) for key in keys]
            if self._num_rounds > 1:  # all ranks set this round's keys, so all have read ``before``
                self._store.delete_key(before[self.rank])
        except RuntimeError as error:
            self._is_broken = True
            raise CollectiveError(
                f"rank {self.rank}: the exchange of {self._what} failed: {error}"
            ) from error
        return rows

    def leave(self) -> None:
        """End this sequence of calls. Rank 0, which may host the store, waits for the others."""
        ends, last = self._keys(self._num_rounds), self._keys(self._num_rounds - 1)
        if self._store is not None and not self._is_broken:
            with suppress(RuntimeError):  # all data has been exchanged
                self._store.set(ends[self.rank], "")
                if self.rank == 0:
                    self._store.wait(ends, timedelta(seconds=_LEAVE_S))
                    for key in (*ends, *last):
                        self._store.delete_key(key)
        self._num_uses += 1
        self._num_rounds = 0
        self._is_broken = False  # the next use has other keys

    def _keys(self, number: int) -> list[str]:
        name = f"zero_core exchange {self._number}.{self._num_uses} round {number}"
        return [f"{name} of rank {rank}" for rank in range(self.world_size)]


@dataclass(eq=False)
class _SharedGroup:
    """A process group, and weak references to the `ProcessLibrary` objects that use it."""

    group: dist.ProcessGroup
    # Backend, global ranks of the members in the group's order, and lane.
    key: tuple[str | None, tuple[int, ...], Lane]
    users: weakref.WeakSet[ProcessLibrary] = field(default_factory=weakref.WeakSet)


@dataclass
class _Job:
    shared: list[_SharedGroup] = field(default_factory=list)  # in order of creation
    of_meshes: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    next_number: int = 0  # lowest free number for a group that its members create alone


_jobs: weakref.WeakKeyDictionary[Any, _Job] = weakref.WeakKeyDictionary()
# Number of exchanges and watches that used a group's store, by purpose.
_counts: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def _of_job() -> _Job:
    return _jobs.setdefault(dist.group.WORLD, _Job())


def known_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = dist.group.WORLD if group is None else group
    assert found is not None
    return found


def exchange_once(ranks: Ranks, what: str, data: bytes) -> list[bytes]:
    """Gather every rank's ``data`` by a one-time `StoreExchange`."""
    exchange = StoreExchange(ranks, what)
    try:
        return exchange.gather_bytes(data)
    except CollectiveError:  # free the number, because a rank that failed earlier took none
        _counts[known_group(ranks.group)]["exchange"] -= 1
        raise


def _next_of(group: dist.ProcessGroup | None, use: str) -> int:
    """Return the serial number of this use of the group's store, which is equal on all ranks."""
    counts = _counts.setdefault(known_group(group), Counter())
    counts[use] += 1
    return counts[use] - 1


def _end_unused() -> None:
    """Abort the groups without users, on this rank only. See [Note: shared groups]."""
    known = _of_job().shared
    unused = [shared for shared in known if not shared.users]
    if not unused:
        return
    known[:] = [shared for shared in known if shared not in unused]
    abort_groups([shared.group for shared in unused])
    for shared in unused:
        dist.destroy_process_group(shared.group)


def _next_number() -> int:
    """Return a number above all that this rank has used for groups."""
    return max(count_groups(), _of_job().next_number)


def backend_on(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """Return the backend that ``group`` uses for the type of ``device``, or None."""
    pairs = [pair.split(":") for pair in dist.get_backend_config(group).split(",")]
    return dict(pairs).get(device.type)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
