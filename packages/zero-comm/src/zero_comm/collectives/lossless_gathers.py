"""Gathers of weights as lossless differences: every bit arrives, and few bytes are sent.

Most 16-bit weights keep their bits in a step of fine-tuning, or move to a neighbouring number. A
rank sends what changed since the version that it published last, in the messages of
`zero_comm.lossless.message`. Groups and phases are those of [Note: the two phases] in
`zero_comm.collectives.weight_gathers`.

[Note: what differences start from]
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

from typing import Final, Unpack

import torch
from torch import Tensor

from zero_comm.collectives.weight_gathers import Origin, SecondaryGather, WeightGather
from zero_comm.lossless.message import max_message_nbytes, pack, unpack
from zero_comm.quantizer.checksum import checksum_of, checksums

_NONE: Final = -1
"""Sent for a version where nothing is kept."""


class LosslessSecondaryGather(SecondaryGather):
    """Gathers weights from secondary shards, which lossless differences keep up to date."""

    def _refresh(
        self,
        secondary: Tensor,
        shard: Tensor,
        *,
        versions: tuple[int | None, int],
        **origin: Unpack[Origin],
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
    the shard itself. See [Note: what differences start from].
    """

    kept_kind = "published weights"

    def gather(self, out: Tensor, shard: Tensor, *, version: int, **origin: Unpack[Origin]) -> None:
        entry = self._entry(origin["unit"], shard.numel(), shard.dtype, shard.device)
        before, entry.version = entry.version, None
        if not self._send_differences(
            out, shard, entry.values, versions=(before, version), **origin
        ):
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
        published: Tensor,
        *,
        versions: tuple[int | None, int],
        **origin: Unpack[Origin],
    ) -> bool:
        """Update the other ranks' slices of ``out``. Returns whether all ranks could."""
        grid, device, rank = self._grid, shard.device, self._transport.rank
        slices, (before, now) = out.view(self._transport.world_size, -1), versions
        message, length = _packed(self, published, shard, versions)
        held = torch.zeros((), dtype=torch.int64, device=device)
        if before is not None:
            parts = [published if n == rank else part for n, part in enumerate(slices)]
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
    gather: WeightGather, old: Tensor, new: Tensor, versions: tuple[int | None, int]
) -> tuple[Tensor, int]:
    """Return a message buffer, and the bytes of the difference in it: 0 without an old version."""
    before, now = versions
    most = max_message_nbytes(new.numel(), new.element_size())
    message = gather.take_bytes("message", (most,), new.device)
    if before is None:
        return message, 0
    return message, pack("differences", old, new, message=message, versions=(before, now))
