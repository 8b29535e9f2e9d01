"""Search for the fastest ratio that fits, over measurements. Pure arithmetic, no clocks.

[Note: search]
Host and device update their shares at the same time. If the host has not published a parameter when
it is needed, the caller waits: the *stall*. With ``h`` seconds per element on the host and ``d`` on
the device, a stall of ``s`` seconds is the work of ``s / (h + d)`` elements too many on the host.
Each of them moved to the device shortens the host's work by ``h`` and lengthens by ``d`` the time
in which the host works unnoticed. That removes the stall and costs ``d`` for each of them. A stall
outweighs that device time if the gain exceeds `NOISE` of the host's seconds. So at every ratio the
sign of the slope is known, and bisection finds the best ratio: the largest at which the host is in
time, but no less than device memory allows.

One probe is the median of `STEPS_PER_PROBE` steps at a ratio. The first step after a change pays
for new memory and does not count. When the bracket is narrower than `RESOLUTION`, its lower end is
held. From then on the ratio changes only if the update's cost is off by more than `CHANGE` for
`PATIENCE` steps in a row, or if device memory no longer suffices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from math import ceil
from statistics import median

STEPS_PER_PROBE = 3
"""Steps whose median is one probe."""
RESOLUTION = 1 / 64
"""The search ends when the bracket is no wider."""
NOISE = 0.02
"""Share of the host's seconds below which a gain does not count."""
CHANGE = 0.25
"""Share by which the cost must move before the search begins again."""
PATIENCE = 5
"""Steps in a row for which it must."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Elements and seconds of both sides in a step, and seconds that callers waited."""

    host_numel: int
    device_numel: int
    host_s: float
    device_s: float
    stall_s: float

    @property
    def cost_s(self) -> float:
        """Cost that is monitored once a ratio is held: work on both sides, and the stall."""
        return self.host_s + self.device_s + self.stall_s


@dataclass(frozen=True, slots=True)
class RatioReport:
    """A settled ratio and the measurements that it follows from.

    Attributes:
        ratio: share of the elements that the host updates from now on.
        host_s_per_element: seconds; None if the host had none when it was measured.
        device_s_per_element: seconds; None if the device never had any.
        stall_s: seconds per step that callers waited for the host, at this ratio if it was probed
            and at the last one otherwise; so are the host's seconds.
        least_ratio: the smallest ratio that fits in device memory; 0 where that sets no bound.
        num_probes: ratios measured in this search.
        reason: of this ratio, in words.
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
    """Controller that chooses each step's ratio from the measurements of the steps before.

    Attributes:
        ratio: for the next step; 1 at first, where everything that the configuration allows fits.
        report: of the last settlement; None during the first search.
    """

    def __init__(self) -> None:
        self.ratio = 1.0
        self.report: RatioReport | None = None
        self._samples: list[Sample] = []
        self._is_first = True  # of this ratio: memory is new
        self._device_s: float | None = None  # per element, as last seen
        self._baseline_s: float | None = None  # cost at the ratio that is held
        self._restart()

    def _restart(self) -> None:
        self._in_time: float | None = None  # the largest ratio without a stall that counts
        self._late: float | None = None  # the smallest one with it
        self._probes: dict[float, Sample] = {}
        self._is_searching = True
        self._num_off = 0

    def observe(self, sample: Sample, least_ratio: float = 0.0) -> float:
        """Record one step at `ratio` and return the ratio for the next one.

        ``least_ratio`` is the smallest ratio that fits in device memory now, 0 to 1.
        """
        if least_ratio > self.ratio:
            # In whole steps, so that a slow drift is not followed.
            ratio = min(ceil(least_ratio / RESOLUTION) * RESOLUTION, 1.0)
            if self._is_searching:
                self._set_ratio(ratio)
            else:
                self._restart()
                self._settle(ratio, sample, least_ratio)
        elif self._is_first:
            self._is_first = False
        elif self._is_searching:
            self._samples.append(sample)
            if len(self._samples) == STEPS_PER_PROBE:
                self._judge(_median(self._take()), least_ratio)
        else:
            self._watch(sample)
        return self.ratio

    def _take(self) -> list[Sample]:
        taken, self._samples = self._samples, []
        return taken

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
        """Whether the stall outweighs the device time saved. See [Note: search]."""
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
        """Hold the ratio until the cost has changed for `PATIENCE` steps."""
        if self._baseline_s is None:
            self._samples.append(sample)
            if len(self._samples) == STEPS_PER_PROBE:
                self._baseline_s = _median(self._take()).cost_s
            return
        is_off = abs(sample.cost_s - self._baseline_s) > CHANGE * self._baseline_s
        self._num_off = self._num_off + 1 if is_off else 0
        if self._num_off == PATIENCE:
            self._restart()  # the next probe is of this ratio


def _median(samples: Sequence[Sample]) -> Sample:
    columns = zip(*map(astuple, samples), strict=True)
    host_numel, device_numel, *seconds = (median(column) for column in columns)
    return Sample(round(host_numel), round(device_numel), *seconds)
