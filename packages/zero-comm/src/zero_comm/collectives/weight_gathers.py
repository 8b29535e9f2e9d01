"""Gathers of a unit's weights: quantized (qwZ), from secondary shards (hpZ), or both.

ZeRO++ (arXiv 2306.10209), sections 3.1 and 3.2.

[Note: the two phases]
W ranks are split into groups of G consecutive ones: nodes, or hpZ's partitions. A unit's buffer has
a slice of s elements for each rank: [groups, G, s]. **Phase 1**, inter-group: the ranks with the
same position in their groups gather their slices among themselves, W / G of them. Each slice enters
every group once. **Phase 2**, intra-group: the ranks of a group exchange what phase 1 brought, and
everything is put in place.

[Note: secondary shards]
After phase 1 a rank holds 1/G of the unit: its **secondary shard**. hpZ keeps it, with the version
of the weights that it was made from, so that later gathers of that version (backward's, and those
of further micro-steps) run phase 2 alone and nothing leaves the group. The first gather of a
version fills it as a by-product. A version is recorded after the bytes are complete, and a gather
asks for the one it needs: a stale or half-written shard is never served. All ranks count versions
alike, so all refresh in the same call. Other ranks of the group may read a secondary shard in
place; it is overwritten only when a new version is gathered, which is after an exchange of all
ranks that each entered after its earlier gathers (see `zero_comm.transport.protocol`).

[Note: differences]
SDP4Bit (Jia et al., arXiv 2410.15526), section 3.1: weights change little from step to step, so
the change needs fewer bits than the weights. A rank sends the quantized difference between its
shard and what it published before, and adds the messages that it sends to its own copy as well. So
it knows the others' values exactly, and the rounding error of a message is part of the next
difference. Where there is no earlier version the shard is sent exactly, once.

[Note: lossless differences]
Most 16-bit weights keep their bits in a step of fine-tuning, or move to a neighbouring number. A
rank sends what changed since the version that it published last, in the messages of
`zero_comm.lossless.message`.

Sender and receivers must hold the same earlier values. With **secondary shards** they do: only
gathers write to them. A buffer that is **kept** by the engine, as the parameters of stages 1 and 2
are, holds the earlier values too, but others may have written to it: an edit of a weight, equal on
all ranks or not. So each rank takes the checksum of what it holds, with its own slice as it
published it, and the ranks compare them with the lengths of the messages and the versions that
they lead from. Where one differs, nothing was published before, or differences would be no shorter,
all ranks send whole values. This exchange is part of every gather, so that a rank that has lost
what it kept is never in another collective than the others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final, TypedDict, Unpack

import torch
from torch import Tensor

from zero_comm.lossless.message import max_message_nbytes, pack, unpack
from zero_comm.quantizer.checksum import checksum_of, checksums
from zero_comm.quantizer.message import Packing
from zero_comm.transport.protocol import TransportCollectives
from zero_comm.transport.scratch import Scratch

# Version of the kept values, None without any, and version of the gathered values.
_Versions = tuple[int | None, int]
_NONE: Final = -1  # sent as the version of the kept values if there are none


class Origin(TypedDict):
    """Arguments of a gather that its exchanges get, too."""

    unit: int
    backward: bool


class Grid:
    """Ranks in groups of equal size. Every rank must construct it. See [Note: the two phases]."""

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
        """Fill ``rows`` ([groups, n], any dtype) with the ``row`` of every group: phase 1."""
        _gather(self._inter_group, rows.view(-1), row.view(-1), origin)

    def gather_intra_group(self, out: Tensor, rows: Tensor, **origin: Unpack[Origin]) -> None:
        """Fill ``out`` ([G, groups, n]) with the ``rows`` of every rank of the group: phase 2."""
        _gather(self._intra_group, out.view(-1), rows.view(-1), origin)


def _gather(
    transport: TransportCollectives | None, out: Tensor, own: Tensor, origin: Origin
) -> None:
    if transport is None:  # this rank is alone
        out.copy_(own)
    else:
        transport.all_gather(out, own, version=0, **origin).wait()


@dataclass(slots=True)
class _Entry:
    """Memory kept for a unit, and the version of the weights in it (None if there are none)."""

    values: Tensor
    version: int | None = None


class WeightGather(ABC):
    """Gathers weights, and keeps memory for each unit with the version of the weights in it.

    Its jobs run one after another, on the queue of gathers. ``transport`` allocates the memory that
    is kept, ``scratch`` has buffers for what is sent and received.
    """

    kept_kind: str  # key of the kept memory in `QuantizedCollectives.private_nbytes`

    def __init__(self, transport: TransportCollectives, grid: Grid, scratch: Scratch) -> None:
        self._transport = transport
        self._grid = grid
        self._scratch = scratch
        self._entries: dict[int, _Entry] = {}

    @abstractmethod
    def gather(self, out: Tensor, shard: Tensor, *, version: int, **origin: Unpack[Origin]) -> None:
        """Fill flat ``out`` with the weights of all ranks' ``shard``. A collective."""

    def forget(self) -> None:
        """Invalidate what is kept. All ranks call it, between the same gathers."""
        for entry in self._entries.values():
            entry.version = None

    @property
    def tensors(self) -> list[Tensor]:
        """Memory kept between gathers."""
        return [entry.values for entry in tuple(self._entries.values())]

    def _entry(self, unit: int, numel: int, dtype: torch.dtype, device: torch.device) -> _Entry:
        """Return the unit's entry, or a new one of no version if its form has changed."""
        entry = self._entries.get(unit)
        if entry is not None:
            kept = entry.values
            if (kept.numel(), kept.dtype, kept.device) == (numel, dtype, device):
                return entry
        entry = self._entries[unit] = _Entry(self._allocate(numel, dtype, device))
        return entry

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._transport.zeros(numel, dtype, device)

    def take_bytes(self, purpose: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return a scratch buffer of this shape."""
        return self._scratch.take(purpose, math.prod(shape), torch.uint8, device).view(shape)


class MessageGather(WeightGather):
    """Gathers quantized messages in both phases. A shard is quantized once per version."""

    kept_kind = "quantized weights"

    def __init__(
        self, transport: TransportCollectives, grid: Grid, scratch: Scratch, packing: Packing
    ) -> None:
        super().__init__(transport, grid, scratch)
        self._packing = packing

    def gather(self, out: Tensor, shard: Tensor, *, version: int, **origin: Unpack[Origin]) -> None:
        nbytes, device = self._packing.nbytes(shard.numel()), shard.device
        entry = self._entry(origin["unit"], nbytes, torch.uint8, device)
        if entry.version != version:
            entry.version = None
            self._packing.pack(shard, entry.values.view(1, -1))
            entry.version = version
        groups, size = self._grid.num_groups, self._grid.group_size
        rows = entry.values.view(1, nbytes)
        if groups > 1:
            rows = self.take_bytes("messages", (groups, nbytes), device)
            self._grid.gather_inter_group(rows, entry.values, **origin)
        everything = self.take_bytes("all messages", (size, groups, nbytes), device)
        self._grid.gather_intra_group(everything, rows, **origin)
        self._packing.unpack(everything.transpose(0, 1), out, senders=range(groups * size))


class SecondaryGather(WeightGather):
    """Gathers weights from secondary shards. See [Note: secondary shards].

    Phase 1 carries messages of ``packing``, without it exact values as phase 2 does. See also
    [Note: differences].
    """

    kept_kind = "secondary shards"

    def __init__(
        self,
        transport: TransportCollectives,
        grid: Grid,
        scratch: Scratch,
        packing: Packing | None = None,
        *,
        sends_differences: bool = False,
    ) -> None:
        super().__init__(transport, grid, scratch)
        self._packing = packing
        self._sends_differences = sends_differences

    def gather(self, out: Tensor, shard: Tensor, *, version: int, **origin: Unpack[Origin]) -> None:
        grid = self._grid
        entry = self._entry(
            origin["unit"], grid.num_groups * shard.numel(), shard.dtype, shard.device
        )
        secondary = entry.values.view(grid.num_groups, -1)
        if entry.version != version:
            versions, entry.version = (entry.version, version), None
            self._refresh(secondary, shard, versions, **origin)
            entry.version = version
        if grid.group_size == 1:  # in the order of ranks already
            grid.gather_intra_group(out, secondary, **origin)
            return
        shape = (grid.group_size, grid.num_groups, shard.numel())
        arrived = self._scratch.take("values", out.numel(), out.dtype, out.device).view(shape)
        grid.gather_intra_group(arrived, secondary, **origin)
        out.view(grid.num_groups, grid.group_size, -1).copy_(arrived.transpose(0, 1))

    def _refresh(
        self, secondary: Tensor, shard: Tensor, versions: _Versions, **origin: Unpack[Origin]
    ) -> None:
        """Fill ``secondary``, [groups, s], with the current shards of its groups: phase 1.

        ``versions`` are those of its values (None: it holds none) and of ``shard``, alike on all
        ranks.
        """
        packing, grid, device = self._packing, self._grid, shard.device
        if packing is None or (self._sends_differences and versions[0] is None):
            grid.gather_inter_group(secondary, shard, **origin)
            return
        sent = shard
        if self._sends_differences:
            sent = self._scratch.take("change", shard.numel(), torch.float32, device)
            sent.copy_(shard).sub_(secondary[grid.group])
        nbytes = packing.nbytes(shard.numel())
        message = self.take_bytes("message", (1, nbytes), device)
        packing.pack(sent, message)
        rows = self.take_bytes("messages", (grid.num_groups, nbytes), device)
        grid.gather_inter_group(rows, message, **origin)
        if not self._sends_differences:
            packing.unpack(rows, secondary.view(-1), senders=grid.peers)
            return
        for row, published, sender in zip(rows, secondary, grid.peers, strict=True):
            packing.unpack(row.view(1, -1), sent, senders=[sender])
            # The sum in fp32 and one rounding: the same bits in every group.
            published.copy_(sent.add_(published))


class LosslessSecondaryGather(SecondaryGather):
    """Gathers weights from secondary shards, which lossless differences keep up to date."""

    def _refresh(
        self, secondary: Tensor, shard: Tensor, versions: _Versions, **origin: Unpack[Origin]
    ) -> None:
        grid, device, (before, now) = self._grid, shard.device, versions
        own = secondary[grid.group]
        message, length = _packed(self, own, shard, versions)
        sent = torch.tensor([length, _NONE if before is None else before], device=device)
        found = torch.empty(grid.num_groups, 2, dtype=torch.int64, device=device)
        grid.gather_inter_group(found, sent, **origin)
        lengths, held = zip(*found.tolist(), strict=True)
        length = max(lengths)
        if before is None or len(set(held)) > 1 or length >= shard.nbytes:
            grid.gather_inter_group(secondary, shard, **origin)
            return
        rows = self.take_bytes("messages", (grid.num_groups, length), device)
        grid.gather_inter_group(rows, message[:length], **origin)
        for row, values, sender in zip(rows, secondary, grid.peers, strict=True):
            if sender != self._transport.rank:
                unpack("differences", row, values, sender=sender, versions=(before, now))
        own.copy_(shard)


class PublishedGather(WeightGather):
    """Gathers weights into buffers that hold the values of the gather before.

    Of each unit it keeps this rank's slice as it was published, since the slice in the buffer is
    the shard itself. See [Note: lossless differences].
    """

    kept_kind = "published weights"

    def gather(self, out: Tensor, shard: Tensor, *, version: int, **origin: Unpack[Origin]) -> None:
        entry = self._entry(origin["unit"], shard.numel(), shard.dtype, shard.device)
        before, entry.version = entry.version, None
        if not self._send_differences(out, shard, entry.values, (before, version), **origin):
            self._transport.all_gather(out, shard, version=version, **origin).wait()
        entry.values.copy_(shard)
        entry.version = version

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Never sent: it need not be where transfers are fastest.
        with torch.inference_mode(False):
            return torch.zeros(numel, dtype=dtype, device=device)

    def _send_differences(
        self,
        out: Tensor,
        shard: Tensor,
        kept: Tensor,
        versions: _Versions,
        **origin: Unpack[Origin],
    ) -> bool:
        """Update the other ranks' slices of ``out``. Returns whether all ranks could."""
        grid, device, rank = self._grid, shard.device, self._transport.rank
        slices, (before, now) = out.view(self._transport.world_size, -1), versions
        message, length = _packed(self, kept, shard, versions)
        held = torch.zeros((), dtype=torch.int64, device=device)
        if before is not None:
            parts = [kept if n == rank else part for n, part in enumerate(slices)]
            held = checksums(torch.stack([*map(checksum_of, parts)]).view(torch.uint8))
        known = torch.tensor([length, _NONE if before is None else before], device=device)
        own = torch.cat([known, held[None]])  # kept until it has been read
        found = torch.empty(3 * len(slices), dtype=torch.int64, device=device)
        self._transport.all_gather(found, own, version=now, **origin).wait()
        lengths, *same = zip(*found.view(-1, 3).tolist(), strict=True)
        length = max(lengths)
        if before is None or any(len(set(of)) > 1 for of in same) or length >= shard.nbytes:
            return False
        groups, size = grid.num_groups, grid.group_size
        rows = self.take_bytes("messages", (groups, length), device)
        grid.gather_inter_group(rows, message[:length], **origin)
        arrived = self.take_bytes("all messages", (size, groups, length), device)
        grid.gather_intra_group(arrived, rows, **origin)
        for sender, values in enumerate(slices):
            if sender != rank:
                row = arrived[sender % size, sender // size]
                unpack("differences", row, values, sender=sender, versions=(before, now))
        return True


def _packed(
    gather: WeightGather, old: Tensor, new: Tensor, versions: _Versions
) -> tuple[Tensor, int]:
    """Return a message buffer, and the bytes of the difference in it: 0 without an old version."""
    before, now = versions
    most = max_message_nbytes(new.numel(), new.element_size())
    message = gather.take_bytes("message", (most,), new.device)
    if before is None:
        return message, 0
    return message, pack("differences", old, new, message=message, versions=(before, now))
