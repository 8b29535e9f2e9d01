"""State tiers on the host and on the compute device, each made of a stepper and a mover.

`HostTier` keeps master weights and states on the host and updates them in a worker thread.
`DeviceTier` keeps them on the compute device and updates them in the caller's thread.

[Note: speculation]
`HostTier.speculate` begins a step before it is confirmed, without publishing values. ``step`` with
the same settings and scale, and at least its pieces, completes it. Any other step undoes it, as do
new or dropped gradients of its elements, `watch_changes`, and reads and writes of states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry, Run, check_active, freeze_groups, split_runs
from zero_offload.flat.grads import GradLedger, add_up
from zero_offload.protocols import ChangeWatcher, Groups
from zero_offload.rules.rule import MASTER
from zero_offload.steppers.memory_stepper import MemoryStepper, UndoLog, UndoMemory
from zero_offload.steppers.stepper import Chunk, Stepper, spans_of
from zero_offload.tiers.worker import HostThread, Job, Phase, Progress, Speculation, Worker
from zero_offload.transfers.mover import GradSums, HostMover, Mover, Release


@dataclass(frozen=True, slots=True)
class TierReport:
    """Counters and sizes of one tier so far.

    Attributes:
        has_kernel: whether a host kernel, not torch, computes the update.
        update_s: host seconds of updates, without waits for gradients or memory.
        host_bytes: host memory of master weights and states, including parameter shards that are
            master weights or upper halves of them.
        memory: bytes in the tier's memory by kind, without parameter shards: "master weights" and
            "optimizer states", for a `HostTier` also gradient copies, published weights, undo log.
        bytes_d2h: gradient bytes copied to the host.
        bytes_h2d: parameter bytes copied to the compute device.
        stall_s: seconds that callers waited for a step.
        num_kept: elements whose tentative updates were kept.
        num_undone: elements whose tentative updates were undone.
        num_differences: parts of new parameters sent as differences.
        num_changed: parts sent whole because the device's values had changed.
    """

    has_kernel: bool
    update_s: float
    host_bytes: int
    memory: Mapping[str, int]
    bytes_d2h: int = 0
    bytes_h2d: int = 0
    stall_s: float = 0.0
    num_kept: int = 0
    num_undone: int = 0
    num_differences: int = 0
    num_changed: int = 0


class FlatTier(ABC):
    """A StateTier with one stepper.

    Reads and writes of state, except `peek_state`, first wait for pending steps. After a failed
    step they and all calls that take or discard gradients or wait raise `OffloadError`.
    """

    _update_s = 0.0  # seconds of updates in the caller's thread

    def __init__(
        self, geometry: Geometry, stepper: Stepper, mover: Mover, progress: Progress
    ) -> None:
        self.geometry = geometry
        self.mover = mover
        self._stepper = stepper
        self._progress = progress
        self._grads = GradLedger()

    @abstractmethod
    def _launch(self, chunks: Sequence[Chunk], grads: GradLedger, grad_scale: float) -> None:
        """Update a step's chunks and publish them, now or in the background."""

    def report(self) -> TierReport:
        num_bytes, is_on_host = self._stepper.num_bytes(), self._stepper.device.type == "cpu"
        return TierReport(
            has_kernel=self._stepper.has_kernel,
            update_s=self._update_s,
            host_bytes=num_bytes.masters + num_bytes.states if is_on_host else 0,
            memory={
                "master weights": num_bytes.master_copies,
                "optimizer states": num_bytes.states,
            },
        )

    def _settle(self) -> None:
        self._progress.drain()

    def offer_grad(self, start: int, grad: Tensor) -> Callable[[], None] | None:
        """Accept the gradient of ``[start, start + grad.numel())``, which replaces an earlier one.

        `HostTier` copies it. `DeviceTier` reads it until ``step`` or ``discard_grads`` returns.
        Return None, or a function to call before the memory of ``grad`` is overwritten.
        """
        self._admit(start, grad)
        return self.mover.offer(start, grad, self._grads)

    def _admit(self, start: int, grad: Tensor) -> None:
        """Check a gradient, and wait for steps that still read earlier ones of the range."""
        if grad.dim() != 1 or not grad.is_contiguous() or not grad.is_floating_point():
            raise ValueError(
                f"a gradient must be 1-D, contiguous and floating point; got {grad.dtype} of "
                f"shape {tuple(grad.shape)} at {start}"
            )
        stop = start + grad.numel()
        self.geometry.check_range(start, stop)
        self._progress.wait(start, stop)

    def read_grad(self, start: int, stop: int) -> Tensor:
        """Return a CPU copy of a gradient, or of the sum of micro-steps in the master dtype."""
        self.geometry.check_range(start, stop)
        found = [torch.empty(0)]
        for a, b, terms in self._grads.segments(start, stop):
            total = terms[0].cpu()
            if len(terms) > 1:
                total = torch.empty(b - a, dtype=self.geometry.master_dtype, device="cpu")
                add_up(terms, total)
            found.append(total)
        return torch.cat(found[1:] or found)

    def discard_grads(self) -> None:
        self._progress.check()
        self.mover.close_grads()
        self._grads = GradLedger()

    def step(self, groups: Groups, active: Sequence[int], *, grad_scale: float) -> None:
        """Update the pieces in ``active`` with the offered gradients times ``grad_scale``.

        Settings are copied, so a scheduler may change ``groups`` afterwards. Invalid arguments
        raise before anything is updated. Gradients of other pieces stay for a later call.
        """
        self._progress.check()
        indices = check_active(self.geometry, active)
        if not indices:
            return
        chunks = self._stepper.plan(indices, freeze_groups(groups), self._grads)
        # This may raise if a sum failed, so steps are counted afterwards.
        grads = self._take(spans_of(chunks))
        with self._progress.launching():
            self._stepper.count(indices)
            self._launch(chunks, grads, grad_scale)

    def _take(self, spans: Sequence[tuple[int, int]]) -> GradLedger:
        return self._grads.take(spans)

    def wait_params(self, start: int, stop: int) -> None:
        for event in self._progress.wait(start, stop):
            self.mover.arrive(event)

    def are_params_ready(self, start: int, stop: int) -> bool:
        return self._progress.is_over(start, stop)

    def state_names(self) -> Sequence[str]:
        return (MASTER, *self._stepper.states)

    def _check_state(self, name: str, start: int, stop: int) -> None:
        self.geometry.check_range(start, stop)
        if name not in self.state_names():
            raise KeyError(f"the optimizer has no state {name!r}, only {list(self.state_names())}")

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        self._settle()
        self._check_state(name, start, stop)
        return self._stepper.read(name, start, stop)

    def watch_changes(self, watcher: ChangeWatcher) -> None:
        self._settle()
        self._stepper.watcher = watcher

    def peek_state(self, name: str, start: int, stop: int) -> Tensor:
        self._check_state(name, start, stop)
        return self._stepper.peek(name, start, stop)

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite one state. ``master_weight`` is also rounded into the parameter shards."""
        self._settle()
        stop = start + values.numel()
        self._check_state(name, start, stop)
        self._stepper.announce([(start, stop)])
        with torch.no_grad():
            self._stepper.write(name, start, values)
            if name != MASTER:
                return
            readers = self.mover.streams.mark_readers()
            if readers is not None:
                self.mover.streams.follow(readers)
            covered = [Run(low, high, ()) for low, high, _ in self.geometry.overlaps(start, stop)]
            for run in split_runs(covered, self.geometry.published_numel):
                self.mover.open_spans([(run.start, run.stop)])
                if not self._stepper.is_in_place:
                    part = values[run.start - start : run.stop - start]
                    out = self.mover.out(run.start, run.stop)
                    self._stepper.round_values(run.start, part, out)
                event = self.mover.publish(run.start, run.stop)
                if event is not None:
                    self.mover.arrive(event)

    def round_values(self, start: int, values: Tensor, out: Tensor) -> None:
        """Write master weights to ``out``, rounded as in a step."""
        self._stepper.round_values(start, values, out)

    def read_scalars(self, piece: int) -> Mapping[str, float]:
        self._settle()
        return self._stepper.read_scalars(piece)

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Restore the result of `read_scalars`. ``num_steps`` of 0 resets the piece's states."""
        self._settle()
        self._stepper.check_scalars(piece, scalars)
        span = self.geometry.pieces[piece]
        self._stepper.announce([(span.start, span.stop)])
        self._stepper.write_scalars(piece, scalars)

    def check_states(self, names: Collection[str], scalars: Sequence[Mapping[str, float]]) -> None:
        for name in names:
            self._check_state(name, 0, 0)
        for piece, of_piece in enumerate(scalars):
            self._stepper.check_scalars(piece, of_piece)


class HostTier(FlatTier):
    """Master weights and states on the host, updated in a worker thread.

    ``step`` does not wait for the update. See `zero_offload.tiers.worker` for the order of updates.
    """

    mover: HostMover
    _speculation: Speculation | None = None

    def __init__(
        self,
        geometry: Geometry,
        stepper: Stepper,
        mover: HostMover,
        thread: HostThread | None = None,
    ) -> None:
        self._thread = HostThread(mover.device) if thread is None else thread
        progress = Progress(self._thread.changed, self._thread.now)
        super().__init__(geometry, stepper, mover, progress)
        self.file = stepper.file
        self.worker = Worker(stepper, mover, progress, self._thread.now)
        self._sums = GradSums(mover, stepper)

    def report(self) -> TierReport:
        found, mover, log = super().report(), self.mover, self.worker.log
        sent = mover.differences
        return replace(
            found,
            update_s=self.worker.update_s,
            memory={
                **found.memory,
                "gradient copies": mover.grad_bytes,
                "published weights": 0 if sent is None else sent.num_bytes,
                "undo log": 0 if log is None else log.num_bytes,
            },
            bytes_d2h=mover.bytes_d2h,
            bytes_h2d=mover.bytes_h2d,
            stall_s=self._progress.stall_s,
            num_kept=0 if log is None else log.num_kept,
            num_undone=0 if log is None else log.num_undone,
            num_differences=0 if sent is None else sent.num_differences,
            num_changed=0 if sent is None else sent.num_changed,
        )

    def drain(self) -> float:
        self._progress.drain()
        return self.worker.update_s

    def expect_micro_steps(self, count: int) -> None:
        self._sums.num_micro_steps = count

    def reserve(self, dtypes: Collection[torch.dtype]) -> None:
        for dtype in dtypes:
            self.mover.reserve(dtype, self._sums.num_micro_steps)

    def offer_grad(self, start: int, grad: Tensor) -> Release | None:
        self._admit(start, grad)
        self._sums.replaced(start, start + grad.numel())
        return self.mover.offer(start, grad, self._grads)

    def _admit(self, start: int, grad: Tensor) -> None:
        self._undo_within(start, start + grad.numel())
        super()._admit(start, grad)

    def add_grad(self, start: int, grad: Tensor, *, is_last: bool) -> Release | None:
        """Start to copy a micro-step's gradient of a range, to be added to earlier ones."""
        self._admit(start, grad)
        return self._sums.add(start, grad, self._grads, is_last=is_last)

    def square_sum(self, start: int, stop: int) -> Future[float]:
        return self._sums.square_sum(start, stop, self._grads)

    def drop_grads(self, start: int, stop: int) -> None:
        """Discard the gradient of a range, so that the next `add_grad` begins a new sum."""
        self._undo_within(start, stop)
        self._sums.replaced(start, stop)
        self._grads.discard(start, stop)

    def read_grad(self, start: int, stop: int) -> Tensor:
        self._sums.settle([(start, stop)])
        if self.mover.arrived is not None:
            self.mover.streams.wait(self.mover.arrived)
        return super().read_grad(start, stop)

    def discard_grads(self) -> None:
        self._undo()
        self._sums.replaced(0, self.geometry.numel)
        super().discard_grads()

    def _take(self, spans: Sequence[tuple[int, int]]) -> GradLedger:
        self._sums.settle(spans)
        return super()._take(spans)

    def _settle(self) -> None:
        self._undo()
        super()._settle()

    def _launch(
        self,
        chunks: Sequence[Chunk],
        grads: GradLedger,
        grad_scale: float,
        phase: Phase = Phase.WHOLE,
    ) -> None:
        entries, before = self._progress.begin(spans_of(chunks))
        of_run = iter(entries)
        of_chunk = [[next(of_run) for _ in chunk.runs] for chunk in chunks]
        arrivals = [self.mover.arrival(spans_of([chunk])) for chunk in chunks]
        readers = self.mover.streams.mark_readers()
        job = Job(phase, chunks, grads, grad_scale, arrivals, before, of_chunk, readers)
        self._thread.submit(self.worker, job)

    def enable_undo(self, most_bytes: int | None) -> None:
        """Create an undo log of at most ``most_bytes``, see `OffloadTiers.can_undo`."""
        stepper = self._stepper
        assert isinstance(stepper, MemoryStepper), "other updates cannot be undone"
        capacity = stepper.undo_capacity()
        if most_bytes is not None:
            capacity = min(capacity, most_bytes)
        self.worker.log = UndoLog(stepper, UndoMemory(capacity))
        self.mover.add_staging()

    def speculate(self, groups: Groups, active: Sequence[int], *, grad_scale: float) -> None:
        """Begin a step over the pieces ``active`` before it is confirmed. See [Note: speculation].

        It may be called several times before ``step``, each time for other pieces.
        """
        self._progress.check()
        indices, frozen = check_active(self.geometry, active), freeze_groups(groups)
        if not indices:
            return
        # plan() may raise, so it precedes the creation of the speculation.
        chunks = self._stepper.plan(indices, frozen, self._grads)
        spans = spans_of(chunks)
        self._sums.settle(spans)
        if self._speculation is not None and not self._speculation.is_of(frozen, grad_scale):
            self._undo()
        if self._speculation is None:
            self._speculation = Speculation(frozen, grad_scale, self._thread.changed)
        speculation = self._speculation
        with self._progress.launching():
            before = self._progress.begin_unpublished(spans)
            speculation.pieces.update(indices)
            speculation.chunks += chunks
            grads = self._grads.copy(spans)
            arrivals = [self.mover.arrival(spans_of([chunk])) for chunk in chunks]
            job = Job(Phase.TENTATIVE, chunks, grads, grad_scale, arrivals, before)
            job.speculation = speculation
            self._thread.submit(self.worker, job)

    def step(self, groups: Groups, active: Sequence[int], *, grad_scale: float) -> None:
        speculation = self._speculation
        rest = active
        if speculation is not None:
            rest = [i for i in active if i not in speculation.pieces]
            is_covered = len(rest) + len(speculation.pieces) == len(active)
            if not is_covered or not speculation.is_of(freeze_groups(groups), grad_scale):
                self._undo()
                speculation, rest = None, active
        super().step(groups, rest, grad_scale=grad_scale)
        if speculation is None:
            return
        with self._progress.launching():
            self._speculation = None
            speculation.end()
            self._stepper.count(sorted(speculation.pieces))
            chunks = sorted(speculation.chunks, key=lambda chunk: chunk.runs[0].start)
            self._launch(chunks, self._take(spans_of(chunks)), grad_scale, Phase.KEEP)

    def _undo(self) -> None:
        """End the speculation, if any, and restore states in the background."""
        speculation = self._speculation
        if speculation is None:
            return
        speculation.end()
        speculation.wait()  # If Ctrl-C interrupts this wait, the next call repeats it.
        chunks = speculation.chunks
        with self._progress.launching():
            before = self._progress.begin_unpublished(())
            none, scale = [None] * len(chunks), speculation.grad_scale
            job = Job(Phase.UNDO, chunks, GradLedger(), scale, none, before)
            self._thread.submit(self.worker, job)
            self._speculation = None

    def _undo_within(self, start: int, stop: int) -> None:
        """Undo the speculation if it reads a gradient of ``[start, stop)``."""
        if self._speculation is not None:
            spans = spans_of(self._speculation.chunks)
            if any(a < stop and start < b for a, b in spans):
                self._undo()


class DeviceTier(FlatTier):
    """Master weights and states on the compute device, updated in the caller's thread."""

    def __init__(self, geometry: Geometry, stepper: Stepper, mover: Mover) -> None:
        super().__init__(geometry, stepper, mover, Progress())

    def read_grad(self, start: int, stop: int) -> Tensor:
        self.mover.close_grads()  # another stream may have produced the gradient
        return super().read_grad(start, stop)

    @torch.no_grad()
    def _launch(self, chunks: Sequence[Chunk], grads: GradLedger, grad_scale: float) -> None:
        self.mover.close_grads()
        entries = iter(self._progress.begin(spans_of(chunks))[0])
        for chunk in chunks:
            self._stepper.announce(spans_of([chunk]))
            started = perf_counter()
            self._stepper.update(chunk, grads, grad_scale, self.mover.out)
            for run in chunk.runs:
                event = self.mover.publish(run.start, run.stop)
                self._progress.publish(next(entries), event)
            self._update_s += perf_counter() - started
        self._progress.finish()
