"""The predicted time of an optimizer step: plain frozen data.

[Note: lanes]
compute  forward, recomputation, backward and the device's update
gather   gathers of parameters
reduce   reductions of gradients, and the step's small all-reduce
copies   between a device and its host
host     the host's update
file     reads and writes of NVMe offload

A lane is busy for the seconds of its work. Lanes overlap, so that their sum exceeds the step. Where
ranks compute on the CPU, data of the same node is copied by the thread that computes: it is in the
lane "gather" or "reduce", and delays "compute".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LANES = ("compute", "gather", "reduce", "copies", "host", "file")


@dataclass(frozen=True)
class Span:
    """Seconds ``[start_s, stop_s)`` of a step in which a lane works on a unit."""

    lane: str
    what: str
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class StepTime:
    """Predicted time of one optimizer step in steady state, all micro-steps included.

    Attributes:
        total_s: seconds from one step's end to the next one's.
        lanes: busy seconds of each of `LANES`.
        samples: samples of the step, over all ranks.
        spans: the work of the lanes in one step, by start.
    """

    total_s: float
    lanes: Mapping[str, float]
    samples: int
    spans: tuple[Span, ...] = ()

    @property
    def bound(self) -> str:
        """The lane that is busy for the longest: no step can be shorter."""
        return max(LANES, key=lambda lane: self.lanes[lane])

    @property
    def bound_s(self) -> float:
        """Busy seconds of the lane that bounds the step."""
        return self.lanes[self.bound]

    @property
    def sample_s(self) -> float:
        """Seconds per sample."""
        return self.total_s / self.samples
