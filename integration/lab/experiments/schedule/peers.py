"""Published schedules of other libraries as programs of work, each under given times.

They are what the papers describe, not what was measured of the libraries. All have this project's
seconds for the same work: one pass of the host per update, gradients and parameters of 16 bits.

[Note: schedules]
ZeRO-Offload  arXiv 2101.06840. Gradients go to the host in backward. When the last one is there,
              the host updates; each new value is copied while the next is computed, and forward
              begins behind the last copy. Its "one-step delayed update", which changes numbers, is
              off
ZenFlow       arXiv 2505.12242. The device updates the most important `ZENFLOW_TOP` of the
              gradient's columns in each step. The others are added up on the host, which updates
              their parameters every `ZENFLOW_STEPS` steps beside the following steps: these wait
              for it only where it takes longer than they do. Traffic is that of the paper, 1.13
              times the model's bytes per step
SuperOffload  arXiv 2509.21271. The host updates each bucket as its gradient arrives, and sends the
              new values at once. Forward begins when all are there. The norm is validated behind
              backward. If it is above the limit, the host undoes the update by computing it
              backwards, and updates again. Its last buckets stay on the device if there is room:
              not here, where all states are on the host. DeepSpeed's code of it speculates without
              clipping alone (runtime/superoffload/superoffload_stage3.py, ``partition_grads``)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lab.experiments.schedule.job import Times
from zero_engine.planning.schedule import Schedule, Work
from zero_offload.testing.virtual_time import Span

ZENFLOW_TOP, ZENFLOW_STEPS = 0.1, 4
_SUM_BYTES, _UPDATE_BYTES = 10, 28
"""Of a gradient that is added to a sum of 4 bytes, and of an update, per parameter."""
CYCLES = 4
"""Of which the last one counts."""
CYCLE_STEPS = 20
"""A multiple of ZenFlow's interval, and of steps of which one is clipped."""


@dataclass
class Program:
    """Steps of a schedule on the resources of `zero_engine.planning.schedule`.

    Attributes:
        ends: the last work of each step's backward.
        published: what the next forward waits for.
        pending: what a later one is to wait for.
    """

    times: Times
    schedule: Schedule = field(default_factory=lambda: Schedule(None))
    ends: list[Work] = field(default_factory=list)
    published: list[Work] = field(default_factory=list)
    pending: list[Work] = field(default_factory=list)

    @property
    def shares(self) -> list[float]:
        """Shares of units' parameters: embedding and head, then the blocks."""
        root = 2 * self.times.root
        return [root, *[(1 - root) / self.times.blocks] * self.times.blocks]

    def forward(self) -> None:
        """Add the blocks' forward, behind everything that is published."""
        after = self.published
        for _ in range(self.times.blocks):
            self._compute("forward", self.times.forward_s / self.times.blocks, after)
            after = []

    def backward(self, sent: float = 1.0) -> list[Work]:
        """Add the blocks' backward, and return the copies of each unit's gradient."""
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
        """Add work of the host."""
        return self._add("host", what, seconds, after, need)

    def publish(self, share: float, after: Work) -> Work:
        """Add the copy of new values to the device."""
        return self._add("up", "parameters", share * self.times.link_s, [after])

    def update_on_device(self, share: float) -> None:
        """Add an update of the device."""
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
    # The update of the interval before is to be there now.
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
        numerics: what it changes of the numbers.
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
    """Return the mean length of a step, and the lanes of one.

    Args:
        clipped_every: one step of so many is clipped; 0 for none.
    """
    program = Program(times)
    num_steps = CYCLES * CYCLE_STEPS
    for number in range(num_steps):
        is_clipped = bool(clipped_every) and number % clipped_every == 0
        peer.add_step(program, number, is_clipped=is_clipped)
    program.schedule.run()
    ends = [work.stop for work in program.ends]
    start, stop = ends[-1 - ZENFLOW_STEPS], ends[-ZENFLOW_STEPS]  # behind ZenFlow's interval
    spans = [
        Span(w.lane, w.what, w.start - start, w.stop - start)
        for w in program.schedule.work
        if w.stop > start and w.start < stop and w.seconds
    ]
    return (ends[-1] - ends[-1 - CYCLE_STEPS]) / CYCLE_STEPS, spans
