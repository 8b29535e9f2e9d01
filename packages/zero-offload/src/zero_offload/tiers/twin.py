"""Twin-Flow: one optimizer state, updated on the host and on the device at the same time.

The host holds and updates a share of the elements, the device the rest (DeepSpeed ZeRO-Offload++,
Twin-Flow). The share is a set of elements: the last ones, or those of some parameters. A piece
that it splits is one parameter in several parts whose scalars stay equal, so that a checkpoint does
not depend on the share and loads at any other.

[Note: resplit]
`TwinTier.resplit` makes new tiers and migrates the state from the old ones, a block at a time. The
device never holds two tiers: state that stays there waits in host memory until the old tier has
been freed. Meanwhile host memory holds the host's old share and its new one, or one of them and the
waiting state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from zero_offload.errors import OffloadError
from zero_offload.flat.geometry import Geometry, check_active
from zero_offload.flat.intervals import Intervals
from zero_offload.memory.storage import BlockFile
from zero_offload.memory.streams import TimedCopy
from zero_offload.protocols import ChangeWatcher, Groups
from zero_offload.tiers.factory import OffloadTiers
from zero_offload.tiers.flat_tier import FlatTier, TierReport
from zero_offload.tiers.part import GradStaging, HeldState, Part, PartReport, migrate
from zero_offload.tiers.share import end_share


class TwinTier:
    """A StateTier made of a host tier over a share of the elements and a device tier over the rest.

    It keeps its own copy of every gradient, on the host or on the device.
    """

    owns_grads = True

    def __init__(
        self,
        geometry: Geometry,
        groups: Groups,
        host: Intervals,
        factory: OffloadTiers,
    ) -> None:
        self.geometry = geometry
        self._alignment = factory.alignment(groups)
        host = geometry.align(host, self._alignment)  # chosen parameters are whole anyway
        self._groups = groups
        self._factory = factory
        self._offered = Intervals()  # and not updated yet
        self._fresh = Intervals()  # offered since the last call of step
        self._closed = Intervals()  # offered for this optimizer step before that call
        self._num_micro_steps = 0  # none: gradients are offered, not added
        self._reserved: list[tuple[int, int, torch.dtype]] = []  # gradients with memory
        self._has_undo = False  # host parts have an undo log
        self._replaced: list[TierReport] = []  # of host tiers before a resplit
        self._has_dropped = False  # a tier, in the resplit under way
        self._lost: BaseException | None = None
        self._watcher: ChangeWatcher | None = None
        self._host = host
        self._parts: list[Part] = []
        self.make_parts(host)

    def make_parts(self, host: Intervals) -> None:
        """Make the parts for the host's share, without state, in place of any. For subclasses."""
        self._host = host
        self._parts.clear()  # before their successors are allocated
        if host or not self.geometry.numel:
            self._parts.append(self._make_part(host, is_host=True))
        if rest := host.complement(self.geometry.numel):
            self._parts.append(self._make_part(rest, is_host=False))

    def _make_part(self, share: Intervals, *, is_host: bool) -> Part:
        geometry, local = self.geometry.part(share)
        make = self._factory.make_host if is_host else self._factory.make_device
        staging = None if is_host else GradStaging(geometry.numel, geometry.master_dtype)
        tier = make(geometry, share, self._groups)
        part = Part(tier, geometry, share, local, is_host, staging)
        if self._num_micro_steps:
            part.expect_micro_steps(self._num_micro_steps)
        if self._has_undo:
            can_undo = part.enable_undo(self._factory.undo_buffer_size)
            assert can_undo, "as the factory says: a share has another length, not another rule"
        self._reserve_part(part)
        if self._watcher is not None:
            part.watch_changes(self._watcher)
        return part

    @property
    def parts(self) -> Sequence[Part]:
        """The host's part and the device's, of which one may be missing.

        Raises:
            OffloadError: a resplit failed midway.
        """
        if self._lost is not None:
            raise OffloadError(
                f"moving optimizer state between host and device failed ({self._lost!r}), so a "
                f"part of it is lost; load a checkpoint into a new tier"
            ) from self._lost
        return self._parts

    @property
    def host_numel(self) -> int:
        """Number of elements that the host holds."""
        return self._host.numel

    @property
    def bytes_d2h(self) -> int:
        return sum(report.bytes_d2h for report in self._reports())

    @property
    def bytes_h2d(self) -> int:
        """Parameter bytes brought from the host so far. Complete after ``wait_params``."""
        return sum(report.bytes_h2d for report in self._reports())

    @property
    def stall_s(self) -> float:
        """Seconds that callers were blocked so far because the host was not done."""
        own = [r.tier.stall_s for r in self.report() if r.is_host and r.tier is not None]
        return sum(own) + sum(report.stall_s for report in self._replaced)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of master weights and states, transfer buffers apart."""
        return sum(r.tier.host_bytes for r in self.report() if r.tier is not None)

    @property
    def file(self) -> BlockFile | None:
        """The file of the host's master weights and state, if there is one, with its counters."""
        tiers = (part.tier for part in self._parts)
        return next((t.file for t in tiers if isinstance(t, FlatTier) and t.file), None)

    def work_s(self) -> dict[str, float]:
        """Return seconds so far of the host's updates, of its file, and of waiting for that."""
        own = [r.tier.update_s for r in self.report() if r.is_host and r.tier is not None]
        found = {"host": sum(own) + sum(report.update_s for report in self._replaced)}
        file = self.file
        if file is not None:
            found |= {"file": file.io_s, "file wait": file.waited_s}
        return found

    def copied_bytes(self) -> tuple[int, int]:
        """Return bytes copied so far from the device to the host, and back."""
        reports = self._reports()
        return sum(r.bytes_d2h for r in reports), sum(r.bytes_h2d for r in reports)

    def recent_updates(self) -> list[tuple[float, float]]:
        """Return start and end of the host's last updates, of `time.perf_counter`."""
        tiers = [p.tier for p in self._parts if p.is_host and isinstance(p.tier, FlatTier)]
        return [span for tier in tiers for span in tier.worker.updates]

    def file_traffic(self) -> tuple[int, int]:
        """Return the bytes of states read from and written to the file since the last resplit.

        Waits for updates and transfers under way. See `BlockFile.traffic`.
        """
        for part in self._parts:
            part.drain()
        return (0, 0) if self.file is None else self.file.traffic()

    def time_copies(self, *, is_on: bool) -> None:
        """Time later copies between the device and the host, or no longer. None are on a CPU."""
        for part in self._parts:
            if isinstance(part.tier, FlatTier):
                part.tier.mover.streams.is_timing = is_on

    def take_copies(self) -> list[TimedCopy]:
        """Return what was copied since the last call, and events before and after each copy."""
        tiers = [part.tier for part in self._parts if isinstance(part.tier, FlatTier)]
        return [copy for tier in tiers for copy in tier.mover.streams.take_copies()]

    def host_memory_bytes(self) -> dict[str, int]:
        """Return bytes of host memory by kind, without parameter shards and their copies."""
        found: Counter[str] = Counter()
        for part in self._parts:
            if (tier := part.report().tier) is not None:
                kinds = dict(tier.memory)
                if part.is_host and self.file is not None:
                    kinds["NVMe buffers"] = kinds.pop("optimizer states")
                found.update(kinds)
        return {kind: nbytes for kind, nbytes in found.items() if nbytes}

    def report(self) -> tuple[PartReport, ...]:
        return tuple(part.report() for part in self._parts)

    def _reports(self) -> list[TierReport]:
        return [*self._replaced, *(r.tier for r in self.report() if r.tier is not None)]

    def offer_grad(self, start: int, grad: Tensor) -> Callable[[], None] | None:
        """Copy the gradient of ``[start, start + grad.numel())``, to each part its share.

        Return None, or a call to make before the memory of ``grad`` is written again.
        """
        stop = start + grad.numel()
        self._begin_offer(start, stop, self._closed)
        release = None  # the host's copies are in order: the last release stands for all
        for part in self.parts:
            for a, b in part.share.overlaps(start, stop):
                own = grad[a - start : b - start]
                release = part.offer_grad(part.share.local(a), own) or release
        self._end_offer(start, stop)
        return release

    def reserve(self, grads: Sequence[tuple[int, int, torch.dtype]]) -> None:
        """Allocate what gradients are copied to, or widened in, and what copies pass through.

        Without it that is done when it is needed. It follows `expect_micro_steps`. ``grads`` are
        ``(start, stop, dtype)`` of what is going to be offered or added.
        """
        self._reserved = list(grads)
        for part in self.parts:
            self._reserve_part(part)

    def device_tensors(self) -> dict[str, list[Tensor]]:
        """Return long-lived tensors on the device, of its part: the host's has none there."""
        parts = [part.device_tensors() for part in self.parts if not part.is_host]
        return parts[0] if parts else {}

    def _reserve_part(self, part: Part) -> None:
        grads = [
            (part.share.local(a), part.share.local(b), dtype)
            for start, stop, dtype in self._reserved
            for a, b in part.share.overlaps(start, stop)
        ]
        if grads:
            part.reserve(grads, self._factory.device)

    def expect_micro_steps(self, count: int) -> None:
        """Expect ``count`` calls of `add_grad` per range and step. It decides on memory alone.

        To be called before state is written and before the first gradient that is added.
        """
        self._num_micro_steps = count
        for part in self.parts:
            part.expect_micro_steps(count)

    def enable_undo(self) -> bool:
        """Prepare for `speculate`: have an undo log of at most ``undo_buffer_size`` bytes.

        Return whether the host's updates can be undone: those of a host kernel, in host memory.
        """
        if self._factory.can_undo:
            most = self._factory.undo_buffer_size
            self._has_undo = all(part.enable_undo(most) for part in self.parts)
        return self._has_undo

    @property
    def undo_bytes(self) -> int:
        """Bytes of host memory of the undo log."""
        return self.host_memory_bytes().get("undo log", 0)

    def speculate(self, groups: Groups, active: Sequence[int], *, grad_scale: float) -> None:
        """Have the host begin a step over its part of the pieces ``active``, before its decision.

        Nobody sees it before ``step`` with the same settings and factor, which goes on with it.
        Anything else undoes it: see `zero_offload.tiers.flat_tier.HostTier`. The device's part is
        updated by ``step`` alone.
        """
        if not self._has_undo:
            raise RuntimeError("speculate without enable_undo: call that once before")
        indices = check_active(self.geometry, active)
        for part in self.parts:
            local = [own for i in indices for own in part.local.get(i, ())]
            part.speculate(groups, local, grad_scale=grad_scale)

    def add_grad(self, start: int, grad: Tensor, *, is_last: bool) -> Callable[[], None] | None:
        """Add to the gradient of ``[start, start + grad.numel())``, to each part its share.

        The sum is taken in the dtype of the master weights, in the order of the calls since the
        last step of the range, and does not depend on the share. What a step left out is dropped
        when a range that it updated gets its next gradient. See `zero_offload.tiers.accumulation`.

        Return None, or a call to make before the memory of ``grad`` is written again.
        """
        if not self._num_micro_steps:
            raise RuntimeError("add_grad without expect_micro_steps: call that once before")
        stop = start + grad.numel()
        self._begin_offer(start, stop, self._closed.difference(self._offered))
        release = None
        for part in self.parts:
            for low, high in part.share.overlaps(start, stop):
                for a, b, is_known in self._offered.divide(low, high):
                    at, own = part.share.local(a), grad[a - start : b - start]
                    added = part.add_grad(at, own, is_first=not is_known, is_last=is_last)
                    release = added or release
        self._end_offer(start, stop)
        return release

    def square_sum(self, start: int, stop: int) -> Callable[[], Tensor]:
        """Start to compute the sum of the squares of the gradient of ``[start, stop)``.

        Return a call that waits for it: 0-dim, on the CPU or the device. It is float64, so that it
        does not depend on the share, but for its last digits.
        """
        self._check_offered(Intervals([(start, stop)]))
        spans = [(p, p.share.local(start), p.share.local(stop)) for p in self.parts]
        calls = [part.square_sum(a, b) for part, a, b in spans if a < b]

        def total() -> Tensor:
            found = torch.zeros((), dtype=torch.float64, device="cpu")
            for call in calls:
                found = found + call()
            return found

        return total

    def _begin_offer(self, start: int, stop: int, ended: Intervals) -> None:
        """Check the range. It begins a new optimizer step if it has ``ended`` elements."""
        self.geometry.check_range(start, stop)
        if any(ended.overlaps(start, stop)):
            left = self._closed.difference(self._fresh)
            self._closed, self._offered = Intervals(), self._fresh
            for part in self.parts:
                for a, b in part.share.intersection(left).spans:
                    part.drop_grads(part.share.local(a), part.share.local(b))
            self.begin_round()

    def _end_offer(self, start: int, stop: int) -> None:
        offer = Intervals([(start, stop)])
        self._offered, self._fresh = self._offered.union(offer), self._fresh.union(offer)

    def _check_offered(self, needed: Intervals) -> None:
        """Raise ValueError if an element has no gradient that waits for a step."""
        missing = needed.difference(self._offered)
        if missing:
            start, stop = missing.spans[0]
            raise ValueError(
                f"no gradient was offered for [{start}, {stop}), or a step has used it; call "
                f"offer_grad or add_grad before step, read_grad and square_sum"
            )

    def read_grad(self, start: int, stop: int) -> Tensor:
        """Return a copy of the gradient offered for ``[start, stop)``, 1-D, on the CPU."""
        self._check_offered(Intervals([(start, stop)]))
        found: list[tuple[int, Tensor]] = []
        for part in self.parts:
            for a, b in part.share.overlaps(start, stop):
                low, high = part.share.local(a), part.share.local(b)
                found.append((a, part.tier.read_grad(low, high)))
        return torch.cat([values for _, values in sorted(found, key=itemgetter(0))])

    def begin_round(self) -> None:
        """Begin a new optimizer step, when a gradient is offered again. For subclasses.

        ``step`` may be called several times for one optimizer step, with other pieces each time.
        """

    def discard_grads(self) -> None:
        self._offered = self._fresh = Intervals()
        for part in self.parts:
            part.tier.discard_grads()

    def step(self, groups: Groups, active: Sequence[int], *, grad_scale: float) -> None:
        """Update the pieces in ``active``: the host first, in its worker, then the device."""
        indices = check_active(self.geometry, active)
        pieces = (self.geometry.pieces[i] for i in indices)
        # No part may be updated when another one refuses.
        self._check_offered(Intervals((p.start, p.stop) for p in pieces))
        self._groups = groups
        for part in self.parts:  # the host's first: it alone may refuse, for a sum that failed
            local = [own for i in indices for own in part.local.get(i, ())]
            self.step_part(part, local, grad_scale)
        self._offered = self._offered.difference(self.geometry.padded_spans(indices))
        self._closed, self._fresh = self._closed.union(self._fresh), Intervals()

    def step_part(self, part: Part, active: Sequence[int], grad_scale: float) -> None:
        """Update the part's own pieces in ``active``. For subclasses."""
        part.tier.step(self._groups, active, grad_scale=grad_scale)

    def wait_params(self, start: int, stop: int) -> None:
        for part in self.parts:
            a, b = part.share.local(start), part.share.local(stop)
            if a < b:
                self.wait_part(part, a, b)

    def wait_part(self, part: Part, start: int, stop: int) -> None:
        """Wait for the part's own range ``[start, stop)``. For subclasses."""
        part.tier.wait_params(start, stop)

    def are_params_ready(self, start: int, stop: int) -> bool:
        spans = [(p, p.share.local(start), p.share.local(stop)) for p in self.parts]
        return all(p.tier.are_params_ready(a, b) for p, a, b in spans if a < b)

    def state_names(self) -> Sequence[str]:
        return tuple(dict.fromkeys(n for part in self.parts for n in part.tier.state_names()))

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        """Return a copy of a state over ``[start, stop)``, 1-D, on the CPU, zero without one."""
        return self._joined(name, start, stop, is_peek=False)

    def watch_changes(self, watcher: ChangeWatcher) -> None:
        """Call ``watcher`` before states change, in the host's thread or the caller's.

        A resplit announces everything.
        """
        self._watcher = watcher
        for part in self.parts:
            part.watch_changes(watcher)

    def peek_state(self, name: str, start: int, stop: int) -> Tensor:
        """Return what `read_state` does, of a range that is not being updated, in any thread."""
        return self._joined(name, start, stop, is_peek=True)

    def _joined(self, name: str, start: int, stop: int, *, is_peek: bool) -> Tensor:
        self.geometry.check_range(start, stop)
        owners = [part for part in self.parts if name in part.tier.state_names()]
        if not owners:
            raise KeyError(f"the optimizer has no state {name!r}, only {self.state_names()}")
        spans = [(p.share.local(start), p.share.local(stop)) for p in owners]
        found = [
            part.peek_state(name, *span) if is_peek else part.tier.read_state(name, *span)
            for part, span in zip(owners, spans, strict=True)
        ]
        for values in found:
            if values.numel() == stop - start:
                return values
        whole = torch.zeros(stop - start, dtype=found[0].dtype, device="cpu")
        for part, (base, _), values in zip(owners, spans, found, strict=True):
            for a, b in part.share.overlaps(start, stop):
                at = part.share.local(a) - base
                whole[a - start : b - start] = values[at : at + b - a]
        return whole

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite one state. ``master_weight`` is rounded into the parameter shards as well."""
        stop = start + values.numel()
        self.geometry.check_range(start, stop)
        for part in self.parts:
            for a, b in part.share.overlaps(start, stop):
                part.write_state(name, part.share.local(a), values[a - start : b - start])

    def read_scalars(self, piece: int) -> Mapping[str, float]:
        """Return ``num_steps`` and the optimizer's scalars. The parts of a split piece agree."""
        part = next(part for part in self.parts if piece in part.local)
        return part.tier.read_scalars(part.local[piece][0])

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        for part in self.parts:
            for own in part.local.get(piece, ()):
                part.tier.write_scalars(own, scalars)

    def check_states(self, names: Collection[str], scalars: Sequence[Mapping[str, float]]) -> None:
        """Refuse what `write_state` or `write_scalars` would refuse, and change nothing."""
        for part in self.parts:
            part.check_states(names, scalars)

    @torch.no_grad()
    def resplit(self, num_host: int) -> None:
        """Let the host hold so many elements of its end from now on, and the device the rest.

        To be called between steps; it waits for one under way. No result changes but the byte
        counters, in which master weights that are published again count. See [Note: resplit].

        Raises:
            ValueError: there are not so many elements, or the host's share is chosen by name.
            RuntimeError: gradients have been offered for a step that has not been taken.
        """
        numel, end = self.geometry.numel, self._factory.end
        self.geometry.check_range(0, num_host)
        host = self.geometry.align(end_share(numel, num_host, end), self._alignment)
        if self._host != end_share(numel, self.host_numel, end):
            raise ValueError(f"the host's share is not an end but chosen by name: {self._host}")
        if self._fresh:
            raise RuntimeError("a resplit between offer_grad and step: step or discard first")
        if host == self._host:
            return
        self.wait_params(0, self.geometry.numel)
        if self._watcher is not None:
            self._watcher.before_change(0, self.geometry.numel)
        scalars = [self.read_scalars(i) for i in range(len(self.geometry.pieces))]
        before, self._has_dropped = self._host, False
        rest = host.complement(self.geometry.numel)
        try:
            self._host = host
            if host.numel > before.numel:  # the host's new tier is filled from the device's old one
                self._replace_host(host)
                self._replace_device(rest)
            else:
                self._replace_device(rest)
                self._replace_host(host)
            for i, values in enumerate(scalars):
                self.write_scalars(i, values)
        except BaseException as error:
            if self._has_dropped:
                self._lost = error
            else:
                self._host = before  # no room for the new share; the old one is whole
            raise

    def _replace_host(self, share: Intervals) -> None:
        """Fill a new host tier from all old ones, then drop the host's old one."""
        new = self._make_part(share, is_host=True) if share else None
        if new is not None:
            self._migrate_to(new.write_state, share)
        self._drop(is_host=True)
        if new is not None:
            self._parts.insert(0, new)

    def _replace_device(self, share: Intervals) -> None:
        """Drop the device's old tier before the new one is made, and fill that from the host."""
        host = next((part.share for part in self._parts if part.is_host), Intervals())
        kept = share.difference(host)
        held = HeldState(kept.numel)
        self._migrate_to(held.write_state, kept)
        self._drop(is_host=False)
        if not share:
            return
        new = self._make_part(share, is_host=False)
        migrate(held, kept, new.write_state, share)
        self._migrate_to(new.write_state, share)
        self._parts.append(new)

    def _migrate_to(
        self, write_state: Callable[[str, int, Tensor], None], share: Intervals
    ) -> None:
        for part in self._parts:
            migrate(part.tier, part.share, write_state, share)

    def _drop(self, *, is_host: bool) -> None:
        for part in [part for part in self._parts if part.is_host == is_host]:
            report = part.report().tier
            if is_host and report is not None:
                self._replaced.append(report)
            self._has_dropped = True
            self._parts.remove(part)
