"""Quantized reduce-scatter of gradients in two hops (qgZ, ZeRO++, arXiv 2306.10209, section 3.3).

[Note: the two hops]
``full`` has a slice of s elements for each of W = N * R ranks: N nodes of R ranks each. Rank
n * R + l has local rank l on node n.

Hop 1, intra-node: slices are re-ordered so that those of all ranks with local rank l are adjacent,
and sent to local rank l of this node: R * N messages in one all-to-all. The received messages are
dequantized and summed in fp32 in rank order: this rank now has its node's sum of the N slices that
belong to ranks of its own local rank. Hop 2, inter-node: each of them is quantized again and sent
to its owner, N messages in one all-to-all, and the owner sums them in fp32 in the order of nodes.
So only (N - 1) / W of the gradient leaves the node per rank, and every element is rounded twice at
most.

With one rank per node there is only hop 2, on one node only hop 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_comm.collectives.feedback import ErrorFeedback
from zero_comm.quantizer.message import Packing
from zero_comm.transport.protocol import TransportCollectives
from zero_comm.transport.scratch import Scratch

_SEED_STEP = 0x9E3779B1  # odd: seeds of successive packings differ


class Rounding:
    """Sequence of seeds for stochastic rounding, different for every rank and use.

    Seeds are None, which rounds to the nearest, unless ``is_stochastic``.
    """

    def __init__(self, *, rank: int, is_stochastic: bool) -> None:
        self._first = (rank * 0x85EBCA6B + 1) % 2**32
        self._is_stochastic = is_stochastic
        self._num_seeds = 0

    def next(self) -> int | None:
        """Return the seed of the next packing."""
        if not self._is_stochastic:
            return None
        self._num_seeds += 1
        return (self._first + self._num_seeds * _SEED_STEP) % 2**32

    def restart(self) -> None:
        """Begin the sequence again."""
        self._num_seeds = 0


@dataclass(frozen=True, slots=True)
class _Hop:
    """One exchange: its ranks and its format."""

    transport: TransportCollectives
    packing: Packing
    senders: Sequence[int]
    """Ranks of the whole group, for error messages."""


class TwoHopReduce:
    """Sums slices of gradients over all ranks, quantized in transit. See [Note: the two hops].

    Every rank must construct it, and call it for the same units in the same order. Not to be
    called by several threads at once.

    Args:
        transport: carries the bytes.
        ranks_per_node: divides the number of ranks; those of a node are consecutive.
        intra_node: packs messages within a node.
        inter_node: packs messages between nodes.
        rounding: seeds of the codes' rounding.
        feedback: keeps quantization errors; None for no error feedback.
    """

    def __init__(
        self,
        transport: TransportCollectives,
        *,
        ranks_per_node: int,
        intra_node: Packing,
        inter_node: Packing,
        rounding: Rounding | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        rank, per_node = transport.rank, ranks_per_node
        self._rank = rank
        self._num_nodes = transport.world_size // per_node
        self._per_node = per_node
        node, local_rank = divmod(rank, per_node)
        near = [node * per_node + i for i in range(per_node)]
        far = [n * per_node + local_rank for n in range(self._num_nodes)]
        self._intra_node = self._inter_node = None
        if per_node > 1:
            self._intra_node = _Hop(transport.subgroup(near), intra_node, near)
        if self._num_nodes > 1:
            self._inter_node = _Hop(transport.subgroup(far), inter_node, far)
        self._rounding = rounding or Rounding(rank=rank, is_stochastic=False)
        self._feedback = feedback
        self._sent = Scratch(transport)
        self._scratch = Scratch()

    def shortens(self, dtype: torch.dtype, numel: int) -> bool:
        """Whether slices of ``numel`` elements of ``dtype`` become fewer bytes in every hop."""
        hops = [hop for hop in (self._intra_node, self._inter_node) if hop is not None]
        return bool(hops) and all(hop.packing.shortens(dtype, numel) for hop in hops)

    def reduce(self, out: Tensor, full: Tensor, *, unit: int) -> None:
        """Sum this rank's slice of every rank's ``full`` into ``out``, and wait for it.

        A block in which any rank has NaN or Inf arrives as NaN.

        Args:
            out: flat, contiguous, any floating dtype; overwritten.
            full: flat, contiguous, a slice of ``out.numel()`` elements for every rank; read.
            unit: index of the unit that the gradients belong to.

        Raises:
            CorruptMessageError: a message is damaged; it names the sender.
        """
        wide = out
        if out.dtype != torch.float32:
            wide = self._scratch.take("sum", out.numel(), torch.float32, out.device)
        slices = full.view(self._num_nodes, self._per_node, -1)
        if self._intra_node is not None:
            slices = self._sum_intra_node(self._intra_node, slices, wide, unit)
        if self._inter_node is not None:
            self._sum_inter_node(self._inter_node, slices.view(self._num_nodes, -1), wide, unit)
        if self._intra_node is None and self._inter_node is None:
            wide.copy_(full)
        if wide is not out:
            out.copy_(wide)

    def _sum_intra_node(self, hop: _Hop, slices: Tensor, wide: Tensor, unit: int) -> Tensor:
        """Return this node's sum of slices [nodes, ranks per node, s], as fp32 [nodes, s]."""
        num_nodes, per_node, numel = slices.shape
        shape = (per_node, num_nodes, hop.packing.nbytes(numel))
        sent = self._bytes(self._sent, "sent within the node", shape, slices.device)
        for node in range(num_nodes):  # re-ordered: [node, local rank] goes to [local rank, node]
            self._pack(hop, slices[node].reshape(-1), sent[:, node], key=(unit, "intra_node", node))
        received = self._bytes(self._scratch, "received within the node", shape, slices.device)
        hop.transport.all_to_all(received.view(-1), sent.view(-1), unit=unit).wait()
        partial = wide.view(1, -1)
        if num_nodes > 1:
            size = num_nodes * numel
            flat = self._scratch.take("node's sums", size, torch.float32, slices.device)
            partial = flat.view(num_nodes, numel)
        for node in range(num_nodes):
            hop.packing.unpack_sum(received[:, node], partial[node], senders=hop.senders)
        return partial

    def _sum_inter_node(self, hop: _Hop, slices: Tensor, wide: Tensor, unit: int) -> None:
        """Sum slices [nodes, s] of the ranks with this local rank into ``wide``."""
        shape = (len(slices), hop.packing.nbytes(wide.numel()))
        sent = self._bytes(self._sent, "sent between nodes", shape, slices.device)
        self._pack(hop, slices.reshape(-1), sent, key=(unit, "inter_node", 0))
        received = self._bytes(self._scratch, "received between nodes", shape, slices.device)
        hop.transport.all_to_all(received.view(-1), sent.view(-1), unit=unit).wait()
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
        self._feedback.update(key, compensated, arrived)

    @staticmethod
    def _bytes(
        scratch: Scratch, purpose: str, shape: tuple[int, ...], device: torch.device
    ) -> Tensor:
        return scratch.take(purpose, math.prod(shape), torch.uint8, device).view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of buffers that are kept between reductions, without the errors."""
        return self._sent.nbytes + self._scratch.nbytes
