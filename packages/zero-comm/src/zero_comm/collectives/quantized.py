"""Collectives of a sharded-training engine with compression: qwZ, hpZ, qgZ and lossless coding.

`QuantizedCollectives` wraps the engine's collectives (`zero_comm.transport.protocol`) and chooses
how each tensor is sent. `weight_gathers` and `two_hop` send it.

[Note: what is sent exactly]
Values with a negative version are never compressed. Engines use negative versions for reduced
gradients and for weights that are gathered to be read exactly. Only `QUANTIZABLE_DTYPES` are
quantized. Shards too small for a shorter message are sent exactly. Whether a shard is quantized
depends only on arguments that are equal on all ranks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from zero_comm.collectives.settings import DIFFERENCE, LOSSLESS, CommSettings
from zero_comm.collectives.two_hop import TwoHopReduce
from zero_comm.collectives.weight_gathers import (
    Announced,
    DifferenceGather,
    Grid,
    LosslessGather,
    LosslessSecondaryGather,
    MessageGather,
    PublishedGather,
    SecondaryGather,
    WeightGather,
    exchange,
)
from zero_comm.lossless.message import Checks, GradientMessages, is_worthwhile
from zero_comm.quantizer.backend import backend
from zero_comm.quantizer.message import Packing
from zero_comm.transport.protocol import (
    AddingCollectives,
    CodingCollectives,
    Gathered,
    InPlaceCollectives,
    Reduced,
    TransportCollectives,
    Work,
)
from zero_comm.transport.scratch import Scratch
from zero_comm.transport.torch_collectives import DoneWork, Rehearsal

_log = logging.getLogger(__name__)
_PUBLISHED = "published"  # key of the `PublishedGather` in `_gathers`, beside formats and None
_REHEARSED = 4096  # maximum elements of a shard that `prepare` sends


def create_collectives(
    native: TransportCollectives,
    *,
    rank: int,
    world_size: int,
    config: Mapping[str, Any],
    ranks_per_node: int,
    frozen: Collection[int],
) -> TransportCollectives | QuantizedCollectives:
    """Create the collectives of a configuration on top of the ``native`` ones.

    Entry point ``quantized`` of the group ``zero_core.collectives``. Every rank must call it.
    Papers: ZeRO++ (arXiv 2306.10209), and SDP4Bit (arXiv 2410.15526) for differences and rotation.

    Args:
        native: the transport collectives, which carry the bytes.
        rank: this process's rank in the group of ``native``.
        world_size: number of ranks in that group.
        config: the resolved ``zero_optimization`` block. `CommSettings` reads its keys.
        ranks_per_node: number of ranks on a node, which are consecutive. Divides ``world_size``.
        frozen: units whose weights are never trained.

    Returns:
        A `QuantizedCollectives`, or ``native`` if nothing is compressed or there is one rank, or
        ``native.coded(...)`` if only gradients are coded losslessly.

    Raises:
        ValueError: a setting is out of range, or ``native`` does not support it. The message names
            the setting's key.
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
    checks = Checks()
    if settings.codes_gradients and world_size > ranks_per_node:
        if not isinstance(native, CodingCollectives):
            raise ValueError(
                "zero_optimization.zero_lossless_gradients needs collectives with coded() and "
                f"prepare(), got {type(native).__name__}: leave the key out"
            )
        native = native.coded(GradientMessages(checks))
    if settings == CommSettings(
        has_checksum=settings.has_checksum, codes_gradients=settings.codes_gradients
    ):
        return native
    adds = settings.gradients is None and isinstance(native, AddingCollectives)
    kind = ExactGradients if adds else QuantizedCollectives
    never = frozenset(frozen)
    return kind(native, settings, checks, ranks_per_node=ranks_per_node, frozen=never)


class QuantizedCollectives:
    """Collectives that compress weights and gradients. `create_collectives` creates them.

    Gathers run in order, and so do reductions. Both may run at once. Methods are not thread-safe.
    """

    def __init__(
        self,
        transport: TransportCollectives,
        settings: CommSettings,
        checks: Checks,
        *,
        ranks_per_node: int,
        frozen: Collection[int],
    ) -> None:
        self.checks = checks
        self._transport = transport
        self._settings = settings
        self._frozen = frozen
        self._ranks_per_node = ranks_per_node
        self._scratch = Scratch()
        self._announced: Announced = {}
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
        """Start to gather weights. A collective. See [Note: what is sent exactly].

        A quantized block with NaN or Inf arrives as NaN on every rank. If ``out`` overlaps a shard
        that is quantized or gathered from secondary shards, ValueError is raised.

        Args:
            out: 1-D, contiguous, ``world_size * shard.numel()`` elements. Filled when ``wait`` of
                the result returns.
            shard: 1-D, contiguous. Its values do not change.
            unit: key of the kept memory.
            version: must grow whenever any rank's shard may have changed. Negative for values
                sent exactly. Ignored for frozen weights, which change only at `forget_values`.
            backward: passed on to the transport.
        """
        _check(out, shard, self._transport.world_size)
        shard_end, out_end = shard.data_ptr() + shard.nbytes, out.data_ptr() + out.nbytes
        is_kept = out.data_ptr() < shard_end and shard.data_ptr() < out_end  # they overlap
        gather = None if version < 0 else self._gather_for(shard, unit, is_kept=is_kept)
        if gather is None:
            exact = self._transport.all_gather
            return exact(out, shard, unit=unit, version=version, backward=backward)
        if is_kept and not isinstance(gather, PublishedGather):
            raise ValueError(
                "shard must not overlap out in a gather that quantizes or keeps weights: out would "
                "replace the exact weights by rounded ones; gather into a buffer of its own"
            )
        current = 0 if unit in self._frozen else version
        job = partial(gather.gather, out, shard, unit=unit, version=current, backward=backward)
        return _Exchange(self._transport.launch(job, is_reduction=False), self._packings.values())

    @property
    def announces(self) -> bool:
        return LOSSLESS in self._gathers

    def announce(self, shards: Sequence[tuple[int, int, Tensor | None, Tensor]]) -> Work:
        """Start to exchange lengths and checksums of later lossless gathers. A collective.

        The host then waits once for all these gathers instead of in each. An item of ``shards`` is
        a unit, its version, ``out`` if it overlaps the shard, and the shard. All ranks must call it
        with the same units and versions. It replaces earlier announcements.
        """

        def job() -> None:
            numbers = {}
            self._announced.clear()
            for unit, version, out, shard in shards:
                gather = self._gather_for(shard, unit, is_kept=out is not None)
                if isinstance(gather, LosslessGather):
                    numbers[unit, version] = gather.numbers(out, shard, unit)
            if numbers:
                read = exchange([*numbers.values()], self._transport.world_size, gather_numbers)
                self._announced.update({key: (read, at) for at, key in enumerate(numbers)})

        def gather_numbers(out: Tensor, own: Tensor) -> None:
            self._transport.all_gather(out, own, unit=-1, version=-2, backward=False).wait()

        return self._transport.launch(job, is_reduction=False)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        """Start to sum this rank's slice of every rank's ``full`` into ``out``. A collective.

        Both are 1-D, contiguous and floating point. ``unit`` is the key of the error feedback.
        """
        reduction = self._reduction
        if reduction is None or not reduction.shortens(full.dtype, out.numel()):
            return self._transport.reduce_scatter(out, full, unit=unit)
        job = partial(reduction.reduce, out, full, unit=unit)
        return _Exchange(self._transport.launch(job, is_reduction=True), reduction.packings)

    def prepare(self, gathered: Gathered, reduced: Reduced, device: torch.device) -> None:
        """Compile the Triton kernels of later exchanges by a rehearsal without other ranks."""
        rank, size, reduction = self._transport.rank, self._transport.world_size, self._reduction
        coded = [r for r in reduced if reduction and reduction.shortens(r[1], r[0] // size)]
        if isinstance(self._transport, CodingCollectives):
            self._transport.prepare(gathered, [r for r in reduced if r not in coded], device)
        if backend(device) != "triton":
            return
        alone, per_node = Rehearsal(size, rank), self._ranks_per_node
        used = QuantizedCollectives(
            alone, self._settings, Checks(), ranks_per_node=per_node, frozen=self._frozen
        )
        # An engine's shards are multiples of 32 elements, so the longest uses the kernels of all.
        longest = {(g[0] in self._frozen, g[2]): g for g in sorted(gathered, key=itemgetter(1))}
        for unit, numel, dtype in longest.values():
            out = torch.zeros(size, min(numel, _REHEARSED), dtype=dtype, device=device)
            shards = [torch.zeros_like(out[0])]
            if self._settings.is_lossless and unit not in self._frozen:
                shards.append(out[rank])
            for version, shard in enumerate(shards * 2):  # the first version may be sent exactly
                used.all_gather(out.view(-1), shard, unit=unit, version=version, backward=False)
        sums = {dtype: numel // size for numel, dtype, _ in sorted(coded, key=itemgetter(0))}
        for unit, (dtype, numel) in enumerate(sums.items()):
            full = torch.zeros(size, min(numel, _REHEARSED), dtype=dtype, device=device)
            for _ in range(2):  # the second reduction decodes the kept errors of the first
                used.reduce_scatter(full[0].float(), full.view(-1), unit=unit)

    @property
    def reduces_in_place(self) -> bool:
        """Whether works of the transport's reductions have ``acknowledge``."""
        return isinstance(self._transport, InPlaceCollectives) and self._transport.reduces_in_place

    def forget_values(self) -> None:
        """Invalidate kept weights after weights changed or a checkpoint was written.

        All ranks must call it between the same exchanges. The next gather of each unit starts from
        the exact weights, as in a run that starts from the checkpoint.
        """
        # Queued, because a gather that still runs would otherwise record its version afterwards.
        self._transport.launch(self._forget_weights, is_reduction=False).wait()

    def forget_errors(self) -> None:
        """Drop gradient errors, which fit no other gradients. All ranks must call it together."""
        if self._reduction is not None and self._reduction.feedback is not None:
            self._transport.launch(self._reduction.feedback.forget, is_reduction=True).wait()

    def begin_step(self, number: int) -> None:
        """Start the random numbers of step ``number``. No reduction may be pending."""
        if self._reduction is not None:
            self._reduction.begin_step(number)

    def _forget_weights(self) -> None:
        self._announced.clear()
        for gather in self._gathers.values():
            gather.forget()

    @property
    def private_nbytes(self) -> dict[str, int]:
        """Bytes held between exchanges, by kind."""
        found = Counter({"message buffers": self._scratch.nbytes})
        for gather in self._gathers.values():
            found[gather.kept_kind] += sum(kept.nbytes for kept in gather.tensors)
        if (reduction := self._reduction) is not None:
            found["message buffers"] += reduction.sent.nbytes + reduction.scratch.nbytes
            found["error feedback"] = sum(error.nbytes for error in reduction.errors)
        return {kind: nbytes for kind, nbytes in found.items() if nbytes}

    def device_tensors(self) -> dict[str, list[Tensor]]:
        """Return all tensors held between exchanges, by category of an engine's states.

        Kept weights are "parameters". Gradient errors are "optimizer_states", because they last
        from step to step. While no exchange runs, a caller may free the storages and later restore
        them with the same bytes. "buffers" have no contents to preserve.
        """
        found = {
            "parameters": [kept for gather in self._gathers.values() for kept in gather.tensors],
            "buffers": self._scratch.tensors,
        }
        if (reduction := self._reduction) is not None:
            found["buffers"] += reduction.sent.tensors + reduction.scratch.tensors
            found["optimizer_states"] = reduction.errors
        return found

    def _make_gathers(self, ranks_per_node: int) -> dict[str | None, WeightGather]:
        """Create the gathers by format, with the key None for exact values."""
        group_size = self._settings.group_size(ranks_per_node)
        is_one_group = group_size == self._transport.world_size
        if is_one_group and not self._packings:
            return {}
        shared = self._transport, Grid(self._transport, group_size), self._scratch
        has_secondary = self._settings.partition_size > 1 and not is_one_group
        gathers: dict[str | None, WeightGather] = {}
        if self._settings.is_lossless and not is_one_group:
            gathers[LOSSLESS] = LosslessSecondaryGather(self._announced, self.checks, *shared)
            gathers[_PUBLISHED] = PublishedGather(self._announced, self.checks, *shared)
        for kind, packing in self._packings.items():
            if kind != DIFFERENCE:
                form = SecondaryGather if has_secondary else MessageGather
                gathers[kind] = form(*shared, packing)
            elif not is_one_group:  # one group has no other group to send differences to
                gathers[kind] = DifferenceGather(*shared, packing)
        if has_secondary:
            gathers[None] = SecondaryGather(*shared)
        return gathers

    def _gather_for(self, shard: Tensor, unit: int, *, is_kept: bool) -> WeightGather | None:
        """Return a shard's gather, None for the transport's. ``is_kept``: ``out`` overlaps it."""
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
    """`QuantizedCollectives` with exact gradients, which the transport sends and adds."""

    _transport: AddingCollectives

    def reduce_add(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        return self._transport.reduce_add(out, full, unit=unit)


@dataclass(slots=True, eq=False)
class _Exchange:
    """Work of an exchange. ``full`` of a reduction may be reused after ``wait``."""

    work: Work
    packings: Collection[Packing]
    contributions: tuple[()] = ()

    def wait(self) -> None:
        self.work.wait()
        for packing in self.packings:
            packing.check_deferred()

    def acknowledge(self) -> Work:
        """Return a finished work: other ranks read only messages, never ``full``."""
        return DoneWork()


def _check(out: Tensor, shard: Tensor, world_size: int) -> None:
    is_flat = all(tensor.dim() == 1 and tensor.is_contiguous() for tensor in (out, shard))
    expected = world_size * shard.numel(), shard.dtype, shard.device
    if not is_flat or (out.numel(), out.dtype, out.device) != expected:
        raise ValueError(
            f"out and shard must be 1-D and contiguous, and out {expected[0]} elements of "
            f"{shard.dtype} on {shard.device}, got shapes {tuple(out.shape)} and "
            f"{tuple(shard.shape)}, and {out.dtype} on {out.device}"
        )


def _log_limits(settings: CommSettings, world_size: int, ranks_per_node: int) -> None:
    """Log settings that have less effect in this group than their names promise."""
    size, group = settings.partition_size, settings.group_size(ranks_per_node)
    partition = f"zero_optimization.zero_hpz_partition_size = {size}"
    useless = {
        f"{partition} has no effect: it is all ranks, and their shards are gathered within the "
        "partition anyway": size == world_size,
        f"{partition} does not divide the {ranks_per_node} ranks of a node: backward's gathers "
        "leave the node": ranks_per_node % size and size != world_size,
        "zero_optimization.zero_lossless_weights has no effect with one group of ranks: whole "
        "weights travel within it": settings.is_lossless and group == world_size,
        "zero_optimization.zero_lossless_gradients has no effect on one node: gradients travel as "
        "they are within it": settings.codes_gradients and ranks_per_node == world_size,
        f"zero_optimization.zero_quantized_weights_format = {DIFFERENCE!r} has no effect with one "
        "group of ranks: weights travel exactly within it": settings.weights == DIFFERENCE
        and group == world_size,
    }
    for text, applies in useless.items():
        if applies:
            _log.warning(text)
    if settings.weights == DIFFERENCE and size == 1 and group != world_size:
        _log.info(
            "differences need a published copy of the weights: 1/%d of the model on each rank",
            group,
        )
