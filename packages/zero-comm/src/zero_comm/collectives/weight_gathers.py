"""Gathers of a unit's weights: quantized (qwZ), from secondary shards (hpZ), or both.

See [Note: the two phases] in `zero_comm.collectives.grid`. ZeRO++ (arXiv 2306.10209), sections 3.1
and 3.2.

[Note: secondary shards]
After phase 1 a rank holds 1/G of the unit: its **secondary shard**. hpZ keeps it, with the version
of the weights that it was made from, so that later gathers of that version (backward's, and those
of further micro-steps) run phase 2 alone and nothing leaves the group. The first gather of a
version fills it as a by-product. A version is recorded after the bytes are complete, and a gather
asks for the one it needs: a stale or half-written shard is never served. All ranks count versions
alike, so all refresh in the same call. Other ranks of the group may read a secondary shard in
place; it is overwritten only when a new version is gathered, which is after an exchange of all
ranks that each entered after its earlier gathers (see `zero_comm.transport.protocol`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zero_comm.collectives.grid import Grid
from zero_comm.collectives.refresh import SecondaryRefresh
from zero_comm.quantizer.message import Packing
from zero_comm.transport.protocol import TransportCollectives
from zero_comm.transport.scratch import Scratch


class WeightGather(Protocol):
    """Gathers weights. Its jobs run one after another, on the queue of gathers."""

    def gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> None:
        """Fill flat ``out`` with the weights of all ranks' ``shard``. A collective."""
        ...

    def forget(self) -> None:
        """Invalidate what is kept. All ranks call it, between the same gathers."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes kept between gathers."""
        ...


class _UnitCache:
    """Memory for each unit, with the version of the weights in it."""

    def __init__(self, transport: TransportCollectives) -> None:
        self._transport = transport
        self._entries: dict[int, _Entry] = {}

    def _entry(self, unit: int, numel: int, dtype: torch.dtype, device: torch.device) -> _Entry:
        """Return the unit's entry, or a new one of no version if its form has changed."""
        entry = self._entries.get(unit)
        if entry is None or not entry.has_form(numel, dtype, device):
            entry = self._entries[unit] = _Entry(self._transport.zeros(numel, dtype, device))
        return entry

    def forget(self) -> None:
        """Invalidate every entry."""
        for entry in self._entries.values():
            entry.version = None

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.values.nbytes for entry in tuple(self._entries.values()))


class MessageGather(_UnitCache):
    """Gathers quantized messages in both phases. A shard is quantized once per version.

    Args:
        transport: allocates the memory that messages are kept in.
        grid: the nodes.
        packing: the format.
        scratch: buffers for received messages.
    """

    def __init__(
        self, transport: TransportCollectives, grid: Grid, packing: Packing, scratch: Scratch
    ) -> None:
        super().__init__(transport)
        self._grid = grid
        self._packing = packing
        self._scratch = scratch

    def gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> None:
        """Fill ``out`` with dequantized weights, this rank's own slice included."""
        message = self._message(shard, unit=unit, version=version)
        groups, size, nbytes = self._grid.num_groups, self._grid.group_size, message.numel()
        rows = message.view(1, -1)
        if groups > 1:
            rows = self._take("messages", groups * nbytes, shard).view(groups, nbytes)
            self._grid.gather_inter_group(rows, message, unit=unit, backward=backward)
        everything = self._take("all messages", size * groups * nbytes, shard)
        everything = everything.view(size, groups, nbytes)
        self._grid.gather_intra_group(everything, rows, unit=unit, backward=backward)
        for group, values in enumerate(out.view(groups, -1)):
            senders = range(group * size, (group + 1) * size)
            self._packing.unpack(everything[:, group], values, senders=senders)

    def _message(self, shard: Tensor, *, unit: int, version: int) -> Tensor:
        nbytes = self._packing.nbytes(shard.numel())
        entry = self._entry(unit, nbytes, torch.uint8, shard.device)
        if entry.version != version:
            entry.version = None
            self._packing.pack(shard, entry.values.view(1, -1))
            entry.version = version
        return entry.values

    def _take(self, purpose: str, nbytes: int, like: Tensor) -> Tensor:
        return self._scratch.take(purpose, nbytes, torch.uint8, like.device)


class SecondaryGather(_UnitCache):
    """Gathers weights from secondary shards. See [Note: secondary shards].

    Args:
        transport: allocates the secondary shards.
        grid: the groups.
        refresh: brings them up to date.
        scratch: buffers for received values.
    """

    def __init__(
        self,
        transport: TransportCollectives,
        grid: Grid,
        refresh: SecondaryRefresh,
        scratch: Scratch,
    ) -> None:
        super().__init__(transport)
        self._grid = grid
        self._refresh = refresh
        self._scratch = scratch

    def gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> None:
        """Refresh the secondary shard if the version is new, then gather within the group."""
        numel = self._grid.num_groups * shard.numel()
        entry = self._entry(unit, numel, shard.dtype, shard.device)
        secondary = entry.values.view(self._grid.num_groups, -1)
        if entry.version != version:
            is_void, entry.version = entry.version is None, None
            self._refresh.refresh(secondary, shard, is_void=is_void, unit=unit, backward=backward)
            entry.version = version
        self._grid.gather_values(out, secondary, self._scratch, unit=unit, backward=backward)


@dataclass(slots=True)
class _Entry:
    """Memory kept for a unit, and the version of the weights in it (None if there are none)."""

    values: Tensor
    version: int | None = None

    def has_form(self, numel: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether ``values`` has this length, dtype and device."""
        mine = self.values
        return (mine.numel(), mine.dtype, mine.device) == (numel, dtype, device)
