"""Protocol of an accelerator's library of collectives (NCCL, say), as the engine uses it.

A **communicator** is one connection of some ranks. The library runs the collectives of one
communicator one after another, in the order in which each rank starts them, which must be the same
on all of them. So what may interleave differently on different ranks has communicators of its own:
a **lane** each for gathers and for reductions, beside the caller's for control.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

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


class ControlLibrary(Protocol):
    """Collectives of the control group. Each is started by every rank, in the same order.

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

    def exchange(
        self, out: Tensor, parts: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Work:
        """Start to send slices of different lengths.

        ``parts`` are this rank's slices by target, ``out`` receives those for it by source, each
        one after another without gaps. ``sent`` and ``received`` are their elements, by rank.
        """

    def all_reduce(self, values: Tensor) -> Work:
        """Start to sum every rank's ``values`` in place, to the same bits on every rank."""

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        """Start to overwrite ``tensor``, of any dtype, with rank ``source``'s."""


class DeviceLibrary(ControlLibrary, Protocol):
    """Collectives over one communicator of an accelerator's library."""

    def all_to_all(self, out: Tensor, parts: Tensor) -> Work:
        """Start to fill slice k of ``out`` with slice ``rank`` of rank k's ``parts``, any dtype.

        Both have ``world_size`` equal slices; they do not overlap.
        """

    def subgroup(self, ranks: Sequence[int], lane: Lane) -> DeviceLibrary:
        """Return the communicator of ``lane`` among ``ranks``, renumbered in that order.

        Every rank of this communicator calls it equally often, in the same order and for the same
        lane, each with the subgroup that it is in: a partition of all ranks, or all of them.
        """

    def close(self) -> None:
        """End the communicators that `subgroup` has made, on this rank alone.

        Nothing is under way on them. The communicator itself belongs to the caller.
        """
