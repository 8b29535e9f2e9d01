"""Quantized reduction of gradients in two hops (qgZ); ZeRO++, arXiv 2306.10209, section 3.3.

[Note: the two hops]
``full`` has a slice of s elements for each of W = N * R ranks: N nodes of R ranks each. Rank
n * R + l is number l of node n.

Hop 1, within the node: slices are re-ordered so that those of all ranks numbered l lie together,
and travel to number l of this node: R * N messages in one all-to-all. What arrives is dequantized
and summed in fp32 in rank order: this rank now has its node's sum of the N slices that belong to
ranks of its own number. Hop 2, across nodes: each of them is quantized again and travels to its
owner, N messages in one all-to-all, and the owner sums them in fp32 in the order of nodes. So only
(N - 1) / W of the gradient leaves the node per rank, and every element is rounded twice at most.

With one rank per node there is only hop 2, on one node only hop 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_comm.feedback import ErrorFeedback
from zero_comm.message import Packing
from zero_comm.native import NativeCollectives
from zero_comm.scratch import Scratch

__all__ = ["Rounding", "TwoHopReduce"]

_SEED_STEP = 0x9E3779B1  # odd: seeds of successive packings differ


class Rounding:
    """Seeds of stochastic rounding, which differ by rank and use; or None: to the nearest."""

    def __init__(self, *, rank: int, is_stochastic: bool) -> None:
        self._first = (rank * 0x85EBCA6B + 1) % 2**32
        self._is_stochastic = is_stochastic
        self._num_seeds = 0

    def next(self) -> int | None:
        """The seed of the next packing."""
        if not self._is_stochastic:
            return None
        self._num_seeds += 1
        return (self._first + self._num_seeds * _SEED_STEP) % 2**32

    def restart(self) -> None:
        """Begin the sequence again."""
        self._num_seeds = 0


@dataclass(frozen=True, slots=True)
class _Hop:
    """One exchange: among whom, and in which format."""

    native: NativeCollectives
    packing: Packing
    senders: Sequence[int]
    """Their ranks among all, to name them."""


class TwoHopReduce:
    """Sums slices of gradients over all ranks, quantized on the way; see [Note: the two hops].

    Every rank must make it, and call it for the same units in the same order. Not to be called by
    several threads at once.

    Args:
        native: carries the bytes.
        ranks_per_node: divides the number of ranks; those of a node are consecutive.
        within: how messages within a node are packed.
        between: how messages between nodes are packed.
        rounding: how codes are rounded.
        feedback: keeps errors of quantizing, if wanted.
    """

    def __init__(
        self,
        native: NativeCollectives,
        *,
        ranks_per_node: int,
        within: Packing,
        between: Packing,
        rounding: Rounding | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        rank, per_node = native.rank, ranks_per_node
        self._rank = rank
        self._num_nodes = native.world_size // per_node
        self._per_node = per_node
        node, place = divmod(rank, per_node)
        near = [node * per_node + i for i in range(per_node)]
        far = [n * per_node + place for n in range(self._num_nodes)]
        self._within = _Hop(native.subgroup(near), within, near) if per_node > 1 else None
        self._across = _Hop(native.subgroup(far), between, far) if self._num_nodes > 1 else None
        self._rounding = rounding or Rounding(rank=rank, is_stochastic=False)
        self._feedback = feedback
        self._sent = Scratch(native.zeros)
        self._scratch = Scratch()

    def shortens(self, dtype: torch.dtype, numel: int) -> bool:
        """Whether slices of ``numel`` elements of ``dtype`` become fewer bytes in every hop."""
        hops = [hop for hop in (self._within, self._across) if hop is not None]
        return bool(hops) and all(hop.packing.shortens(dtype, numel) for hop in hops)

    def reduce(self, out: Tensor, full: Tensor, *, unit: int) -> None:
        """``out`` = the sum of this rank's slice over all ranks; returns when it is there.

        A block in which any rank has NaN or Inf arrives as NaN.

        Args:
            out: flat, contiguous, any floating dtype; overwritten.
            full: flat, contiguous, a slice of ``out.numel()`` elements for every rank; read.
            unit: whose gradients they are.

        Raises:
            CorruptMessageError: a message is damaged; it names the sender.
        """
        wide = out
        if out.dtype != torch.float32:
            wide = self._scratch.take("sum", out.numel(), torch.float32, out.device)
        slices = full.view(self._num_nodes, self._per_node, -1)
        if self._within is not None:
            slices = self._sum_within(self._within, slices, wide, unit)
        if self._across is not None:
            self._sum_across(self._across, slices.view(self._num_nodes, -1), wide, unit)
        if self._within is None and self._across is None:
            wide.copy_(full)
        if wide is not out:
            out.copy_(wide)

    def _sum_within(self, hop: _Hop, slices: Tensor, wide: Tensor, unit: int) -> Tensor:
        """The node's sum of slices [nodes, ranks per node, s]: fp32 [nodes, s]."""
        num_nodes, per_node, numel = slices.shape
        shape = (per_node, num_nodes, hop.packing.nbytes(numel))
        sent = self._bytes(self._sent, "sent within", shape, slices.device)
        for node in range(num_nodes):  # re-ordered: [node, place] lands at [place, node]
            self._pack(hop, slices[node].reshape(-1), sent[:, node], key=(unit, "within", node))
        received = self._bytes(self._scratch, "received within", shape, slices.device)
        hop.native.all_to_all(received.view(-1), sent.view(-1), unit=unit).wait()
        partial = wide.view(1, -1)
        if num_nodes > 1:
            size = num_nodes * numel
            flat = self._scratch.take("node's sums", size, torch.float32, slices.device)
            partial = flat.view(num_nodes, numel)
        for node in range(num_nodes):
            hop.packing.unpack_sum(received[:, node], partial[node], senders=hop.senders)
        return partial

    def _sum_across(self, hop: _Hop, slices: Tensor, wide: Tensor, unit: int) -> None:
        """Sum of slices [nodes, s] of the ranks with this rank's number, into ``wide``."""
        shape = (len(slices), hop.packing.nbytes(wide.numel()))
        sent = self._bytes(self._sent, "sent across", shape, slices.device)
        self._pack(hop, slices.reshape(-1), sent, key=(unit, "across", 0))
        received = self._bytes(self._scratch, "received across", shape, slices.device)
        hop.native.all_to_all(received.view(-1), sent.view(-1), unit=unit).wait()
        hop.packing.unpack_sum(received, wide, senders=hop.senders)

    def _pack(self, hop: _Hop, values: Tensor, rows: Tensor, *, key: object) -> None:
        seed = self._rounding.next()
        if self._feedback is None:
            hop.packing.pack(values, rows, seed=seed)
            return
        numel, device = values.numel(), values.device
        compensated = self._scratch.take("compensated", numel, torch.float32, device).copy_(values)
        self._feedback.compensate(key, compensated)
        hop.packing.pack(compensated, rows, seed=seed)
        arrived = self._scratch.take("arrived", numel, torch.float32, device)
        hop.packing.unpack(rows, arrived, senders=[self._rank] * len(rows))
        self._feedback.learn(key, compensated, arrived)

    def _bytes(
        self, scratch: Scratch, purpose: str, shape: tuple[int, ...], device: torch.device
    ) -> Tensor:
        numel = 1
        for length in shape:
            numel *= length
        return scratch.take(purpose, numel, torch.uint8, device).view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of buffers that are kept between reductions, without the errors."""
        return self._sent.nbytes + self._scratch.nbytes
