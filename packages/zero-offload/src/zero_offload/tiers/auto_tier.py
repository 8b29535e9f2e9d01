"""`AutoTier`: a `TwinTier` that measures its steps and moves its split point to the fastest place.

`zero_offload.tiers.auto_ratio` decides which that is, within the device's free memory. A step is
measured when the first gradient of the next one is offered, because the host is done with it then
and nothing is pending. What the device has not reached by then counts for the next step: nobody
waits for a measurement. Each rank decides alone: the split point changes where an element is
updated, not how, so ranks need not agree.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch

from zero_offload.flat.geometry import Geometry
from zero_offload.flat.intervals import Intervals
from zero_offload.protocols import Groups
from zero_offload.tiers.auto_ratio import AutoRatio, RatioReport, Sample
from zero_offload.tiers.factory import OffloadTiers
from zero_offload.tiers.part import AnyPart
from zero_offload.tiers.twin import TwinTier

_log = logging.getLogger(__name__)

MARGIN = 0.05
"""Share of the device's memory that is kept free for fragmentation and libraries."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes of one device's memory that this process may use.

    Attributes:
        available: held by torch's allocator, used or not, and free on the device; no more than this
            process may take (``set_per_process_memory_fraction``).
        peak: the most that tensors have taken at once so far.
        total: of the device, or what this process may take of it.
    """

    available: int
    peak: int
    total: int


@cache
def _warn_unbounded(why: str) -> None:
    warnings.warn(
        f"the device's free memory is not known ({why}): ratio auto has no lower bound, and may "
        f"move more to the device than fits; give a ratio or a device_budget",
        RuntimeWarning,
        stacklevel=2,
    )


def read_memory(device: torch.device) -> MemoryReading | None:
    """Return a reading, or None where the device's memory is the host's or has no accounting."""
    if device.type == "cpu":
        return None
    try:
        free, total = torch.accelerator.get_memory_info(device)
        reserved = torch.accelerator.memory_reserved(device)
        peak = torch.accelerator.max_memory_allocated(device)
    except (AttributeError, RuntimeError) as error:  # torch 2.10's, or a backend without it
        _warn_unbounded(str(error))
        return None
    # foreign: torch.cuda has a limit on this process's share of the memory, other modules may not
    fraction = getattr(torch.get_device_module(device), "get_per_process_memory_fraction", None)
    allowed = total if fraction is None else round(fraction(device) * total)
    return MemoryReading(min(free + reserved, allowed), peak, min(total, allowed))


class DeviceRoom:
    """Bound on the ratio: the smallest whose device share fits beside everything else."""

    def __init__(self, numel: int, element_bytes: int) -> None:
        self.element_bytes = element_bytes
        self._numel = numel
        self._peak = 0
        self._numel_at_peak = 0

    def bound(self, now: MemoryReading | None, device_numel: int) -> float:
        """Return the bound, 0 to 1. ``device_numel`` were on the device since the last call."""
        if now is None or not self._numel or not self.element_bytes:
            return 0.0
        if now.peak > self._peak:
            self._peak, self._numel_at_peak = now.peak, device_numel
        spare = now.available - now.peak - MARGIN * now.total
        fitting = self._numel_at_peak + spare / self.element_bytes
        return min(max(1.0 - fitting / self._numel, 0.0), 1.0)


class AutoTier(TwinTier):
    """A StateTier whose host share begins with everything and ends where steps are fastest."""

    def __init__(
        self,
        geometry: Geometry,
        groups: Groups,
        factory: OffloadTiers,
        *,
        element_bytes: int,
        controller: AutoRatio | None = None,
    ) -> None:
        everything = Intervals([(0, geometry.numel)])
        super().__init__(geometry, groups, everything, factory)
        self.controller = controller or AutoRatio()
        self._element_bytes = element_bytes
        self._room = DeviceRoom(geometry.numel, element_bytes)
        self._updates = factory.make_clock()  # of the device's part
        self._stalls = factory.make_clock()  # in which the caller's stream waits for the host
        self._host_s = 0.0  # as the host tier counted when the step began
        self._num_updated = {True: 0, False: 0}  # elements, on the host and on the device

    @property
    def ratio_report(self) -> RatioReport | None:
        """The last settled ratio and its reason. None during the first search."""
        return self.controller.report

    def expect_micro_steps(self, count: int) -> None:
        """Expect sums on the device as well, of which each element takes more than its gradient."""
        super().expect_micro_steps(count)
        shards = self.geometry.shards
        narrowest = min((shard.element_size() for _, shard in shards), default=0)
        wider = self.geometry.master_dtype.itemsize - narrowest
        self._room = DeviceRoom(self.geometry.numel, self._element_bytes + wider)

    def step_part(self, part: AnyPart, active: Sequence[int], grad_scale: float) -> None:
        with nullcontext() if part.is_host else self._updates.measure():
            super().step_part(part, active, grad_scale)
        pieces = part.geometry.pieces
        self._num_updated[part.is_host] += sum(pieces[i].stop - pieces[i].start for i in active)

    def wait_part(self, part: AnyPart, start: int, stop: int) -> None:
        is_late = part.is_host and not part.tier.are_params_ready(start, stop)
        with self._stalls.measure() if is_late else nullcontext():
            super().wait_part(part, start, stop)

    def begin_round(self) -> None:
        """Evaluate the last step, and resplit before the first gradient of the next is offered."""
        sample = self._take_sample()
        if not self._fresh:  # else a parameter without a gradient before came first
            before = self.controller.report
            device_numel = self.geometry.numel - self.host_numel
            least_ratio = self._room.bound(read_memory(self._factory.device), device_numel)
            ratio = self.controller.observe(sample, least_ratio)
            if self.controller.report is not before:
                _log.info("offload_optimizer settled on %s", self.controller.report)
            self.resplit(round(ratio * self.geometry.numel))
        self._host_s = self._drain_host()

    def _take_sample(self) -> Sample:
        with self._stalls.measure():  # a host that is not done is late, too
            host_s = self._drain_host() - self._host_s
        sample = Sample(
            host_numel=self._num_updated[True],
            device_numel=self._num_updated[False],
            host_s=host_s,
            device_s=self._updates.take(),
            stall_s=self._stalls.take(),
        )
        self._num_updated = {True: 0, False: 0}
        return sample

    def _drain_host(self) -> float:
        self.check_whole()
        return 0.0 if self._host_part is None else self._host_part.drain()
