"""Closed forms of what quantized collectives send and keep, for plans that allocate nothing.

Entry points ``collectives`` and ``uploads`` of the group ``zero_core.footprints``.
`zero_comm.create_collectives` serves the same configuration for real. ZeRO++ (arXiv 2306.10209),
sections 3.1 to 3.3; weight differences: SDP4Bit (arXiv 2410.15526).

[Note: phases and hops]
Phases of gathers are those of [Note: the two phases] in `zero_comm.collectives.weight_gathers`:
phase 1 runs **across** groups, phase 2 **within** one. With secondary shards phase 2 carries exact
elements, without them both phases carry messages. Hops of reductions are those of [Note: the two
hops] in `zero_comm.collectives.two_hop`. A shard that no message would shorten travels exactly.

Lossless differences are phase 1 at stage 3, and secondary shards are kept. At stages 1 and 2, where
every rank keeps all weights, both phases carry them; not counted are 16 bytes per rank of lengths
and checksums. Losslessly coded gradients replace what the engine's own reduction sends to another
node: a slice, or a partial sum.

[Note: expected bytes]
A step of Adam moves each weight by about the learning rate ``lr``. How many bits that changes
depends on how far apart neighbouring numbers are, which is proportional to the weight. So the bits
of a difference are a function of ``lr * 2**p / std`` alone, where p is the precision of the dtype
in bits (8 for bf16, 11 for fp16, 24 for fp32) and std the standard deviation of the weights.

`_TYPICAL` is what differences take per weight for normal weights that move by 0.3 lr
times a normal number. It was made by encoding 2**21 weights. The first steps of Adam, which move
all weights by lr, take up to 2.5 times as much (recorded steps: the project's docs/benchmarks.md).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from zero_comm.collectives.feedback import STORED
from zero_comm.collectives.settings import DIFFERENCE, LOSSLESS, CommSettings
from zero_comm.lossless.block_frame import BLOCK_NUMEL, descriptors_nbytes, fixed_nbytes, num_blocks
from zero_comm.lossless.message import (
    HEADER_NBYTES,
    GradientMessages,
    is_worthwhile,
    max_message_nbytes,
    message_nbytes,
)
from zero_comm.quantizer.message import Packing

_FP32_NBYTES = torch.float32.itemsize
_STD: Final = 0.02  # of initial weights in most transformers
_FIRST_POWER, _POWER_STEP = -10, 2
# fmt: off
_TYPICAL: Final = (
    0.09, 0.14, 0.26, 0.59, 1.43, 2.21, 3.97, 6.53, 9.2, 12.3, 16.1, 16.5, 18.2, 24.3,
)
# fmt: on


@dataclass(frozen=True, slots=True)
class GatherFootprint:
    """Bytes of one segment's gather. See [Note: phases and hops].

    Attributes:
        across_nbytes: bytes that a rank hands into phase 1.
        within_nbytes: bytes that a rank hands into phase 2.
        format: format of phase 1's messages; None if it carries exact elements.
        is_kept: whether phase 2 starts from a secondary shard.
    """

    across_nbytes: int
    within_nbytes: int
    format: str | None
    is_kept: bool


@dataclass(frozen=True, slots=True)
class ReduceFootprint:
    """Bytes of one message in each hop of a reduction."""

    within_nbytes: int
    across_nbytes: int


def expected_difference_bits(dtype: torch.dtype, learning_rate: float) -> float:
    """Return the bits per weight, fp32, bf16 or fp16, that a step's difference should take."""
    if learning_rate <= 0.0:
        return 0.0625  # a descriptor of 16 bits per block
    precision = 1 - math.log2(torch.finfo(dtype).eps)
    power = math.log2(learning_rate / _STD) + precision
    place = min(max((power - _FIRST_POWER) / _POWER_STEP, 0.0), len(_TYPICAL) - 1.0)
    low = min(int(place), len(_TYPICAL) - 2)
    expected = _TYPICAL[low] + (place - low) * (_TYPICAL[low + 1] - _TYPICAL[low])
    return min(8.0 * dtype.itemsize, expected)


def expected_difference_nbytes(numel: int, dtype: torch.dtype, learning_rate: float) -> int:
    """Return the expected bytes of a message of differences of weights."""
    return HEADER_NBYTES + math.ceil(numel * expected_difference_bits(dtype, learning_rate) / 8)


def expected_gradient_nbytes(numel: int, itemsize: int) -> int:
    """Return the bytes of a message of bfloat16 or float32 gradients of a normal distribution.

    Of 256 of them the largest is between 2 and 4 standard deviations, so a code of 7 or more stands
    for less than 1/32 of one: 1 element in 40.
    """
    coded = fixed_nbytes(3, itemsize) + BLOCK_NUMEL // 40
    return message_nbytes(descriptors_nbytes(numel) + num_blocks(numel) * coded)


def comm_footprint(
    *,
    config: Mapping[str, Any],
    world_size: int,
    ranks_per_node: int,
    learning_rate: float | None = None,
) -> CommFootprint:
    """Return the closed forms of the collectives that a configuration asks for.

    Args:
        config: the resolved ``zero_optimization`` block.
        world_size: number of ranks.
        ranks_per_node: ranks of a node, which are consecutive; divides ``world_size``.
        learning_rate: of the optimizer, on which lossless differences depend: see
            [Note: expected bytes]. None counts the most that they and coded gradients
            may take.

    Raises:
        ValueError: a setting that makes no sense, by key.
    """
    settings = CommSettings.from_config(config)
    is_gathered = config.get("stage", 3) == 3
    return CommFootprint(
        settings, world_size, ranks_per_node, is_gathered=is_gathered, learning_rate=learning_rate
    )


def upload_nbytes(*, numel: int, dtype: torch.dtype, learning_rate: float | None = None) -> int:
    """Return the expected bytes of a lossless difference that goes from the host to a device.

    Args:
        numel: parameters in it.
        dtype: of the parameters.
        learning_rate: of the optimizer; None counts the parameters' own bytes, which are the most.
    """
    if learning_rate is None or not is_worthwhile(dtype, numel):
        return numel * dtype.itemsize
    return math.ceil(numel * expected_difference_bits(dtype, learning_rate) / 8)


class CommFootprint:
    """Phases, hops and memory of one configuration's collectives.

    Attributes:
        group_size: ranks of a group of gathers.
        num_groups: number of these groups.
    """

    def __init__(
        self,
        settings: CommSettings,
        world_size: int,
        ranks_per_node: int,
        *,
        is_gathered: bool,
        learning_rate: float | None,
    ) -> None:
        """Prepare. ``is_gathered``: stage 3, whose weights are not kept whole."""
        self._settings = settings
        self._is_gathered = is_gathered
        self._learning_rate = learning_rate
        self._world_size = world_size
        self._per_node = ranks_per_node
        self._num_nodes = world_size // ranks_per_node
        self._has_partition = settings.partition_size > 1
        self.group_size = settings.group_size(ranks_per_node)
        self.num_groups = world_size // self.group_size

    def gather(
        self, numel: int, dtype: torch.dtype, *, is_trainable: bool
    ) -> GatherFootprint | None:
        """Return a shard's gather, or None if the engine's own collective serves it."""
        if self._world_size == 1:
            return None
        settings = self._settings
        if settings.is_lossless and is_trainable:
            if self.num_groups > 1 and is_worthwhile(dtype, numel):
                across = numel * dtype.itemsize  # at most: a whole shard's
                if self._learning_rate is not None:
                    expected = expected_difference_nbytes(numel, dtype, self._learning_rate)
                    across = min(across, expected)
                within = numel * dtype.itemsize if self._is_gathered else across
                return GatherFootprint(
                    across, self.num_groups * within, LOSSLESS, is_kept=self._is_gathered
                )
            if not self._is_gathered:
                return None
        kind = settings.weights if is_trainable else settings.frozen_weights
        if kind is not None and not settings.weight_packing(kind).shortens(dtype, numel):
            kind = None
        is_one_group = self.num_groups == 1
        is_kept = not is_one_group and (self._has_partition or kind == DIFFERENCE)
        if is_one_group and kind == DIFFERENCE:
            kind = None  # there is no other group that needs the change
        if kind is None and not is_kept:
            return None
        exact = numel * dtype.itemsize
        across = exact if kind is None else settings.weight_packing(kind).nbytes(numel)
        return GatherFootprint(
            across, self.num_groups * (exact if is_kept else across), kind, is_kept
        )

    def reduction(self, numel: int, dtype: torch.dtype) -> ReduceFootprint | None:
        """Return the reduction, or None if the engine's own collective serves it.

        ``numel`` is of the shard that a rank receives, ``dtype`` that of communication.
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
        """Return the expected and the most bytes of a slice that is sent to another node.

        None if slices are sent as they are. Expected are gradients of a normal distribution. Those
        of float16 are counted with the most, and so are all without a learning rate.
        """
        messages = GradientMessages()
        is_coded = self._settings.codes_gradients and self._num_nodes > 1
        if not is_coded or not messages.serves(dtype, numel):
            return None
        most = messages.max_nbytes(dtype, numel)
        if dtype == torch.float16 or self._learning_rate is None:
            return most, most
        return expected_gradient_nbytes(numel, dtype.itemsize), most

    def memory(
        self,
        shards: Iterable[tuple[int, torch.dtype, bool]],
        reduced: Iterable[tuple[int, torch.dtype, torch.dtype]],
    ) -> dict[str, int]:
        """Return the bytes that a rank holds between exchanges, by `QuantizedCollectives`' kinds.

        Args:
            shards: elements, dtype and trainability of each segment's shard of weights.
            reduced: elements, communicated dtype and summed dtype of each segment's gradients.
        """
        kept: Counter[str] = Counter()
        buffers: Counter[object] = Counter()  # by purpose, each as long as its longest use
        for numel, dtype, is_trainable in shards:
            gather = self.gather(numel, dtype, is_trainable=is_trainable)
            if gather is not None:
                if gather.is_kept:
                    kept["secondary shards"] += gather.within_nbytes
                elif gather.format == LOSSLESS:
                    kept["published weights"] += numel * dtype.itemsize
                else:
                    kept["quantized weights"] += gather.across_nbytes
                buffers |= self._gather_buffers(numel, dtype, gather)
        for numel, dtype, summed in reduced:
            reduction = self.reduction(numel, dtype)
            if reduction is not None:
                used, error_nbytes = self._reduce_buffers(numel, summed, reduction)
                kept["error feedback"] += error_nbytes
                buffers |= used
        found = {**kept, "message buffers": sum(buffers.values())}
        return {kind: nbytes for kind, nbytes in found.items() if nbytes}

    def _gather_buffers(
        self, numel: int, dtype: torch.dtype, gather: GatherFootprint
    ) -> Counter[object]:
        """Return the buffers of one gather, since gathers run one after another."""
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
        if size > 1:  # slices of the groups are interleaved in the gathered buffer
            found["values", dtype] = size * gather.within_nbytes
        return found

    def _reduce_buffers(
        self, numel: int, summed: torch.dtype, reduction: ReduceFootprint
    ) -> tuple[Counter[object], int]:
        """Return the buffers of one reduction, and the bytes of its error feedback."""
        nodes, near = self._num_nodes, self._per_node
        found: Counter[object] = Counter()
        longest = error_nbytes = 0
        for hop, num_parts, num_ranks, nbytes in (
            ("within the node", nodes, near, reduction.within_nbytes),
            ("between nodes", 1, nodes, reduction.across_nbytes),
        ):
            if num_ranks > 1:
                found[f"sent {hop}"] = found[f"received {hop}"] = num_ranks * num_parts * nbytes
                longest = max(longest, num_ranks)
                error_nbytes += num_parts * STORED.nbytes(num_ranks * numel)
        if near > 1 and nodes > 1:
            found["node's sums"] = nodes * numel * _FP32_NBYTES
        if summed != torch.float32:
            found["sum"] = numel * _FP32_NBYTES
        fmt = self._settings.gradients
        if fmt is None or fmt.error_feedback is None:
            return found, 0
        found["compensated"] = found["arrived"] = longest * numel * _FP32_NBYTES
        return found, error_nbytes
