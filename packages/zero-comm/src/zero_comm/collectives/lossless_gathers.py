"""Gathers of weights as lossless differences: every bit arrives, and few bytes are sent.

Most 16-bit weights keep their bits in a step of fine-tuning, or move to a neighbouring number. A
rank sends what changed since the version that it published last, in the messages of
`zero_comm.differences.message`. Groups and phases are those of [Note: the two phases] in
`zero_comm.collectives.weight_gathers`.

[Note: what differences start from]
Sender and receivers must hold the same earlier values. With **secondary shards** they do: only
gathers write to them. A buffer that is **kept** by the engine, as the parameters of stages 1 and 2
are, holds the earlier values too, but others may have written to it: an edit of a weight, equal on
all ranks or not. So each rank takes the checksum of what it holds, with its own slice as it
published it, and the ranks compare them as they exchange the messages' lengths. Where one differs,
nothing was published before, or differences would be no shorter, all ranks send whole values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_comm.collectives.weight_gathers import SecondaryGather, WeightGather
from zero_comm.differences.message import (
    max_message_nbytes,
    pack_difference,
    unpack_difference,
)
from zero_comm.quantizer.checksum import checksums


class LosslessSecondaryGather(SecondaryGather):
    """Gathers weights from secondary shards, which lossless differences keep up to date."""

    def _refresh(
        self,
        secondary: Tensor,
        shard: Tensor,
        *,
        versions: tuple[int | None, int],
        unit: int,
        backward: bool,
    ) -> None:
        grid, device, (before, now) = self._grid, shard.device, versions
        own, length = secondary[grid.group], 0
        if before is not None:
            most = max_message_nbytes(shard.numel(), shard.element_size())
            message = self._take_bytes("message", (most,), device)
            length = pack_difference(own, shard, message, versions=(before, now))
            lengths = torch.empty(grid.num_groups, dtype=torch.int64, device=device)
            sent = torch.tensor([length], device=device)
            grid.gather_inter_group(lengths, sent, unit=unit, backward=backward)
            length = int(lengths.max())
        if before is None or length >= shard.nbytes:
            grid.gather_inter_group(secondary, shard, unit=unit, backward=backward)
            return
        rows = self._take_bytes("messages", (grid.num_groups, length), device)
        grid.gather_inter_group(rows, message[:length], unit=unit, backward=backward)
        for row, values, sender in zip(rows, secondary, grid.peers, strict=True):
            if sender != self._transport.rank:
                unpack_difference(row, values, versions=(before, now), sender=sender)
        own.copy_(shard)


class PublishedGather(WeightGather):
    """Gathers weights into buffers that hold the values of the gather before.

    Of each unit it keeps this rank's slice as it was published, since the slice in the buffer is
    the shard itself. See [Note: what differences start from].
    """

    kept_kind = "published weights"

    def gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> None:
        entry = self._entry(unit, shard.numel(), shard.dtype, shard.device)
        before, entry.version = entry.version, None
        if before is None or not self._send_differences(
            out, shard, entry.values, versions=(before, version), unit=unit, backward=backward
        ):
            self._transport.all_gather(
                out, shard, unit=unit, version=version, backward=backward
            ).wait()
        entry.values.copy_(shard)
        entry.version = version

    def _send_differences(
        self,
        out: Tensor,
        shard: Tensor,
        published: Tensor,
        *,
        versions: tuple[int, int],
        unit: int,
        backward: bool,
    ) -> bool:
        """Update the other ranks' slices of ``out``. Returns whether all ranks could."""
        grid, device, rank = self._grid, shard.device, self._transport.rank
        slices = out.view(self._transport.world_size, -1)
        most = max_message_nbytes(shard.numel(), shard.element_size())
        message = self._take_bytes("message", (most,), device)
        length = pack_difference(published, shard, message, versions=versions)
        held = [published if number == rank else part for number, part in enumerate(slices)]
        facts = torch.stack([torch.tensor(length, device=device), _checksum(held)])
        found = torch.empty(2 * len(slices), dtype=torch.int64, device=device)
        self._transport.all_gather(
            found, facts, unit=unit, version=versions[1], backward=backward
        ).wait()
        lengths, sums = zip(*found.view(-1, 2).tolist(), strict=True)
        length = max(lengths)
        if len(set(sums)) > 1 or length >= shard.nbytes:
            return False
        groups, size = grid.num_groups, grid.group_size
        rows = self._take_bytes("messages", (groups, length), device)
        grid.gather_inter_group(rows, message[:length], unit=unit, backward=backward)
        arrived = self._take_bytes("all messages", (size, groups, length), device)
        grid.gather_intra_group(arrived, rows, unit=unit, backward=backward)
        for sender, (row, values) in enumerate(
            zip(arrived.transpose(0, 1).flatten(0, 1), slices, strict=True)
        ):
            if sender != rank:
                unpack_difference(row, values, versions=versions, sender=sender)
        return True


def _checksum(slices: list[Tensor]) -> Tensor:
    """Return one checksum of values: int64, without dimensions, on their device."""
    return checksums(torch.stack([_of_slice(part) for part in slices]).view(torch.uint8))


def _of_slice(values: Tensor) -> Tensor:
    whole = values.view(torch.uint8)
    if whole.numel() % 8 or whole.data_ptr() % 8:
        padded = torch.zeros(-(-whole.numel() // 8) * 8, dtype=torch.uint8, device=values.device)
        padded[: whole.numel()] = whole
        whole = padded
    return checksums(whole)
