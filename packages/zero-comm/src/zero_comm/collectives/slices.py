"""Quantized slices of a process group for DDP, FSDP2 and the plain functions.

What no message would shorten travels exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero_comm.collectives.two_hop import GradientFormat, TwoHopReduce
from zero_comm.quantizer.message import Packing
from zero_comm.transport.topology import check_ranks_per_node, find_ranks_per_node
from zero_comm.transport.torch_collectives import TorchCollectives


class SliceReducer:
    """Sums slices of gradients over a group (qgZ), in two hops where nodes have several ranks.

    Every rank of the group constructs it alike and calls it in the same order. The first reduction
    may ask all ranks for their nodes. Not to be called by several threads at once.
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

        The sum is taken and scaled in fp32 (fp64 where a slice travels exactly in it), so that fp16
        doesn't overflow before an average is taken. Both tensors are flat and contiguous. Error
        feedback keeps an error for each ``key`` and length of gradients that are reduced
        repeatedly.
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
        """Drop the errors that feedback keeps. Every rank calls it alike."""
        if self._two_hop is not None and self._two_hop.feedback is not None:
            self._two_hop.feedback.forget()


def gather_slices(
    collectives: TorchCollectives, packing: Packing | None, out: Tensor, own: Tensor
) -> None:
    """Fill ``out`` with every rank's slice, as messages if they are shorter in ``out``'s dtype.

    Both tensors are flat and contiguous. ``own`` has ``out``'s dtype or a wider one. Without
    ``packing`` slices are gathered exactly.
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
