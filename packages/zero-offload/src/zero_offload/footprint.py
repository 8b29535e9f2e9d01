"""Predicted memory of offloaded state and parameters, computed without allocating it.

The entry points ``state_tier`` and ``param_tier`` of ``zero_core.footprints`` predict the memory of
`zero_offload.create_tier` and `zero_offload.create_param_tier` for the same configuration.

[Note: planned bytes]
host part     elements updated on the host, predicted as one end of the flat space. It has master
              weights and states in host memory or on NVMe, copies of gradients, and buffers for
              copies of new parameters to the device.
device part   all other elements. On an accelerator the engine counts their master weights and
              states, and this module the copies of their gradients.
split master  fp32 master weight of a bf16 parameter, kept as the parameter and an int16 remainder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry, Intervals
from zero_offload.memory.host_memory import packed
from zero_offload.param_tier import NUM_WRITE_BUFFERS, ParamSettings, num_in_host_memory
from zero_offload.protocols import Groups, OptimizerClass
from zero_offload.rules.compact import Bf16AdamRule, EightBitAdamRule
from zero_offload.rules.rule import KERNEL_DTYPES, PARAM, REMAINDER
from zero_offload.settings import OffloadSettings
from zero_offload.steppers.file_stepper import BLOCK_NUMEL, longest_parts
from zero_offload.steppers.memory_stepper import undo_capacity
from zero_offload.steppers.stepper import BlockLayout
from zero_offload.steppers.torch_stepper import FUSED_ALIGNMENT
from zero_offload.tiers.shares import end_share, is_chosen, state_bytes, within_budget
from zero_offload.transfers.mover import NUM_BUFFERS, SHORTEST_NBYTES, num_layers, part_numel


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    stop: int
    dtype: torch.dtype
    grad_dtype: torch.dtype
    is_offloaded: bool

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class TierFootprint:
    """Bytes of the tier that `zero_offload.create_tier` creates on one rank, for any ratio.

    Args:
        numel, pieces, optimizer_class, groups, config: as for `create_tier`.
        params: ``(start, tensor)``: 1-D parameter shards on the meta device.
        grad_dtypes: gradient dtype of each of ``params``.
        num_added: number of gradients per element that the tier receives and adds up in a step.
        resting: indices in ``params`` of the offloaded shards.
        is_accelerated: whether the compute device is not the host's CPU.
        has_kernel: whether a host kernel computes the update.
        is_speculative: whether updates start before their step is confirmed, with an undo log.

    Raises:
        ValueError: a setting or an optimizer is not supported. The message names it.
    """

    def __init__(
        self,
        *,
        numel: int,
        pieces: Sequence[tuple[int, int, int]],
        params: Sequence[tuple[int, Tensor]],
        grad_dtypes: Sequence[torch.dtype],
        num_added: int,
        resting: Collection[int],
        is_accelerated: bool,
        optimizer_class: OptimizerClass,
        groups: Groups,
        config: Mapping[str, Any],
        has_kernel: bool,
        is_speculative: bool,
    ) -> None:
        self._spans = [
            _Span(start, start + tensor.numel(), tensor.dtype, dtype, index in resting)
            for index, ((start, tensor), dtype) in enumerate(zip(params, grad_dtypes, strict=True))
        ]
        self._geometry = geometry = Geometry(numel, pieces, params, len(groups))
        self._num_added = num_added
        self._settings = OffloadSettings.from_config(config)
        self._is_accelerated = is_accelerated
        self._state_bytes = state_bytes(optimizer_class, groups, geometry.master_dtype)
        # The sizes of a rule's buffers do not depend on its kernel or on the kind of weight decay.
        compact = {"int8": EightBitAdamRule, "bfloat16": Bf16AdamRule}
        kind = compact.get(self._settings.state_dtype)
        self._rule = None if kind is None else kind(cast(Any, None), is_decoupled=True)
        is_plain = not has_kernel or any(group.get("amsgrad") for group in groups)
        self._has_undo = is_speculative and not is_plain and geometry.master_dtype != torch.float64
        block = config.get("offload_optimizer") or {}
        if is_speculative and block.get("update_in_backward") and not self._has_undo:
            raise ValueError(
                f"offload_optimizer.update_in_backward: updates of {optimizer_class.__qualname__} "
                "with these settings cannot be undone, as no host kernel computes them, and a step "
                "may be clipped or cancelled: leave the key out"
            )
        is_fused = any(group.get("fused") for group in groups)
        self._alignment = 1
        if not is_accelerated:
            usual = FUSED_ALIGNMENT if is_fused and is_plain else 1
            self._alignment = usual if self._rule is None else self._rule.block

    def planned_ratio(self, params: Sequence[tuple[str, int]]) -> float:
        """Return the share of the elements that the settings give to the host, 1 for ``"auto"``.

        Args:
            params: name and number of elements of each trainable parameter of the whole model.
        """
        settings = self._settings
        if settings.parameters is not None:
            named = [n for name, n in params if is_chosen(name, settings.parameters)]
            return sum(named) / max(sum(n for _, n in params), 1)
        if settings.device_budget is not None:
            budget, end = settings.device_budget, settings.host_share
            host = within_budget(
                self._geometry,
                budget,
                self._state_bytes,
                end,
                is_accelerated=self._is_accelerated,
                adds_grads=self._num_added > 1,
            )
            return host.numel / max(self._geometry.numel, 1)
        return 1.0 if settings.ratio == "auto" else settings.ratio

    def _host_span(self, ratio: float) -> tuple[int, int]:
        numel, geometry = self._geometry.numel, self._geometry
        share = end_share(numel, round(ratio * numel), self._settings.host_share)
        spans = geometry.align(share, self._alignment).spans
        return spans[0] if spans else (0, 0)

    def device_span(self, ratio: float) -> tuple[int, int]:
        start, stop = self._host_span(ratio)
        return (stop, self._geometry.numel) if start == 0 else (0, start)

    def host_bytes(self, ratio: float) -> dict[str, int]:
        start, stop = self._host_span(ratio)
        part = self._clipped(start, stop)
        # On a CPU, shards in the master dtype can be the master weights, without a copy.
        masters = self._masters(part, needs_copy=self._is_accelerated)
        kept = {"master weights": masters, "optimizer states": self._states(start, stop)}
        if self._settings.nvme_path is not None:
            kept = {"NVMe buffers": self._nvme_buffer_bytes(ratio)}
        return {
            **kept,
            "gradient copies": self._grad_bytes(part, stop - start),
            "parameter copies": self._staging_bytes(part),
            "published weights": sum(span.nbytes for span in self._sent_as_differences(part)),
            "differences": NUM_BUFFERS * self._pinned(self._difference_room(part)),
            "undo log": self._undo_bytes(ratio)[0],
        }

    def _nvme_buffer_bytes(self, ratio: float) -> int:
        """Return the bytes of host buffers for state on NVMe, estimated if moments are fp32."""
        start, stop = self._host_span(ratio)
        part, buffer_count = self._clipped(start, stop), self._settings.buffer_count
        if self._rule is not None and part:
            geometry = self._geometry.part(Intervals([(start, stop)]))[0]
            rules = [self._rule.for_params(tensor.dtype) for _, tensor in geometry.shards]
            layout = BlockLayout(geometry, rules, BLOCK_NUMEL)
            longest = sum(longest_parts(layout.record_bytes, len(layout.names)))
            return min(buffer_count, len(layout.blocks)) * longest
        num_blocks = sum(-(-span.numel // BLOCK_NUMEL) for span in part)
        most = min(max((span.numel for span in part), default=0), BLOCK_NUMEL)
        whole = min(buffer_count, num_blocks) * most * self.file_bytes(ratio)
        return -(-whole // max(_numel(part), 1))

    def _undo_bytes(self, ratio: float) -> tuple[int, int]:
        """Return the bytes of the undo log with and without the limit ``undo_buffer_size``."""
        start, stop = self._host_span(ratio)
        if not self._has_undo or start == stop:
            return 0, 0
        part = self._clipped(start, stop)
        whole = self._whole(part)
        halves = sum(span.nbytes for span in part if span not in whole)
        kept = self._masters(part, needs_copy=True) + halves + self._states(start, stop)
        capacity = undo_capacity(self._geometry.part(Intervals([(start, stop)]))[0], kept)
        most = self._settings.undo_buffer_size
        return capacity if most is None else min(capacity, most), capacity

    def undo_share(self, ratio: float) -> float:
        nbytes, capacity = self._undo_bytes(ratio)
        return nbytes / capacity if capacity else 0.0

    def device_bytes(self, ratio: float) -> dict[str, int]:
        """Return the bytes on the device by kind, without those that the engine counts."""
        start, stop = self.device_span(ratio)
        part = self._clipped(start, stop)
        grad_dtypes = {span.grad_dtype for span in part}
        if part and self._num_added > 1:
            # Gradients of micro-steps are added in the master weights' dtype.
            grad_dtypes = {self._geometry.master_dtype}
        found = {"gradient copies": sum((stop - start) * d.itemsize for d in grad_dtypes)}
        if room := self._difference_room(self._clipped(*self._host_span(ratio))):
            found["differences"] = room + room // 32  # decoding needs 1/32 more
        if not self._is_accelerated:
            found["master weights"] = self._masters(part, needs_copy=False)
            found["optimizer states"] = self._states(start, stop)
        return found

    def link_bytes(self, ratio: float) -> tuple[int, int]:
        """Return bytes copied per step to the host, and to the device if values are sent whole."""
        part = self._clipped(*self._host_span(ratio))
        rest = self._clipped(*self.device_span(ratio))
        down = self._num_added * sum(span.numel * span.grad_dtype.itemsize for span in part)
        down += sum(span.nbytes for span in rest if span.is_offloaded)
        return down, sum(span.nbytes for span in part if not span.is_offloaded)

    def uploaded_numel(self, ratio: float) -> dict[torch.dtype, int]:
        found: Counter[torch.dtype] = Counter()
        for span in self._clipped(*self._host_span(ratio)):
            if not span.is_offloaded:
                found[span.dtype] += span.numel
        return dict(found)

    def file_bytes(self, ratio: float) -> int:
        """Return the bytes of master weights and states in the file, 0 without one."""
        if self._settings.nvme_path is None:
            return 0
        start, stop = self._host_span(ratio)
        masters = _numel(self._whole(self._clipped(start, stop)))
        states = (stop - start) * self._state_bytes
        if self._rule is not None:
            states = sum(nbytes for _, nbytes in self._kept(start, stop))
        return masters * self._geometry.master_dtype.itemsize + states

    def _clipped(self, start: int, stop: int) -> list[_Span]:
        found = [replace(s, start=max(s.start, start), stop=min(s.stop, stop)) for s in self._spans]
        return [span for span in found if span.numel > 0]

    def _kept(self, start: int, stop: int) -> Iterator[tuple[str, int]]:
        assert self._rule is not None, "only compact state has a rule"
        geometry = self._geometry
        for piece, shard in zip(geometry.pieces, geometry.piece_shards, strict=True):
            numel = min(piece.stop, stop) - max(piece.start, start)
            if numel > 0:
                rule = self._rule.for_params(geometry.shards[shard][1].dtype)
                for name, (dtype, length) in rule.stored(numel).items():
                    yield name, length * dtype.itemsize

    def _states(self, start: int, stop: int) -> int:
        if self._rule is None:
            return (stop - start) * self._state_bytes
        halves = (PARAM, REMAINDER)
        return sum(nbytes for name, nbytes in self._kept(start, stop) if name not in halves)

    def _masters(self, part: Sequence[_Span], *, needs_copy: bool) -> int:
        """Return the bytes of master weights that are not in the memory of parameters."""
        whole = self._whole(part)
        width = self._geometry.master_dtype.itemsize
        needs_copy |= any(s.dtype.itemsize != width or s.is_offloaded for s in whole)
        lower = 0
        if self._rule is not None and part:
            kept = self._kept(part[0].start, part[-1].stop)
            lower = sum(nbytes for name, nbytes in kept if name == REMAINDER)
        return lower + (_numel(whole) * width if needs_copy else 0)

    def _whole(self, part: Sequence[_Span]) -> list[_Span]:
        rule = self._rule
        if rule is None:
            return list(part)
        return [span for span in part if not rule.for_params(span.dtype).is_master_split]

    def _grad_bytes(self, part: Sequence[_Span], numel: int) -> int:
        wide = self._geometry.master_dtype
        dtypes = {s.grad_dtype if s.grad_dtype in KERNEL_DTYPES else wide for s in part}
        layers = {dtype: num_layers(self._num_added, dtype) for dtype in dtypes}
        total = sum(numel * count * dtype.itemsize for dtype, (count, _) in layers.items())
        has_sum = any(has_sum for _, has_sum in layers.values())
        return total + (numel * wide.itemsize if has_sum else 0)

    def _staging_bytes(self, part: Sequence[_Span]) -> int:
        """Return the bytes of host buffers from which new parameters are copied to the device."""
        if not self._is_accelerated:
            return 0
        # Offloaded shards are written in place and need no buffer.
        part = [span for span in part if not span.is_offloaded]
        whole = self._whole(part)
        longest = self._geometry.published_numel
        largest = min(max((span.numel for span in whole), default=0), longest)
        dtypes = {span.dtype for span in whole}
        num_buffers = 3 if self._has_undo else 2
        staged = sum(num_buffers * self._pinned(largest * dtype.itemsize) for dtype in dtypes)
        held = [span.nbytes for span in part if span not in whole]
        buffers = packed(held, should_pin=self._settings.pin_memory)
        return staged + sum(self._pinned(sum(buffer)) for buffer in buffers)

    def _sent_as_differences(self, part: Sequence[_Span]) -> list[_Span]:
        if not self._is_accelerated or not self._settings.lossless_upload:
            return []
        return [
            span
            for span in part
            if not span.is_offloaded
            and span.dtype != torch.float64
            and span.nbytes >= SHORTEST_NBYTES
        ]

    def _difference_room(self, part: Sequence[_Span]) -> int:
        """Return the bytes of a buffer for one difference, with the codec's overhead."""
        longest = part_numel(self._geometry.published_numel)
        sent = self._sent_as_differences(part)
        most = max((min(s.numel, longest) * s.dtype.itemsize for s in sent), default=0)
        return most + most // 128

    def _pinned(self, nbytes: int) -> int:
        """Return the bytes that torch allocates: the next power of two if page-locked."""
        is_rounded = self._settings.pin_memory and nbytes > 0
        return 1 << (nbytes - 1).bit_length() if is_rounded else nbytes


def _numel(spans: Sequence[_Span]) -> int:
    return sum(span.numel for span in spans)


tier_footprint = TierFootprint


def param_footprint(
    *, shards: Sequence[tuple[int, int, torch.dtype]], config: Mapping[str, Any]
) -> dict[str, int]:
    """Return the host bytes of offloaded parameter shards, by kind.

    Args:
        shards: ``(segment, numel, dtype)`` of each shard, in order of use.
        config: the resolved ``zero_optimization`` block.

    Raises:
        ValueError: a setting is not supported. The message names it.
    """
    settings = ParamSettings.from_config(config)
    num_host = num_in_host_memory(shards, settings)
    sizes = [numel * dtype.itemsize for _, numel, dtype in shards]
    in_file = sizes[num_host:]
    num_buffers = min(settings.buffer_count, len(in_file)) + NUM_WRITE_BUFFERS if in_file else 0
    return {
        "parameters": sum(sizes[:num_host]),
        "parameter buffers": num_buffers * max(in_file, default=0),
    }
