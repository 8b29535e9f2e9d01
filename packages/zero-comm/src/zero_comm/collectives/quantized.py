"""Collectives of a sharded-training engine that send less: qwZ, hpZ, qgZ and lossless coding.

They wrap the engine's own collectives, which carry the bytes (`zero_comm.transport.protocol`), and
offer the same methods. This module chooses how each segment is sent;
`zero_comm.collectives.weight_gathers` and `zero_comm.collectives.two_hop` send weights and
gradients. Nothing here imports an engine.

[Note: what is sent exactly]
Values that are not floating point; a shard so small that its message would be no shorter; and
values of a negative version, which are no weights (an engine may gather reduced gradients so). The
choice depends on dtype, length and version alone, so all ranks make the same.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from zero_comm.collectives.settings import DIFFERENCE, LOSSLESS, CommSettings
from zero_comm.collectives.two_hop import TwoHopReduce
from zero_comm.collectives.weight_gathers import (
    Grid,
    LosslessSecondaryGather,
    MessageGather,
    PublishedGather,
    SecondaryGather,
    WeightGather,
)
from zero_comm.lossless.message import GradientMessages, is_worthwhile
from zero_comm.quantizer.message import Packing
from zero_comm.transport.protocol import (
    AddingCollectives,
    CodingCollectives,
    InPlaceCollectives,
    TransportCollectives,
    Work,
)
from zero_comm.transport.scratch import Scratch
from zero_comm.transport.torch_collectives import DoneWork

_log = logging.getLogger(__name__)
_PUBLISHED = "published"  # the key of a gather, beside the formats


def create_collectives(
    native: TransportCollectives,
    *,
    rank: int,
    world_size: int,
    config: Mapping[str, Any],
    ranks_per_node: int,
    frozen: Collection[int],
) -> TransportCollectives | QuantizedCollectives:
    """Make the collectives that a configuration asks for, on top of the ``native`` ones.

    The entry point ``quantized`` of the group ``zero_core.collectives``. ZeRO++ (arXiv
    2306.10209); SDP4Bit (arXiv 2410.15526) for differences and rotation. Every rank calls it.

    Args:
        native: the transport collectives, which carry the bytes.
        rank: this process's rank in ``native``'s group.
        world_size: size of that group.
        config: the resolved ``zero_optimization`` block; see `CommSettings` for the keys.
        ranks_per_node: ranks of a node, which are consecutive; divides ``world_size``.
        frozen: units whose weights are never trained.

    Returns:
        A `QuantizedCollectives`, or ``native`` itself when the config asks for no compression or
        there is only one rank. With ``zero_lossless_gradients`` alone: ``native`` with a codec.

    Raises:
        ValueError: a setting is out of range, or ``native`` cannot serve it; the message names its
            key.
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
    if rank == 0:
        _log_limits(settings, world_size, ranks_per_node)
    if settings.codes_gradients and world_size > ranks_per_node:
        if not isinstance(native, CodingCollectives):
            raise ValueError(
                "zero_optimization.zero_lossless_gradients needs collectives that have coded(), "
                f"got {type(native).__name__}: leave the key out"
            )
        native = native.coded(GradientMessages())
    if settings == CommSettings(
        has_checksum=settings.has_checksum, codes_gradients=settings.codes_gradients
    ):
        return native
    never = frozenset(frozen)
    if settings.gradients is None and isinstance(native, AddingCollectives):
        return ExactGradients(native, settings, ranks_per_node=ranks_per_node, frozen=never)
    return QuantizedCollectives(native, settings, ranks_per_node=ranks_per_node, frozen=never)


class QuantizedCollectives:
    """Collectives that compress weights and gradients. `create_collectives` makes them.

    Several exchanges may run at once and may be waited for in any order. Not to be used by several
    threads at the same moment.
    """

    def __init__(
        self,
        transport: TransportCollectives,
        settings: CommSettings,
        *,
        ranks_per_node: int,
        frozen: Collection[int],
    ) -> None:
        self._transport = transport
        self._settings = settings
        self._frozen = frozen
        self._scratch = Scratch()
        formats = {settings.weights, settings.frozen_weights}
        self._packings = {kind: settings.weight_packing(kind) for kind in formats if kind}
        self._gathers = self._make_gathers(ranks_per_node)
        self._reduction: TwoHopReduce | None = None
        if settings.gradients is not None:
            self._reduction = TwoHopReduce(
                transport, settings.gradients, ranks_per_node=ranks_per_node, defers=True
            )

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        """Start to gather weights. A collective. See also [Note: what is sent exactly].

        A block with NaN or Inf arrives as NaN on every rank, if it is quantized. ``out`` must not
        overlap a shard that is to be quantized: the exact weights would be overwritten by rounded
        ones.

        Args:
            out: 1-D, contiguous, ``world_size * shard.numel()`` elements of ``shard``'s dtype,
                on its device; filled when ``wait`` of the result returns.
            shard: 1-D, contiguous; never written to.
            unit: key of the messages or secondary shards that are kept.
            version: must grow whenever the values of any rank's shard may have changed; negative
                for values that are no weights. Frozen weights have one version until
                `forget_values`.
            backward: whether the gather serves a backward pass; passed on.
        """
        _check(out, shard, self._transport.world_size)
        is_kept = _overlap(out, shard)
        gather = None if version < 0 else self._gather_for(shard, unit, is_kept=is_kept)
        if gather is None:
            return self._transport.all_gather(
                out, shard, unit=unit, version=version, backward=backward
            )
        if is_kept and not isinstance(gather, PublishedGather):
            raise ValueError(
                "shard must not overlap out in a gather that quantizes or keeps weights: out would "
                "replace the exact weights by rounded ones; gather into a buffer of its own"
            )

        current = 0 if unit in self._frozen else version
        job = partial(gather.gather, out, shard, unit=unit, version=current, backward=backward)
        return _Exchange(self._transport.launch(job, is_reduction=False), self._packings.values())

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        """Start to sum this rank's slice of every rank's ``full`` into ``out``. A collective.

        Both are 1-D, contiguous and floating point. ``unit`` is the key of the error feedback.
        """
        reduction = self._reduction
        if reduction is None or not reduction.shortens(full.dtype, out.numel()):
            return self._transport.reduce_scatter(out, full, unit=unit)
        job = partial(reduction.reduce, out, full, unit=unit)
        return _Exchange(self._transport.launch(job, is_reduction=True), reduction.packings)

    @property
    def reduces_in_place(self) -> bool:
        """Whether works of reductions have ``acknowledge``, as those of the transport then do."""
        return isinstance(self._transport, InPlaceCollectives) and self._transport.reduces_in_place

    def forget_values(self) -> None:
        """Invalidate kept weights and errors, since weights changed or a checkpoint is written.

        All ranks call it, between the same exchanges. The next gather of each unit starts from the
        exact weights and gradient errors are dropped, so that a run continued after a checkpoint
        equals one started from it.
        """
        # In the queue: a gather that is still running must not record its version afterwards.
        self._transport.launch(self._forget_weights, is_reduction=False).wait()
        if self._reduction is not None:
            self._transport.launch(self._reduction.forget, is_reduction=True).wait()

    def forget_errors(self) -> None:
        """Drop the errors of gradients after a skipped step.

        They belong to gradients that overflowed, or to another loss scale. All ranks call it, after
        their reductions.
        """
        feedback = None if self._reduction is None else self._reduction.feedback
        if feedback is not None:
            self._transport.launch(feedback.forget, is_reduction=True).wait()

    def _forget_weights(self) -> None:
        for gather in self._gathers.values():
            gather.forget()

    @property
    def private_nbytes(self) -> dict[str, int]:
        """Bytes held between exchanges, by kind."""
        found = Counter({"message buffers": self._scratch.nbytes})
        for gather in self._gathers.values():
            found[gather.kept_kind] += sum(kept.nbytes for kept in gather.tensors)
        if self._reduction is not None:
            found["message buffers"] += self._reduction.nbytes
            if self._reduction.feedback is not None:
                errors = self._reduction.feedback.tensors
                found["error feedback"] = sum(error.nbytes for error in errors)
        return {kind: nbytes for kind, nbytes in found.items() if nbytes}

    def device_tensors(self) -> dict[str, list[Tensor]]:
        """Return all tensors held between exchanges, by the part of an engine's states.

        Kept weights belong to "parameters", errors of gradients to "optimizer_states" (they are
        kept from step to step), and "buffers" hold nothing. While no exchange is under way the
        storages may be emptied, if they are filled again with the same bytes (for buffers: any).
        """
        found = {
            "parameters": [kept for gather in self._gathers.values() for kept in gather.tensors],
            "buffers": self._scratch.tensors,
        }
        if self._reduction is not None:
            found["buffers"] += self._reduction.buffers
            if self._reduction.feedback is not None:
                found["optimizer_states"] = self._reduction.feedback.tensors
        return found

    def _make_gathers(self, ranks_per_node: int) -> dict[str | None, WeightGather]:
        """Make the gather of each format, with the key None for exact values."""
        group_size = self._settings.group_size(ranks_per_node)
        is_one_group = group_size == self._transport.world_size
        if is_one_group and not self._packings:
            return {}
        shared = self._transport, Grid(self._transport, group_size), self._scratch
        has_secondary = self._settings.partition_size > 1 and not is_one_group
        gathers: dict[str | None, WeightGather] = {}
        if self._settings.is_lossless and not is_one_group:
            gathers[LOSSLESS] = LosslessSecondaryGather(*shared)
            gathers[_PUBLISHED] = PublishedGather(*shared)
        for kind, packing in self._packings.items():
            if kind != DIFFERENCE and not has_secondary:
                gathers[kind] = MessageGather(*shared, packing)
            elif not is_one_group:  # in one group there is nobody to send differences to
                is_difference = kind == DIFFERENCE
                gathers[kind] = SecondaryGather(*shared, packing, sends_differences=is_difference)
        if has_secondary:
            gathers[None] = SecondaryGather(*shared)
        return gathers

    def _gather_for(self, shard: Tensor, unit: int, *, is_kept: bool) -> WeightGather | None:
        """Choose the gather of this shard, or None for the transport's.

        ``is_kept``: the shard is a part of the buffer that is filled.
        """
        settings = self._settings
        if settings.is_lossless and unit not in self._frozen:
            if not is_worthwhile(shard.dtype, shard.numel()):
                return None if is_kept else self._gathers.get(None)
            return self._gathers.get(_PUBLISHED if is_kept else LOSSLESS)
        kind = settings.frozen_weights if unit in self._frozen else settings.weights
        if kind is not None and self._packings[kind].shortens(shard.dtype, shard.numel()):
            return self._gathers.get(kind)
        return self._gathers.get(None)


class ExactGradients(QuantizedCollectives):
    """`QuantizedCollectives` that send and add gradients as the transport does."""

    _transport: AddingCollectives

    def reduce_add(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        """Start to add this rank's slice of every rank's ``full`` to ``out``, in rank order."""
        return self._transport.reduce_add(out, full, unit=unit)


@dataclass(slots=True)
class _Exchange:
    """Work of an exchange. A reduction's ``full`` may be reused after ``wait``."""

    work: Work
    packings: Collection[Packing]
    contributions: tuple[()] = ()

    def wait(self) -> None:
        """Block until ``out`` is filled (on CUDA: for the caller's current stream)."""
        self.work.wait()
        for packing in self.packings:
            packing.check_deferred()

    def acknowledge(self) -> Work:
        """Return a work that is done: no other rank reads ``full``, only its messages."""
        return DoneWork()


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


def _log_limits(settings: CommSettings, world_size: int, ranks_per_node: int) -> None:
    """Log settings that have less effect here than their names promise."""
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
    if settings.is_lossless and settings.group_size(ranks_per_node) == world_size:
        _log.warning(
            "zero_optimization.zero_lossless_weights has no effect with one group of ranks: whole "
            "weights travel within it"
        )
    if settings.codes_gradients and ranks_per_node == world_size:
        _log.warning(
            "zero_optimization.zero_lossless_gradients has no effect on one node: gradients travel "
            "as they are within it"
        )
    if settings.weights == DIFFERENCE:
        group = settings.group_size(ranks_per_node)
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
