"""`Shares`: which elements of a flat space the host holds and which the device, and their moves.

[Note: resplit]
`Shares.resplit` makes new tiers and migrates the state from the old ones, a block at a time. The
device never holds two tiers: state that stays there waits in host memory until the old tier has
been freed. Meanwhile host memory holds the host's old share and its new one, or one of them and the
waiting state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from zero_offload.errors import OffloadError
from zero_offload.flat.geometry import Geometry
from zero_offload.flat.intervals import Intervals
from zero_offload.protocols import ChangeWatcher, Groups
from zero_offload.tiers.factory import OffloadTiers
from zero_offload.tiers.flat_tier import TierReport
from zero_offload.tiers.part import AnyPart, DevicePart, HeldState, HostPart, PartWatcher, migrate
from zero_offload.tiers.share import end_share


class Shares:
    """The host's part of a flat space and the device's, of which one may be missing.

    ``host`` are the host's elements. Split points are aligned, such that they change no bit.
    """

    def __init__(
        self, geometry: Geometry, groups: Groups, host: Intervals, factory: OffloadTiers
    ) -> None:
        self.geometry = geometry
        self._alignment = factory.alignment(groups)
        self._groups = groups
        self._factory = factory
        self._num_micro_steps = 0  # none: gradients are offered, not added
        self._reserved: list[tuple[int, int, torch.dtype]] = []  # gradients with memory
        self._has_undo = False  # the host's part has an undo log
        self._replaced: list[TierReport] = []  # of host tiers before a resplit
        self._has_dropped = False  # a tier, in the resplit under way
        self._lost: BaseException | None = None
        self._watcher: ChangeWatcher | None = None
        self.make_parts(geometry.align(host, self._alignment))  # chosen parameters stay whole

    def make_parts(self, host: Intervals) -> None:
        """Make the parts for the host's share, without state, in place of any. For subclasses."""
        self._host = host
        self._set_parts(None, None)  # freed before their successors are allocated
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
            can_undo = tier.enable_undo(self._factory.undo_buffer_size)
            assert can_undo, "as the factory says: a share has another length, not another rule"
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
        """The host's part and the device's, after `check_whole`."""
        self.check_whole()
        return self._present

    def check_whole(self) -> None:
        """Raise `OffloadError` after a resplit that failed midway."""
        if self._lost is not None:
            raise OffloadError(
                f"moving optimizer state between host and device failed ({self._lost!r}), so a "
                f"part of it is lost; load a checkpoint into a new tier"
            ) from self._lost

    @property
    def host_numel(self) -> int:
        """Number of elements that the host holds."""
        return self._host.numel

    def expect_micro_steps(self, count: int) -> None:
        """Expect ``count`` calls of `add_grad` per range and step. It decides on memory alone.

        To be called before state is written and before the first gradient that is added.
        """
        self.check_whole()
        self._num_micro_steps = count
        if self._host_part is not None:
            self._host_part.tier.expect_micro_steps(count)
        if self._device_part is not None:
            self._device_part.has_sum = True

    def enable_undo(self) -> bool:
        """Prepare for `speculate`: have an undo log of at most ``undo_buffer_size`` bytes.

        Return whether the host's updates can be undone: those of a host kernel, in host memory.
        """
        if self._factory.can_undo:
            self.check_whole()
            host, most = self._host_part, self._factory.undo_buffer_size
            self._has_undo = host is None or host.tier.enable_undo(most)
        return self._has_undo

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
        """Call ``watcher`` before states change, in the host's thread or the caller's.

        A resplit announces everything.
        """
        self._watcher = watcher
        for part in self.parts:
            self._watch_part(part)

    def _watch_part(self, part: AnyPart) -> None:
        if self._watcher is not None:
            part.snapshots().watch_changes(PartWatcher(self._watcher, part.share))

    def read_scalars(self, piece: int) -> Mapping[str, float]:
        """Return ``num_steps`` and the optimizer's scalars. The parts of a split piece agree."""
        part = next(part for part in self.parts if piece in part.local)
        return part.tier.read_scalars(part.local[piece][0])

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        for part in self.parts:
            for own in part.local.get(piece, ()):
                part.tier.write_scalars(own, scalars)

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
        if not self.may_move(host):
            return
        if self._watcher is not None:
            self._watcher.before_change(0, numel)
        scalars = [self.read_scalars(i) for i in range(len(self.geometry.pieces))]
        before, self._has_dropped = self._host, False
        rest = host.complement(numel)
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

    def may_move(self, host: Intervals) -> bool:
        """Return whether ``host`` is another share, once no step is under way. For subclasses."""
        return host != self._host

    def _replace_host(self, share: Intervals) -> None:
        """Fill a new host tier from all old ones, then drop the host's old one."""
        new = self._make_host(share) if share else None
        if new is not None:
            self._migrate_to(new.write_state, share)
        if self._host_part is not None:
            self._replaced.append(self._host_part.tier.report())
            self._has_dropped = True
        self._set_parts(new, self._device_part)

    def _replace_device(self, share: Intervals) -> None:
        """Drop the device's old tier before the new one is made, and fill that from the host."""
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
