"""Protocol of the collectives that carry this package's bytes.

An engine passes its own to `zero_comm.create_collectives`; `zero_comm.TorchCollectives` implements
it over plain torch.distributed. Both satisfy the protocol by shape alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Work(Protocol):
    """Handle of a running collective, such as `torch.distributed.Work`."""

    def wait(self) -> object:
        """Block until the result may be read by the caller (on CUDA: by its current stream)."""


@runtime_checkable
class TransportCollectives(Protocol):
    """Collectives over flat tensors of any dtype, bytes included.

    Every rank calls the same methods in the same order. Buffers may be reused after ``wait``. A
    ``shard`` changes only after an exchange of all ranks that each entered after its gathers.
    """

    @property
    def rank(self) -> int:
        """This process's rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        """Start to fill ``out`` with every rank's ``shard``, in rank order."""

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        """Start to sum this rank's slice of every rank's ``full`` into ``out``, exactly."""

    def all_to_all(self, out: Tensor, parts: Tensor, *, unit: int) -> Work:
        """Start to fill slice k of ``out`` with slice ``rank`` of rank k's ``parts``.

        After ``wait`` no other rank reads ``parts`` any more.
        """

    def subgroup(self, ranks: Sequence[int]) -> TransportCollectives:
        """Return collectives among some of these ranks, renumbered in the given order.

        Every rank calls it equally often, each with the subgroup that it is in.
        """

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a zeroed 1-D tensor in the memory that transfers are fastest from.

        It is held as long as the collectives.
        """

    def launch(self, job: Callable[[], None], *, is_reduction: bool) -> Work:
        """Run ``job`` beside the caller, after earlier jobs of its kind. It may wait for works."""


@runtime_checkable
class AddingCollectives(TransportCollectives, Protocol):
    """Transport collectives that add to a sum."""

    def reduce_add(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        """Start to add this rank's slice of every rank's ``full`` to ``out``, in rank order."""


class SliceCodec(Protocol):
    """Codes slices of gradients so that every bit arrives. Tensors are 1-D and contiguous."""

    def serves(self, dtype: torch.dtype, numel: int) -> bool:
        """Whether slices of ``numel`` elements are coded."""

    def max_nbytes(self, dtype: torch.dtype, numel: int) -> int:
        """Return the most bytes that a message may have."""

    def pack(self, values: Tensor, message: Tensor) -> int:
        """Write the message of ``values``, and return its bytes."""

    def unpack(self, message: Tensor, values: Tensor, *, sender: int) -> None:
        """Fill ``values`` from a message of rank ``sender``."""


@runtime_checkable
class CodingCollectives(TransportCollectives, Protocol):
    """Transport collectives whose reductions can code what they send to other nodes."""

    def coded(self, codec: SliceCodec) -> TransportCollectives:
        """Return the same collectives with reductions that send messages of ``codec``."""


@runtime_checkable
class InPlaceCollectives(TransportCollectives, Protocol):
    """Transport collectives that may read gradients in the other ranks' memory."""

    @property
    def reduces_in_place(self) -> bool:
        """Whether works of reductions have ``contributions`` and ``acknowledge``."""
