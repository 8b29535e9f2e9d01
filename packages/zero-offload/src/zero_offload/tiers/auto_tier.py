"""`AutoTier`: a `TwinTier` that measures its steps and moves to the fastest ratio.

A step is measured when the next step's first gradient is offered. If the host is still updating,
the wait for it counts as a stall. Device work that is still running counts for the next step.
Each rank chooses its own ratio. On a CPU no ratio changes a value. On accelerators, whose update
may round differently, no two ranks may own the same elements.

[Note: search]
Host and device update their shares at the same time. Time in which the caller waits for the host is
a *stall*. With ``h`` host seconds and ``d`` device seconds per element, a stall of ``s`` seconds is
the work of ``s / (h + d)`` elements. Moving them to the device removes the stall and costs ``d``
each. The move pays off if it gains more than `NOISE` of the host's seconds. Bisection finds the
largest ratio without such a stall that device memory allows.

A probe is the median of `STEPS_PER_PROBE` steps. The first step at a ratio allocates memory and
does not count. The search ends when the bisected interval is at most `RESOLUTION` wide. It restarts
if `Sample.cost_s` differs by more than `CHANGE` for `PATIENCE` steps in a row. If device memory
becomes too small, the smallest ratio that fits is used.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from functools import cache
from math import ceil
from statistics import median

import torch

from zero_offload.flat.geometry import Geometry, Intervals
from zero_offload.protocols import Groups
from zero_offload.tiers.factory import OffloadTiers
from zero_offload.tiers.shares import AnyPart
from zero_offload.tiers.twin import TwinTier

STEPS_PER_PROBE = 3
"""Steps whose median is one probe."""
RESOLUTION = 1 / 64
"""Width of the bisected interval of ratios at which the search ends."""
NOISE = 0.02
"""Share of the host's seconds below which a gain is ignored."""
CHANGE = 0.25
"""Relative change of the cost that restarts the search."""
PATIENCE = 5
"""Steps in a row for which the cost must have changed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Elements and seconds of host and device in a step, and seconds of waits for the host."""

    host_numel: int
    device_numel: int
    host_s: float
    device_s: float
    stall_s: float

    @property
    def cost_s(self) -> float:
        """Sum of the seconds, which is monitored after the search has settled on a ratio."""
        return self.host_s + self.device_s + self.stall_s


@dataclass(frozen=True, slots=True)
class RatioReport:
    """A settled ratio and its measurements.

    Attributes:
        ratio: share of the elements that the host updates from now on.
        host_s_per_element: seconds; None if the host had no elements.
        device_s_per_element: last measured seconds; None if not measured.
        stall_s: seconds per step that callers waited for the host. This and the host's seconds are
            from this ratio if it was probed, otherwise from the last probe or step.
        least_ratio: smallest ratio that fits in device memory, 0 for no bound.
        num_probes: number of ratios measured in this search.
        reason: explanation of the ratio.
    """

    ratio: float
    host_s_per_element: float | None
    device_s_per_element: float | None
    stall_s: float
    least_ratio: float
    num_probes: int
    reason: str

    def __str__(self) -> str:
        bound = f"at least {self.least_ratio:.3f}" if self.least_ratio else "no bound"
        return (
            f"ratio {self.ratio:.3f}: {self.reason}; host {_speed(self.host_s_per_element)}, "
            f"device {_speed(self.device_s_per_element)}, stall {self.stall_s * 1e3:.3g} ms per "
            f"step, device memory: {bound}; {self.num_probes} probes"
        )


def _speed(seconds: float | None) -> str:
    return "not measured" if not seconds else f"{1 / seconds:.3g} elements/s"


class AutoRatio:
    """Controller that chooses each step's ratio from measurements of earlier steps."""

    def __init__(self) -> None:
        self.ratio = 1.0
        self.report: RatioReport | None = None
        self._samples: list[Sample] = []
        self._is_first = True  # the next step is the first at its ratio
        self._device_s: float | None = None  # last measured seconds per device element
        self._baseline_s: float | None = None  # cost at the settled ratio
        self._restart()

    def _restart(self) -> None:
        self._in_time: float | None = None  # largest ratio without a significant stall
        self._late: float | None = None  # smallest ratio with a significant stall
        self._probes: dict[float, Sample] = {}
        self._is_searching = True
        self._num_off = 0

    def observe(self, sample: Sample, least_ratio: float = 0.0) -> float:
        """Record one step and return the next ratio, which is at least ``least_ratio``."""
        if least_ratio > self.ratio:
            # Rounding up avoids a resplit for each small change of free memory.
            ratio = min(ceil(least_ratio / RESOLUTION) * RESOLUTION, 1.0)
            if self._is_searching:
                self._set_ratio(ratio)
            else:
                self._restart()
                self._settle(ratio, sample, least_ratio)
        elif self._is_first:
            self._is_first = False
        elif self._is_searching:
            if (probe := self._probe(sample)) is not None:
                self._judge(probe, least_ratio)
        else:
            self._watch(sample)
        return self.ratio

    def _probe(self, sample: Sample) -> Sample | None:
        """Add a sample. Return the median after every `STEPS_PER_PROBE` samples, otherwise None."""
        self._samples.append(sample)
        if len(self._samples) < STEPS_PER_PROBE:
            return None
        columns = zip(*map(astuple, self._samples), strict=True)
        host_numel, device_numel, *seconds = (median(column) for column in columns)
        self._samples.clear()
        return Sample(round(host_numel), round(device_numel), *seconds)

    def _set_ratio(self, ratio: float) -> None:
        if ratio != self.ratio:
            self.ratio, self._is_first = ratio, True
            self._samples.clear()

    def _judge(self, probe: Sample, least_ratio: float) -> None:
        self._probes[self.ratio] = probe
        if probe.device_numel:
            self._device_s = probe.device_s / probe.device_numel
        if self._is_outweighing(probe):
            self._late = self.ratio
        else:
            self._in_time = self.ratio
        low = max(least_ratio, 0.0 if self._in_time is None else self._in_time)
        if self._late is None and low < 1.0:
            self._set_ratio(1.0)
        elif self._late is not None and self._late - low > RESOLUTION:
            self._set_ratio((low + self._late) / 2)
        else:
            self._settle(low, probe, least_ratio)

    def _is_outweighing(self, probe: Sample) -> bool:
        """Return whether removing the stall gains more than it costs. See [Note: search]."""
        if not probe.host_numel:
            return False
        host_s = probe.host_s / probe.host_numel
        device_s = self._device_s or 0.0
        if host_s + device_s == 0.0:
            return False
        num_late = min(probe.stall_s / (host_s + device_s), probe.host_numel)
        return probe.stall_s - num_late * device_s > NOISE * probe.host_s

    def _settle(self, ratio: float, last: Sample, least_ratio: float) -> None:
        self._set_ratio(ratio)
        probe = self._probes.get(ratio, last)
        self._is_searching = False
        self._baseline_s = None
        self._num_off = 0
        self.report = RatioReport(
            ratio=ratio,
            host_s_per_element=probe.host_s / probe.host_numel if probe.host_numel else None,
            device_s_per_element=self._device_s,
            stall_s=probe.stall_s,
            least_ratio=least_ratio,
            num_probes=len(self._probes),
            reason=self._reason(ratio),
        )

    def _reason(self, ratio: float) -> str:
        if ratio > (self._in_time or 0.0):
            return "device memory has no room for a smaller one"
        if ratio == 1.0:
            return "the host is in time with every element"
        if self._in_time is None:
            return "the host is late with any share"
        return f"the host is in time, and late at ratio {self._late:.3f}"

    def _watch(self, sample: Sample) -> None:
        """Restart the search if the cost has changed for `PATIENCE` steps."""
        if self._baseline_s is None:
            if (probe := self._probe(sample)) is not None:
                self._baseline_s = probe.cost_s
            return
        is_off = abs(sample.cost_s - self._baseline_s) > CHANGE * self._baseline_s
        self._num_off = self._num_off + 1 if is_off else 0
        if self._num_off == PATIENCE:
            self._restart()  # The next probe measures the current ratio.


_log = logging.getLogger(__name__)

MARGIN = 0.05
"""Share of the device's memory kept free for fragmentation and libraries."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes of one device's memory that this process may use.

    Attributes:
        available: free bytes and bytes of torch's allocator, within
            ``set_per_process_memory_fraction``.
        peak: maximum bytes of tensors so far.
        total: bytes of the device, or this process's share.
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
    """Return a reading, or None for a CPU or a backend without memory statistics."""
    if device.type == "cpu":
        return None
    try:
        free, total = torch.accelerator.get_memory_info(device)
        reserved = torch.accelerator.memory_reserved(device)
        peak = torch.accelerator.max_memory_allocated(device)
    # An older torch lacks a function, or a backend has no memory statistics.
    except (AttributeError, RuntimeError) as error:
        _warn_unbounded(str(error))
        return None
    # foreign: of torch's device modules only torch.cuda may have this limit
    fraction = getattr(torch.get_device_module(device), "get_per_process_memory_fraction", None)
    allowed = total if fraction is None else round(fraction(device) * total)
    return MemoryReading(min(free + reserved, allowed), peak, min(total, allowed))


class DeviceRoom:
    """Estimates the smallest ratio whose device share fits in device memory."""

    def __init__(self, numel: int, element_bytes: int) -> None:
        self.element_bytes = element_bytes
        self._numel = numel
        self._peak = 0
        self._numel_at_peak = 0

    def bound(self, now: MemoryReading | None, device_numel: int) -> float:
        """Return the ratio, or 0 if unknown. ``device_numel`` counts elements in the last step."""
        if now is None or not self._numel or not self.element_bytes:
            return 0.0
        if now.peak > self._peak:
            self._peak, self._numel_at_peak = now.peak, device_numel
        spare = now.available - now.peak - MARGIN * now.total
        fitting = self._numel_at_peak + spare / self.element_bytes
        return min(max(1.0 - fitting / self._numel, 0.0), 1.0)


class AutoTier(TwinTier):
    """A `TwinTier` that starts with all elements on the host and finds the fastest ratio."""

    def __init__(
        self,
        geometry: Geometry,
        groups: Groups,
        factory: OffloadTiers,
        *,
        element_bytes: int,
        controller: AutoRatio | None = None,
    ) -> None:
        super().__init__(geometry, groups, Intervals([(0, geometry.numel)]), factory)
        self.controller = controller or AutoRatio()
        self._element_bytes = element_bytes
        self._room = DeviceRoom(geometry.numel, element_bytes)
        self._updates = factory.make_clock()  # clock of the device's updates
        self._stalls = factory.make_clock()  # clock of waits for the host
        self._host_s = 0.0  # total host seconds at the start of the step
        self._num_updated = {True: 0, False: 0}  # updated elements on host and device

    @property
    def ratio_report(self) -> RatioReport | None:
        """The last settled ratio and its reason, or None during the first search."""
        return self.controller.report

    def expect_micro_steps(self, count: int) -> None:
        """Expect sums on the device too, which may take more memory than gradients."""
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
        """Measure the last step, and resplit unless gradients of the next one were offered."""
        sample = self._take_sample()
        if not self._fresh:  # Otherwise gradients of the new step have been offered already.
            before = self.controller.report
            device_numel = self.geometry.numel - self.host_numel
            least_ratio = self._room.bound(read_memory(self._factory.device), device_numel)
            ratio = self.controller.observe(sample, least_ratio)
            if self.controller.report is not before:
                _log.info("offload_optimizer settled on %s", self.controller.report)
            self.resplit(round(ratio * self.geometry.numel))
        self._host_s = self._drain_host()

    def _take_sample(self) -> Sample:
        with self._stalls.measure():  # Waiting for a host that still updates is a stall.
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
        return 0.0 if self._host_part is None else self._host_part.tier.drain()
