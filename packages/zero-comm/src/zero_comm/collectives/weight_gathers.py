"""Gathers of a unit's weights: quantized (qwZ), from secondary shards (hpZ), or as differences.

ZeRO++ (arXiv 2306.10209), sections 3.1 and 3.2.

[Note: the two phases]
W ranks form groups of G consecutive ranks: nodes, or hpZ's partitions. A unit's buffer has a slice
of s elements per rank: [groups, G, s]. **Phase 1**, inter-group: the W / G ranks with the same
position in their groups gather their slices, so each slice enters every group once. **Phase 2**,
intra-group: the ranks of a group exchange the slices from phase 1 and put all slices in place.

[Note: secondary shards]
After phase 1 a rank holds 1/G of the unit, its **secondary shard**. hpZ keeps it with the version
of its weights. Later gathers of that version, in backward or further micro-steps, then run phase 2
only and send nothing outside the group. A version is recorded only after all bytes have arrived, so
an incomplete shard is never used. All ranks count versions alike and refresh in the same call.
Ranks of the group may read a secondary shard in place. Only a gather of a new version overwrites
it. By then every rank has finished its earlier gathers and has taken part in a later exchange with
all ranks (see `zero_comm.transport.protocol`).

[Note: differences]
SDP4Bit (Jia et al., arXiv 2410.15526), section 3.1: weights change little per step, so a change
needs fewer bits than a weight. A rank sends the quantized difference between its shard and the
values that it published before. It also adds this message to its own copy of the published values.
The copy therefore equals that of the receivers, and the next difference includes the rounding
error. Without an earlier version the shard is sent exactly.

[Note: lossless differences]
In a step of fine-tuning most 16-bit weights keep their bits or move to a neighbouring number. A
rank sends the change since its last published version (`zero_comm.lossless.message`).

Sender and receivers must hold the same earlier values. Only gathers write to secondary shards. A
buffer that the engine keeps, as in stages 1 and 2, may have been edited by user code. Each rank
therefore computes a checksum of its buffer, with its own slice as published. The ranks exchange
checksums, versions and message lengths. All of them send whole values if checksums or versions
differ, if nothing was published before, or if the longest difference is not shorter. A rank that
lost its kept values thus enters the same collectives as the others. The exchange is part of the
gather, and the host waits for it. An engine on accelerators announces the gathers of all units
after its update instead: one exchange, and one wait.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, TypedDict, Unpack

import torch
from torch import Tensor

from zero_comm.lossless.codec import find_codec
from zero_comm.lossless.message import Checks, max_message_nbytes, message_nbytes, pack, unpack
from zero_comm.quantizer.checksum import checksum_of, checksums
from zero_comm.quantizer.message import Packing
from zero_comm.transport.protocol import TransportCollectives
from zero_comm.transport.scratch import Scratch

# Versions of the kept values and of those to gather.
_Versions = tuple[int, int]
_Gather = Callable[[Tensor, Tensor], None]
_NONE: Final = -1  # version of memory without values
# By unit and version: a function that waits for the numbers of all units, and the unit's index.
Announced = dict[tuple[int, int], tuple[Callable[[], Tensor], int]]


class Origin(TypedDict):
    """Arguments of a gather that are passed on to its exchanges."""

    unit: int
    backward: bool


class Grid:
    """Groups of ``group_size`` ranks. Every rank must construct it. See [Note: the two phases]."""

    def __init__(self, transport: TransportCollectives, group_size: int) -> None:
        rank, size = transport.rank, group_size
        self.num_groups = transport.world_size // size
        self.group_size = size
        self.group, position = divmod(rank, size)
        # Ranks that have this rank's position in their groups.
        self.peers = [g * size + position for g in range(self.num_groups)]
        self._inter_group = transport.subgroup(self.peers) if self.num_groups > 1 else None
        own_group = [self.group * size + i for i in range(size)]
        self._intra_group = transport.subgroup(own_group) if size > 1 else None

    def gather_inter_group(self, rows: Tensor, row: Tensor, **origin: Unpack[Origin]) -> None:
        """Phase 1: fill ``rows`` ([groups, n], any dtype) with the ``row`` of every group."""
        _gather(self._inter_group, rows.view(-1), row.view(-1), origin)

    def gather_intra_group(self, out: Tensor, rows: Tensor, **origin: Unpack[Origin]) -> None:
        """Phase 2: fill ``out`` ([G, groups, n]) with the ``rows`` of every rank of the group."""
        _gather(self._intra_group, out.view(-1), rows.view(-1), origin)


def _gather(
    transport: TransportCollectives | None, out: Tensor, own: Tensor, origin: Origin
) -> None:
    if transport is None:  # this rank is the only one
        out.copy_(own)
    else:
        transport.all_gather(out, own, version=0, **origin).wait()


@dataclass(slots=True)
class _Entry:
    """Kept memory of a unit, and the version of the weights in it."""

    values: Tensor
    version: int = _NONE


_Shared = tuple[TransportCollectives, Grid, Scratch]  # arguments of `WeightGather`


class WeightGather(ABC):
    """Gathers weights, and keeps memory per unit with the version of the weights in it.

    Gathers run one after another. By default ``transport`` allocates the kept memory.
    """

    kept_kind: str  # key of the kept memory in `QuantizedCollectives.private_nbytes`

    def __init__(
        self,
        transport: TransportCollectives,
        grid: Grid,
        scratch: Scratch,
        packing: Packing | None = None,
    ) -> None:
        self._transport = transport
        self._grid = grid
        self._scratch = scratch
        self._packing = packing
        self._entries: dict[int, _Entry] = {}

    @abstractmethod
    def gather(self, out: Tensor, shard: Tensor, *, version: int, **origin: Unpack[Origin]) -> None:
        """Fill flat ``out`` with every rank's ``shard``. A collective."""

    def forget(self) -> None:
        """Invalidate the kept weights. All ranks must call it between the same gathers."""
        for entry in self._entries.values():
            entry.version = _NONE

    @property
    def tensors(self) -> list[Tensor]:
        return [entry.values for entry in tuple(self._entries.values())]

    def _entry(self, unit: int, numel: int, dtype: torch.dtype, device: torch.device) -> _Entry:
        """Return the unit's entry, or a new one without a version if none has this form."""
        entry = self._entries.get(unit)
        if entry is not None:
            kept = entry.values
            if (kept.numel(), kept.dtype, kept.device) == (numel, dtype, device):
                return entry
        entry = self._entries[unit] = _Entry(self._allocate(numel, dtype, device))
        return entry

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._transport.zeros(numel, dtype, device)

    def _gather_rows(self, message: Tensor, **origin: Unpack[Origin]) -> Tensor:
        """Phase 1: return the message of each group, [groups, bytes]."""
        shape = self._grid.num_groups, message.numel()
        if shape[0] == 1:
            return message.view(shape)
        rows = self._scratch.take("messages", math.prod(shape), torch.uint8, message.device)
        self._grid.gather_inter_group(rows, message, **origin)
        return rows.view(shape)

    def _gather_messages(self, message: Tensor, **origin: Unpack[Origin]) -> Tensor:
        """Both phases: return the messages of all ranks, [G, groups, bytes]."""
        rows, size = self._gather_rows(message, **origin), self._grid.group_size
        numel = size * rows.numel()
        arrived = self._scratch.take("all messages", numel, torch.uint8, message.device)
        self._grid.gather_intra_group(arrived, rows, **origin)
        return arrived.view(size, *rows.shape)


class MessageGather(WeightGather):
    """Gathers quantized messages in both phases. A shard is quantized once per version."""

    kept_kind = "quantized weights"

    def gather(self, out: Tensor, shard: Tensor, *, version: int, **origin: Unpack[Origin]) -> None:
        packing = self._packing
        assert packing is not None, "messages have a format"
        nbytes = packing.nbytes(shard.numel())
        entry = self._entry(origin["unit"], nbytes, torch.uint8, shard.device)
        if entry.version != version:
            entry.version = _NONE
            packing.pack(shard, entry.values.view(1, -1))
            entry.version = version
        rows = self._gather_messages(entry.values, **origin).transpose(0, 1)
        packing.unpack(rows, out, senders=range(self._transport.world_size))


class SecondaryGather(WeightGather):
    """Gathers weights from secondary shards. See [Note: secondary shards].

    Phase 1 sends messages of ``packing``, or exact values without one. Phase 2 sends exact values.
    """

    kept_kind = "secondary shards"

    def gather(self, out: Tensor, shard: Tensor, *, version: int, **origin: Unpack[Origin]) -> None:
        grid = self._grid
        entry = self._entry(
            origin["unit"], grid.num_groups * shard.numel(), shard.dtype, shard.device
        )
        secondary = entry.values.view(grid.num_groups, -1)
        if entry.version != version:
            versions, entry.version = (entry.version, version), _NONE
            self._refresh(secondary, shard, versions, **origin)
            entry.version = version
        if grid.group_size == 1:  # ``secondary`` is in rank order already
            grid.gather_intra_group(out, secondary, **origin)
            return
        shape = (grid.group_size, grid.num_groups, shard.numel())
        arrived = self._scratch.take("values", out.numel(), out.dtype, out.device).view(shape)
        grid.gather_intra_group(arrived, secondary, **origin)
        out.view(grid.num_groups, grid.group_size, -1).copy_(arrived.transpose(0, 1))

    def _refresh(
        self, secondary: Tensor, shard: Tensor, versions: _Versions, **origin: Unpack[Origin]
    ) -> None:
        """Phase 1: fill ``secondary``, [groups, s], with the current shards of `Grid.peers`."""
        if self._packing is None:
            self._grid.gather_inter_group(secondary, shard, **origin)
            return
        rows = self._gather_packed(shard, self._packing, **origin)
        self._packing.unpack(rows, secondary.view(-1), senders=self._grid.peers)

    def _gather_packed(self, values: Tensor, packing: Packing, **origin: Unpack[Origin]) -> Tensor:
        nbytes = packing.nbytes(values.numel())
        message = self._scratch.take("message", nbytes, torch.uint8, values.device)
        packing.pack(values, message.view(1, -1))
        return self._gather_rows(message, **origin)


class DifferenceGather(SecondaryGather):
    """`SecondaryGather` whose phase 1 sends quantized differences. See [Note: differences]."""

    def _refresh(
        self, secondary: Tensor, shard: Tensor, versions: _Versions, **origin: Unpack[Origin]
    ) -> None:
        grid, packing = self._grid, self._packing
        if packing is None or versions[0] == _NONE:
            grid.gather_inter_group(secondary, shard, **origin)
            return
        change = self._scratch.take("change", shard.numel(), torch.float32, shard.device)
        change.copy_(shard).sub_(secondary[grid.group])
        rows = self._gather_packed(change, packing, **origin)
        for row, published, sender in zip(rows, secondary, grid.peers, strict=True):
            packing.unpack(row.view(1, -1), change, senders=[sender])
            # A sum in fp32 with one rounding gives the same bits in every group.
            published.copy_(change.add_(published))


def numbers_of(
    old: Tensor,
    new: Tensor,
    before: int,
    held: Sequence[Tensor] = (),
    nbytes: Tensor | None = None,
) -> Tensor:
    """Return the three numbers that ranks compare: int64, [3]. See [Note: lossless differences].

    They are the size of this rank's message in bytes, the version of the kept values, and a
    checksum of ``held`` (0 if empty), whose values must be equal on all ranks. Without kept values
    they are 0, -1 and 0.
    """
    total = zero = torch.zeros((), dtype=torch.int64, device=new.device)
    if before == _NONE:
        return torch.stack([zero, zero + _NONE, zero])
    if nbytes is None:
        nbytes = message_nbytes(find_codec("differences", new.device).measure(old, new))
    if held:
        total = checksums(torch.stack([*map(checksum_of, held)]).view(torch.uint8))
    return torch.stack([nbytes, zero + before, total])


def exchange(numbers: Sequence[Tensor], num_ranks: int, gather: _Gather) -> Callable[[], Tensor]:
    """Exchange units' ``numbers``. Return a function that waits and returns [ranks, units, 3].

    ``gather`` fills its first argument with every rank's second one.
    """
    own = torch.stack([*numbers])
    found = own.new_empty(num_ranks, *own.shape)
    gather(found.view(-1), own.view(-1))
    if found.is_cpu:
        return lambda: found
    copied = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=True)
    copied.copy_(found, non_blocking=True)
    event = torch.accelerator.current_stream(found.device).record_event()

    @cache
    def read() -> Tensor:
        event.synchronize()
        return copied

    return read


class LosslessGather(WeightGather):
    """Gathers weights as lossless differences, or whole if a rank lacks the earlier values."""

    def __init__(self, announced: Announced, checks: Checks, *shared: *_Shared) -> None:
        super().__init__(*shared)
        self._announced = announced
        self._checks = checks

    @abstractmethod
    def numbers(self, out: Tensor | None, shard: Tensor, unit: int) -> Tensor:
        """Return this rank's numbers of a unit (see `numbers_of`) for an announcement."""

    def _message(
        self,
        old: Tensor,
        new: Tensor,
        unit: int,
        versions: _Versions,
        ranks: Sequence[int],
        gather: _Gather,
        held: Sequence[Tensor] = (),
    ) -> Tensor | None:
        """Return a message as long as the longest one of ``ranks``, or None to send whole values.

        Without an announcement ``gather`` exchanges the numbers, and the host waits for them.
        """
        (before, now), nbytes = versions, None
        most = max_message_nbytes(new.numel(), new.element_size())
        message = self._scratch.take("message", most, torch.uint8, new.device)
        announced = self._announced.pop((unit, now), None)
        if announced is not None:
            read, place = announced
            found = read()[[*ranks], place]
        else:
            if before != _NONE:
                nbytes = pack("differences", old, new, message=message, versions=versions)
            own = numbers_of(old, new, before, held, nbytes)
            found = exchange([own], len(ranks), gather)()[:, 0]
        lengths, kept, sums = zip(*found.tolist(), strict=True)
        length = max(lengths)
        if before == _NONE or {*kept} != {before} or len({*sums}) > 1 or length >= new.nbytes:
            return None
        if nbytes is None:
            pack("differences", old, new, message=message, versions=versions)
        return message[:length]

    def _apply(
        self, rows: Tensor, old: list[Tensor], unit: int, versions: _Versions, senders: list[int]
    ) -> None:
        """Apply the messages in ``rows`` to ``old``, except this rank's own."""
        checks, own = self._checks, self._transport.rank
        about: dict[str, Any] = {"unit": unit, "versions": versions}
        unpack("differences", rows, old, senders=senders, checks=checks, own=own, **about)


class LosslessSecondaryGather(LosslessGather, SecondaryGather):
    """`SecondaryGather` whose phase 1 sends lossless differences."""

    def numbers(self, out: Tensor | None, shard: Tensor, unit: int) -> Tensor:
        grid = self._grid
        entry = self._entry(unit, grid.num_groups * shard.numel(), shard.dtype, shard.device)
        return numbers_of(entry.values.view(grid.num_groups, -1)[grid.group], shard, entry.version)

    def _refresh(
        self, secondary: Tensor, shard: Tensor, versions: _Versions, **origin: Unpack[Origin]
    ) -> None:
        grid, unit, own = self._grid, origin["unit"], secondary[self._grid.group]
        gather = partial(grid.gather_inter_group, **origin)
        message = self._message(own, shard, unit, versions, grid.peers, gather)
        if message is None:
            gather(secondary, shard)
            return
        rows = self._gather_rows(message, **origin)
        self._apply(rows, [*secondary], unit, versions, grid.peers)
        own.copy_(shard)


class PublishedGather(LosslessGather):
    """Gathers weights into buffers that still hold the values of the previous gather.

    It keeps this rank's slice of each unit as published, because the slice in the buffer is the
    shard itself, which an update changes. See [Note: lossless differences].
    """

    kept_kind = "published weights"

    def numbers(self, out: Tensor | None, shard: Tensor, unit: int) -> Tensor:
        assert out is not None, "the shard is a part of it"
        entry = self._entry(unit, shard.numel(), shard.dtype, shard.device)
        return numbers_of(entry.values, shard, entry.version, self._held(out, entry.values))

    def gather(self, out: Tensor, shard: Tensor, *, version: int, **origin: Unpack[Origin]) -> None:
        unit, ranks = origin["unit"], range(self._transport.world_size)
        entry = self._entry(unit, shard.numel(), shard.dtype, shard.device)
        versions, entry.version = (entry.version, version), _NONE

        def gather(out: Tensor, shard: Tensor) -> None:
            self._transport.all_gather(out, shard, version=version, **origin).wait()

        held = self._held(out, entry.values)
        message = self._message(entry.values, shard, unit, versions, ranks, gather, held)
        if message is None:
            gather(out, shard)
        else:
            rows = self._gather_messages(message, **origin)
            senders = [g * len(rows) + i for i in range(len(rows)) for g in range(rows.shape[1])]
            values = [held[sender] for sender in senders]
            self._apply(rows.flatten(0, 1), values, unit, versions, senders)
        entry.values.copy_(shard)
        entry.version = version

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # The transport's memory is not needed, because the kept slice is never sent.
        with torch.inference_mode(False):
            return torch.zeros(numel, dtype=dtype, device=device)

    def _held(self, out: Tensor, kept: Tensor) -> list[Tensor]:
        """Return every rank's values of the last version: ``out``, but ``kept`` for this rank."""
        slices = [*out.view(self._transport.world_size, -1)]
        slices[self._transport.rank] = kept
        return slices
