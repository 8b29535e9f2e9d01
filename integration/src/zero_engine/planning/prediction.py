"""Time of an optimizer step from the rates of a machine.

[Note: one step]
The simulated program is that of `zero_core.core.passes` on one rank. A unit's all-gather is
launched one unit before its use, in forward and backward. A unit's reduce-scatter starts when its
gradients are complete, and is waited for one unit later. Block inputs that are kept on the host are
copied to it in forward, and back one unit ahead in backward. Gradients of tied weights are copied
back before the root's backward. Then a small all-reduce decides whether the step is taken, and the
device and the host update their parts. The host updates earlier, in backward, if nothing can cancel
the step, or if an undo log has room for the old values. A unit's next forward waits for its update.
`NUM_STEPS` steps are simulated, and the last one counts.

With the vertical schedule (`zero_core.vertical.schedule`) one pass has all micro-batches of a step,
and each micro-batch's gradient of a unit is reduced separately.

If ranks compute on the CPU, the computing thread copies the data that ranks of its node send.

Each piece of work has a duration, a resource, and earlier work that it depends on.

[Note: resources]
main      the computing thread, or the compute stream: in program order
link      collectives between ranks: in launch order
down      copies to the host: in launch order
host      the host's updates: among ready ones the lowest ``need``, then program order
up        copies to the device: in the order of "host"
file      reads and writes of NVMe offload: in the order of "host"

If ranks compute on the CPU, all running work shares ``cores``. If the running work asks for more,
all work that uses cores is slowed down by the same factor.

[Note: lanes]
compute  forward, recomputation, backward and the device's update
gather   gathers of parameters
reduce   reductions of gradients, and the step's small all-reduce
copies   between a device and its host
host     the host's update
file     reads and writes of NVMe offload

A lane's seconds are the sum of its work. Lanes overlap, so their sum can exceed the step. If ranks
compute on the CPU, the computing thread also copies data of the same node: the lane is then
"gather" or "reduce", and the copy delays "compute".
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from zero_core.config import Config
from zero_core.footprint import (
    Forecast,
    GradientCase,
    Layout,
    Links,
    Segment,
    Trace,
    UnitLayout,
    accumulated_dtype,
    arithmetic_of,
    facts_nbytes,
    gather_calls,
    may_speculate,
    num_gathers,
    reduction_calls,
    updates_in_backward,
)
from zero_engine.planning.rates import Rates

LANES = ("compute", "gather", "reduce", "copies", "host", "file")
NUM_STEPS = 3
_WIDE = "float32"
_UNDO_COST = 1.05
"""Extra time of an undo log, relative to the update, as the benchmark ``cpu_adam`` measures it with
two cores and 64 Mi elements. The log writes 12 bytes per element, Adam reads and writes 26."""


@dataclass(frozen=True)
class Span:
    """Time ``[start_s, stop_s)`` of a step in which a lane is busy with ``what``."""

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
        spans: work of the lanes in one step, by start.
    """

    total_s: float
    lanes: Mapping[str, float]
    samples: int
    spans: tuple[Span, ...] = ()

    @property
    def bound(self) -> str:
        """Lane with the most busy seconds."""
        return max(LANES, key=lambda lane: self.lanes[lane])

    @property
    def bound_s(self) -> float:
        return self.lanes[self.bound]

    @property
    def sample_s(self) -> float:
        return self.total_s / self.samples


@dataclass(eq=False, slots=True)
class Work:
    """Piece of work that takes ``seconds`` on a resource, after all of ``after`` is done.

    ``cores`` are kept busy meanwhile. On host, up and file the lowest ``need`` goes first.
    `Schedule.run` sets ``start`` and ``stop``.
    """

    resource: str
    lane: str
    what: str
    seconds: float
    after: list[Work] = field(default_factory=list)
    cores: float = 0.0
    need: int = 0
    start: float = 0.0
    stop: float = -1.0
    _num_awaited: int = 0
    _left: float = 0.0


class Schedule:
    """Pieces of work in program order, which `run` simulates."""

    def __init__(self, cores: float | None) -> None:
        self._cores = cores
        self.work: list[Work] = []

    def add(
        self,
        resource: str,
        lane: str,
        what: str,
        seconds: float,
        after: Iterable[Work | None] = (),
        *,
        cores: float = 0.0,
        need: int = 0,
    ) -> Work:
        awaited = [work for work in after if work is not None]
        self.work.append(Work(resource, lane, what, seconds, awaited, cores, need))
        return self.work[-1]

    def run(self) -> None:
        """Set start and stop of all work. Raises ValueError if some work can never start."""
        followers: dict[int, list[Work]] = {}
        queues: dict[str, deque[Work]] = {n: deque() for n in ("main", "link", "down")}
        ready: dict[str, list[tuple[int, int, Work]]] = {n: [] for n in ("host", "up", "file")}
        place = {id(work): number for number, work in enumerate(self.work)}

        def offer(work: Work) -> None:
            if work.resource in ready and not work._num_awaited:
                heapq.heappush(ready[work.resource], (work.need, place[id(work)], work))

        for work in self.work:
            work._num_awaited, work._left = len(work.after), work.seconds
            for earlier in work.after:
                followers.setdefault(id(earlier), []).append(work)
            if work.resource in queues:
                queues[work.resource].append(work)
            offer(work)
        running: dict[str, Work] = {}
        now, num_done = 0.0, 0
        while num_done < len(self.work):
            for name, queue in queues.items():
                if name not in running and queue and not queue[0]._num_awaited:
                    running[name] = queue.popleft()
                    running[name].start = now
            for name, waiting in ready.items():
                if name not in running and waiting:
                    running[name] = heapq.heappop(waiting)[2]
                    running[name].start = now
            if not running:
                raise ValueError("work waits for work that cannot come before it")
            asked = sum(work.cores for work in running.values())
            slowed = 1.0 if self._cores is None or asked <= self._cores else asked / self._cores
            pace = {name: slowed if w.cores else 1.0 for name, w in running.items()}
            passed = min(w._left * pace[name] for name, w in running.items())
            now += passed
            for name, work in list(running.items()):
                work._left -= passed / pace[name]
                if work._left > 1e-12:
                    continue
                del running[name]
                work.stop = now
                num_done += 1
                for follower in followers.get(id(work), ()):
                    follower._num_awaited -= 1
                    offer(follower)


class Transfer(NamedTuple):
    """Seconds on the link and on the computing thread, and cores that the link keeps busy."""

    link_s: float = 0.0
    main_s: float = 0.0
    link_cores: float = 0.0


_NOTHING = Transfer()


@dataclass(frozen=True)
class UnitTime:
    """Seconds of one unit, for one micro-batch.

    Attributes:
        renew: part of a gather that is done once per optimizer step.
        gather: part of a gather that is done for each use.
        sums: the gather of the gradient's sum, at stage 0.
        down_s, up_s: copies of gradients to the host and of parameters to the device.
        fetch_s: copy of offloaded parameter shards, for each gather.
        inputs_down_s, inputs_up_s: copies of block inputs that are kept on the host.
    """

    forward_s: float
    backward_s: float
    renew: Transfer = _NOTHING
    gather: Transfer = _NOTHING
    reduce: Transfer = _NOTHING
    sums: Transfer = _NOTHING
    host_s: float = 0.0
    undo_s: float = 0.0
    down_s: float = 0.0
    up_s: float = 0.0
    fetch_s: float = 0.0
    read_s: float = 0.0
    write_s: float = 0.0
    inputs_down_s: float = 0.0
    inputs_up_s: float = 0.0


@dataclass(frozen=True)
class StepShape:
    """Settings that decide the order of a step's work, and seconds that belong to no unit.

    Attributes:
        has_sharded_params: whether parameters are released after use.
        is_added_by_tier: whether an offload tier sums the gradients of the micro-steps.
        is_in_backward: whether the host updates in backward without an undo log.
        undo_share: share of the host's elements whose update in backward fits the undo log.
        agree: resource and seconds of the small all-reduce of [Note: one step].
        num_together: micro-batches that pass through a unit before the next unit.
        waiting: units updated after that all-reduce although the undo log has room for them.
    """

    micro_steps: int
    last_block: int
    is_accelerated: bool
    threads: int
    has_peers: bool = False
    is_gathered: bool = False
    has_sharded_params: bool = False
    is_added_by_tier: bool = False
    is_in_backward: bool = False
    undo_share: float = 0.0
    agree: tuple[str, float] = ("main", 0.0)
    device_update_s: float = 0.0
    per_step_s: float = 0.0
    num_together: int = 1
    tied_down_s: float = 0.0
    tied_up_s: float = 0.0
    waiting: frozenset[int] = frozenset()


@dataclass
class Prediction:
    """Step times of one configuration, for any share of its optimizer state on the host."""

    layout: Layout
    config: Config
    forecast: Forecast
    links: Links
    rates: Rates
    trace: Trace

    def __post_init__(self) -> None:
        self._spans = {s.index: (low, stop) for low, stop, s in self.forecast.spans}
        self._is_accelerated = self.rates.cores is None
        self._stage = self.config.zero_optimization.stage
        self._has_peers = self.layout.world_size > 1

    def _transfer(self, verb: str, calls: Sequence[tuple[int, int]]) -> Transfer:
        if not self._has_peers:
            return Transfer()
        near = sum(self.rates.seconds([f"{verb}.within"], near) for near, _ in calls)
        far = busy = 0.0
        for _, nbytes in calls:
            if nbytes:
                far += self.rates.seconds([f"{verb}.between"], nbytes)
                if f"{verb}.between.cpu" in self.rates.curves:
                    busy += self.rates.seconds([f"{verb}.between.cpu"], nbytes)
        if self._is_accelerated:
            return Transfer(near + far)
        return Transfer(far, near, busy / far if far else 0.0)

    def _host_numel(self, segment: Segment, ratio: float) -> int:
        tier = self.forecast.tier
        if tier is None:
            return 0
        low, stop = self._spans[segment.index]
        first, last = tier.device_span(ratio)
        return stop - low - max(min(stop, last) - max(low, first), 0)

    def _unit_time(
        self, unit: UnitLayout, forward_s: float, backward_s: float, ratio: float, file_bytes: float
    ) -> UnitTime:
        config, links, footprint = self.config, self.links, self.forecast.collectives
        trainable = [s for s in unit.segments if s.is_trainable]
        renew: list[tuple[int, int]] = []
        gather: list[tuple[int, int]] = []
        fetched = 0
        for segment in unit.segments:
            if not num_gathers(segment, self.layout, config):
                continue
            anew, each = gather_calls(segment, links, footprint)
            renew, gather = renew + anew, gather + each
            if segment in self.forecast.resting:
                fetched += segment.shard_numel * segment.dtype.itemsize
        reduce = [c for s in trainable for c in reduction_calls(s, config, links, footprint)[0]]
        sums = [
            links.gather(s.shard_numel * accumulated_dtype(s, config).itemsize)
            for s in (trainable if self._stage == 0 else ())
        ]
        # Autograd's gradient is copied into the unit's buffer. The reduced gradient is read for its
        # norm.
        written = 0
        for segment in trainable:
            plan = self.forecast.gradients[segment.index]
            own = plan.accumulated if plan.case is GradientCase.ALONE else plan.communicated
            written += segment.padded_numel * (segment.dtype.itemsize + own.itemsize)
            written += segment.shard_numel * accumulated_dtype(segment, config).itemsize
        host = [(s, self._host_numel(s, ratio)) for s in trainable]
        numel = sum(n for _, n in host)
        gradients = self.forecast.gradients
        down = sum(n * gradients[s.index].offered.itemsize for s, n in host)
        up = sum(n * s.dtype.itemsize for s, n in host if s not in self.forecast.resting)
        state = file_bytes * numel
        host_s = self._update_s("host", host)
        inputs = sum(self.trace.moved.get(unit.index, ())) if config.has_inputs_on_host else 0
        return UnitTime(
            forward_s=forward_s,
            backward_s=backward_s + self.rates.seconds([f"memory.{_WIDE}"], written),
            renew=self._transfer("gather", renew),
            gather=self._transfer("gather", gather),
            reduce=self._transfer("reduce", reduce),
            sums=self._transfer("gather", sums),
            host_s=host_s,
            undo_s=host_s * _UNDO_COST,
            down_s=self._copy_s("to_host", down),
            up_s=self._copy_s("to_device", up),
            fetch_s=self._copy_s("to_device", fetched),
            read_s=self.rates.seconds(["file.read"], state) if state else 0.0,
            write_s=self.rates.seconds(["file.write"], state) if state else 0.0,
            inputs_down_s=self._copy_s("to_host", inputs),
            inputs_up_s=self._copy_s("to_device", inputs),
        )

    def _copy_s(self, way: str, nbytes: int) -> float:
        if not self._is_accelerated or not nbytes:
            return 0.0
        return self.rates.seconds([f"copy.{way}"], nbytes)

    def _update_s(self, place: str, parts: Sequence[tuple[Segment, int]]) -> float:
        optimizer = self.config.optimizer
        kind = "adamw" if optimizer is None else optimizer.type.lower()
        state = self.config.zero_optimization.offload_optimizer.state_dtype
        found = 0.0
        for segment, numel in parts:
            dtype = str(segment.dtype).removeprefix("torch.")
            ends = [f"{kind}.{dtype}", dtype, _WIDE]
            if place == "host" and state != _WIDE:
                ends = [f"{dtype}.{state}", f"{_WIDE}.{state}", *ends]
            if numel:
                found += self.rates.seconds([f"update.{place}.{end}" for end in ends], numel)
        return found

    def _shape(self, ratio: float) -> StepShape:
        trainable = [s for s in self.layout.segments if s.is_trainable]
        own = []
        for segment in trainable:
            low, stop = self._spans[segment.index]
            own.append((segment, stop - low - self._host_numel(segment, ratio)))
        num_params, num_units = len(self.layout.params), len(self.layout.units)
        nbytes = facts_nbytes(num_params, num_units, arithmetic_of(self.config))
        way = "between" if self.links.num_nodes > 1 else "within"
        agree_s = self.rates.seconds([f"agree.{way}"], nbytes) if self._has_peers else 0.0
        steps = self.config.gradient_accumulation_steps
        tied = sum(self.forecast.tied) if self.config.has_inputs_on_host else 0
        tier = self.forecast.tier
        return StepShape(
            micro_steps=steps,
            last_block=self.layout.last_block,
            is_accelerated=self._is_accelerated,
            threads=self.rates.threads,
            has_peers=self._has_peers,
            is_gathered=(self._has_peers and self._stage > 0) or bool(self.forecast.resting),
            has_sharded_params=self._stage == 3,
            is_added_by_tier=self.forecast.num_added > 1,
            is_in_backward=updates_in_backward(self.config),
            undo_share=tier.undo_share(ratio) if tier and may_speculate(self.config) else 0.0,
            agree=("link" if self._is_accelerated else "main", agree_s),
            device_update_s=self._update_s("device", own),
            per_step_s=self.rates.seconds(["step"], 1),
            num_together=steps if self.config.is_vertical else 1,
            tied_down_s=self._copy_s("to_host", tied),
            tied_up_s=self._copy_s("to_device", tied),
        )

    def at(self, ratio: float) -> StepTime:
        """Return the time of a step with the share ``ratio`` of the optimizer state on the host."""
        forward = {u: self.rates.pass_s(p) for u, p in self.trace.forward.items()}
        total = sum(forward.values())
        backward = self.trace.backward
        backward_s = 2 * total if backward is None else self.rates.pass_s(backward)
        per_pass = self.rates.seconds(["pass"], 1)
        # With NVMe offload an update reads and writes each element's states in a file.
        file_bytes = 0.0
        tier = self.forecast.tier
        if tier is not None and (in_file := tier.file_bytes(ratio)):
            file_bytes = in_file / sum(self._host_numel(s, ratio) for *_, s in self.forecast.spans)
        units = []
        for unit in self.layout.units:
            own = forward.get(unit.index, 0.0)
            is_block = 0 < unit.index <= self.layout.last_block
            again = own if self.config.is_recomputed and is_block else 0.0
            share = own / total if total else 0.0
            back = backward_s * share + again + per_pass
            units.append(self._unit_time(unit, own + per_pass, back, ratio, file_bytes))
        shape = self._shape(ratio)
        cores = None if self.rates.cores is None else self.rates.cores / self.rates.ranks
        program = run_steps(shape, units, cores)
        start, stop = program.ends[-2].stop, program.ends[-1].stop
        spans = sorted(
            (
                Span(w.lane, w.what, max(w.start - start, 0.0), min(w.stop, stop) - start)
                for w in program.schedule.work
                if w.stop > start and w.start < stop and w.seconds
            ),
            key=lambda span: (span.start_s, span.lane),
        )
        lanes = dict.fromkeys(LANES, 0.0)
        for work in program.last:
            lanes[work.lane] += work.seconds
        return StepTime(stop - start, lanes, self.config.train_batch_size, tuple(spans))


def run_steps(shape: StepShape, units: Sequence[UnitTime], cores: float | None) -> StepProgram:
    """Simulate `NUM_STEPS` steps.

    An update before the step's decision is void if the host has not begun it by that time. The
    simulation is then repeated with the unit's update after the decision, without an undo log.
    """
    while True:
        program = StepProgram(shape, units, Schedule(cores))
        for _ in range(NUM_STEPS):
            program.step()
        program.schedule.run()
        decided = program.decided
        void = {unit for unit, work in program.ahead.items() if work.start >= decided.stop}
        if not void:
            return program
        shape = replace(shape, waiting=shape.waiting | void)


class StepProgram:
    """Simulation of the engine's program, one step per call of `step`. See [Note: one step].

    For each step, ``ends`` has the computing thread's final work. Three attributes describe the
    newest step: ``last`` is all its work, ``decided`` is the all-reduce that decides whether it is
    taken, and ``ahead`` has the updates before that decision, by unit.
    """

    decided: Work

    def __init__(self, shape: StepShape, units: Sequence[UnitTime], schedule: Schedule) -> None:
        self._shape = shape
        self._units = units
        self._cores = 0.0 if shape.is_accelerated else float(shape.threads)
        self.schedule = schedule
        self.ends: list[Work] = []
        self.last: list[Work] = []
        self.ahead: dict[int, Work] = {}
        self._now: Work | None = None  # last work of the computing thread
        self._begun: dict[int, Work] = {}  # updates before the decision, by unit
        self._published: dict[int, Work] = {}  # units' new values from the host
        self._stored: dict[int, Work] = {}  # copies of block inputs to the host
        self._tied: Work | None = None  # copy of tied gradients to the host
        self._gathers: dict[int, Work | None] = {}  # launched gathers that nothing has waited for
        # Unit whose reduction is in flight, and whether its gradient is complete.
        self._in_flight: tuple[int, bool] | None = None
        self._reduction: Work | None = None
        self._reduced: dict[int, Work | None] = {}

    def step(self) -> None:
        shape, first = self._shape, len(self.schedule.work)
        self._reduced.clear()
        num_passes = shape.micro_steps // shape.num_together
        for number in range(num_passes):
            self._forward(is_first=number == 0)
            self._backward(is_last=number == num_passes - 1)
        agreed = self.decided = self._agree()
        self.ahead = dict(self._begun)
        if not shape.is_in_backward:
            for unit in reversed(range(len(self._units))):
                if unit in self._begun:
                    self._publish(unit, [self._begun.pop(unit), agreed])
                else:
                    self._update_on_host(unit, agreed)
        self.ends.append(self._compute("update", shape.device_update_s + shape.per_step_s))
        self.last = self.schedule.work[first:]

    def _compute(
        self, what: str, seconds: float, after: Sequence[Work | None] = (), lane: str = "compute"
    ) -> Work:
        awaited = [self._now, *after]
        self._now = self.schedule.add("main", lane, what, seconds, awaited, cores=self._cores)
        return self._now

    def _exchange(
        self, lane: str, what: str, transfer: Transfer, after: Work | None
    ) -> Work | None:
        seconds, _, cores = transfer
        if not seconds:
            return None
        return self.schedule.add("link", lane, what, seconds, [self._now, after], cores=cores)

    def _launch_gather(self, unit: int, *, is_new: bool) -> None:
        if unit in self._gathers:
            return
        time, ready = self._units[unit], self._published.get(unit)
        if time.fetch_s:
            ready = self.schedule.add(
                "up", "copies", f"unit {unit}", time.fetch_s, [self._now, ready]
            )
        what = f"unit {unit}"
        if is_new:
            ready = self._exchange("gather", what, time.renew, ready) or ready
        self._gathers[unit] = self._exchange("gather", what, time.gather, ready) or ready

    def _wait_gather(self, unit: int, *, is_new: bool) -> None:
        time, arrived = self._units[unit], self._gathers.pop(unit, None)
        copied = time.gather.main_s + (time.renew.main_s if is_new else 0.0)
        if arrived is not None or copied:
            self._compute(f"unit {unit}", copied, [arrived], "gather")

    def _forward(self, *, is_first: bool) -> None:
        shape = self._shape
        has_gathers = shape.is_gathered and (is_first or shape.has_sharded_params)
        for unit in range(len(self._units)):
            ahead = [unit] if unit else [0, 1][: len(self._units)]
            for other in ahead if has_gathers else ():
                self._launch_gather(other, is_new=is_first)
            if has_gathers:
                self._wait_gather(unit, is_new=is_first)
                if 0 < unit < len(self._units) - 1:
                    self._launch_gather(unit + 1, is_new=is_first)
            if moved_s := shape.num_together * self._units[unit].inputs_down_s:
                self._stored[unit] = self.schedule.add(
                    "down", "copies", f"inputs of unit {unit}", moved_s, [self._now]
                )
            published = self._published.get(unit) if is_first else None
            seconds = shape.num_together * self._units[unit].forward_s
            self._compute(f"forward of unit {unit}", seconds, [published])

    def _backward(self, *, is_last: bool) -> None:
        shape = self._shape
        is_sharded = shape.is_gathered and shape.has_sharded_params
        if tied_s := shape.num_together * shape.tied_down_s:
            self._tied = self.schedule.add("down", "copies", "tied gradients", tied_s, [self._now])
        arrived = self._fetch_inputs(len(self._units) - 1)
        for unit in reversed(range(len(self._units))):
            if is_sharded and 0 < unit < shape.last_block:
                self._launch_gather(unit, is_new=False)
                self._wait_gather(unit, is_new=False)
                if unit > 1:
                    self._launch_gather(unit - 1, is_new=False)
            elif is_sharded and unit == shape.last_block and unit > 1:
                self._launch_gather(unit - 1, is_new=False)
            for number in range(shape.num_together):
                is_units_last = number == shape.num_together - 1
                ahead = self._fetch_inputs(unit - 1 if is_units_last else unit)
                self._compute(f"backward of unit {unit}", self._units[unit].backward_s, [arrived])
                self._reduce(unit, is_last=is_last and is_units_last)
                arrived = ahead
        self._finish_reduction()

    def _fetch_inputs(self, unit: int) -> Work | None:
        seconds = 0.0 if unit < 0 else self._units[unit].inputs_up_s
        seconds += 0.0 if unit else self._shape.tied_up_s
        if not seconds:
            return None
        ready = [self._now, self._stored.get(unit) if unit else self._tied]
        return self.schedule.add("up", "copies", f"inputs of unit {unit}", seconds, ready)

    def _reduce(self, unit: int, *, is_last: bool) -> None:
        shape = self._shape
        if not (shape.has_peers or is_last or shape.is_added_by_tier):
            return
        self._finish_reduction()
        self._in_flight = unit, is_last
        self._reduction = self._exchange("reduce", f"unit {unit}", self._units[unit].reduce, None)
        if not shape.has_peers:
            self._finish_reduction()

    def _finish_reduction(self) -> None:
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        unit, is_last = in_flight
        time, arrived, self._reduction = self._units[unit], self._reduction, None
        if arrived is not None or time.reduce.main_s:
            self._compute(f"unit {unit}", time.reduce.main_s, [arrived], "reduce")
        if is_last:
            sums = self._exchange("reduce", f"sums of unit {unit}", time.sums, None)
            if time.sums.main_s:
                self._compute(f"sums of unit {unit}", time.sums.main_s, [], "reduce")
            self._reduced[unit] = sums or self._now
            if time.down_s:
                self._reduced[unit] = self.schedule.add(
                    "down", "copies", f"unit {unit}", time.down_s, [self._reduced[unit]]
                )
            if self._shape.is_in_backward:
                self._update_on_host(unit, None)
            else:
                self._begin_update(unit)

    def _agree(self) -> Work:
        place, seconds = self._shape.agree
        if not seconds:
            assert self._now is not None, "there was a forward"
            return self._now
        awaited = [work for work in self._reduced.values() if work is not None]
        if place == "main":
            return self._compute("agreement", seconds, awaited, "reduce")
        agreed = self.schedule.add("link", "reduce", "agreement", seconds, [self._now, *awaited])
        return self._compute("agreement", 0.0, [agreed], "reduce")

    def _update_on_host(self, unit: int, agreed: Work | None) -> None:
        time, add, what = self._units[unit], self.schedule.add, f"unit {unit}"
        if not time.host_s:
            return
        ready = [self._reduced.get(unit), agreed]
        if time.read_s:
            ready.append(add("file", "file", what, time.read_s, ready, need=unit))
        updated = add("host", "host", what, time.host_s, ready, cores=self._cores, need=unit)
        if time.write_s:
            add("file", "file", what, time.write_s, [updated], need=unit)
        self._publish(unit, [updated])

    def _begin_update(self, unit: int) -> None:
        shape, time = self._shape, self._units[unit]
        room = shape.undo_share * sum(other.host_s for other in self._units)
        begun = sum(self._units[other].host_s for other in self._begun)
        if not time.host_s or unit in shape.waiting or begun + time.host_s > room * (1 + 1e-9):
            return
        what, seconds, ready = f"unit {unit}", time.host_s + time.undo_s, [self._reduced.get(unit)]
        self._begun[unit] = self.schedule.add(
            "host", "host", what, seconds, ready, cores=self._cores, need=unit
        )

    def _publish(self, unit: int, ready: list[Work | None]) -> None:
        seconds = self._units[unit].up_s
        if seconds or len(ready) > 1:
            self._published[unit] = self.schedule.add(
                "up", "copies", f"unit {unit}", seconds, ready, need=unit
            )
        else:
            (self._published[unit],) = [work for work in ready if work is not None]
