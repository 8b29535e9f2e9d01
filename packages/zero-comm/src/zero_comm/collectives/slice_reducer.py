"""Quantized reduction of gradients for DDP, FSDP2 and the plain functions.
A thin layer over `zero_comm.collectives.two_hop`: what the caller chose, one reducer per process
group, and what is reduced exactly because its messages would be no shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zero_comm.collectives.feedback import ErrorFeedback, LocoSettings
from zero_comm.collectives.two_hop import Rounding, TwoHopReduce
from zero_comm.quantizer.block_format import BlockFormat
from zero_comm.quantizer.message import Packing
from zero_comm.transport.torch_collectives import TorchCollectives


@dataclass(frozen=True, slots=True)
class GradientFormat:
    """Formats and options of gradient messages.

    Args:
        intra_node: format of messages within a node.
        inter_node: format of messages between nodes.
        is_stochastic: whether they are rounded stochastically.
        error_feedback: settings of error feedback; None for none.
        has_checksum: whether messages carry a checksum.
    """

    intra_node: BlockFormat
    inter_node: BlockFormat
    is_stochastic: bool = False
    error_feedback: LocoSettings | None = None
    has_checksum: bool = False

    @classmethod
    def make(
        cls,
        intra_node: str | BlockFormat,
        inter_node: str | BlockFormat | None,
        *,
        is_stochastic: bool,
        error_feedback: LocoSettings | None,
        has_checksum: bool,
    ) -> GradientFormat:
        """Make a format in which ``inter_node`` defaults to ``intra_node``."""
        near = BlockFormat.make(intra_node)
        far = near if inter_node is None else BlockFormat.make(inter_node)
        return cls(near, far, is_stochastic, error_feedback, has_checksum)


class SliceReducer:
    """Sums slices of gradients over a group (qgZ), in two hops where nodes have several ranks.

    Every rank of the group constructs it alike and calls it in the same order. Not to be called by
    several threads at once.

    Args:
        collectives: the group's.
        fmt: formats of the messages.
        ranks_per_node: consecutive ranks that share a node; divides the group.
        seed: of stochastic rounding, equal on all ranks.
    """

    def __init__(
        self,
        collectives: TorchCollectives,
        fmt: GradientFormat,
        *,
        ranks_per_node: int,
        seed: int = 0,
    ) -> None:
        self._collectives = collectives
        # A number of its own for each rank under each seed.
        stream = seed * collectives.world_size + collectives.rank
        feedback = fmt.error_feedback
        self._feedback = None if feedback is None else ErrorFeedback(feedback)
        self._two_hop = TwoHopReduce(
            collectives,
            ranks_per_node=ranks_per_node,
            intra_node=Packing(fmt.intra_node, has_checksum=fmt.has_checksum),
            inter_node=Packing(fmt.inter_node, has_checksum=fmt.has_checksum),
            rounding=Rounding(rank=stream, is_stochastic=fmt.is_stochastic),
            feedback=self._feedback,
        )
        self._units: dict[tuple[object, int], int] = {}

    def reduce(self, out: Tensor, full: Tensor, *, scale: float, key: object) -> None:
        """Fill ``out`` with ``scale`` times the sum of this rank's slice over all ranks.

        The sum is taken and scaled in fp32 (fp64 where a slice travels exactly in it), so that
        fp16 doesn't overflow before an average is taken.

        Args:
            out: flat, contiguous, any floating dtype.
            full: flat, contiguous, ``world_size * out.numel()`` elements; read.
            scale: 1 / ranks for the average.
            key: identifies gradients that are reduced repeatedly. Error feedback keeps an error
                for each key and length.

        Raises:
            CorruptMessageError: a message arrived damaged; it names the sender.
        """
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
        """Drop the errors that feedback keeps. Every rank calls it alike."""
        if self._feedback is not None:
            self._feedback.forget()
