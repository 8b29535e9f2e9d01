"""Collectives for a sharded-training engine that send fewer bytes: qwZ, hpZ, qgZ and more.

They wrap the engine's own collectives, which carry the bytes (`zero_comm.native`), and offer the
same. What is done to weights is in `zero_comm.weights`, to gradients in `zero_comm.two_hop`; here
is decided which segment goes which way. Nothing here imports an engine.

[Note: what travels exactly]
Values that are not floating point; a shard so small that its message would be no shorter; and what
has a negative version, which marks values that are no weights (an engine may gather reduced
gradients so). The choice depends on dtype and length alone, so all ranks make the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from zero_comm.block_format import BlockFormat
from zero_comm.carriers import Carrier, Differences, Exact, Messages
from zero_comm.feedback import ErrorFeedback
from zero_comm.grid import Grid
from zero_comm.message import Packing
from zero_comm.native import NativeCollectives, NativeWork
from zero_comm.scratch import Scratch
from zero_comm.settings import DIFFERENCE, CommSettings
from zero_comm.two_hop import Rounding, TwoHopReduce
from zero_comm.weights import MessageGather, SecondaryGather, WeightGather

__all__ = ["QuantizedCollectives", "create_collectives"]

_log = logging.getLogger(__name__)

# A block of differences is longer than one of 4-bit weights: changes of neighbouring weights are
# of one size (each is a learning rate times about one), so few outliers cost their neighbours.
_DIFFERENCE_FORMAT = BlockFormat("int4", 256)


def create_collectives(
    native: NativeCollectives,
    *,
    rank: int,
    world_size: int,
    config: Mapping[str, Any],
    ranks_per_node: int,
    frozen: Collection[int],
) -> NativeCollectives | QuantizedCollectives:
    """Make the collectives that a configuration asks for, carried by ``native``.

    The entry point ``quantized`` of the group ``zero_core.collectives``. ZeRO++ (arXiv
    2306.10209); SDP4Bit (arXiv 2410.15526) for differences and rotation. Every rank calls it.

    Args:
        native: carries the bytes.
        rank: this process's rank in ``native``'s group.
        world_size: size of that group.
        config: the resolved ``zero_optimization`` block; see `CommSettings` for the keys.
        ranks_per_node: ranks of a node, which are consecutive; divides ``world_size``.
        frozen: units whose weights are never trained.

    Returns:
        A `QuantizedCollectives`, or ``native`` itself when the config asks for nothing, or there is
        one rank and nothing is sent.

    Raises:
        ValueError: a setting that makes no sense, by key.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be within [0, {world_size}), got {rank}")
    if ranks_per_node < 1 or world_size % ranks_per_node:
        raise ValueError(f"ranks_per_node must divide the {world_size} ranks, got {ranks_per_node}")
    settings = CommSettings.from_config(config)
    if world_size == 1:
        return native  # nothing is sent
    if settings.partition_size > world_size or world_size % settings.partition_size:
        raise ValueError(
            f"zero_optimization.zero_hpz_partition_size must divide the {world_size} ranks, got "
            f"{settings.partition_size}"
        )
    if settings == CommSettings(has_checksum=settings.has_checksum):
        return native
    if rank == 0:
        _tell(settings, world_size, ranks_per_node)
    return QuantizedCollectives(
        native, settings, ranks_per_node=ranks_per_node, frozen=frozenset(frozen)
    )


class QuantizedCollectives:
    """Gathers weights and reduces gradients as the settings say; made by `create_collectives`.

    Several exchanges may be under way at once and may be waited for in any order. Not to be used by
    several threads at the same moment.

    Args:
        native: carries the bytes.
        settings: what is asked for.
        ranks_per_node: ranks of a node.
        frozen: units whose weights are never trained.
    """

    def __init__(
        self,
        native: NativeCollectives,
        settings: CommSettings,
        *,
        ranks_per_node: int,
        frozen: Collection[int] = frozenset(),
    ) -> None:
        self._native = native
        self._settings = settings
        self._frozen = frozen
        self._rounding = Rounding(rank=native.rank, is_stochastic=settings.is_stochastic)
        self._feedback = None if settings.loco is None else ErrorFeedback(settings.loco)
        self._ways: dict[str | None, WeightGather] = {}
        self._packings: dict[str, Packing] = {}
        self._make_ways(ranks_per_node)
        self._reduction: TwoHopReduce | None = None
        self._gradient_packings: list[Packing] = []
        if settings.within is not None and settings.between is not None:
            self._reduction = TwoHopReduce(
                native,
                ranks_per_node=ranks_per_node,
                within=self._gradient_packing(settings.within),
                between=self._gradient_packing(settings.between),
                rounding=self._rounding,
                feedback=self._feedback,
            )

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> NativeWork:
        """Start to gather weights; see [Note: what travels exactly] for what else. A collective.

        A block with NaN or Inf arrives as NaN on every rank, if it is quantized.

        Args:
            out: 1-D, contiguous, ``world_size * shard.numel()`` elements of ``shard``'s dtype,
                on its device; filled when ``wait`` of the result returns.
            shard: 1-D, contiguous; never written to.
            unit: whose shard it is; what is kept is kept under this number.
            version: must grow whenever the values of any rank's shard may have changed; negative
                for what isn't weights. Frozen weights have one version until `forget_values`.
            backward: whether the gather serves a backward pass; passed on.

        Raises:
            ValueError: ``out`` doesn't match ``shard``, or overlaps one that is to be quantized:
                the exact weights would be overwritten by rounded ones.
        """
        _check(out, shard, self._native.world_size)
        way = None if version < 0 else self._way_of(shard, unit)
        if way is None:
            return self._native.all_gather(
                out, shard, unit=unit, version=version, backward=backward
            )
        if _overlap(out, shard):
            raise ValueError(
                "shard must not overlap out in a gather that quantizes or keeps weights: out would "
                "replace the exact weights by rounded ones; gather into a buffer of its own"
            )

        current = 0 if unit in self._frozen else version

        def job() -> None:
            way.gather(out, shard, unit=unit, version=current, backward=backward)

        return _Job(self._native.launch(job, is_reduction=False), self._packings.values())

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> NativeWork:
        """Start to sum this rank's slice of every rank's ``full`` into ``out``. A collective.

        Args:
            out: 1-D, contiguous, floating point; overwritten.
            full: 1-D, contiguous, ``world_size * out.numel()`` elements, floating point.
            unit: whose gradients they are.
        """
        reduction = self._reduction
        if reduction is None or not reduction.shortens(full.dtype, out.numel()):
            return self._native.reduce_scatter(out, full, unit=unit)

        def job() -> None:
            reduction.reduce(out, full, unit=unit)

        return _Job(self._native.launch(job, is_reduction=True), self._gradient_packings)

    @property
    def has_retire(self) -> bool:
        """Whether works of reductions have ``retire``: those of ``native`` do."""
        return bool(getattr(self._native, "has_retire", False))

    def forget_values(self) -> None:
        """What is kept is void: weights were replaced from outside, or a checkpoint is written.

        All ranks call it, between the same exchanges. The next gather of each unit starts from the
        exact weights, and errors of gradients are dropped, so that a run that goes on after a
        checkpoint equals the one that starts from it.
        """
        # In the lane: a gather that is still under way must not enter its version afterwards.
        self._native.launch(self._forget_weights, is_reduction=False).wait()
        self._native.launch(self._forget_gradients, is_reduction=True).wait()

    def forget_errors(self) -> None:
        """The last step was skipped; all ranks call it, after their reductions.

        Errors are dropped: they are of gradients that overflowed, or of another loss scale.
        """
        if self._feedback is not None:
            self._native.launch(self._feedback.forget, is_reduction=True).wait()

    def _forget_weights(self) -> None:
        for way in self._ways.values():
            way.forget()

    def _forget_gradients(self) -> None:
        self._rounding.restart()
        if self._feedback is not None:
            self._feedback.forget()

    @property
    def private_nbytes(self) -> dict[str, int]:
        """Bytes held between exchanges, by what they are."""
        found = {
            "secondary shards": 0,
            "quantized weights": 0,
            "error feedback": 0 if self._feedback is None else self._feedback.nbytes,
            "message buffers": self._scratch.nbytes,
        }
        for way in self._ways.values():
            is_secondary = isinstance(way, SecondaryGather)
            found["secondary shards" if is_secondary else "quantized weights"] += way.nbytes
        if self._reduction is not None:
            found["message buffers"] += self._reduction.nbytes
        return {kind: nbytes for kind, nbytes in found.items() if nbytes}

    def _make_ways(self, ranks_per_node: int) -> None:
        """A way to gather for each format that a unit can have; None: exact values."""
        settings, native = self._settings, self._native
        self._scratch = Scratch()
        formats = {settings.weights, settings.frozen_weights}
        self._packings = {kind: self._weight_packing(kind) for kind in formats if kind}
        has_secondary = settings.partition_size > 1
        group_size = settings.partition_size if has_secondary else ranks_per_node
        is_one_group = group_size == native.world_size
        if is_one_group and not self._packings:
            return
        grid = Grid(native, group_size)
        for kind, packing in self._packings.items():
            if kind == DIFFERENCE and is_one_group:
                continue  # no group to tell what changed
            if kind == DIFFERENCE or (has_secondary and not is_one_group):
                self._ways[kind] = self._secondary(grid, self._carrier(kind, grid))
            else:
                self._ways[kind] = MessageGather(native, grid, packing, self._scratch)
        if has_secondary and not is_one_group:
            self._ways[None] = self._secondary(grid, Exact(grid))

    def _secondary(self, grid: Grid, carrier: Carrier) -> SecondaryGather:
        return SecondaryGather(self._native, grid, carrier, self._scratch)

    def _carrier(self, kind: str, grid: Grid) -> Carrier:
        carries = Differences if kind == DIFFERENCE else Messages
        return carries(grid, self._packings[kind], self._scratch)

    def _weight_packing(self, kind: str) -> Packing:
        fmt = _DIFFERENCE_FORMAT if kind == DIFFERENCE else BlockFormat.make(kind)
        return Packing(fmt, has_checksum=self._settings.has_checksum, defers=True)

    def _gradient_packing(self, kind: str) -> Packing:
        plain = BlockFormat.make(kind)
        fmt = BlockFormat(kind, plain.block_size, has_rotation=self._settings.has_rotation)
        packing = Packing(fmt, has_checksum=self._settings.has_checksum, defers=True)
        self._gradient_packings.append(packing)
        return packing

    def _way_of(self, shard: Tensor, unit: int) -> WeightGather | None:
        """How this shard is gathered; None: by ``native``."""
        settings = self._settings
        kind = settings.frozen_weights if unit in self._frozen else settings.weights
        if kind is not None and self._packings[kind].shortens(shard.dtype, shard.numel()):
            return self._ways.get(kind)
        return self._ways.get(None)


class _Job:
    """An exchange under way; a reduction's ``full`` is free again when it is done."""

    contributions = ()

    def __init__(self, work: NativeWork, packings: Collection[Packing]) -> None:
        self._work = work
        self._packings = packings

    def wait(self) -> None:
        """Block until ``out`` is filled (on CUDA: for the caller's current stream)."""
        self._work.wait()
        for packing in self._packings:
            packing.settle()

    def retire(self) -> Callable[[], None]:
        """Nobody reads ``full``: its messages travelled."""
        return _nothing


def _nothing() -> None:
    return None


def _check(out: Tensor, shard: Tensor, world_size: int) -> None:
    for name, tensor in (("out", out), ("shard", shard)):
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be 1-D and contiguous, got shape {tuple(tensor.shape)}")
    if out.dtype != shard.dtype or out.device != shard.device:
        raise ValueError(
            f"out must have shard's dtype and device, {shard.dtype} on {shard.device}, "
            f"got {out.dtype} on {out.device}"
        )
    if out.numel() != world_size * shard.numel():
        raise ValueError(
            f"out must have world_size * shard.numel() = {world_size} * {shard.numel()} elements, "
            f"got {out.numel()}"
        )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share a byte of memory."""
    return (
        a.device == b.device
        and a.data_ptr() < b.data_ptr() + b.nbytes
        and b.data_ptr() < a.data_ptr() + a.nbytes
    )


def _tell(settings: CommSettings, world_size: int, ranks_per_node: int) -> None:
    """Say where a setting does less than its name promises."""
    size = settings.partition_size
    if size > 1 and size == world_size:
        _log.warning(
            "zero_optimization.zero_hpz_partition_size = %d has no effect: it is all ranks, and "
            "their shards are gathered within the partition anyway",
            size,
        )
    elif ranks_per_node % size:
        _log.warning(
            "zero_optimization.zero_hpz_partition_size = %d does not divide the %d ranks of a "
            "node: backward's gathers leave the node",
            size,
            ranks_per_node,
        )
    if settings.weights == DIFFERENCE:
        group = size if size > 1 else ranks_per_node
        if group == world_size:
            _log.warning(
                "zero_optimization.zero_quantized_weights_format = %r has no effect with one group "
                "of ranks: weights travel exactly within it",
                DIFFERENCE,
            )
        elif size == 1:
            _log.info(
                "differences need a published copy of the weights: 1/%d of the model on each rank",
                group,
            )
