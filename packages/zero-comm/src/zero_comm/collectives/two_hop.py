"""Quantized reduce-scatter of gradients in two hops (qgZ, ZeRO++, arXiv 2306.10209, section 3.3).

[Note: the two hops]
W = N * R ranks run on N nodes with R ranks each. Rank n * R + l has local rank l on node n.
``full`` has a slice of s elements for each of the W ranks.

Hop 1, within a node: each rank sends to local rank l of its node the slices for all N ranks with
local rank l. The slices for one receiver are re-ordered to be adjacent, and R * N messages travel
in one all-to-all. The receiver dequantizes the messages and sums them in fp32 in rank order. It
then holds its node's sums of N slices.

Hop 2, between nodes: each of the N sums is quantized again and sent to its owner, in one all-to-all
of N messages. The owner sums them in fp32 in node order.

Per rank, only (N - 1) / W of the gradient leaves the node. An element is quantized at most twice.
With one rank per node there is only hop 2, and on one node only hop 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero_comm.collectives.feedback import ErrorFeedback, LocoSettings
from zero_comm.quantizer.block_format import GROUP_SEED_STEP, BlockFormat, seed_of_group
from zero_comm.quantizer.message import Packing
from zero_comm.transport.protocol import TransportCollectives
from zero_comm.transport.scratch import Scratch
from zero_comm.transport.topology import check_ranks_per_node, find_ranks_per_node
from zero_comm.transport.torch_collectives import TorchCollectives


@dataclass(frozen=True, slots=True)
class GradientFormat:
    """Formats of gradient messages within a node and between nodes, and their options."""

    intra_node: BlockFormat
    inter_node: BlockFormat
    is_stochastic: bool = False
    error_feedback: LocoSettings | None = None
    has_checksum: bool = False

    @classmethod
    def make(
        cls, intra_node: str | BlockFormat, inter_node: str | BlockFormat | None, **options: Any
    ) -> GradientFormat:
        """Create a format whose ``inter_node`` defaults to ``intra_node``."""
        near = BlockFormat.make(intra_node)
        far = near if inter_node is None else BlockFormat.make(inter_node)
        return cls(near, far, **options)


class _Hop(NamedTuple):
    """Ranks and format of one exchange."""

    name: str
    packing: Packing
    senders: Sequence[int]  # ranks in the whole group, for error messages
    transport: TransportCollectives


class TwoHopReduce:
    """Sums slices of gradients over all ranks, quantized in transit. See [Note: the two hops].

    Every rank must construct it alike, with the same ``seed`` of stochastic rounding, and reduce
    the same units in the same order. Methods are not thread-safe.
    """

    def __init__(
        self,
        transport: TransportCollectives,
        fmt: GradientFormat,
        *,
        ranks_per_node: int,
        seed: int = 0,
        defers: bool = False,
    ) -> None:
        rank, size, per_node = transport.rank, transport.world_size, ranks_per_node
        self._rank, self._num_nodes, self._per_node = rank, size // per_node, per_node
        first = rank - rank % per_node

        def hop(name: str, kind: BlockFormat, ranks: list[int]) -> _Hop | None:
            packing = Packing(kind, has_checksum=fmt.has_checksum, defers=defers)
            return _Hop(name, packing, ranks, transport.subgroup(ranks)) if ranks[1:] else None

        near, far = [*range(first, first + per_node)], [*range(rank % per_node, size, per_node)]
        self._intra_node = hop("within the node", fmt.intra_node, near)
        self._inter_node = hop("between nodes", fmt.inter_node, far)
        self._hops = [hop for hop in (self._intra_node, self._inter_node) if hop is not None]
        self.packings = [hop.packing for hop in self._hops]
        self.feedback = None if fmt.error_feedback is None else ErrorFeedback(fmt.error_feedback)
        # Every rank and ``seed`` gets its own first seed of stochastic rounding.
        stream = seed * size + rank
        self._first_seed = (stream * 0x85EBCA6B + 1) % 2**32 if fmt.is_stochastic else None
        self._num_seeds = 0
        self.sent = Scratch(transport)
        self.scratch = Scratch()

    def shortens(self, dtype: torch.dtype, numel: int) -> bool:
        """Whether slices of ``numel`` elements of ``dtype`` become shorter in every hop."""
        return bool(self._hops) and all(p.shortens(dtype, numel) for p in self.packings)

    def reduce(self, out: Tensor, full: Tensor, *, unit: int) -> None:
        """Sum this rank's slice of every rank's ``full`` into ``out``, and wait for the result.

        Both are flat and contiguous. ``out`` may have any floating dtype. A block with NaN or Inf
        on any rank arrives as NaN.
        """
        numel, num_nodes = out.numel(), self._num_nodes
        wide = out
        if out.dtype != torch.float32:
            wide = self.scratch.take("sum", numel, torch.float32, out.device)
        total = wide.view(1, numel)
        slices = full.view(num_nodes, self._per_node, numel)
        if self._intra_node is not None:
            sums = total
            if self._inter_node is not None:
                size = num_nodes * numel
                sums = self.scratch.take("node's sums", size, torch.float32, out.device)
            self._sum(self._intra_node, slices, sums.view(num_nodes, numel), unit)
            slices = sums
        if self._inter_node is not None:
            self._sum(self._inter_node, slices.view(1, num_nodes, numel), total, unit)
        if wide is not out:
            out.copy_(wide)

    def _sum(self, hop: _Hop, slices: Tensor, sums: Tensor, unit: int) -> None:
        """Sum ``slices``, [parts, ranks of the hop, s], over the hop's ranks to fp32 [parts, s]."""
        num_parts, num_ranks, numel = slices.shape
        shape = (num_ranks, num_parts, hop.packing.nbytes(numel))
        size, device = math.prod(shape), slices.device
        sent = self.sent.take(f"sent {hop.name}", size, torch.uint8, device)
        received = self.scratch.take(f"received {hop.name}", size, torch.uint8, device)
        rows = sent.view(shape).transpose(0, 1)  # messages to one rank are adjacent in ``sent``
        self._pack(hop.packing, slices, rows, key=(unit, hop.name))
        hop.transport.all_to_all(received, sent, unit=unit).wait()
        rows = received.view(shape).transpose(0, 1)
        hop.packing.unpack_sum(rows, sums.view(-1), senders=[*hop.senders] * num_parts)

    def _pack(self, packing: Packing, slices: Tensor, rows: Tensor, *, key: object) -> None:
        """Pack ``slices``, [parts, ranks of the hop, s], into ``rows``, [parts, ranks, bytes]."""
        seed = None
        if self._first_seed is not None:
            seed = (self._first_seed + (self._num_seeds + 1) * GROUP_SEED_STEP) % 2**32
            self._num_seeds += len(slices)
        if self.feedback is None:
            packing.pack(slices.reshape(-1), rows, seed=seed)
            return
        for part, values in enumerate(slices):  # each part has its own error
            flat, own, own_key = values.reshape(-1), rows[part], (key, part)
            compensated = self.scratch.take("compensated", len(flat), torch.float32, flat.device)
            self.feedback.compensate(own_key, compensated.copy_(flat))
            packing.pack(compensated, own, seed=seed_of_group(seed, part))
            arrived = self.scratch.take("arrived", len(flat), torch.float32, flat.device)
            packing.unpack(own, arrived, senders=[self._rank] * len(own))
            self.feedback.update(own_key, compensated, arrived)

    @property
    def errors(self) -> list[Tensor]:
        return [] if self.feedback is None else self.feedback.tensors

    def begin_step(self, number: int) -> None:
        """Start the seeds of step ``number``, far from those of other steps."""
        self._num_seeds = number * GROUP_SEED_STEP


class SliceReducer:
    """Quantized sum of gradient slices over a process group (qgZ), for DDP, FSDP2 and functions.

    Slices that no message would shorten are sent exactly. Every rank of the group must construct it
    alike and call it in the same order. The first reduction may exchange node keys.
    """

    def __init__(
        self,
        collectives: TorchCollectives,
        fmt: GradientFormat,
        *,
        ranks_per_node: int | DeviceMesh | None,
        seed: int = 0,
    ) -> None:
        self._collectives = collectives
        self._format = fmt
        self._given = check_ranks_per_node(collectives, ranks_per_node)
        self._seed = seed
        self._two_hop: TwoHopReduce | None = None
        self._units: dict[tuple[object, int], int] = {}

    def reduce(self, out: Tensor, full: Tensor, *, scale: float, key: object = None) -> None:
        """Fill ``out`` with ``scale`` times the sum of this rank's slice over all ranks.

        Both tensors are flat and contiguous. The sum and the scaling are in fp32, so that fp16
        cannot overflow before an average is taken. An exact fp64 slice is summed in fp64. Error
        feedback keeps one error per ``key`` and length.
        """
        if self._two_hop is None:
            ranks_per_node = find_ranks_per_node(self._collectives, self._given, full.device)
            self._two_hop = TwoHopReduce(
                self._collectives, self._format, ranks_per_node=ranks_per_node, seed=self._seed
            )
        unit = self._units.setdefault((key, full.numel()), len(self._units))
        if self._two_hop.shortens(full.dtype, out.numel()):
            total = torch.empty_like(out, dtype=torch.float32)
            self._two_hop.reduce(total, full, unit=unit)
        else:
            wide = torch.promote_types(full.dtype, torch.float32)
            total = torch.empty_like(out, dtype=wide)
            self._collectives.reduce_scatter(total, full, unit=unit).wait()
        out.copy_(total.mul_(scale))

    def forget_errors(self) -> None:
        """Drop the kept errors of error feedback. Every rank must call it between reductions."""
        if self._two_hop is not None and self._two_hop.feedback is not None:
            self._two_hop.feedback.forget()


def gather_slices(
    collectives: TorchCollectives, packing: Packing | None, out: Tensor, own: Tensor
) -> None:
    """Fill ``out`` with every rank's slice, as messages if they are shorter in ``out``'s dtype.

    Both tensors are flat and contiguous. ``own`` has the dtype of ``out`` or a wider one. If
    ``packing`` is None, slices are gathered exactly.
    """

    def gather(gathered: Tensor, sent: Tensor) -> None:
        collectives.all_gather(gathered, sent, unit=-1, version=-1, backward=False).wait()

    if packing is None or not packing.shortens(out.dtype, own.numel()):
        gather(out, own.to(out.dtype))
        return
    world_size, nbytes = collectives.world_size, packing.nbytes(own.numel())
    message = torch.empty(nbytes, dtype=torch.uint8, device=own.device)
    packing.pack(own, message.view(1, nbytes))
    rows = message.new_empty(world_size, nbytes)
    gather(rows.view(-1), message)
    packing.unpack(rows, out, senders=range(world_size))
