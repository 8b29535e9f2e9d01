"""What the engine asks of collectives, and what it gives those that decorate its own.

A part of `zero_core.protocols`, which see.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = [
    "EXACT_GRADIENTS",
    "EXACT_PARAMETERS",
    "Collectives",
    "CollectivesFactory",
    "NativeCollectives",
    "Work",
]

EXACT_GRADIENTS, EXACT_PARAMETERS = -1, -2
"""Versions of what must arrive exact."""


@runtime_checkable
class Work(Protocol):
    """A collective under way; `torch.distributed.Work` is one."""

    def wait(self) -> object:
        """Block until the result may be read by the caller (on CUDA: by its current stream)."""
        ...


@runtime_checkable
class Collectives(Protocol):
    """How shards become units, and unit gradients become shards.

    Every rank of the group calls the same methods in the same order. Buffers belong to the caller
    and may be read or reused only after ``wait``. More than that, a ``shard`` is changed only after
    an exchange with all ranks that each of them entered after its ``wait``, so that a rank may read
    another's shard where it lies.

    Two things are optional:

    ``forget_values()``: all ranks call it when weights were replaced from outside of a step (a
    checkpoint or files loaded, values edited, states written) and when a checkpoint is saved. What
    is kept of them is void: the next gather of each unit starts from the exact values, so that a
    resumed run equals the one that went on.

    ``forget_errors()``: all ranks call it when a step is skipped, after its reductions: what was
    kept of its gradients is void.

    ``private_nbytes``: a mapping of the bytes that it holds on this rank, by kind ("secondary
    shards", say), which `Engine.memory_report` shows.
    """

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        """Start to fill ``out`` with every rank's ``shard``, in rank order.

        Args:
            out: 1-D, contiguous, ``world_size * shard.numel()`` elements, dtype of ``shard``.
            shard: 1-D, contiguous, any dtype (bytes too). It may be a view of this rank's slice
                of ``out``; it is never changed otherwise.
            unit: index of the segment it belongs to (a unit has one per dtype and
                trainability): a stable key for private buffers.
            version: grows whenever the values of ``shard`` may have changed. Negative: they must
                arrive exact; `EXACT_GRADIENTS` (reduced ones, at stage 0) or `EXACT_PARAMETERS`
                (to be read, not to be trained with).
            backward: whether the gather serves a backward pass.
        """
        ...

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        """Start to sum this rank's slice of every rank's ``full`` into ``out``.

        The sum is taken in rank order in fp32 (float64 for float64 input). Gradients come
        already divided by the world size.

        Args:
            out: 1-D, contiguous, floating point (what gradients accumulate in); overwritten.
            full: 1-D, contiguous, ``world_size * out.numel()`` elements, floating point; its
                contents are undefined afterwards.
            unit: index of the segment it belongs to.

        Returns:
            The work. It may have an attribute ``contributions``: each rank's part of the sum, in
            rank order, readable after ``wait``; with it the engine can name the rank whose gradient
            is not finite. If an attribute ``has_retire`` of the collectives is true, it has a
            method ``retire() -> Callable[[], None]``: the engine calls it once, when it has looked
            at them, and calls what it returns before it writes to ``full`` again, which other ranks
            may be reading until then. Without that, the engine's buffers are not shared with other
            ranks, and ``native`` sends them.
        """
        ...


class NativeCollectives(Collectives, Protocol):
    """The engine's own collectives, over which a part carries its bytes.

    A rank is numbered within the group of the instance. Methods may be called from any thread, but
    the ranks call those of one instance in the same order, seen by each thread alone, and two
    threads never use the same method and ``unit`` of an instance.
    """

    @property
    def rank(self) -> int:
        """This rank within the group."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks of the group."""
        ...

    def all_to_all(self, out: Tensor, parts: Tensor, *, unit: int) -> Work:
        """Start to fill slice ``k`` of ``out`` with slice ``rank`` of rank ``k``'s ``parts``.

        When ``wait`` returns, ``out`` holds the bytes and ``parts`` may be overwritten: whoever
        reads it where it lies has done so. (A gather promises less; see `Collectives`.)

        Args:
            out: 1-D, contiguous, any dtype; ``world_size`` equal slices.
            parts: of the length and dtype of ``out``; must not overlap it.
            unit: index of the segment it belongs to.

        Raises:
            ValueError: they differ, or do not divide by the number of ranks.
        """
        ...

    def subgroup(self, ranks: Sequence[int]) -> NativeCollectives:
        """Collectives among ``ranks`` of this group, which are renumbered in that order.

        Every rank calls it equally often, in the same order, each with the subgroup that it is
        in. What different subgroups exchange does not disturb each other, and `launch` is the same
        for all.

        Raises:
            ValueError: this rank is not among ``ranks``, or one is given twice or does not exist.
        """
        ...

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """1-D memory that it sends from best: on hosts, shared with the ranks of the node.

        It is held as long as the collectives. What lies in it and is gathered is read there by
        other ranks: see `Collectives` for when it may be overwritten.
        """
        ...

    def launch(self, job: Callable[[], None], *, is_reduction: bool) -> Work:
        """Run ``job`` beside the caller, after the earlier jobs of the same lane.

        There are two lanes, for gathers and for reductions. Within a job works are waited for: a
        second hop starts when the first has arrived, not when the caller comes by. On hosts a lane
        is a thread, in which the caller's grad and inference modes hold. On an accelerator it is
        a stream: the job runs at once, on the host, and what it enqueues comes after what the
        caller's current stream holds. ``wait`` of the result returns (on an accelerator: lets the
        current stream go on) when the job is done, and raises what it raised. A job launched by a
        job of the same lane runs at once. What a job allocates on an accelerator is reused in the
        order of the lane's stream: whoever reads it on another one keeps it until that is done.
        """
        ...


class CollectivesFactory(Protocol):
    """Entry point of ``zero_core.collectives``: decorates the engine's own collectives."""

    def __call__(
        self,
        native: NativeCollectives,
        *,
        rank: int,
        world_size: int,
        config: Mapping[str, Any],
        ranks_per_node: int,
        frozen: Collection[int],
    ) -> Collectives:
        """Make collectives that carry their bytes over ``native``.

        Args:
            native: works on any dtype, ``torch.uint8`` included.
            rank: this rank.
            world_size: number of ranks.
            config: the resolved ``zero_optimization`` block as plain builtins.
            ranks_per_node: ranks ``[n * ranks_per_node, (n + 1) * ranks_per_node)`` share node
                ``n``; divides ``world_size``.
            frozen: indices of the segments that are never trained.

        Raises:
            ValueError: a setting that it refuses, by name.
        """
        ...
