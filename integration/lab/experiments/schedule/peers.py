"""Published schedules of other libraries, simulated with given times.

The schedules follow the papers. The libraries themselves are not measured. All schedules use this
project's times for the same work: one host pass per update, and 16-bit gradients and parameters.

[Note: schedules]
ZeRO-Offload  arXiv 2101.06840. Gradients go to the host during backward. After the last one the
              host updates. Each new value is copied while the next one is computed, and forward
              begins after the last copy. The "one-step delayed update", which changes results, is
              off
ZenFlow       arXiv 2505.12242. In each step the device updates the gradient's most important
              columns (`ZENFLOW_TOP`). The host sums the others and updates their parameters every
              `ZENFLOW_STEPS` steps, in parallel with the following steps. Forward waits only if an
              update takes longer than that. Traffic is the paper's, 1.13 times the model's bytes
              per step
SuperOffload  arXiv 2509.21271. The host updates each bucket when its gradient arrives, and sends
              the new values at once. Forward begins when all have arrived. The norm is checked
              after backward. If it exceeds the limit, the host computes the update backwards, then
              updates again. The paper keeps the last buckets on the device if there is room. Here
              all states are on the host. DeepSpeed's code speculates only without clipping
              (runtime/superoffload/superoffload_stage3.py, ``partition_grads``)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lab.experiments.schedule.job import Times
from zero_engine.planning.prediction import Schedule, Work
from zero_offload.testing.virtual_time import Span

ZENFLOW_TOP, ZENFLOW_STEPS = 0.1, 4
_SUM_BYTES, _UPDATE_BYTES = 10, 28
"""Host traffic per parameter: adding a gradient to a 4-byte sum, and an update."""
CYCLES = 4
"""Number of simulated cycles. Only the last one counts."""
CYCLE_STEPS = 20
"""A multiple of ZenFlow's interval and of ``clipped_every``."""


@dataclass
class Program:
    """Steps of a schedule on the resources of `zero_engine.planning.prediction`.

    Attributes:
        ends: last work of each step's backward.
        published: work that the next forward waits for.
        pending: work that a later forward waits for.
    """

    times: Times
    schedule: Schedule = field(default_factory=lambda: Schedule(None))
    ends: list[Work] = field(default_factory=list)
    published: list[Work] = field(default_factory=list)
    pending: list[Work] = field(default_factory=list)

    @property
    def shares(self) -> list[float]:
        """Shares of the parameters: embedding with head, then each block."""
        root = 2 * self.times.root
        return [root, *[(1 - root) / self.times.blocks] * self.times.blocks]

    def forward(self) -> None:
        """Add the blocks' forward after all published work."""
        after = self.published
        for _ in range(self.times.blocks):
            self._compute("forward", self.times.forward_s / self.times.blocks, after)
            after = []

    def backward(self, sent: float = 1.0) -> list[Work]:
        """Add the blocks' backward. Return the copies of the units' gradients."""
        found = []
        for share in reversed(self.shares[1:]):
            passed = self._compute("backward", self.times.backward_s / self.times.blocks)
            found.append(self._add("down", "gradient", sent * share * self.times.link_s, [passed]))
        found.append(
            self._add("down", "gradient", sent * self.shares[0] * self.times.link_s, [passed])
        )
        self.ends.append(passed)
        return found

    def update(self, what: str, seconds: float, after: list[Work], need: int = 0) -> Work:
        return self._add("host", what, seconds, after, need)

    def publish(self, share: float, after: Work) -> Work:
        return self._add("up", "parameters", share * self.times.link_s, [after])

    def update_on_device(self, share: float) -> None:
        self._compute("update", share * self.times.device_s)

    def _compute(self, what: str, seconds: float, after: list[Work] | None = None) -> Work:
        return self.schedule.add("main", "compute", what, seconds, after or [])

    def _add(self, lane: str, what: str, seconds: float, after: list[Work], need: int = 0) -> Work:
        return self.schedule.add(lane, lane, what, seconds, after, need=need)


def _late(program: Program, _: int, *, is_clipped: bool) -> None:
    program.forward()
    arrived = program.backward()
    program.published = []
    for share in program.shares:
        updated = program.update("update", share * program.times.host_s, arrived)
        program.published.append(program.publish(share, updated))


def _stale(program: Program, number: int, *, is_clipped: bool) -> None:
    program.forward()
    rest = 1 - ZENFLOW_TOP
    arrived = program.backward(sent=rest)
    program.update_on_device(ZENFLOW_TOP)
    added_s = rest * program.times.host_s * _SUM_BYTES / _UPDATE_BYTES
    shares = [*reversed(program.shares[1:]), program.shares[0]]
    added = [
        program.update("keep", share * added_s, [copied])
        for share, copied in zip(shares, arrived, strict=True)
    ]
    if (number + 1) % ZENFLOW_STEPS:
        program.published = []
        return
    # The next forward waits for the update of the previous interval.
    program.published, program.pending = program.pending, []
    for share in program.shares:
        updated = program.update("update", rest * share * program.times.host_s, added, need=1)
        program.pending.append(program.publish(rest * share, updated))


def _speculative(program: Program, _: int, *, is_clipped: bool) -> None:
    program.forward()
    arrived = program.backward()
    shares = [*reversed(program.shares[1:]), program.shares[0]]
    updated = [
        program.update("update", share * program.times.host_s, [copied])
        for share, copied in zip(shares, arrived, strict=True)
    ]
    program.published = [
        program.publish(share, work) for share, work in zip(shares, updated, strict=True)
    ]
    if is_clipped:
        undone = [program.update("undo", s * program.times.host_s, updated) for s in shares]
        again = [program.update("update", s * program.times.host_s, undone) for s in shares]
        program.published += [program.publish(s, w) for s, w in zip(shares, again, strict=True)]


@dataclass(frozen=True)
class Peer:
    """A published schedule.

    Attributes:
        numerics: how the schedule changes results.
    """

    name: str
    paper: str
    add_step: Callable[..., None]
    numerics: str


PEERS = (
    Peer(
        "ZeRO-Offload, late update",
        "arXiv 2101.06840",
        _late,
        "exact: the update waits for the norm",
    ),
    Peer(
        "ZenFlow, staleness",
        "arXiv 2505.12242",
        _stale,
        f"another trajectory: nine tenths of the columns are updated up to {2 * ZENFLOW_STEPS - 1} "
        "steps late, from sums",
    ),
    Peer(
        "SuperOffload, speculate and roll back",
        "arXiv 2509.21271",
        _speculative,
        "exact where no step is clipped; a roll-back computes Adam backwards and rounds",
    ),
)


def run(peer: Peer, times: Times, clipped_every: int = 0) -> tuple[float, list[Span]]:
    """Return the mean step length, and the spans of one step.

    Args:
        peer: the schedule.
        times: seconds of a step's work.
        clipped_every: number of steps of which one is clipped; 0 for none.
    """
    program = Program(times)
    num_steps = CYCLES * CYCLE_STEPS
    for number in range(num_steps):
        is_clipped = bool(clipped_every) and number % clipped_every == 0
        peer.add_step(program, number, is_clipped=is_clipped)
    program.schedule.run()
    ends = [work.stop for work in program.ends]
    # Show the step after one of ZenFlow's intervals, because it contains the host's update.
    start, stop = ends[-1 - ZENFLOW_STEPS], ends[-ZENFLOW_STEPS]
    spans = [
        Span(w.lane, w.what, w.start - start, w.stop - start)
        for w in program.schedule.work
        if w.stop > start and w.start < stop and w.seconds
    ]
    return (ends[-1] - ends[-1 - CYCLE_STEPS]) / CYCLE_STEPS, spans
