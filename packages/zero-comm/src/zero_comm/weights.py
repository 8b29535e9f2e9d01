"""How a unit's weights are gathered: quantized (qwZ), from secondary shards (hpZ), or both.

See [Note: the two phases] in `zero_comm.grid`. ZeRO++ (arXiv 2306.10209), sections 3.1 and 3.2.

[Note: secondary shards]
After phase 1 a rank holds 1/G of the unit: its **secondary shard**. hpZ keeps it, with the version
of the weights that it was made of, so that later gathers of that version (backward's, and those of
further micro-steps) run phase 2 alone and nothing leaves the group. It is built from what the first
gather of a version brings anyway. A version is entered after the bytes are complete, and a gather
asks for the one it wants: a stale or half-written shard is never served. All ranks count versions
alike, so all refresh in the same call. Other ranks of the group may read a secondary shard in
place; it is overwritten only when a new version is gathered, which is after an exchange of all
ranks that each entered after its earlier gathers (see `zero_comm.native`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zero_comm.carriers import Carrier
from zero_comm.grid import Grid
from zero_comm.message import Packing
from zero_comm.native import NativeCollectives
from zero_comm.scratch import Scratch

__all__ = ["MessageGather", "SecondaryGather", "WeightGather"]


class WeightGather(Protocol):
    """A way to gather; its jobs run in turn, on the lane of gathers."""

    def gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> None:
        """Fill flat ``out`` with the weights of all ranks' ``shard``; a collective."""
        ...

    def forget(self) -> None:
        """What is kept is void; all ranks call it, between the same gathers."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes kept between gathers."""
        ...


class _Keeper:
    """Keeps memory for each unit, with the version of the weights in it."""

    def __init__(self, native: NativeCollectives) -> None:
        self._native = native
        self._kept: dict[int, _Kept] = {}

    def _of(self, unit: int, numel: int, dtype: torch.dtype, device: torch.device) -> _Kept:
        """What is kept of a unit; made anew, and of no version, if it was of another form."""
        kept = self._kept.get(unit)
        if kept is None or not kept.is_like(numel, dtype, device):
            kept = self._kept[unit] = _Kept(self._native.zeros(numel, dtype, device))
        return kept

    def forget(self) -> None:
        """See `WeightGather`."""
        for kept in self._kept.values():
            kept.version = None

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return sum(kept.values.nbytes for kept in tuple(self._kept.values()))


class MessageGather(_Keeper):
    """Weights travel as messages in both phases; a shard is quantized once per version.

    Args:
        native: where the messages are kept.
        grid: the groups, nodes.
        packing: the format.
        scratch: for what arrives.
    """

    def __init__(
        self, native: NativeCollectives, grid: Grid, packing: Packing, scratch: Scratch
    ) -> None:
        super().__init__(native)
        self._grid = grid
        self._packing = packing
        self._scratch = scratch

    def gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> None:
        """See `WeightGather`; this rank's own slice of ``out`` is dequantized, too."""
        message = self._message(shard, unit=unit, version=version)
        groups, size, nbytes = self._grid.num_groups, self._grid.group_size, message.numel()
        rows = message.view(1, -1)
        if groups > 1:
            rows = self._take("messages", groups * nbytes, shard).view(groups, nbytes)
            self._grid.gather_across(rows, message, unit=unit, backward=backward)
        everything = self._take("all messages", size * groups * nbytes, shard)
        everything = everything.view(size, groups, nbytes)
        self._grid.gather_within(everything, rows, unit=unit, backward=backward)
        for group, values in enumerate(out.view(groups, -1)):
            senders = range(group * size, (group + 1) * size)
            self._packing.unpack(everything[:, group], values, senders=senders)

    def _message(self, shard: Tensor, *, unit: int, version: int) -> Tensor:
        nbytes = self._packing.nbytes(shard.numel())
        kept = self._of(unit, nbytes, torch.uint8, shard.device)
        if kept.version != version:
            kept.version = None
            self._packing.pack(shard, kept.values.view(1, -1))
            kept.version = version
        return kept.values

    def _take(self, purpose: str, nbytes: int, like: Tensor) -> Tensor:
        return self._scratch.take(purpose, nbytes, torch.uint8, like.device)


class SecondaryGather(_Keeper):
    """Weights are gathered from secondary shards; see [Note: secondary shards].

    Args:
        native: where they are kept.
        grid: the groups.
        carrier: how they are brought up to date.
        scratch: for what arrives.
    """

    def __init__(
        self, native: NativeCollectives, grid: Grid, carrier: Carrier, scratch: Scratch
    ) -> None:
        super().__init__(native)
        self._grid = grid
        self._carrier = carrier
        self._scratch = scratch

    def gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> None:
        """See `WeightGather`."""
        numel = self._grid.num_groups * shard.numel()
        kept = self._of(unit, numel, shard.dtype, shard.device)
        secondary = kept.values.view(self._grid.num_groups, -1)
        if kept.version != version:
            is_void, kept.version = kept.version is None, None
            self._carrier.refresh(secondary, shard, is_void=is_void, unit=unit, backward=backward)
            kept.version = version
        self._grid.gather_values(out, secondary, self._scratch, unit=unit, backward=backward)


@dataclass(slots=True)
class _Kept:
    """What is kept of a unit, and the version of the weights in it; None: of none."""

    values: Tensor
    version: int | None = None

    def is_like(self, numel: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether it holds so many elements, of that dtype and on that device."""
        mine = self.values
        return (mine.numel(), mine.dtype, mine.device) == (numel, dtype, device)
