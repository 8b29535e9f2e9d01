"""Closed forms of the bytes that the collectives send and keep, without allocating anything.

Entry points ``collectives`` and ``uploads`` of the group ``zero_core.footprints``. The forms
describe `zero_comm.create_collectives` for the same configuration.

[Note: phases and hops]
[Note: the two phases] in `zero_comm.collectives.weight_gathers` defines the phases of gathers:
phase 1 **across** groups, phase 2 **within** a group. Phase 2 sends exact elements from secondary
shards. Otherwise both phases send messages. [Note: the two hops] in `zero_comm.collectives.two_hop`
defines the hops of reductions. Shards that no message would shorten are sent exactly.

At stage 3, lossless differences are sent in phase 1 and update secondary shards. At stages 1 and 2,
where every rank keeps all weights, both phases send differences. The forms omit the 24 bytes per
rank and unit of lengths, versions and checksums. Losslessly coded gradients replace the slices or
partial sums that the engine's reduction sends to other nodes.

[Note: expected bytes]
A step of Adam changes each weight by about the learning rate ``lr``. The number of changed bits
depends on the spacing of numbers, which is proportional to the weight. The size of a difference is
therefore a function of ``lr * 2**p / std``, with the dtype's precision p in bits (8 for bf16, 11
for fp16, 24 for fp32) and the standard deviation std of the weights.

`_BITS` has the measured bits per weight for 2**21 normally distributed weights whose changes are
normally distributed with standard deviation 0.3 lr. Adam's first steps change all weights by lr and
take up to 2.5 times as many bits (recorded steps: integration/lab/evidence/benchmarks.md).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from zero_comm.collectives.feedback import STORED
from zero_comm.collectives.settings import DIFFERENCE, LOSSLESS, CommSettings
from zero_comm.lossless.block_frame import BLOCK_NUMEL, descriptors_nbytes, fixed_nbytes, num_blocks
from zero_comm.lossless.message import (
    HEADER_NBYTES,
    is_worthwhile,
    max_message_nbytes,
    message_nbytes,
)
from zero_comm.quantizer.message import Packing

_FP32_NBYTES = torch.float32.itemsize
_STD: Final = 0.02  # standard deviation of initial weights in most transformers
_FIRST_POWER, _POWER_STEP = -10, 2  # log2(lr * 2**p / std) of `_BITS`: first value, step
_BITS: Final = (0.09, 0.14, 0.26, 0.59, 1.43, 2.21, 3.97, 6.53, 9.2, 12.3, 16.1, 16.5, 18.2, 24.3)


@dataclass(frozen=True, slots=True)
class GatherFootprint:
    """Bytes of one segment's gather. See [Note: phases and hops]."""

    across_nbytes: int  # bytes that a rank contributes to phase 1
    within_nbytes: int  # bytes that a rank contributes to phase 2
    format: str | None  # format of phase 1's messages, None for exact elements
    is_kept: bool  # whether phase 2 starts from a secondary shard


@dataclass(frozen=True, slots=True)
class ReduceFootprint:
    """Bytes of one message in each hop of a reduction."""

    within_nbytes: int
    across_nbytes: int


def expected_difference_nbytes(numel: int, dtype: torch.dtype, learning_rate: float) -> int:
    """Return the expected bytes of a step's fp32, bf16 or fp16 difference, without the header."""
    bits = 0.0625  # if no weight changes: a 16-bit descriptor per block
    if learning_rate > 0.0:
        precision = 1 - math.log2(torch.finfo(dtype).eps)
        power = math.log2(learning_rate / _STD) + precision
        place = min(max((power - _FIRST_POWER) / _POWER_STEP, 0.0), len(_BITS) - 1.0)
        low = min(int(place), len(_BITS) - 2)
        interpolated = _BITS[low] + (place - low) * (_BITS[low + 1] - _BITS[low])
        bits = min(8.0 * dtype.itemsize, interpolated)
    return math.ceil(numel * bits / 8)


def expected_gradient_nbytes(numel: int, itemsize: int) -> int:
    """Return the expected message bytes of normally distributed bfloat16 or float32 gradients."""
    # The largest of 256 such values is 2 to 4 standard deviations. The elements below 1/32 of a
    # standard deviation, 1 in 40, are then escapes.
    coded = fixed_nbytes(3, itemsize) + BLOCK_NUMEL // 40
    return message_nbytes(descriptors_nbytes(numel) + num_blocks(numel) * coded)


def comm_footprint(
    *,
    config: Mapping[str, Any],
    world_size: int,
    ranks_per_node: int,
    learning_rate: float | None = None,
) -> CommFootprint:
    """Return the closed forms for the collectives of a configuration.

    Arguments and errors are those of `zero_comm.create_collectives`. The optimizer's
    ``learning_rate`` determines the [Note: expected bytes]. None counts whole weights instead of
    differences, and the largest possible coded gradients.
    """
    return CommFootprint(config, world_size, ranks_per_node, learning_rate)


def upload_nbytes(*, numel: int, dtype: torch.dtype, learning_rate: float | None = None) -> int:
    """Return the expected bytes of a lossless difference uploaded from the host to a device.

    Short uploads, and uploads without the optimizer's ``learning_rate``, count all parameter bytes.
    """
    if learning_rate is None or not is_worthwhile(dtype, numel):
        return numel * dtype.itemsize
    return expected_difference_nbytes(numel, dtype, learning_rate)


class CommFootprint:
    """Bytes sent and kept by the collectives of one configuration."""

    def __init__(
        self,
        config: Mapping[str, Any],
        world_size: int,
        ranks_per_node: int,
        learning_rate: float | None,
    ) -> None:
        self._settings = settings = CommSettings.from_config(config)
        self._is_gathered = config.get("stage", 3) == 3
        self._learning_rate = learning_rate
        self._world_size = world_size
        self._per_node = ranks_per_node
        self._num_nodes = world_size // ranks_per_node
        self.group_size = settings.group_size(ranks_per_node)  # ranks in a group of gathers
        self.num_groups = world_size // self.group_size

    def gather(
        self, numel: int, dtype: torch.dtype, *, is_trainable: bool
    ) -> GatherFootprint | None:
        """Return the footprint of a shard's gather, or None for the engine's own collective."""
        if self._world_size == 1:
            return None
        settings, exact, is_one_group = self._settings, numel * dtype.itemsize, self.num_groups == 1
        if settings.is_lossless and is_trainable:
            if not is_one_group and is_worthwhile(dtype, numel):
                across = exact
                if self._learning_rate is not None:
                    expected = expected_difference_nbytes(numel, dtype, self._learning_rate)
                    across = min(exact, HEADER_NBYTES + expected)
                within = self.num_groups * (exact if self._is_gathered else across)
                return GatherFootprint(across, within, LOSSLESS, is_kept=self._is_gathered)
            if not self._is_gathered:
                return None
        kind = settings.weights if is_trainable else settings.frozen_weights
        if kind is not None and not settings.weight_packing(kind).shortens(dtype, numel):
            kind = None
        is_kept = not is_one_group and (settings.partition_size > 1 or kind == DIFFERENCE)
        if is_one_group and kind == DIFFERENCE:
            kind = None  # one group has no other group to send differences to
        if kind is None and not is_kept:
            return None
        across = exact if kind is None else settings.weight_packing(kind).nbytes(numel)
        within = self.num_groups * (exact if is_kept else across)
        return GatherFootprint(across, within, kind, is_kept)

    def reduction(self, numel: int, dtype: torch.dtype) -> ReduceFootprint | None:
        """Return the footprint of a reduction, or None for the engine's own collective.

        ``numel`` is the size of the shard that a rank receives, ``dtype`` the communication dtype.
        """
        fmt = self._settings.gradients
        if self._world_size == 1 or fmt is None:
            return None
        within, across = Packing(fmt.intra_node), Packing(fmt.inter_node)
        taken = [within] * (self._per_node > 1) + [across] * (self._num_nodes > 1)
        if not all(packing.shortens(dtype, numel) for packing in taken):
            return None
        return ReduceFootprint(within.nbytes(numel), across.nbytes(numel))

    def coded_nbytes(self, numel: int, dtype: torch.dtype) -> tuple[int, int] | None:
        """Return expected and largest bytes of a coded slice for another node, None if not coded.

        For float16, or without a learning rate, both are the largest bytes.
        """
        is_coded = self._settings.codes_gradients and self._num_nodes > 1
        if not is_coded or not is_worthwhile(dtype, numel):
            return None
        most = max_message_nbytes(numel, dtype.itemsize)
        if dtype == torch.float16 or self._learning_rate is None:
            return most, most
        return expected_gradient_nbytes(numel, dtype.itemsize), most

    def memory(
        self,
        shards: Iterable[tuple[int, torch.dtype, bool]],
        reduced: Iterable[tuple[int, torch.dtype, torch.dtype]],
    ) -> dict[str, list[int]]:
        """Return the bytes of each buffer, by the kinds of `QuantizedCollectives.private_nbytes`.

        Args:
            shards: elements, dtype and trainability of each segment's shard of weights.
            reduced: elements, communication dtype and sum dtype of each shard of gradients.
        """
        kept: defaultdict[str, list[int]] = defaultdict(list)
        buffers: Counter[object] = Counter()  # bytes per purpose: the maximum over segments
        for numel, dtype, is_trainable in shards:
            gather = self.gather(numel, dtype, is_trainable=is_trainable)
            if gather is not None:
                if gather.is_kept:
                    kept["secondary shards"].append(gather.within_nbytes)
                elif gather.format == LOSSLESS:
                    kept["published weights"].append(numel * dtype.itemsize)
                else:
                    kept["quantized weights"].append(gather.across_nbytes)
                buffers |= self._gather_buffers(numel, dtype, gather)
        for numel, dtype, summed in reduced:
            reduction = self.reduction(numel, dtype)
            if reduction is not None:
                used, errors = self._reduce_buffers(numel, summed, reduction)
                kept["error feedback"] += errors
                buffers |= used
        kept["message buffers"] += buffers.values()
        return {kind: sizes for kind, sizes in kept.items() if sizes}

    def _gather_buffers(
        self, numel: int, dtype: torch.dtype, gather: GatherFootprint
    ) -> Counter[object]:
        size, groups = self.group_size, self.num_groups
        found: Counter[object] = Counter()
        if gather.format is not None and groups > 1:
            found["messages"] = groups * gather.across_nbytes
        if gather.format == LOSSLESS:
            found["message"] = max_message_nbytes(numel, dtype.itemsize)
        if not gather.is_kept:
            found["all messages"] = size * groups * gather.across_nbytes
            return found
        if gather.format not in (None, LOSSLESS):
            found["message"] = gather.across_nbytes
        if gather.format == DIFFERENCE:
            found["change"] = numel * _FP32_NBYTES
        if size > 1:  # phase 2 re-orders the groups' slices from a buffer
            found["values", dtype] = size * gather.within_nbytes
        return found

    def _reduce_buffers(
        self, numel: int, summed: torch.dtype, reduction: ReduceFootprint
    ) -> tuple[Counter[object], list[int]]:
        """Return the buffers of one reduction, and those of its error feedback."""
        nodes, near = self._num_nodes, self._per_node
        found: Counter[object] = Counter()
        longest, errors = 0, list[int]()
        for hop, num_parts, num_ranks, nbytes in (
            ("within the node", nodes, near, reduction.within_nbytes),
            ("between nodes", 1, nodes, reduction.across_nbytes),
        ):
            if num_ranks > 1:
                found[f"sent {hop}"] = found[f"received {hop}"] = num_ranks * num_parts * nbytes
                longest = max(longest, num_ranks)
                errors += num_parts * [STORED.nbytes(num_ranks * numel)]
        if near > 1 and nodes > 1:
            found["node's sums"] = nodes * numel * _FP32_NBYTES
        if summed != torch.float32:
            found["sum"] = numel * _FP32_NBYTES
        fmt = self._settings.gradients
        if fmt is None or fmt.error_feedback is None:
            return found, []
        found["compensated"] = found["arrived"] = longest * numel * _FP32_NBYTES
        return found, errors
