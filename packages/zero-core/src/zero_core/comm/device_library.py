"""What the engine asks of an accelerator's library of collectives (NCCL, say).

A **communicator** is one connection of some ranks. The library runs the collectives of one
communicator one after another, in the order in which each rank starts them, which must be the same
on all of them. So what may interleave differently on different ranks has communicators of its own:
a **lane** each for gathers and for reductions, beside the caller's for control.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zero_core.protocols import Work

# torch 2.13 renamed the tensor collectives; the old names warn there.
all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
"""The library's all-gather of 1-D tensors."""


class Lane(Enum):
    """Purpose of a communicator. Those of different lanes share no order."""

    GATHERS = "gathers"
    REDUCTIONS = "reductions"


class DeviceLibrary(Protocol):
    """Collectives over one communicator. Each is started by every rank of it, in the same order.

    Tensors are 1-D (for `all_reduce` and `broadcast`: of any shape), contiguous and on the rank's
    device. What they read and write is ordered after the current stream of the caller, and
    ``wait`` of the result makes the current stream of its caller wait for it. Buffers belong to the
    caller and may be reused only then.

    Attributes:
        rank: this rank within the communicator.
        world_size: number of its ranks.
    """

    rank: int
    world_size: int

    def all_gather(self, out: Tensor, shard: Tensor) -> Work:
        """Start to fill ``out`` with every rank's ``shard`` (any dtype), in rank order.

        ``shard`` may be this rank's slice of ``out``.
        """

    def all_to_all(self, out: Tensor, parts: Tensor) -> Work:
        """Start to fill slice k of ``out`` with slice ``rank`` of rank k's ``parts``, any dtype.

        Both have ``world_size`` equal slices; they do not overlap.
        """

    def all_reduce(self, values: Tensor) -> Work:
        """Start to sum every rank's ``values`` in place, to the same bits on every rank."""

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        """Start to overwrite ``tensor``, of any dtype, with rank ``source``'s."""

    def subgroup(self, ranks: Sequence[int], lane: Lane) -> DeviceLibrary:
        """Return the communicator of ``lane`` among ``ranks``, renumbered in that order.

        Every rank of this communicator calls it equally often, in the same order and for the same
        lane, each with the subgroup that it is in: a partition of all ranks, or all of them.
        """

    def close(self) -> None:
        """End the communicators that `subgroup` has made, on this rank alone.

        Nothing is under way on them. The communicator itself belongs to the caller.
        """


class ProcessLibrary:
    """`DeviceLibrary` over a process group of torch.distributed.

    Tensors of any dtype travel as bytes: NCCL has no type for some (int16, complex).
    """

    def __init__(self, group: dist.ProcessGroup | None, *, rank: int, world_size: int) -> None:
        """``group`` None is the default group, or none at all if ``world_size`` is 1.

        ``rank`` is this rank within the group.
        """
        self.rank = rank
        self.world_size = world_size
        self._group = group

    def all_gather(self, out: Tensor, shard: Tensor) -> Work:
        work = all_gather_single(_bytes(out), _bytes(shard), group=self._group, async_op=True)
        return cast(Work, work)

    def all_to_all(self, out: Tensor, parts: Tensor) -> Work:
        work = dist.all_to_all_single(_bytes(out), _bytes(parts), group=self._group, async_op=True)
        return cast(Work, work)

    def all_reduce(self, values: Tensor) -> Work:
        return cast(Work, dist.all_reduce(values, group=self._group, async_op=True))

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        work = dist.broadcast(_bytes(tensor), group=self._group, group_src=source, async_op=True)
        return cast(Work, work)

    def subgroup(self, ranks: Sequence[int], lane: Lane) -> ProcessLibrary:
        members = dist.get_process_group_ranks(self._group)
        chosen = [members[r] for r in ranks]
        order: dict[str, Any] = {} if chosen == sorted(chosen) else {"sort_ranks": False}
        group = dist.new_group(chosen, use_local_synchronization=True, **order)
        return ProcessLibrary(group, rank=list(ranks).index(self.rank), world_size=len(ranks))

    def close(self) -> None:
        """See `DeviceLibrary.close`. Groups end with the process."""


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
