"""Length of a step with offload in virtual time: no accelerator, nothing is measured.

The engine and zero-offload's tiers run for real, a small model on the CPU with one rank. Only
streams, events and the host's thread are simulated: they advance clocks by given times
(`zero_offload.testing.virtual_time`). A row's step is the time from one backward's end to the next,
in steady state.

[Note: bounds]
Of seconds for all parameters, ``r`` is the host's ratio.

in backward         units are updated while backward goes on: max(forward + backward + (1 - r)
                    update on the device, r host, r link each way)
after the decision  with clipping no update may begin before backward ends, and no block may be
                    computed before its update: max(backward, r link) + max(forward + (1 - r)
                    update on the device, r host, r link)

with an undo log    clipping is on and no step is clipped: units are updated while backward goes
                    on, and published after the decision: the larger of the first bound and
                    max(backward, r link) + max(forward + (1 - r) update on the device, r link).
                    What the log takes of the host's time (``undo_s``) is in no bound
every step clipped  the same, but each update is undone and done again: the second bound

The **tail** is the time per step in which the resource that sets the bound is idle, less what no
order of updates could fill: where the host sets it, the last unit's forward, and in backward its
backward too, as they lie between the last update and the first gradient.

[Note: model]
Equal blocks between a small embedding and a small head. The caller takes `LAUNCH_S` per block and
pass, and waits for the device once per step, before the decision. A chunk is to a block as 2^24
elements are to a block of the 10.3 B parameters; with random times an eighth of a block, in the
comparisons with auto a quarter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, cast

import torch
import typer
from torch import Tensor, nn, optim

import zero_core
from benchmarks.harness.options import RESULTS, Output, of
from benchmarks.harness.ranks import Row
from benchmarks.harness.report import MS, Axes, Column, Panel, Section, judged, publish
from zero_offload.flat.geometry import Geometry, freeze_groups
from zero_offload.flat.grads import GradLedger
from zero_offload.flat.intervals import Intervals
from zero_offload.memory.host_memory import HostMemory
from zero_offload.memory.ring import HostRing
from zero_offload.protocols import Groups, OptimizerClass, ParamStore
from zero_offload.rules.plain import AdamRule
from zero_offload.settings import OffloadSettings
from zero_offload.steppers.memory_stepper import MemoryStepper
from zero_offload.steppers.stepper import Chunk
from zero_offload.steppers.undo import Record
from zero_offload.testing.virtual_time import (
    Span,
    VirtualStream,
    VirtualStreams,
    VirtualThread,
    VirtualTime,
)
from zero_offload.tier import make_device_tier, make_twin
from zero_offload.tiers.auto_tier import AutoTier
from zero_offload.tiers.clock import DeviceClock
from zero_offload.tiers.factory import OffloadTiers
from zero_offload.tiers.flat_tier import DeviceTier, HostTier
from zero_offload.tiers.share import host_share
from zero_offload.tiers.transfer import DeviceMover, HostMover
from zero_offload.tiers.twin import TwinTier

Mode = Literal["in backward", "after the decision", "with an undo log", "every step clipped"]
MODES: tuple[Mode, ...] = (
    "in backward",
    "after the decision",
    "with an undo log",
    "every step clipped",
)
PLAIN: tuple[Mode, ...] = MODES[:2]
CPU = torch.device("cpu")
CHUNK_NUMEL = 64
ROOT_NUMEL = 16
LAUNCH_S = 0.5e-3
WARM_STEPS = 2
MOST_AUTO_STEPS = 80
BAR, TAIL_BAR_S = 1.05, 0.020
LANES = ("compute", "down", "host", "up")


@dataclass(frozen=True)
class Times:
    """Seconds for all parameters: passes, link each way, host's and device's update. Blocks."""

    forward_s: float = 0.36
    backward_s: float = 1.07
    link_s: float = 0.41
    host_s: float = 2.9
    device_s: float = 0.07
    blocks: int = 50
    undo_s: float = 0.0
    """Host's copies of all states to an undo log."""

    def bound_s(self, mode: Mode, ratio: float) -> float:
        """Return the least length of a step, see [Note: bounds]."""
        link, host, rest = ratio * self.link_s, ratio * self.host_s, (1 - ratio) * self.device_s
        early = max(self.forward_s + self.backward_s + rest, host, link)
        if mode == "in backward":
            return early
        decided = max(self.backward_s, link)
        if mode == "with an undo log":
            return max(early, decided + max(self.forward_s + rest, link))
        return decided + max(self.forward_s + rest, host, link)

    def last_unit_s(self, mode: Mode, ratio: float) -> float:
        """Return the part of the idle time that no order of updates could fill."""
        is_early = mode in ("in backward", "with an undo log")
        passes = self.forward_s + (self.backward_s if is_early else 0.0)
        rest = (1 - ratio) * self.device_s
        is_host = ratio * self.host_s > max(passes + rest, ratio * self.link_s)
        return passes / self.blocks if is_host else 0.0


@dataclass(frozen=True)
class Variant:
    """A schedule: today's, or with a part of it as it was before."""

    end: str = "last"
    """The host's end of the model."""
    is_fifo: bool = False
    """Updates in the order of arrival."""
    is_hasty: bool = False
    """The caller lets the stream up wait, before the copies of earlier steps are enqueued."""


TODAY = Variant()
BEFORE = {
    "as before": Variant("first", is_fifo=True, is_hasty=True),
    "host has the first blocks": Variant("first"),
    "updates in order of arrival": Variant(is_fifo=True),
    "caller makes up wait": Variant(is_hasty=True),
}


class _Kernel:
    """An Adam kernel that computes nothing: its calls take time on a lane."""

    def __init__(self, stream: VirtualStream | VirtualTime, element_s: float) -> None:
        self._stream = stream
        self._element_s = element_s

    def adam_step(self, master: Tensor, *args: Any, **kwargs: Any) -> None:
        seconds = master.numel() * self._element_s
        if isinstance(self._stream, VirtualTime):
            self._stream.work("host", "update", seconds)
        else:
            self._stream.enqueue("update", seconds)


class _HastyStreams(VirtualStreams):
    """The caller makes up wait at once for what it has enqueued."""

    def __init__(self, thread: VirtualThread, *args: Any) -> None:
        super().__init__(*args)
        self._thread = thread

    def mark_readers(self) -> torch.Event:
        self._thread.catch_up()
        readers = super().mark_readers()
        super().follow(readers)
        return readers

    def follow(self, event: torch.Event) -> None:
        """Up waits already."""


class _Clock(DeviceClock):
    """A clock of the virtual compute stream."""

    def __init__(self, compute: VirtualStream) -> None:
        super().__init__(CPU)
        self._compute = compute

    def mark(self) -> torch.Event:
        event: torch.Event = self._compute.record_event()
        return event


class _Tiers(OffloadTiers):
    """Tiers whose streams, kernels, thread and clock are the simulation's."""

    def __init__(self, job: Job, geometry: Geometry, **arguments: Any) -> None:
        super().__init__(geometry, **arguments)
        self._job = job

    def make_clock(self) -> DeviceClock:
        return _Clock(self._job.compute)

    def make_host(self, part: Geometry, share: Intervals, groups: Groups) -> HostTier:
        job, times = self._job, self._job.times
        thread, copy_s = VirtualThread(job.time), times.link_s / job.numel
        streams: VirtualStreams
        if job.variant.is_hasty:
            streams = _HastyStreams(thread, job.compute, copy_s, copy_s)
        else:
            streams = VirtualStreams(job.compute, copy_s, copy_s)
        mover = HostMover(part, CPU, HostMemory(should_pin=False), streams=streams, is_staged=True)
        kernel = _Kernel(job.time, times.host_s / job.numel)
        frozen = freeze_groups(groups)
        stepper = _LoggingStepper(
            job, part, _rule(kernel), frozen, is_in_place=False, upper=mover.hold
        )
        stepper.is_sequential = job.variant.is_fifo
        return HostTier(part, stepper, mover, thread)

    def make_device(self, part: Geometry, share: Intervals, groups: Groups) -> DeviceTier:
        kernel = _Kernel(self._job.compute, self._job.times.device_s / self._job.numel)
        frozen = freeze_groups(groups)
        stepper = MemoryStepper(part, _rule(kernel), frozen, is_in_place=False, upper=part.view)
        return DeviceTier(part, stepper, DeviceMover(part, CPU))


class _LoggingStepper(MemoryStepper):
    """A stepper whose copies to the undo log take time on the host's lane."""

    def __init__(self, job: Job, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._job = job

    def update_tentatively(
        self, chunk: Chunk, grads: GradLedger, grad_scale: float, ring: HostRing
    ) -> Record | None:
        job, numel = self._job, sum(run.stop - run.start for run in chunk.runs)
        job.time.work("host", "log", numel * job.times.undo_s / job.numel)
        return super().update_tentatively(chunk, grads, grad_scale, ring)


def _rule(kernel: _Kernel) -> AdamRule:
    return AdamRule.of(cast(Any, kernel), optim.AdamW)


class _Pass(torch.autograd.Function):
    """The identity, which takes time in both passes and gives its weight a constant gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, job: Job) -> Tensor:
        ctx.job, ctx.shape, ctx.dtype = job, weight.shape, weight.dtype
        job.launch("forward", job.times.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.job.launch("backward", ctx.job.times.backward_s)
        is_clipped = ctx.job.mode == "every step clipped"
        return grads[0], torch.full(ctx.shape, float(is_clipped), dtype=ctx.dtype), None


class _Block(nn.Module):
    def __init__(self, job: Job, numel: int) -> None:
        super().__init__()
        self.job = job
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Pass.apply(x, self.weight, self.job))  # type: ignore[no-untyped-call]


class _Model(nn.Module):
    def __init__(self, job: Job, block_numel: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(ROOT_NUMEL))
        self.blocks = nn.ModuleList(_Block(job, block_numel) for _ in range(job.times.blocks))
        self.head = nn.Parameter(torch.zeros(ROOT_NUMEL))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.embedding
        for block in self.blocks:
            x = block(x)
        return (x * self.head).sum()


@dataclass
class Job:
    """One training in virtual time.

    Attributes:
        ends: when each step's backward ended, on the device.
    """

    times: Times
    mode: Mode
    ratio: float | Literal["auto"]
    variant: Variant = TODAY
    chunks_per_block: float = 12.28
    time: VirtualTime = field(default_factory=VirtualTime)
    ends: list[float] = field(default_factory=list)
    numel: int = 0

    def __post_init__(self) -> None:
        self.compute = VirtualStream(self.time, "compute")
        model = _Model(self, round(self.chunks_per_block * CHUNK_NUMEL))
        self.numel = sum(p.numel() for p in model.parameters())
        block: dict[str, Any] = {
            "device": "cpu",
            "ratio": self.ratio,
            "host_share": self.variant.end,
            "update_in_backward": self.mode != "after the decision",
        }
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "bf16": {"enabled": True},
            "check_grad_overflow": False,
            "gradient_clipping": 0.0 if self.mode == "in backward" else 1.0,
            "zero_optimization": {"stage": 1, "offload_optimizer": block},
        }
        self._engine = zero_core.build(model, config, state_tier=self._make_tier)

    def _make_tier(
        self,
        *,
        numel: int,
        pieces: Sequence[tuple[int, int, int]],
        params: Sequence[tuple[int, Tensor]],
        device: torch.device,
        optimizer_class: OptimizerClass,
        groups: Groups,
        config: Mapping[str, Any],
        adam_kernel: Any,
        device_tier: Any,
        names: Sequence[str] = (),
        param_store: ParamStore | None = None,
    ) -> TwinTier:
        settings = OffloadSettings.from_config(config)
        geometry = Geometry(numel, pieces, params, len(groups), published_numel=CHUNK_NUMEL)
        tiers = _Tiers(
            self,
            geometry,
            settings=settings,
            device=device,
            optimizer_class=optimizer_class,
            groups=groups,
            adam_kernel=None,
            device_tier=make_device_tier,
        )
        host = host_share(settings, geometry, names, optimizer_class, groups, is_accelerated=False)
        self.tier = make_twin(geometry, host, groups, tiers)
        return self.tier

    def launch(self, what: str, seconds: float) -> None:
        """Enqueue a block's share of a pass."""
        self.time.caller += LAUNCH_S
        self.compute.enqueue(what, seconds / self.times.blocks)

    def step(self) -> None:
        """Train one step."""
        loss = self._engine(torch.zeros(ROOT_NUMEL, dtype=torch.bfloat16))
        self._engine.backward(loss)
        self.time.caller = max(self.time.caller, self.compute.end)
        self.ends.append(self.compute.end)
        self._engine.step()
        recent = self.ends[-3:][0]
        self.time.spans = [span for span in self.time.spans if span.stop > recent]

    def run(self) -> float:
        """Train until the step's length is steady, and return it."""
        for _ in range(WARM_STEPS + 1):
            self.step()
        return self.ends[-1] - self.ends[-2]

    def settle(self) -> float:
        """Train until ``"auto"`` has settled, and return the ratio."""
        tier = self.tier
        assert isinstance(tier, AutoTier)
        while tier.ratio_report is None:
            if len(self.ends) > MOST_AUTO_STEPS:
                raise AssertionError(f"no ratio after {MOST_AUTO_STEPS} steps")
            self.step()
        return tier.ratio_report.ratio

    def lanes(self) -> list[Span]:
        """Return what each lane did in the last step but one, from its backward's end on."""
        start, stop = self.ends[-3], self.ends[-2]
        inside = (s for s in self.time.spans if s.stop > start and s.start < stop)
        return [Span(s.lane, s.what, s.start - start, s.stop - start) for s in inside]


def _row(times: Times, mode: Mode, ratio: float, step_s: float, **more: Any) -> Row:
    bound_s = times.bound_s(mode, ratio)
    return {
        "mode": mode,
        "ratio": ratio,
        "step_s": step_s,
        "bound_s": bound_s,
        "over_bound": step_s / bound_s,
        "tail_s": step_s - bound_s - times.last_unit_s(mode, ratio),
        **more,
    }


def fixed_rows(lanes: dict[str, list[Span]]) -> Iterator[Row]:
    """Yield steps at ratios 1 and 0.4 as they are, and at 1 and 0.4 as they were in backward."""
    times = Times()
    for mode in MODES:
        for ratio in (1.0, 0.4):
            job = Job(times, mode, ratio)
            row = _row(times, mode, ratio, job.run(), case=f"{mode}, ratio {ratio}")
            is_met = row["over_bound"] <= BAR and row["tail_s"] <= TAIL_BAR_S
            lanes[row["case"]] = job.lanes()
            yield {**row, "is_met": is_met}
    for name, variant in BEFORE.items():
        for ratio in (1.0, 0.4):
            job = Job(times, "in backward", ratio, variant)
            case = f"{name}, ratio {ratio}"
            yield _row(times, "in backward", ratio, job.run(), case=case, is_met=None)
            if ratio == 1.0 and name == next(iter(BEFORE)):
                lanes[case] = job.lanes()


def auto_rows() -> Iterator[Row]:
    """Yield the step at the ratio that ``"auto"`` finds, beside the best of fixed ones."""
    for mode in PLAIN:
        yield _auto_row(Times(), mode, f"auto, {mode}")


def _auto_row(times: Times, mode: Mode, case: str) -> Row:
    def step_s(ratio: float) -> float:
        return Job(times, mode, ratio, chunks_per_block=4).run()

    ratio = Job(times, mode, "auto", chunks_per_block=4).settle()
    best_s, best = min((step_s(eighth / 8), eighth / 8) for eighth in range(9))
    found_s = step_s(ratio)
    row = _row(times, mode, ratio, found_s, case=case, best_ratio=best, best_s=best_s)
    return {**row, "over_best": found_s / best_s, "is_met": found_s <= BAR * best_s}


def random_times(count: int) -> list[Times]:
    """Return random times: a link no slower than backward, a host from fast to slow."""
    draw = random.Random(18)
    found = []
    for _ in range(count):
        forward_s = 10 ** draw.uniform(-1, 0)
        backward_s = forward_s * draw.uniform(2, 3.3)
        both = forward_s + backward_s
        found.append(
            Times(
                forward_s=forward_s,
                backward_s=backward_s,
                link_s=backward_s * draw.uniform(0.05, 0.9),
                host_s=both * 10 ** draw.uniform(-0.5, 0.6),
                device_s=both * draw.uniform(0.01, 0.15),
                blocks=draw.choice((24, 32, 48, 64)),
            )
        )
    return found


def random_rows(count: int, *, has_auto: bool) -> Iterator[Row]:
    """Yield steps at ratios 1 and 0.4, or at that of ``"auto"``, for random times."""
    for number, times in enumerate(random_times(count)):
        for mode in PLAIN:
            more: Row = {"case": f"{number}, {mode}", **asdict(times)}
            if has_auto:
                yield {**more, **_auto_row(times, mode, more["case"])}
                continue
            for ratio in (1.0, 0.4):
                step_s = Job(times, mode, ratio, chunks_per_block=8).run()
                row = _row(times, mode, ratio, step_s)
                yield {**more, **row, "is_met": row["over_bound"] <= BAR}


PARTS = ("fixed", "auto", "random", "random_auto")


def main(
    only: Annotated[list[str] | None, of(PARTS)] = None,
    draws: Annotated[int, typer.Option(min=1, help="Random times.")] = 100,
    auto_draws: Annotated[int, typer.Option(min=1, help="Of these with auto.")] = 25,
    output: Output = RESULTS,
) -> None:
    """Simulate, write ``schedule.json`` and ``schedule.png``, print a table per part."""
    lanes: dict[str, list[Span]] = {}
    made: dict[str, Iterator[Row]] = {
        "fixed": fixed_rows(lanes),
        "auto": auto_rows(),
        "random": random_rows(draws, has_auto=False),
        "random_auto": random_rows(auto_draws, has_auto=True),
    }
    parts = {part: list(made[part]) for part in only or PARTS}
    report = {"times": asdict(Times()), "launch_s": LAUNCH_S, "parts": parts}
    publish(output, "schedule", report, list(sections(parts, lanes)))


def sections(
    parts: Mapping[str, Sequence[Row]], lanes: Mapping[str, Sequence[Span]]
) -> Iterator[Section]:
    """Yield a table per part: all fixed rows, the worst of the random ones."""
    columns = [
        Column("step s", "step_s", ".3f"),
        Column("bound s", "bound_s", ".3f"),
        Column("of bound", lambda row: judged(row["over_bound"], ".3f", row["is_met"])),
        Column("tail ms", "tail_s", ".1f", MS),
    ]
    if "fixed" in parts:
        panels: list[Panel] = [_lane_panel(case, spans) for case, spans in lanes.items()]
        rows = {row["case"]: row for row in parts["fixed"]}
        yield Section("steps in virtual time", rows, columns, heading="case", panels=panels)
    best = Column("of best", lambda row: judged(row["over_best"], ".3f", row["is_met"]))
    found = [Column("ratio", "ratio", ".3f"), Column("best ratio", "best_ratio", ".3f"), best]
    if "auto" in parts:
        rows = {row["case"]: row for row in parts["auto"]}
        yield Section("the ratio that auto finds", rows, [*found, *columns[:2]], heading="case")
    given = [
        Column(name.removesuffix("_s"), name, ".3f")
        for name in ("forward_s", "backward_s", "link_s", "host_s", "device_s")
    ]
    if "random" in parts:
        listed = sorted(parts["random"], key=lambda row: -float(row["over_bound"]))
        rows = {f"{row['case']}, ratio {row['ratio']}": row for row in listed[:5]}
        caption = _share_met(listed)
        yield Section(
            "random times, the worst", rows, [columns[2], *given], caption=caption, heading="draw"
        )
    if "random_auto" in parts:
        listed = sorted(parts["random_auto"], key=lambda row: -float(row["over_best"]))
        rows = {row["case"]: row for row in listed[:5]}
        caption = _share_met(listed)
        yield Section(
            "random times with auto, the worst",
            rows,
            [*found, *given],
            caption=caption,
            heading="draw",
        )


def _share_met(rows: Sequence[Row]) -> str:
    return f"{sum(bool(row['is_met']) for row in rows)} of {len(rows)} within {BAR}"


COLORS = {
    "forward": "tab:blue",
    "backward": "tab:orange",
    "update": "tab:green",
    "log": "tab:olive",
    "gradient": "tab:red",
    "parameters": "tab:purple",
}


def _lane_panel(case: str, spans: Sequence[Span]) -> Panel:
    def draw(axes: Axes) -> None:
        for what, color in COLORS.items():
            for place, lane in enumerate(LANES):
                bars = [
                    (s.start, s.stop - s.start) for s in spans if (s.lane, s.what) == (lane, what)
                ]
                axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=color)
        axes.set_yticks(range(len(LANES)), LANES)
        axes.invert_yaxis()
        axes.set_xlabel("seconds after the end of backward")

    return (case, 6, draw)
