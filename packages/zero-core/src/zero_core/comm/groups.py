"""Process groups of the engines: made in one order, shared, and ended with their last user.

[Note: groups that cannot hang]
torch makes a group in one of three ways, each with a condition that the caller must meet:

- ``new_group(ranks)``, called by *every* rank of the job in one order, members or not. Its name is
  a counter of such calls; since torch 2.15 (pytorch#189073), of those of the next way too, which
  other ranks do not count. With a device bound to the default group
  (``init_process_group(device_id=...)``) NCCL splits the default communicator, and ranks outside
  take part in that.
- ``new_group(ranks, use_local_synchronization=True)``, called by the members alone. Its name is a
  hash of the ranks and of the *number of groups* that the calling rank is in; since torch 2.15, of
  that counter. Members whose numbers differ look for each other under different names, until the
  timeout; and a group of a name that an ended one had may find what that one left in the store.
  With a bound device the split waits for the ranks outside, which never come.
- ``split_group(parent, ...)``, called by the ranks of ``parent``, for a bound device alone. It is
  named as in the second way.

So where an engine has all ranks of the job, it takes the first way, from their highest counter.
Where it has some of them, it takes the third if a device is bound and the second otherwise, with a
number that its ranks agree on and have used for no group of these ranks before
(`zero_core._torch.counting_groups`).

[Note: shared groups]
A group is found again by its backend, ranks and lane: by the subgroups of one engine (ZeRO++'s two
exchanges split the ranks alike) and by further engines. Whether it is there is agreed upon by its
members, for an engine may have ended on some of them only. It ends on a rank with the last library
there that uses it. That waits for no other rank, as one that closes its engine may be one that
failed: a group is aborted, with nothing under way on it. Groups that end together are aborted as
one: NCCL's aborts of several communicators may wait for each other (pytorch#119797).

A library that is dropped without `close` uses nothing any more. Its groups end when a library next
asks for a group or is closed: a finalizer runs at a time of its own on each rank, on any thread.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple, cast

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
    store_address,
    timeout_of,
)
from zero_core.comm.control import ControlGroup, Exchange
from zero_core.comm.device_library import Lane, all_gather_single
from zero_core.comm.p2p import TimedWork
from zero_core.errors import CollectiveError, ConfigError
from zero_core.protocols import Work
from zero_core.watch.place import Place
from zero_core.watch.watch import Watch

_LEAVE_S = 30.0
"""Longest wait for ranks that are to read the last round of a `StoreExchange`."""
_LOOK_S = 1.0
"""Time after which a `StoreExchange` that waits asks whether the other ranks are alive."""


class ProcessLibrary:
    """`zero_core.comm.device_library.DeviceLibrary` over a process group of torch.distributed.

    Tensors of any dtype travel as bytes: NCCL has no type for some (int16, complex).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float | None = None,
    ) -> None:
        """``group`` None is the default group, or none at all if ``world_size`` is 1.

        ``rank`` is this rank within the group, ``device`` the one that it computes on. Where
        waiting blocks the host, it fails after ``timeout_s`` seconds; None: the group's timeout.
        """
        self.rank = rank
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._group = group
        self._device = device

    def all_gather(self, out: Tensor, shard: Tensor) -> Work:
        work = all_gather_single(_bytes(out), _bytes(shard), group=self._group, async_op=True)
        return self._limited(work)

    def all_to_all(self, out: Tensor, parts: Tensor) -> Work:
        work = dist.all_to_all_single(_bytes(out), _bytes(parts), group=self._group, async_op=True)
        return self._limited(work)

    def exchange(
        self, out: Tensor, parts: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Work:
        size = parts.itemsize
        work = dist.all_to_all_single(
            _bytes(out),
            _bytes(parts),
            output_split_sizes=[numel * size for numel in received],
            input_split_sizes=[numel * size for numel in sent],
            group=self._group,
            async_op=True,
        )
        return self._limited(work)

    def all_reduce(self, values: Tensor) -> Work:
        return self._limited(dist.all_reduce(values, group=self._group, async_op=True))

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        work = dist.broadcast(_bytes(tensor), group=self._group, group_src=source, async_op=True)
        return self._limited(work)

    def _limited(self, work: Any) -> Work:
        return cast(Work, work if self._timeout_s is None else TimedWork(work, self._timeout_s))

    def subgroup(self, ranks: Sequence[int], lane: Lane) -> ProcessLibrary:
        """Return the communicator of ``lane`` among ``ranks``. See [Note: shared groups]."""
        shared = self._acquire(tuple(ranks), lane)
        shared.users.add(self)
        _end_unused()
        made = ProcessLibrary(
            shared.group,
            rank=list(ranks).index(self.rank),
            world_size=len(ranks),
            device=self._device,
            timeout_s=self._timeout_s,
        )
        if shared.is_new:  # connect its ranks now: a backward must not be the first to fail
            shared.is_new = False
            own = torch.full((1,), made.rank, dtype=torch.int64, device=self._device)
            found = torch.empty(made.world_size, dtype=torch.int64, device=self._device)
            if lane is Lane.GATHERS:
                made.all_gather(found, own).wait()
            else:
                made.all_to_all(found, own.repeat(made.world_size)).wait()
            assert found.tolist() == list(range(made.world_size))
        return made

    def close(self) -> None:
        """End the groups of which this was the last user. See [Note: shared groups]."""
        if dist.is_initialized():  # its end was that of all groups
            for shared in _shared_groups():
                shared.users.discard(self)
            _end_unused()

    def _acquire(self, ranks: tuple[int, ...], lane: Lane) -> _SharedGroup:
        """Find the group among ``ranks``, or make it with all ranks of this library."""
        members = dist.get_process_group_ranks(self._group)
        backend = backend_on(self._group, self._device)
        assert backend is not None, "the group exchanges tensors of the device"
        known = _shared_groups()
        key = _Key(backend, tuple(members[r] for r in ranks), lane)
        used = [shared for shared in known if shared.key == key and shared.users]
        found = used[-1] if used else None
        is_everybody = len(members) == dist.get_world_size()
        serial = -1 if found is None else found.serial
        number = group_names_begin_at() if is_everybody else _next_number(key.ranks)
        next_serial = max([next(_serials), *(shared.serial + 1 for shared in known)])
        card = _Card(list(ranks), lane.value, serial, next_serial, number)
        rows = ControlGroup(self, self._device).gather_bytes(json.dumps(card).encode())
        cards = [_Card(*json.loads(row)) for row in rows]
        parts = _partition(cards)
        serial = max(card.next_serial for card in cards)
        to_make = []
        for part in parts:
            serials = {cards[r].serial for r in part}
            if len(serials) > 1 or -1 in serials:  # else its ranks have the same group already
                to_make.append(part)
        is_new = ranks in to_make
        options = {
            "timeout": timeout_of(self._group, self._device),
            "pg_options": _options(backend),
            "group_desc": f"zero_core {lane.value}",
        }
        group: dist.ProcessGroup | None = None
        if is_everybody:
            begin_group_names_at(max(card.number for card in cards))
            for part in to_make:
                chosen = [members[r] for r in part]
                made = dist.new_group(chosen, backend=backend, **_order(chosen), **options)
                group = made if part == ranks else group
        elif to_make:
            number = max(cards[r].number for part in to_make for r in part)
            with _numbered(key.ranks, number):
                group = self._make_alone(to_make, ranks, key, options)
        if not is_new:
            assert found is not None
            return found
        assert group is not None
        known.append(_SharedGroup(group, serial, key))
        return known[-1]

    def _make_alone(
        self,
        to_make: Sequence[tuple[int, ...]],
        ranks: tuple[int, ...],
        key: _Key,
        options: dict[str, Any],
    ) -> dist.ProcessGroup | None:
        """Make groups without the job's ranks outside. Return the one among ``ranks``."""
        is_ascending = all(list(part) == sorted(part) for part in to_make)
        if _bound_device() is None:
            if ranks not in to_make:
                return None
            made: dist.ProcessGroup = dist.new_group(
                list(key.ranks),
                backend=key.backend,
                use_local_synchronization=True,
                **_order(key.ranks),
                **options,
            )
            return made
        if not is_ascending:
            raise ConfigError(
                f"subgroups {[list(part) for part in to_make]}: expected ascending ranks, as torch "
                "splits a group with a bound device in that order"
            )
        return dist.split_group(self._group, [list(part) for part in to_make], **options)


def group_of_mesh(mesh: DeviceMesh, device: torch.device) -> dist.ProcessGroup:
    """Return the process group of a 2-D mesh over some of the job's ranks, in its order.

    It is made once, by the ranks of the mesh, and kept. See [Note: groups that cannot hang].
    """
    ranks: list[int] = mesh.mesh.flatten().tolist()
    made = _of_meshes.setdefault(dist.group.WORLD, {})
    found = made.get(tuple(ranks))
    if found is not None:
        return found
    if _bound_device() is not None:
        raise ConfigError(
            f"build(mesh=...) of two dimensions over ranks {ranks} alone, with a device bound by "
            "init_process_group(device_id=...): NCCL makes their group with all ranks of the job; "
            f"on all of them, call group = torch.distributed.new_group({ranks}), and build("
            "process_group=group) on these"
        )
    numbers = torch.tensor([_next_number(tuple(ranks))])
    for dim in (1, 0):  # within each row; then the rows of all
        rank, size = mesh.get_local_rank(dim), mesh.size(dim)
        line = ProcessLibrary(mesh.get_group(dim), rank=rank, world_size=size, device=device)
        numbers = ControlGroup(line, device).gather(numbers)
    with _numbered(tuple(ranks), int(numbers.max())):
        group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    made[tuple(ranks)] = group
    return group


def exchange_by_store(
    group: dist.ProcessGroup | None, card: bytes, *, rank: int, world_size: int
) -> list[bytes]:
    """Return every rank's ``card``, in rank order, without any backend of the group.

    Every rank of ``group`` must call it.
    """
    known = _known_group(group)
    number = _num_exchanges.get(known, 0)
    store = known.get_group_store()
    store.set(f"zero_core card {number} of rank {rank}", card.decode())
    cards = [store.get(f"zero_core card {number} of rank {r}") for r in range(world_size)]
    _num_exchanges[known] = number + 1
    return cards


class GroupBeats:
    """`zero_core.watch.beats.BeatStore` in the store of a process group.

    It has a connection of its own: a store serves one blocking call at a time.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, rank: int, world_size: int) -> None:
        """Every rank makes those of a process group in one order."""
        known = _known_group(group)
        number = _num_beats[known] = _num_beats.get(known, -1) + 1
        store = known.get_group_store()
        self.host, address = "the store of the process group", store_address(store)
        if address is not None:
            is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            who = "torchrun's agent" if is_agents else "rank 0 of the job"
            self.host = f"{who} (it hosts {self.host} at {address})"
        self._store = clone_store(store)
        self._keys = [f"zero_core beats {number} of rank {r}" for r in range(world_size)]
        self._rank = rank
        self._known: set[int] = set()

    def publish(self, beat: str) -> None:
        self._store.set(self._keys[self._rank], beat)

    def read(self, ranks: Sequence[int]) -> dict[int, str]:
        unknown = [rank for rank in ranks if rank not in self._known]
        if unknown and self._store.check([self._keys[rank] for rank in unknown]):
            self._known.update(unknown)
        else:
            self._known.update(r for r in unknown if self._store.check([self._keys[r]]))
        there = [rank for rank in ranks if rank in self._known]
        found = self._store.multi_get([self._keys[rank] for rank in there])
        return {rank: beat.decode() for rank, beat in zip(there, found, strict=True)}


class StoreExchange(Exchange):
    """`zero_core.comm.control.Exchange` in the store of a process group, without collectives.

    It is for one thread beside training. The collectives of a group belong to the thread that
    trains: those of another would be launched in another order on each rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        rank: int,
        world_size: int,
        timeout: timedelta,
        watch: Watch | None = None,
    ) -> None:
        """Every rank makes the exchanges of a process group in one order.

        ``timeout`` is the longest wait for another rank, and the wait for one that ``watch`` finds
        dead ends at once. One rank alone needs no group.
        """
        self.rank = rank
        self.world_size = world_size
        self.place = Place()
        self._longest_wait_s = timeout.total_seconds()
        self._watch = watch
        self._group = group
        self._num_uses = 0
        self._num_rounds = 0
        self._is_broken = False
        self._store: Any = None
        self._number = 0
        if world_size > 1:
            known = _known_group(group)
            self._number = _num_beside[known] = _num_beside.get(known, -1) + 1

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """See `Exchange`. ``data`` is ASCII.

        Raises:
            CollectiveError: a rank is dead or does not answer within the timeout, or the store has
                ended.
        """
        if self.world_size == 1:
            return [data]
        number = self._num_rounds
        self._num_rounds += 1
        try:
            if self._store is None:
                # A store serves one blocking call at a time.
                self._store = clone_store(_known_group(self._group).get_group_store())
            self._store.set(self._key(number, self.rank), data.decode())
            self._wait_for(number)
            rows = [self._store.get(self._key(number, r)) for r in range(self.world_size)]
            if number:  # every rank has read the round before
                self._store.delete_key(self._key(number - 1, self.rank))
        except RuntimeError as error:
            self._is_broken = True
            raise CollectiveError(
                f"rank {self.rank}: the exchange of a save beside training failed: {error}"
            ) from error
        return rows

    def _wait_for(self, number: int) -> None:
        """Wait until all ranks have given their data of a round. Else raise a RuntimeError."""
        began = asked = time.monotonic()
        missing = list(range(self.world_size))
        while missing and not self._store.check([self._key(number, rank) for rank in missing]):
            now = time.monotonic()
            if now - asked >= _LOOK_S:
                asked = now
                missing = [r for r in missing if not self._store.check([self._key(number, r)])]
                dead = "" if self._watch is None else self._watch.find_dead(missing)
                if dead or now - began >= self._longest_wait_s:
                    raise RuntimeError(dead or f"no answer of ranks {missing[:4]} in time")
            time.sleep(min(max((now - began) / 4, 0.001), _LOOK_S))

    def leave(self) -> None:
        """See `Exchange`. The store may be in the process of rank 0, which leaves last."""
        rounds, self._num_rounds = self._num_rounds, 0
        ranks = range(self.world_size)
        ends = [self._key(rounds, r) for r in ranks]
        last = [self._key(rounds - 1, r) for r in ranks]
        if self._store is not None and not self._is_broken:
            with suppress(RuntimeError):  # the checkpoint is complete, or has failed
                self._store.set(ends[self.rank], "")
                if self.rank == 0:
                    self._store.wait(ends, timedelta(seconds=_LEAVE_S))
                    for key in (*ends, *last):
                        self._store.delete_key(key)
        self._num_uses += 1
        self._is_broken = False  # the keys of the next use are others

    def _key(self, number: int, rank: int) -> str:
        use = f"{self._number}.{self._num_uses}"
        return f"zero_core exchange {use} round {number} of rank {rank}"


class _Key(NamedTuple):
    """Identity of a shared group: ``ranks`` are the job's, in the order of the group."""

    backend: str
    ranks: tuple[int, ...]
    lane: Lane


class _Card(NamedTuple):
    """A rank's part in the choice of a group."""

    ranks: list[int]  # of the subgroup that it is in, numbered within the library
    lane: str
    serial: int  # of the group that it has already; -1: none
    next_serial: int  # higher than that of any group here
    number: int  # by which the group may be named here


@dataclass(eq=False)
class _SharedGroup:
    """A process group and the libraries that use it.

    Attributes:
        serial: a number that its members agreed on, and that no other of its key has.
        users: the libraries that were given it. It keeps none of them alive.
    """

    group: dist.ProcessGroup
    serial: int
    key: _Key
    users: weakref.WeakSet[ProcessLibrary] = field(default_factory=weakref.WeakSet)
    is_new: bool = True


# All by the default group. The last: the lowest number for the next group of these ranks.
_known: weakref.WeakKeyDictionary[Any, list[_SharedGroup]] = weakref.WeakKeyDictionary()
_of_meshes: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
_numbers: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], int]] = weakref.WeakKeyDictionary()
_serials: Iterator[int] = count()
# By the group: exchanges through its store that have ended; beats in it; `StoreExchange`s.
_num_exchanges: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_num_beats: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_num_beside: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _known_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = dist.group.WORLD if group is None else group
    assert found is not None
    return found


def _shared_groups() -> list[_SharedGroup]:
    """Return the groups of this process, in the order in which they were made."""
    return _known.setdefault(dist.group.WORLD, [])


def _end_unused() -> None:
    """End the groups that no library uses, on this rank alone. See [Note: shared groups]."""
    known = _shared_groups()
    unused = [shared for shared in known if not shared.users]
    if not unused:
        return
    known[:] = [shared for shared in known if shared not in unused]
    abort_groups([shared.group for shared in unused])
    for shared in unused:
        dist.destroy_process_group(shared.group)


def _partition(cards: Sequence[_Card]) -> list[tuple[int, ...]]:
    parts = list(dict.fromkeys(tuple(card.ranks) for card in cards))
    is_partition = sorted(r for part in parts for r in part) == list(range(len(cards)))
    is_own = all(rank in card.ranks for rank, card in enumerate(cards))
    if not is_partition or not is_own or len({card.lane for card in cards}) > 1:
        given = "; ".join(f"rank {r}: {card.lane} of {card.ranks}" for r, card in enumerate(cards))
        raise ConfigError(
            f"subgroup: every rank gives the subgroup that it is in, for the same lane; together "
            f"they are all ranks, each once; found {given}"
        )
    return parts


def _bound_device() -> torch.device | None:
    world = dist.group.WORLD
    return None if world is None else world.bound_device_id


def _next_number(ranks: tuple[int, ...]) -> int:
    """Return the lowest number by which a new group of ``ranks`` may be named on this rank."""
    return max(count_groups(), _numbers.setdefault(dist.group.WORLD, {}).get(ranks, 0))


def _numbered(ranks: tuple[int, ...], number: int) -> AbstractContextManager[None]:
    """Name a group of ``ranks`` that is made in this context by ``number``, once."""
    _numbers.setdefault(dist.group.WORLD, {})[ranks] = number + 1
    return counting_groups(number)


def backend_on(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """Return the name of the backend of ``group`` on ``device``, or None if it has none there."""
    pairs = [pair.split(":") for pair in dist.get_backend_config(group).split(",")]
    return dict(pairs).get(device.type)


def _options(backend: str) -> Any:
    """Return options of a group, for a stream of high priority. None for other backends than NCCL.

    At normal priority the few blocks of NCCL's kernels wait for those of large matrix products.
    """
    if backend != "nccl":
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def _order(ranks: Sequence[int]) -> dict[str, Any]:
    """Return the argument of ``new_group`` that keeps the order of ``ranks``, where it is needed.

    torch 2.10 does not know it.
    """
    return {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
