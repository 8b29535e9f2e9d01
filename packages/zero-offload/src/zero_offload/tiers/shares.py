"""Division of a flat space's elements between host and device, and its changes.

[Note: resplit]
`Shares.resplit` creates new tiers and migrates the state in blocks, by StateTier methods only.
Device memory never holds two device tiers: state that stays on the device waits in host memory
until the old tier is freed. Host memory then holds the host's old and new share, or one of them and
the waiting state.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import ClassVar

import torch
from torch import Tensor

from zero_offload.errors import OffloadError
from zero_offload.flat.geometry import Geometry, Intervals
from zero_offload.memory.storage import BlockFile
from zero_offload.memory.streams import TimedCopy
from zero_offload.protocols import (
    ChangeWatcher,
    DeviceMemory,
    Groups,
    OptimizerClass,
    ReservingTier,
    StateTier,
)
from zero_offload.rules.resolve import check_elementwise
from zero_offload.rules.rule import MASTER
from zero_offload.settings import HostShare, OffloadSettings
from zero_offload.steppers.torch_stepper import probe_entry, served_groups
from zero_offload.tiers.factory import OffloadTiers
from zero_offload.tiers.flat_tier import FlatTier, HostTier, TierReport
from zero_offload.transfers.mover import Release

_SQUARED_NUMEL = 1 << 24
"""Elements whose squares are summed at once, to limit what torch may convert to float64."""


@dataclass(frozen=True, slots=True)
class PartReport:
    """Sorted ``(start, stop)`` spans of a part, and its report, or None if its tier has none."""

    is_host: bool
    spans: tuple[tuple[int, int], ...]
    tier: TierReport | None


@dataclass(eq=False)
class Part:
    """A tier over the elements ``share`` of a flat space.

    Attributes:
        geometry: the tier's own flat space, whose offsets are `Intervals.local`.
        local: the tier's piece indices, by piece index of the whole space.
    """

    is_host: ClassVar[bool]
    tier: StateTier
    geometry: Geometry
    share: Intervals
    local: Mapping[int, tuple[int, ...]]

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite a state. A part without pieces has master weights only."""
        if self.local or name == MASTER:
            self.tier.write_state(name, start, values)

    def check_states(self, names: Collection[str], scalars: Sequence[Mapping[str, float]]) -> None:
        # `local` has the tier's pieces in their order.
        own = [scalars[piece] for piece, indices in self.local.items() for _ in indices]
        self.tier.check_states(names if own else (), own)


@dataclass(eq=False)
class HostPart(Part):
    """The host's part, which is updated in the background."""

    is_host = True
    tier: HostTier

    def add_grad(
        self, start: int, grad: Tensor, *, is_first: bool, is_last: bool
    ) -> Release | None:
        return self.tier.add_grad(start, grad, is_last=is_last)

    def offer_grad(self, start: int, grad: Tensor) -> Release | None:
        return self.tier.offer_grad(start, grad)

    def square_sum(self, start: int, stop: int) -> Callable[[], float]:
        return self.tier.square_sum(start, stop).result

    def reserve(self, grads: Sequence[tuple[int, int, torch.dtype]], device: torch.device) -> None:
        self.tier.reserve({dtype for *_, dtype in grads})

    def report(self) -> PartReport:
        return PartReport(True, self.share.spans, self.tier.report())


@dataclass(eq=False)
class DevicePart(Part):
    """The device's part, with device memory for copies of gradients.

    Copies, sums and updates are enqueued on the caller's stream, in order. With ``has_sum``
    micro-steps are added in the master weights' dtype.
    """

    is_host = False
    has_sum: bool = False
    # copies or sums of gradients, by dtype
    _memory: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False)

    def add_grad(
        self, start: int, grad: Tensor, *, is_first: bool, is_last: bool
    ) -> Release | None:
        """Add a gradient to the tier's gradient, or replace it if ``is_first``."""
        total = self._memory_of(start, grad)
        return self.tier.offer_grad(start, total.copy_(grad) if is_first else total.add_(grad))

    def offer_grad(self, start: int, grad: Tensor) -> Release | None:
        """Offer the tier a copy of the gradient, because the caller may reuse its memory."""
        return self.tier.offer_grad(start, self._memory_of(start, grad).copy_(grad))

    def _memory_of(self, start: int, grad: Tensor) -> Tensor:
        whole = self._allocate(self._kept_dtype(grad.dtype), grad.device)
        return whole[start : start + grad.numel()]

    def _kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.geometry.master_dtype if self.has_sum else dtype

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if dtype not in self._memory:
            self._memory[dtype] = torch.empty(self.geometry.numel, dtype=dtype, device=device)
        return self._memory[dtype]

    def square_sum(self, start: int, stop: int) -> Callable[[], Tensor]:
        """Enqueue a sum of squares, see `TwinTier.square_sum`. The result is on the device."""
        (memory,) = self._memory.values()
        found = memory.new_zeros((), dtype=torch.float64)
        for part in torch.split(memory[start:stop], _SQUARED_NUMEL):
            found += torch.linalg.vector_norm(part, dtype=torch.float64).square()
        return lambda: found

    def reserve(self, grads: Sequence[tuple[int, int, torch.dtype]], device: torch.device) -> None:
        kept = [(start, stop, self._kept_dtype(dtype)) for start, stop, dtype in grads]
        for *_, dtype in kept:
            self._allocate(dtype, device)
        if isinstance(self.tier, ReservingTier):
            self.tier.reserve(kept)

    def device_tensors(self) -> dict[str, list[Tensor]]:
        held = self.tier.device_tensors() if isinstance(self.tier, DeviceMemory) else {}
        found = {kind: list(tensors) for kind, tensors in held.items()}
        found["gradients"] = [*found.get("gradients", []), *self._memory.values()]
        return found

    def report(self) -> PartReport:
        found = self.tier.report() if isinstance(self.tier, FlatTier) else None
        if found is not None:
            copies = sum(memory.nbytes for memory in self._memory.values())
            found = replace(found, memory={**found.memory, "gradient copies": copies})
        return PartReport(False, self.share.spans, found)


AnyPart = HostPart | DevicePart


@dataclass(frozen=True, slots=True)
class PartWatcher:
    """`ChangeWatcher` of a part, which passes offsets of the whole space to ``watcher``."""

    watcher: ChangeWatcher
    share: Intervals

    def before_change(self, start: int, stop: int) -> None:
        if start < stop:
            first, last = self.share.element(start), self.share.element(stop - 1)
            for low, high in self.share.overlaps(first, last + 1):
                self.watcher.before_change(low, high)


BLOCK_NUMEL = 1 << 22
"""Maximum elements of one state that are copied at once: 16 MiB of fp32."""


@dataclass(frozen=True, slots=True)
class HeldState:
    """State in host memory while it moves from an old tier to a new one."""

    numel: int
    states: dict[str, Tensor] = field(default_factory=dict)

    def state_names(self) -> Sequence[str]:
        return tuple(self.states)

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        return self.states[name][start:stop]

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        """Copy values of one state. The first values of a state determine its dtype."""
        if name not in self.states:
            self.states[name] = torch.zeros(self.numel, dtype=values.dtype, device="cpu")
        self.states[name][start : start + values.numel()].copy_(values)


def migrate(
    source: StateTier | HeldState,
    source_share: Intervals,
    write_state: Callable[[str, int, Tensor], None],
    share: Intervals,
) -> None:
    """Copy all states of the elements in both shares. ``write_state`` gets offsets in ``share``."""
    common = source_share.intersection(share)
    for name in source.state_names():
        for low, high in common.spans:
            for start in range(low, high, BLOCK_NUMEL):
                at, to = source_share.local(start), share.local(start)
                numel = min(BLOCK_NUMEL, high - start)
                write_state(name, to, source.read_state(name, at, at + numel))


WIDENED_NUMEL = 1 << 26
"""Elements of 16-bit gradients that the engine's device tier converts to fp32 at once."""


def host_share(
    settings: OffloadSettings,
    geometry: Geometry,
    names: Sequence[str],
    optimizer_class: OptimizerClass,
    groups: Groups,
    *,
    is_accelerated: bool,
) -> Intervals | None:
    """Return the elements that the settings give to the host, or None for ratio ``"auto"``."""
    if settings.parameters is not None:
        if len(names) != len(geometry.pieces):
            raise ValueError(
                f"parameters has patterns of names, and {len(names)} of {len(geometry.pieces)} "
                "parameters are named: give model.named_parameters(), or names to the factory"
            )
        chosen = [i for i, name in enumerate(names) if is_chosen(name, settings.parameters)]
        return geometry.padded_spans(chosen)
    if settings.device_budget is not None:
        nbytes = state_bytes(optimizer_class, groups, geometry.master_dtype)
        budget, end = settings.device_budget, settings.host_share
        return within_budget(geometry, budget, nbytes, end, is_accelerated=is_accelerated)
    if settings.ratio == "auto":
        return None
    return end_share(geometry.numel, round(settings.ratio * geometry.numel), settings.host_share)


def end_share(numel: int, num_host: int, end: HostShare) -> Intervals:
    start = 0 if end == "first" else numel - num_host
    return Intervals([(start, start + num_host)])


def is_chosen(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name matches a pattern of `fnmatchcase`, where ``*`` matches dots too."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
            raise ValueError(
                f"parameters: {pattern!r} matches no parameter; near it are {list(near)}"
            )


def within_budget(
    geometry: Geometry,
    budget: int,
    element_state_bytes: int,
    end: HostShare,
    *,
    is_accelerated: bool,
    adds_grads: bool = False,
) -> Intervals:
    """Return the fewest host elements, at ``end``, whose complement fits in ``budget`` bytes."""

    def fits(num_host: int) -> bool:
        held = device_bytes(
            geometry,
            end_share(numel, num_host, end).complement(numel),
            element_state_bytes,
            is_accelerated=is_accelerated,
            adds_grads=adds_grads,
        )
        return held <= budget

    numel = geometry.numel
    # Bisection works because fewer host elements need at least as many device bytes.
    return end_share(numel, bisect_left(range(numel), True, key=fits), end)


def device_bytes(
    geometry: Geometry,
    share: Intervals,
    element_state_bytes: int,
    *,
    is_accelerated: bool,
    adds_grads: bool = False,
) -> int:
    """Return the bytes of a share on the device: states, master weights, one gradient.

    Master weights take no bytes if all shards have the master dtype. A gradient has its shard's
    dtype, and with ``adds_grads`` the master dtype. Without ``adds_grads`` an accelerator's tier
    converts up to `WIDENED_NUMEL` elements at once if the master dtype is wider.
    """
    views = [view for span in share.spans for _, _, view in geometry.overlaps(*span)]
    master = geometry.master_dtype
    is_in_place = all(view.dtype == master for view in views)
    if adds_grads:
        grads = share.numel * master.itemsize
    else:
        grads = sum(view.numel() * view.element_size() for view in views)
    kept = share.numel * element_state_bytes + grads
    if is_in_place:
        return kept
    widened = min(share.numel, WIDENED_NUMEL) if is_accelerated and not adds_grads else 0
    return kept + (share.numel + widened) * master.itemsize


def state_bytes(optimizer_class: OptimizerClass, groups: Groups, dtype: torch.dtype) -> int:
    """Return the bytes of one element's optimizer states, without its master weight."""
    check_elementwise(optimizer_class)
    cpu = torch.device("cpu")
    entries = [probe_entry(optimizer_class, g, cpu, dtype) for g in served_groups(groups, cpu)]
    dtypes = {k: v for entry in entries for k, v in entry.elementwise().items()}
    return sum(found.itemsize for found in dtypes.values())


class Shares:
    """The host's and the device's part of a flat space, one of which may be missing.

    Counters include host tiers that a resplit replaced.
    """

    def __init__(
        self, geometry: Geometry, groups: Groups, host: Intervals, factory: OffloadTiers
    ) -> None:
        self.geometry = geometry
        self._alignment = factory.alignment(groups)
        self._groups = groups
        self._factory = factory
        self._num_micro_steps = 0  # 0 until expect_micro_steps is called
        self._reserved: list[tuple[int, int, torch.dtype]] = []  # arguments of reserve()
        self._has_undo = False  # whether the host's part has an undo log
        self._replaced: list[TierReport] = []  # last reports of replaced host tiers
        self._has_dropped = False  # whether the current resplit has freed a tier
        self._lost: BaseException | None = None
        self._watcher: ChangeWatcher | None = None
        # Alignment moves only split points inside pieces. Names select whole pieces.
        self.make_parts(geometry.align(host, self._alignment))

    def make_parts(self, host: Intervals) -> None:
        """Replace the parts by parts without state, the host's with the elements ``host``."""
        self._host = host
        self._set_parts(None, None)  # frees the old parts first
        rest = host.complement(self.geometry.numel)
        on_host = self._make_host(host) if host or not self.geometry.numel else None
        self._set_parts(on_host, self._make_device(rest) if rest else None)

    def _set_parts(self, host: HostPart | None, device: DevicePart | None) -> None:
        self._host_part = host
        self._device_part = device
        self._present: list[AnyPart] = [part for part in (host, device) if part is not None]

    def _make_host(self, share: Intervals) -> HostPart:
        geometry, local = self.geometry.part(share)
        tier = self._factory.make_host(geometry, share, self._groups)
        part = HostPart(tier, geometry, share, local)
        if self._num_micro_steps:
            tier.expect_micro_steps(self._num_micro_steps)
        if self._has_undo:
            tier.enable_undo(self._factory.undo_buffer_size)
        self._reserve_part(part)
        self._watch_part(part)
        return part

    def _make_device(self, share: Intervals) -> DevicePart:
        geometry, local = self.geometry.part(share)
        tier = self._factory.make_device(geometry, share, self._groups)
        part = DevicePart(tier, geometry, share, local, self._num_micro_steps > 0)
        self._reserve_part(part)
        self._watch_part(part)
        return part

    @property
    def parts(self) -> Sequence[AnyPart]:
        """The existing parts, the host's first. Raises OffloadError after a failed resplit."""
        self.check_whole()
        return self._present

    def check_whole(self) -> None:
        if self._lost is not None:
            raise OffloadError(
                f"moving optimizer state between host and device failed ({self._lost!r}), so a "
                f"part of it is lost; load a checkpoint into a new tier"
            ) from self._lost

    @property
    def host_numel(self) -> int:
        return self._host.numel

    def expect_micro_steps(self, count: int) -> None:
        """Set the expected number of `add_grad` calls per range and step, to allocate memory.

        Call it before state is written and before the first gradient is added.
        """
        self.check_whole()
        self._num_micro_steps = count
        if self._host_part is not None:
            self._host_part.tier.expect_micro_steps(count)
        if self._device_part is not None:
            self._device_part.has_sum = True

    def enable_undo(self) -> bool:
        """Create the undo log for `speculate`. Return False if no update can be undone."""
        self.check_whole()
        self._has_undo = self._factory.can_undo
        if self._has_undo and self._host_part is not None:
            self._host_part.tier.enable_undo(self._factory.undo_buffer_size)
        return self._has_undo

    def reserve(self, grads: Sequence[tuple[int, int, torch.dtype]]) -> None:
        """Allocate memory, see `ReservingTier.reserve`. Call it after `expect_micro_steps`."""
        self._reserved = list(grads)
        for part in self.parts:
            self._reserve_part(part)

    def device_tensors(self) -> dict[str, list[Tensor]]:
        self.check_whole()
        return {} if self._device_part is None else self._device_part.device_tensors()

    def _reserve_part(self, part: AnyPart) -> None:
        grads = [
            (part.share.local(a), part.share.local(b), dtype)
            for start, stop, dtype in self._reserved
            for a, b in part.share.overlaps(start, stop)
        ]
        if grads:
            part.reserve(grads, self._factory.device)

    def watch_changes(self, watcher: ChangeWatcher) -> None:
        """Call ``watcher`` before states change. A resplit announces all elements."""
        self._watcher = watcher
        for part in self.parts:
            self._watch_part(part)

    def _watch_part(self, part: AnyPart) -> None:
        if self._watcher is not None:
            part.tier.watch_changes(PartWatcher(self._watcher, part.share))

    def read_scalars(self, piece: int) -> Mapping[str, float]:
        """Return ``num_steps`` and the scalars of a piece, which are equal on host and device."""
        part = next(part for part in self.parts if piece in part.local)
        return part.tier.read_scalars(part.local[piece][0])

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        for part in self.parts:
            for own in part.local.get(piece, ()):
                part.tier.write_scalars(own, scalars)

    @torch.no_grad()
    def resplit(self, num_host: int) -> None:
        """Move elements so that the host has ``num_host``, up to the alignment of split points.

        Call it between steps. It waits for a pending step. States are rounded to their new tier's
        dtypes. Byte counters grow, as master weights are published again. See [Note: resplit].

        Raises:
            ValueError: ``num_host`` is out of range, or parameter names select the host's elements.
            RuntimeError: gradients were offered for a step that has not been taken.
        """
        numel, end = self.geometry.numel, self._factory.end
        self.geometry.check_range(0, num_host)
        host = self.geometry.align(end_share(numel, num_host, end), self._alignment)
        if self._host != end_share(numel, self.host_numel, end):
            raise ValueError(f"the host's share is not an end but chosen by name: {self._host}")
        if not self.may_move(host):
            return
        if self._watcher is not None:
            self._watcher.before_change(0, numel)
        scalars = [self.read_scalars(i) for i in range(len(self.geometry.pieces))]
        before, self._has_dropped = self._host, False
        rest = host.complement(numel)
        try:
            self._host = host
            # The growing side needs the other side's old state, so the growing side goes first.
            if host.numel > before.numel:
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
                # No tier was replaced, so the old tiers still have all state.
                self._host = before
            raise

    def may_move(self, host: Intervals) -> bool:
        """Return whether ``host`` differs from the host's elements. Subclasses add checks."""
        return host != self._host

    def _replace_host(self, share: Intervals) -> None:
        """Create a host tier, fill it from the present tiers, then drop the old host tier."""
        new = self._make_host(share) if share else None
        if new is not None:
            self._migrate_to(new.write_state, share)
        if self._host_part is not None:
            self._replaced.append(self._host_part.tier.report())
            self._has_dropped = True
        self._set_parts(new, self._device_part)

    def _replace_device(self, share: Intervals) -> None:
        """Copy the state to host memory, drop the old device tier, and fill a new one."""
        on_host = Intervals() if self._host_part is None else self._host_part.share
        kept = share.difference(on_host)
        held = HeldState(kept.numel)
        self._migrate_to(held.write_state, kept)
        self._has_dropped |= self._device_part is not None
        self._set_parts(self._host_part, None)
        if share:
            new = self._make_device(share)
            migrate(held, kept, new.write_state, share)
            self._migrate_to(new.write_state, share)
            self._set_parts(self._host_part, new)

    def _migrate_to(
        self, write_state: Callable[[str, int, Tensor], None], share: Intervals
    ) -> None:
        for part in self._present:
            migrate(part.tier, part.share, write_state, share)

    def report(self) -> tuple[PartReport, ...]:
        return tuple(part.report() for part in self._present)

    def _host_reports(self) -> list[TierReport]:
        host = self._host_part
        return self._replaced if host is None else [*self._replaced, host.tier.report()]

    @property
    def bytes_d2h(self) -> int:
        return sum(report.bytes_d2h for report in self._host_reports())

    @property
    def bytes_h2d(self) -> int:
        """Parameter bytes copied from the host so far, complete after ``wait_params``."""
        return sum(report.bytes_h2d for report in self._host_reports())

    @property
    def stall_s(self) -> float:
        return sum(report.stall_s for report in self._host_reports())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of master weights and states, or of a state file's buffers."""
        return sum(r.tier.host_bytes for r in self.report() if r.tier is not None)

    @property
    def undo_bytes(self) -> int:
        return self.host_memory_bytes().get("undo log", 0)

    @property
    def file(self) -> BlockFile | None:
        return None if self._host_part is None else self._host_part.tier.file

    def work_s(self) -> dict[str, float]:
        """Return seconds of the host's updates, of file transfers, and of waits for the file."""
        found = {"host": sum(report.update_s for report in self._host_reports())}
        if self.file is not None:
            found |= {"file": self.file.io_s, "file wait": self.file.waited_s}
        return found

    def copied_bytes(self) -> tuple[int, int]:
        """Return bytes copied so far from the device to the host, and back."""
        return self.bytes_d2h, self.bytes_h2d

    def recent_updates(self) -> list[tuple[float, float]]:
        """Return start and end of the host tier's recent updates, by `time.perf_counter`."""
        return [] if self._host_part is None else list(self._host_part.tier.worker.updates)

    def file_traffic(self) -> tuple[int, int]:
        """Wait for transfers. Return the file's bytes read and written since the last resplit."""
        if self._host_part is not None:
            self._host_part.tier.drain()
        return (0, 0) if self.file is None else self.file.traffic()

    def time_copies(self, *, is_on: bool) -> None:
        """Start or stop timing copies between device and host. A CPU has no such copies."""
        if self._host_part is not None:
            self._host_part.tier.mover.streams.is_timing = is_on

    def take_copies(self) -> list[TimedCopy]:
        """Return the copies timed since the last call, with the events around each."""
        host = self._host_part
        return [] if host is None else host.tier.mover.streams.take_copies()

    def host_memory_bytes(self) -> dict[str, int]:
        """Return bytes of host memory by kind, without parameter shards and parameter staging."""
        found: Counter[str] = Counter()
        is_all_on_host = self._factory.device.type == "cpu"
        for part in self.report():
            if part.tier is not None and (part.is_host or is_all_on_host):
                kinds = dict(part.tier.memory)
                if part.is_host and self.file is not None:
                    kinds["NVMe buffers"] = kinds.pop("optimizer states")
                found.update(kinds)
        return {kind: nbytes for kind, nbytes in found.items() if nbytes}
