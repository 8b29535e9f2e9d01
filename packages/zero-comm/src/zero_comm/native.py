"""What this package asks of the collectives beneath it: who carries the bytes.

An engine hands its own collectives to `zero_comm.create_collectives`; `zero_comm.TorchCollectives`
is the same over plain torch.distributed. Both satisfy the protocol below by shape alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["NativeCollectives", "NativeWork"]


@runtime_checkable
class NativeWork(Protocol):
    """A collective under way; `torch.distributed.Work` is one."""

    def wait(self) -> object:
        """Block until the result may be read by the caller (on CUDA: by its current stream)."""
        ...


@runtime_checkable
class NativeCollectives(Protocol):
    """Collectives over flat tensors of any dtype, bytes included.

    Every rank calls the same methods in the same order; buffers may be reused after ``wait``. A
    ``shard`` changes only after an exchange of all ranks that each entered after its gathers.
    """

    @property
    def rank(self) -> int:
        """This process's place among the ranks."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        ...

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> NativeWork:
        """Start to fill ``out`` with every rank's ``shard``, in rank order."""
        ...

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> NativeWork:
        """Start to sum this rank's slice of every rank's ``full`` into ``out``, exactly."""
        ...

    def all_to_all(self, out: Tensor, parts: Tensor, *, unit: int) -> NativeWork:
        """Start to fill slice k of ``out`` with slice ``rank`` of rank k's ``parts``.

        After ``wait`` no other rank reads ``parts`` any more.
        """
        ...

    def subgroup(self, ranks: Sequence[int]) -> NativeCollectives:
        """The same among some of these ranks, in that order.

        Every rank calls it equally often, each with the subgroup that it is in.
        """
        ...

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D tensor in the memory that it sends from best; it is never given back."""
        ...

    def launch(self, job: Callable[[], None], *, is_reduction: bool) -> NativeWork:
        """Run ``job`` beside the caller, after earlier jobs of its kind; it may wait for works."""
        ...
