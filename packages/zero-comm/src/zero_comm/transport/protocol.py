"""Protocols of the collectives that carry this package's bytes.

An engine passes its collectives to `zero_comm.create_collectives`. `zero_comm.TorchCollectives`
implements `TransportCollectives` over plain torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

Gathered = Sequence[tuple[int, int, torch.dtype]]  # unit, elements of a shard, dtype
Reduced = Sequence[tuple[int, torch.dtype, torch.dtype]]  # elements, dtype, dtype of the sum


@runtime_checkable
class Work(Protocol):
    """Handle of a running collective, such as `torch.distributed.Work`."""

    def wait(self) -> object:
        """Wait for the result. On CUDA perhaps only the caller's current stream waits."""


@runtime_checkable
class TransportCollectives(Protocol):
    """Collectives over flat tensors of any dtype, including bytes.

    Every rank must call the same methods in the same order. Buffers may be reused after ``wait``. A
    ``shard`` may change only after an exchange that every rank enters after reading the result.
    """

    @property
    def rank(self) -> int:
        """This process's rank among ``world_size`` ranks."""

    @property
    def world_size(self) -> int: ...

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        """Start to fill ``out`` with every rank's ``shard``, in rank order."""

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        """Start to sum this rank's slice of every rank's ``full`` into ``out``, unquantized."""

    def all_to_all(self, out: Tensor, parts: Tensor, *, unit: int) -> Work:
        """Start to fill slice k of ``out`` with slice ``rank`` of rank k's ``parts``.

        After ``wait`` no other rank reads ``parts``.
        """

    def subgroup(self, ranks: Sequence[int]) -> TransportCollectives:
        """Return collectives among the given ranks, renumbered in the given order.

        Every rank must call it equally often, each time with the subgroup that the rank belongs to.
        """

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate 1-D zeros in memory with the fastest transfers. It may never be freed."""

    def launch(self, job: Callable[[], None], *, is_reduction: bool) -> Work:
        """Run ``job``, perhaps asynchronously, after earlier jobs with equal ``is_reduction``."""


@runtime_checkable
class AddingCollectives(TransportCollectives, Protocol):
    """Transport collectives whose reductions can add to a sum."""

    def reduce_add(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        """Start to add this rank's slice of every rank's ``full`` to ``out``, in rank order."""


class MessageChecks(Protocol):
    """`zero_comm.lossless.message.Checks`, as the engine's collectives use it."""

    def num_damaged(self) -> Tensor | None: ...
    def take(self) -> Sequence[tuple[int, str]]: ...
    def clear(self) -> None: ...


class SliceCodec(Protocol):
    """Lossless codec for slices of gradients. Tensors are 1-D and contiguous."""

    @property
    def checks(self) -> MessageChecks:
        """Checks of the messages that `unpack` has decoded on an accelerator."""

    def serves(self, dtype: torch.dtype, numel: int) -> bool:
        """Whether slices of ``numel`` elements are coded."""

    def max_nbytes(self, dtype: torch.dtype, numel: int) -> int:
        """Return the largest possible size of a message in bytes."""

    def pack(self, values: Tensor, message: Tensor) -> Tensor:
        """Write ``values`` as a message. Return its size in bytes: int64, 0-dim, on its device."""

    def unpack(self, message: Tensor, values: Tensor, *, sender: int, unit: int) -> None:
        """Fill ``values`` from a message of rank ``sender``."""


@runtime_checkable
class CodingCollectives(TransportCollectives, Protocol):
    """Transport collectives whose reductions can code slices for other nodes."""

    def coded(self, codec: SliceCodec) -> TransportCollectives:
        """Return the same collectives, but with reductions that send messages of ``codec``."""

    def prepare(self, gathered: Gathered, reduced: Reduced, device: torch.device) -> None:
        """Prepare later exchanges, for example by compiling their kernels."""


@runtime_checkable
class InPlaceCollectives(TransportCollectives, Protocol):
    """Transport collectives that may read gradients in other ranks' memory."""

    @property
    def reduces_in_place(self) -> bool:
        """Whether works of reductions have ``contributions`` and ``acknowledge``."""
