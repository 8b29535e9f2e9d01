"""A training in virtual time: the engine and zero-offload's tiers under simulated clocks.

The engine and zero-offload's tiers really run, with a small model on one CPU rank. Only streams,
events and the host's thread are simulated. They advance clocks by given times
(`zero_offload.testing.virtual_time`). A step lasts from the end of one backward to the end of the
next, in steady state.

[Note: bounds]
Times are seconds for all parameters. ``r`` is the ratio, the host's share.

in backward         units are updated during backward: max(forward + backward + (1 - r) device
                    update, r host update, r link in each direction)
after the decision  with clipping, no update may begin before backward ends, and no block's forward
                    before its update: max(backward, r link) + max(forward + (1 - r) device update,
                    r host update, r link)
with an undo log    clipping is on and no step is clipped. Units are updated during backward and
                    published after the decision: the maximum of the first bound and
                    max(backward, r link) + max(forward + (1 - r) device update, r link). The log's
                    own time on the host (``log_s``, ``keep_s``) is not included
every step clipped  the same, but every update is undone and repeated: the second bound

[Note: model]
Equal blocks between an embedding and a head, which are small unless ``root`` is set. The calling
thread takes `LAUNCH_S` per block and pass, and waits for the device once per step, before the
decision. A chunk is to a block what 2^24 elements are to a block of the simulated model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn, optim

import zero_core
from zero_offload.flat.geometry import Geometry, Intervals, freeze_groups
from zero_offload.flat.grads import GradLedger
from zero_offload.memory.host_memory import HostMemory
from zero_offload.protocols import Groups, OptimizerClass, ParamStore, UploadCodec
from zero_offload.rules.rule import AdamRule
from zero_offload.settings import OffloadSettings
from zero_offload.steppers.memory_stepper import MemoryStepper, UndoLog, UndoMemory
from zero_offload.steppers.stepper import Chunk
from zero_offload.testing.virtual_time import (
    Span,
    VirtualStream,
    VirtualStreams,
    VirtualThread,
    VirtualTime,
)
from zero_offload.tier import make_device_tier, make_twin
from zero_offload.tiers.auto_tier import AutoTier
from zero_offload.tiers.factory import DeviceClock, OffloadTiers
from zero_offload.tiers.flat_tier import DeviceTier, HostTier
from zero_offload.tiers.shares import host_share
from zero_offload.tiers.twin import TwinTier
from zero_offload.transfers.mover import HostMover, Mover

Mode = Literal["in backward", "after the decision", "with an undo log", "every step clipped"]
MODES: tuple[Mode, ...] = (
    "in backward",
    "after the decision",
    "with an undo log",
    "every step clipped",
)
CPU = torch.device("cpu")
CHUNK_NUMEL = 64
EIGHT_BIT_CHUNK_NUMEL = 128
"""Must be at least one block of 8-bit codes."""
ROOT_NUMEL = 16
LAUNCH_S = 0.5e-3
WARM_STEPS = 2
MOST_AUTO_STEPS = 80
CLIPPED = 2.0
"""A gradient value whose norm exceeds the limit."""


@dataclass(frozen=True)
class Times:
    """Seconds for all parameters: passes, link in each direction, host and device update."""

    forward_s: float = 0.36
    backward_s: float = 1.07
    link_s: float = 0.41
    host_s: float = 2.9
    device_s: float = 0.07
    blocks: int = 50
    log_s: float = 0.0
    """The host's copies of all states to an undo log."""
    keep_s: float = 0.0
    """The host's work to publish all logged updates."""
    undo_s: float = 0.0
    """The host's copies back from the log."""
    term_s: float = 0.0
    """The update's reads of the gradients of one more micro-batch."""
    root: float = 0.0
    """Share of all parameters in the embedding, and the same in the head."""

    def bound_s(self, mode: Mode, ratio: float) -> float:
        """Return the least length of a step. See [Note: bounds]."""
        link, host, rest = ratio * self.link_s, ratio * self.host_s, (1 - ratio) * self.device_s
        early = max(self.forward_s + self.backward_s + rest, host, link)
        if mode == "in backward":
            return early
        decided = max(self.backward_s, link)
        if mode == "with an undo log":
            return max(early, decided + max(self.forward_s + rest, link))
        return decided + max(self.forward_s + rest, host, link)

    def last_unit_s(self, mode: Mode, ratio: float) -> float:
        """Return the idle time that no order of updates can avoid."""
        is_early = mode in ("in backward", "with an undo log")
        passes = self.forward_s + (self.backward_s if is_early else 0.0)
        rest = (1 - ratio) * self.device_s
        is_host = ratio * self.host_s > max(passes + rest, ratio * self.link_s)
        return passes / self.blocks if is_host else 0.0


@dataclass(frozen=True)
class Variant:
    """A schedule: the present one, or one with an earlier behaviour."""

    end: str = "last"
    """"first" or "last": the end of the model that the host updates."""
    is_fifo: bool = False
    """Whether updates run in the order of arrival."""
    is_hasty: bool = False
    """Whether the upload stream waits at once for all work that the caller has enqueued."""


TODAY = Variant()


class _Kernel:
    """An Adam kernel that computes nothing. Its calls take time on a lane.

    Args:
        element_s: seconds per updated element.
        term_s: seconds per element for each further gradient.
    """

    sums_grads = True

    def __init__(
        self, stream: VirtualStream | VirtualTime, element_s: float, term_s: float = 0.0
    ) -> None:
        self._stream = stream
        self._element_s = element_s
        self._term_s = term_s

    def adam_step(self, master: Tensor, grad: Any, *args: Any, **kwargs: Any) -> None:
        further = len(grad) - 1 if isinstance(grad, list) else 0
        seconds = master.numel() * (self._element_s + further * self._term_s)
        if isinstance(self._stream, VirtualTime):
            self._stream.work("host", "update", seconds)
        else:
            self._stream.enqueue("update", seconds)

    def adam_step_8bit(self, param: Tensor, grad: Any, *args: Any, **kwargs: Any) -> None:
        self.adam_step(param, grad)

    def grad_norm_sq(self, grads: Sequence[Tensor], **kwargs: Any) -> tuple[float, int]:
        """Return the squared norm of the sum of gradients. Takes no virtual time."""
        return float(sum(grads).square().sum()), 0  # type: ignore[union-attr]


class _HastyStreams(VirtualStreams):
    """Streams whose upload stream waits at once for all work that the caller has enqueued."""

    def __init__(self, thread: VirtualThread, *args: Any) -> None:
        super().__init__(*args)
        self._thread = thread

    def mark_readers(self) -> torch.Event:
        self._thread.catch_up()
        readers = super().mark_readers()
        super().follow(readers)
        return readers

    def follow(self, event: torch.Event) -> None:
        """Do nothing, because `mark_readers` already makes the upload stream wait."""


class _Clock(DeviceClock):
    def __init__(self, compute: VirtualStream) -> None:
        super().__init__(CPU)
        self._compute = compute

    def mark(self) -> torch.Event:
        event: torch.Event = self._compute.record_event()
        return event


class _Tiers(OffloadTiers):
    """Tiers with simulated streams, kernels, threads and clocks."""

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
        assert self.rule is not None, "there is a kernel"
        frozen = freeze_groups(groups)
        stepper = MemoryStepper(part, self.rule, frozen, is_in_place=False, upper=mover.hold)
        stepper.is_sequential = job.variant.is_fifo
        return _LoggingTier(job, part, stepper, mover, thread)

    def make_device(self, part: Geometry, share: Intervals, groups: Groups) -> DeviceTier:
        kernel = _Kernel(self._job.compute, self._job.times.device_s / self._job.numel)
        rule = AdamRule.of(cast(Any, kernel), optim.AdamW)
        frozen = freeze_groups(groups)
        stepper = MemoryStepper(part, rule, frozen, is_in_place=False, upper=part.view)
        return DeviceTier(part, stepper, Mover(part, CPU))


class _LoggingTier(HostTier):
    """A tier whose undo log takes time on the host's lane."""

    def __init__(self, job: Job, *args: Any) -> None:
        super().__init__(*args)
        self._job = job

    def enable_undo(self, most_bytes: int | None) -> None:
        super().enable_undo(most_bytes)
        stepper = self._stepper
        assert isinstance(stepper, MemoryStepper), "checked by the base class"
        self.worker.log = _TimedLog(self._job, stepper, UndoMemory(stepper.undo_capacity()))


class _TimedLog(UndoLog):
    """An undo log whose copies take time."""

    def __init__(self, job: Job, stepper: MemoryStepper, memory: UndoMemory) -> None:
        super().__init__(stepper, memory)
        self._job = job

    def update(self, chunk: Chunk, grads: GradLedger, grad_scale: float) -> None:
        super().update(chunk, grads, grad_scale)
        if self.has(chunk):
            numel = sum(run.stop - run.start for run in chunk.runs)
            self._work("log", numel, self._job.times.log_s)

    def keep(self, chunk: Chunk) -> bool:
        before = self.num_kept
        is_kept = super().keep(chunk)
        self._work("keep", self.num_kept - before, self._job.times.keep_s)
        return is_kept

    def undo(self, chunk: Chunk) -> None:
        before = self.num_undone
        super().undo(chunk)
        self._work("undo", self.num_undone - before, self._job.times.undo_s)

    def _work(self, what: str, numel: int, seconds: float) -> None:
        self._job.time.work("host", what, numel * seconds / self._job.numel)


class _Pass(torch.autograd.Function):
    """The identity function.

    Forward and backward take time, and the weight's gradient is constant.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, job: Job) -> Tensor:
        ctx.job, ctx.shape, ctx.dtype = job, weight.shape, weight.dtype
        job.launch("forward", job.times.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        value = CLIPPED if ctx.job.is_clipped else 0.0
        ctx.job.launch("backward", ctx.job.times.backward_s)
        return grads[0], torch.full(ctx.shape, value, dtype=ctx.dtype), None


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
        share = job.times.root / (1 - 2 * job.times.root)
        root = max(ROOT_NUMEL, round(job.times.blocks * block_numel * share))
        self.embedding = nn.Parameter(torch.zeros(root))
        self.blocks = nn.ModuleList(_Block(job, block_numel) for _ in range(job.times.blocks))
        self.head = nn.Parameter(torch.zeros(root))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.embedding[:ROOT_NUMEL]
        for block in self.blocks:
            x = block(x)
        return (x * self.head[:ROOT_NUMEL]).sum()


@dataclass
class Job:
    """A training in virtual time.

    Attributes:
        times: seconds of a step over all of its micro-batches.
        variant: the schedule.
        chunks_per_block: number of update chunks per block.
        clipped_every: with an undo log, number of steps of which one is clipped; 0 for none.
        is_eight_bit: whether the host has 8-bit moments.
        micro_batches: number of micro-batches per step, trained by ``train_batch``.
        is_vertical: whether all micro-batches pass a block before the next block runs.
        ends: device times at which each step's backward ended.
    """

    times: Times
    mode: Mode
    ratio: float | Literal["auto"]
    variant: Variant = TODAY
    chunks_per_block: float = 12.28
    clipped_every: int = 0
    is_eight_bit: bool = False
    micro_batches: int = 1
    is_vertical: bool = False
    time: VirtualTime = field(default_factory=VirtualTime)
    ends: list[float] = field(default_factory=list)
    numel: int = 0

    def __post_init__(self) -> None:
        if self.mode == "every step clipped":
            self.clipped_every = 1
        self.compute = VirtualStream(self.time, "compute")
        self._num_left = self.times.blocks * self.micro_batches  # launches left until backward ends
        self._chunk_numel = EIGHT_BIT_CHUNK_NUMEL if self.is_eight_bit else CHUNK_NUMEL
        model = _Model(self, round(self.chunks_per_block * self._chunk_numel))
        self.numel = sum(p.numel() for p in model.parameters())
        block: dict[str, Any] = {
            "device": "cpu",
            "ratio": self.ratio,
            "host_share": self.variant.end,
            "update_in_backward": self.mode != "after the decision",
            "state_dtype": "int8" if self.is_eight_bit else "float32",
        }
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.micro_batches,
            "accumulation_schedule": "vertical" if self.is_vertical else "horizontal",
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "bf16": {"enabled": True},
            "check_grad_overflow": False,
            "gradient_clipping": 0.0 if self.mode == "in backward" else 1.0,
            "zero_optimization": {"stage": 1, "offload_optimizer": block},
        }
        self._engine = zero_core.build(model, config, state_tier=self._make_tier)

    @property
    def is_clipped(self) -> bool:
        """Whether the current step will be clipped."""
        return bool(self.clipped_every) and len(self.ends) % self.clipped_every == 0

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
        upload_codec: UploadCodec | None = None,
    ) -> TwinTier:
        settings = OffloadSettings.from_config(config)
        geometry = Geometry(numel, pieces, params, len(groups), published_numel=self._chunk_numel)
        tiers = _Tiers(
            self,
            geometry,
            settings=settings,
            device=device,
            optimizer_class=optimizer_class,
            groups=groups,
            adam_kernel=_Kernel(
                self.time, self.times.host_s / self.numel, self.times.term_s / self.numel
            ),
            device_tier=make_device_tier,
        )
        host = host_share(settings, geometry, names, optimizer_class, groups, is_accelerated=False)
        self.tier = make_twin(geometry, host, groups, tiers)
        return self.tier

    def launch(self, what: str, seconds: float) -> None:
        """Enqueue a block's share of a micro-batch's forward or backward."""
        self.time.caller += LAUNCH_S
        num_launches = self.times.blocks * self.micro_batches
        self.compute.enqueue(what, seconds / num_launches)
        self._num_left -= what == "backward"
        if self.micro_batches > 1 and not self._num_left:
            self._end_backward()  # `train_batch` continues with the decision after this launch

    def _end_backward(self) -> None:
        """Make the caller wait for the device, and record the end of backward."""
        self.time.caller = max(self.time.caller, self.compute.end)
        self.ends.append(self.compute.end)
        self._num_left = self.times.blocks * self.micro_batches

    def step(self) -> None:
        x = torch.zeros(ROOT_NUMEL, dtype=torch.bfloat16)
        if self.micro_batches > 1:
            self._engine.train_batch([x] * self.micro_batches)
        else:
            self._engine.backward(self._engine(x))
            self._end_backward()
            self._engine.step()
        recent = self.ends[-3:][0]
        self.time.spans = [span for span in self.time.spans if span.stop > recent]

    def run(self) -> float:
        """Train until the step length is steady, and return that length."""
        for _ in range(WARM_STEPS + 1):
            self.step()
        return self.ends[-1] - self.ends[-2]

    def mean_run(self) -> float:
        """Train until the mean length of ``clipped_every`` steps is steady. Return that mean."""
        count = max(self.clipped_every, 1)
        for _ in range(WARM_STEPS + 1 + count):
            self.step()
        return (self.ends[-1] - self.ends[-1 - count]) / count

    def settle(self) -> float:
        """Train until ``"auto"`` has settled and return the ratio."""
        tier = self.tier
        assert isinstance(tier, AutoTier)
        while tier.ratio_report is None:
            if len(self.ends) > MOST_AUTO_STEPS:
                raise AssertionError(f"no ratio after {MOST_AUTO_STEPS} steps")
            self.step()
        return tier.ratio_report.ratio

    def lanes(self) -> list[Span]:
        """Return the spans of the last step but one, relative to the end of its backward."""
        start, stop = self.ends[-3], self.ends[-2]
        inside = (s for s in self.time.spans if s.stop > start and s.start < stop)
        return [Span(s.lane, s.what, s.start - start, s.stop - start) for s in inside]
