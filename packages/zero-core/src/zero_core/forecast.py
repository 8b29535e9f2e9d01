"""How much memory a configuration takes and how much it sends, worked out on the meta device.

[Note: where the numbers come from]
Parameters, gradients and pools: `zero_core.memory` itself, run on the meta device. Master weights
and states: the tier's own rules over the same layout; which states there are, the optimizer tells
by a step on two elements. Traffic: the calls that `zero_core.flow` makes in a step, over the
same segments. Activations: `zero_core.activations`.

What zero-offload and zero-comm keep and send is stated here and in `zero_core.few_bits` once more,
as closed forms, so that a plan can recommend a package that is not installed; the integration tests
hold these forms against the packages.

All byte counts are per rank. The rank planned for is rank 0; all ranks are alike but for padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from zero_core.blueprint import Blueprint
from zero_core.config import Config
from zero_core.discovery import compute_dtype
from zero_core.few_bits import FewBits
from zero_core.layout import Segment
from zero_core.memory import Memory, accumulated_dtype, communicated_dtype, offered_dtype
from zero_core.offload_form import OffloadForm
from zero_core.protocols import Work
from zero_core.resting import Resting, resting_segments
from zero_core.tier import optimizer_options, probe_states

__all__ = ["Forecast", "MemoryUse", "buffer_bytes", "num_gathers"]

_META, _CPU = torch.device("meta"), torch.device("cpu")
_STAGED_NUMEL = 1 << 24  # of a run of parameters on its way to the device, at most
_NVME_BLOCK_NUMEL = 1 << 20
_NUM_PACKED = 8  # of the largest tensors that share a page-locked buffer
_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one rank by kind.

    Attributes:
        device: bytes on the compute device.
        host: bytes of host memory that the rank takes besides.
    """

    device: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """Bytes on the compute device in all."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory in all."""
        return sum(self.host.values())


class Forecast:
    """One configuration's bytes per rank, for any ratio of its optimizer state on the host."""

    def __init__(
        self,
        drawn: Blueprint,
        config: Config,
        *,
        is_accelerated: bool,
        ranks_per_node: int,
        other_bytes: Mapping[str, int],
    ) -> None:
        """Lay everything out on the meta device.

        Args:
            drawn: the model taken apart.
            config: the resolved configuration.
            is_accelerated: whether the compute device is another one than the host.
            ranks_per_node: ranks that share a node; divides the number of ranks.
            other_bytes: device bytes that no configuration changes (model buffers, activations).
        """
        self._layout = drawn.layout
        self._config = config
        self._is_accelerated = is_accelerated
        is_one_host = ranks_per_node == drawn.layout.world_size
        self._has_shared_memory = is_one_host and not is_accelerated
        offload = config.zero_optimization.offload_param.device
        is_apart = offload == "nvme" or (offload == "cpu" and is_accelerated)
        self._resting = resting_segments(drawn.layout, config, is_apart=is_apart)
        resting = Resting(self._resting, _Nowhere()) if self._resting else None
        memory = Memory(
            drawn.found,
            drawn.layout,
            config,
            rank=0,
            device=_META,
            is_accelerated=is_accelerated,
            resting=resting,
        )
        memory.allocate_grads(_read_nothing if self._is_offloaded else None)
        self.stage = memory.stage
        self._few_bits = FewBits(drawn.layout, config, memory.stage, ranks_per_node)
        self._spans = _spans(memory)
        self._numel = drawn.layout.local_numel(is_sharded=memory.has_sharded_state)
        self._form = OffloadForm.of(
            drawn, config, is_sharded=memory.has_sharded_state, is_accelerated=is_accelerated
        )
        self._state_bytes = _state_bytes_per_element(drawn)
        self._fixed = {
            **memory.expected_report(),
            "exchange buffers": self._exchange_bytes(),
            "micro-step gradient": self._further_shard_bytes(),
            "parameter gradient": self._largest_gradient_bytes(),
            **self._few_bits.memory(),
            **other_bytes,
        }

    def memory(self, ratio: float) -> MemoryUse:
        """Bytes by kind with the first ``ratio`` of the optimizer state on the host."""
        cut = self._form.cut(ratio, self._numel)
        device = {
            **self._fixed,
            "master weights": self._device_master_bytes(cut),
            "optimizer states": self._device_state_bytes(cut),
            "gradient copies": self._landing_bytes(cut, self._numel) if self._is_offloaded else 0,
        }
        host = {**self._host_bytes(cut), **self._resting_bytes()}
        return MemoryUse(_without_zeros(device), _without_zeros(host))

    def device_state_bytes(self, ratio: float) -> int:
        """What ``device_budget`` counts: masters, states and a gradient in the compute dtype."""
        cut = round(ratio * self._numel)
        grads = sum((b - a) * s.dtype.itemsize for a, b, s in self._overlaps(cut, self._numel))
        states = (self._numel - cut) * self._state_bytes
        return states + self._device_master_bytes(cut) + grads

    def _device_master_bytes(self, cut: int) -> int:
        rest = self._overlaps(cut, self._numel)
        if self._is_accelerated or (cut == 0 and not self._is_offloaded):
            return sum(
                (high - low) * max(s.dtype.itemsize, 4)
                for low, high, s in rest
                if s.dtype not in _WIDE or self._rests(s)
            )
        # zero-offload's own tier on a CPU keeps whole masters of all or of none of its elements.
        whole = self._whole(rest)
        width = _master_itemsize(whole)
        needs_copy = any(s.dtype.itemsize != width or self._rests(s) for _, _, s in whole)
        copies = sum(high - low for low, high, _ in whole) * width if needs_copy else 0
        return copies + self._remainder_bytes(cut, self._numel)

    def _device_state_bytes(self, cut: int) -> int:
        if self._form.is_compact and not self._is_accelerated:
            return self._form.state_bytes(cut, self._numel)
        return (self._numel - cut) * self._state_bytes

    def _whole(self, part: Sequence[tuple[int, int, Segment]]) -> list[tuple[int, int, Segment]]:
        """What has a master weight that is not split."""
        is_split = self._form.is_compact
        return [x for x in part if not (is_split and x[2].dtype == torch.bfloat16)]

    def _remainder_bytes(self, start: int, stop: int) -> int:
        return self._form.remainder_bytes(start, stop) if self._form.is_compact else 0

    def _rests(self, segment: Segment) -> bool:
        """Whether the segment's shard rests off the device, so that its master lies beside it."""
        return segment in self._resting

    def _resting_bytes(self) -> dict[str, int]:
        """Host memory of parameters; what rests in a file takes buffers there."""
        offload = self._config.zero_optimization.offload_param
        sizes = [s.shard_numel * s.dtype.itemsize for s in self._resting]
        if offload.device != "nvme":
            return {"parameters": sum(sizes)}
        num_host, total = 0, 0
        for segment in self._resting:
            total += segment.shard_numel
            if total > offload.max_in_cpu:
                break
            num_host += 1
        on_file = sizes[num_host:]
        # Those that are read ahead, and two for new values.
        num_buffers = min(offload.buffer_count, len(on_file)) + 2 if on_file else 0
        return {
            "parameters": sum(sizes[:num_host]),
            "parameter buffers": num_buffers * max(on_file, default=0),
        }

    @property
    def _is_offloaded(self) -> bool:
        return self._config.zero_optimization.offload_optimizer.device != "none"

    def _host_bytes(self, cut: int) -> dict[str, int]:
        part = self._overlaps(0, cut)
        whole, width = self._whole(part), _master_itemsize(self._spans)
        # Where the device is the host, full-precision shards are their own master weights.
        needs_copy = self._is_accelerated or any(
            s.dtype.itemsize != width or self._rests(s) for _, _, s in whole
        )
        masters = sum(high - low for low, high, _ in whole) * width if needs_copy else 0
        is_compact = self._form.is_compact
        masters += self._remainder_bytes(0, cut)
        states = self._form.state_bytes(0, cut) if is_compact else cut * self._state_bytes
        if self._config.zero_optimization.offload_optimizer.device == "nvme":
            kept = {"NVMe buffers": self._nvme_buffer_bytes(part, masters + states)}
        else:
            kept = {"master weights": masters, "optimizer states": states}
        return {
            **kept,
            "gradient copies": self._landing_bytes(0, cut),
            "parameter copies": self._sent_bytes(part),
        }

    def _nvme_buffer_bytes(self, part: Sequence[tuple[int, int, Segment]], nbytes: int) -> int:
        """Host memory that ``nbytes`` of master weights and states on NVMe pass through.

        Close where blocks are alike; each buffer has room for the longest.
        """
        lengths = [high - low for low, high, _ in part]
        num_blocks = sum(-(-length // _NVME_BLOCK_NUMEL) for length in lengths)
        count = min(self._config.zero_optimization.offload_optimizer.buffer_count, num_blocks)
        longest = min(max(lengths, default=0), _NVME_BLOCK_NUMEL)
        return -(-count * longest * nbytes // max(sum(lengths), 1))

    def _landing_bytes(self, start: int, stop: int) -> int:
        """The tier's own copies of the gradients of ``[start, stop)``, one for each dtype."""
        dtypes = {self._offered(s) for _, _, s in self._overlaps(start, stop)}
        return sum((stop - start) * dtype.itemsize for dtype in dtypes)

    def _sent_bytes(self, part: Sequence[tuple[int, int, Segment]]) -> int:
        """What new values go to the device through: small buffers, or all of a split master."""
        if not self._is_accelerated:
            return 0
        part = [x for x in part if not self._rests(x[2])]  # those are written in place
        whole = self._whole(part)
        largest = min(max((b - a for a, b, _ in whole), default=0), _STAGED_NUMEL)
        dtypes = {s.dtype for _, _, s in whole}
        staged = sum(2 * self._pinned_bytes(largest * dtype.itemsize) for dtype in dtypes)
        held = [(b - a) * s.dtype.itemsize for a, b, s in part if (a, b, s) not in whole]
        return staged + self._packed_bytes(held)

    def _packed_bytes(self, sizes: Sequence[int]) -> int:
        """Neighbours share buffers with room for a few of the largest."""
        if not self._config.zero_optimization.offload_optimizer.pin_memory:
            return sum(sizes)
        limit = 1 << (_NUM_PACKED * max(sizes, default=1) - 1).bit_length()
        total = packed = 0
        for size in sizes:
            if packed and packed + size > limit:
                total, packed = total + self._pinned_bytes(packed), 0
            packed += size
        return total + self._pinned_bytes(packed)

    def _pinned_bytes(self, nbytes: int) -> int:
        """torch page-locks memory in powers of two."""
        is_pinned = self._config.zero_optimization.offload_optimizer.pin_memory
        return 1 << (nbytes - 1).bit_length() if is_pinned and nbytes else nbytes

    def host_link_bytes(self, ratio: float) -> tuple[int, int]:
        """Bytes per step to the host (gradients, new values that rest there) and back."""
        cut = self._form.cut(ratio, self._numel)
        part, rest = self._overlaps(0, cut), self._overlaps(cut, self._numel)
        down = sum((b - a) * self._offered(s).itemsize for a, b, s in part)
        down += sum((b - a) * s.dtype.itemsize for a, b, s in rest if self._rests(s))
        up = sum((b - a) * s.dtype.itemsize for a, b, s in part if not self._rests(s))
        return down, up + self._fetched_bytes()

    def _fetched_bytes(self) -> int:
        """Bytes of shards that come to the device in a step: as often as they are gathered."""
        steps = self._config.gradient_accumulation_steps
        num_units = len(self._layout.units)
        return sum(
            s.shard_numel * s.dtype.itemsize * num_gathers(s, num_units, self.stage, steps)
            for s in self._resting
        )

    def _offered(self, segment: Segment) -> torch.dtype:
        return offered_dtype(segment, self._config, has_keeper=True)

    def _overlaps(self, start: int, stop: int) -> list[tuple[int, int, Segment]]:
        clipped = [(max(low, start), min(high, stop), s) for low, high, s in self._spans]
        return [(low, high, s) for low, high, s in clipped if low < high]

    def _exchange_bytes(self) -> int:
        """What the collectives receive into, kept for each size; a unit's segments at once."""
        if self._layout.world_size == 1 or self._has_shared_memory:
            return 0
        largest: Counter[tuple[int, torch.dtype]] = Counter()
        for unit in self._layout.units:
            trainable = [s for s in unit.segments if s.is_trainable and not self._few_bits.hops(s)]
            largest |= Counter(
                (s.padded_numel, communicated_dtype(s, self._config)) for s in trainable
            )
        return sum(n * numel * dtype.itemsize for (numel, dtype), n in largest.items())

    def _further_shard_bytes(self) -> int:
        """From the second micro-step on, a unit is reduced beside the shard that it is added to."""
        if self._layout.world_size == 1 or self._config.gradient_accumulation_steps == 1:
            return 0
        units: Counter[int] = Counter()
        for s in self._layout.segments:
            if s.is_trainable:
                units[s.unit] += s.shard_numel * accumulated_dtype(s, self._config).itemsize
        return max(units.values(), default=0)

    def _largest_gradient_bytes(self) -> int:
        """Autograd's own gradient of a parameter, until it is moved into its unit's."""
        params = (p for p in self._layout.params if p.is_trainable)
        return max((p.numel * p.dtype.itemsize for p in params), default=0)


def _read_nothing(start: int, stop: int) -> Tensor:
    return torch.empty(stop - start, device=_META)


def num_gathers(segment: Segment, num_units: int, stage: int, steps: int) -> int:
    """How often the segment's parameters are gathered in one optimizer step."""
    if stage < 3:  # after an update of other ranks' slices
        return int(stage > 0 and segment.is_trainable)
    is_once = segment.unit in (0, num_units - 1)  # backward begins with the last unit
    return steps * (1 if is_once else 2)


class _Nowhere:
    """A `zero_core.protocols.ParamTier` of which only the name is needed: nothing is run."""

    def expect(self, segments: Sequence[int]) -> None:
        raise AssertionError("a forecast runs nothing")

    def fetch(self, segment: int, out: Tensor) -> Work:
        raise AssertionError("a forecast runs nothing")

    def write(self, segment: int, start: int, values: Tensor) -> None:
        raise AssertionError("a forecast runs nothing")

    def home(self, segment: int) -> Tensor | None:
        raise AssertionError("a forecast runs nothing")

    def report(self) -> Mapping[str, int]:
        raise AssertionError("a forecast runs nothing")


def _spans(memory: Memory) -> list[tuple[int, int, Segment]]:
    """Each trainable segment's part of the local flat space."""
    return [(*v.local_span, v.segment) for v in memory.values if v.local_span is not None]


def _master_itemsize(part: Sequence[tuple[int, int, Segment]]) -> int:
    """Bytes of an element of zero-offload's master weights, which all have one dtype."""
    return 8 if any(s.dtype == torch.float64 for _, _, s in part) else 4


def _state_bytes_per_element(drawn: Blueprint) -> int:
    kind = type(drawn.optimizer)
    make = cast(Any, kind)
    states = probe_states(make, drawn.groups, optimizer_options(kind, drawn.groups), _CPU)
    return sum(dtype.itemsize for dtype in states.values())


def _without_zeros(kinds: Mapping[str, int]) -> dict[str, int]:
    return {kind: nbytes for kind, nbytes in kinds.items() if nbytes}


def buffer_bytes(model: nn.Module, config: Config) -> int:
    """Bytes of the model's buffers (`register_buffer`) once the engine has cast them."""
    buffers = (b for module in model.modules() for b in module._buffers.values() if b is not None)
    return sum(b.numel() * compute_dtype(b, config.buffer_dtype).itemsize for b in buffers)
