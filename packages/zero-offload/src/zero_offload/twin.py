"""Twin-Flow: one optimizer state, of which the host holds and updates a share, the device the rest,
at the same time (DeepSpeed ZeRO-Offload++, Twin-Flow).

The share is a set of elements: the first ``k``, or those of some parameters. A piece that it cuts
is one parameter in several parts whose scalars stay equal, so a checkpoint knows nothing of the
share and loads at any other.

[Note: a cut that moves]
`recut` makes new tiers and moves the state from the old ones, a block at a time. The device never
holds two tiers: what stays there waits in host memory until the old one has gone. Host memory holds
for a while the host's old share and its new one, or one of them and what waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from zero_offload.geometry import Geometry, check_active
from zero_offload.intervals import Intervals
from zero_offload.moving import HeldState, Landing, Part, lost_part, move_state
from zero_offload.protocols import StateTier
from zero_offload.storage import BlockFile

__all__ = ["PartFactory", "TwinTier"]

PartFactory = Callable[[Geometry, Intervals, Sequence[Mapping[str, Any]]], StateTier]
"""Makes a tier for a part's flat space, the elements that make it, and the ``param_groups`` that
its optimizer starts with."""


class TwinTier:
    """A StateTier made of a host tier over a share of the elements and a device tier over the rest.

    It keeps its own copy of every gradient, on the host or on the device.

    Args:
        geometry: the whole flat space.
        groups: ``param_groups``, every default filled in; ``params`` in them are not looked at.
        host: the host's share; where the space is empty the host has it.
        make_host: makes the host tier. It must return from ``step`` before the work is done for
            the two to run at the same time.
        make_device: makes the device tier.
        alignment: a cut within a parameter lies at a multiple of so many of its elements.
    """

    keeps_grads = True

    def __init__(
        self,
        geometry: Geometry,
        groups: Sequence[Mapping[str, Any]],
        host: Intervals,
        *,
        make_host: PartFactory,
        make_device: PartFactory,
        alignment: int = 1,
    ) -> None:
        self.geometry = geometry
        self._alignment = alignment
        self._groups = groups
        self._make_host = make_host
        self._make_device = make_device
        self._offered = Intervals()  # and not updated yet
        self._fresh = Intervals()  # offered since the last call of step
        self._closed = Intervals()  # offered for this optimizer step before that call
        self._gone_bytes = (0, 0)  # of tiers that a recut replaced
        self._gone_stall_s = 0.0
        self._is_given_up = False  # whether the recut under way has dropped a tier
        self._host = host
        self._parts: list[Part] = []
        if host or not geometry.numel:
            self._parts.append(self._make_part(host, is_host=True))
        if rest := host.complement(geometry.numel):
            self._parts.append(self._make_part(rest, is_host=False))

    def _make_part(self, share: Intervals, *, is_host: bool) -> Part:
        geometry, local = self.geometry.part(share)
        make = self._make_host if is_host else self._make_device
        landing = None if is_host else Landing(geometry.numel)
        return Part(make(geometry, share, self._groups), geometry, share, local, is_host, landing)

    @property
    def cut(self) -> int:
        """How many elements the host holds: with a ratio, the element at which its share ends."""
        return self._host.numel

    @property
    def bytes_d2h(self) -> int:
        """Gradient bytes copied to the host so far."""
        return self._gone_bytes[0] + sum(getattr(p.tier, "bytes_d2h", 0) for p in self._parts)

    @property
    def bytes_h2d(self) -> int:
        """Parameter bytes brought from the host so far; complete after ``wait_params``."""
        return self._gone_bytes[1] + sum(getattr(p.tier, "bytes_h2d", 0) for p in self._parts)

    @property
    def file(self) -> BlockFile | None:
        """Where the host's part of the state lies if not in memory, with its counters."""
        return next((f for p in self._parts if (f := getattr(p.tier, "file", None))), None)

    @property
    def stall_s(self) -> float:
        """Seconds that callers were blocked so far because the host was not done."""
        own = sum(getattr(part.tier, "stall_s", 0.0) for part in self._parts if part.is_host)
        return self._gone_stall_s + own

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that master weights and state take, transfer buffers apart."""
        return sum(getattr(part.tier, "host_bytes", 0) for part in self._parts)

    def offer_grad(self, start: int, grad: Tensor) -> Callable[[], None] | None:
        """Copy the gradient of ``[start, start + grad.numel())``; each part gets its share.

        Returns:
            None, or what must be called before the memory of ``grad`` is written again: the copy
            may still be under way.
        """
        stop = start + grad.numel()
        self.geometry.check_range(start, stop)
        if any(self._closed.overlaps(start, stop)):
            self._closed, self._offered = Intervals(), self._fresh
            self._begin_round()
        release = None  # the host's copies are in order: the last says all
        for part in self._parts:
            for a, b in part.share.overlaps(start, stop):
                at, own = part.share.local(a), grad[a - start : b - start]
                own = own if part.landing is None else part.landing.copy(at, own)
                release = part.tier.offer_grad(at, own) or release
        offer = Intervals([(start, stop)])
        self._offered, self._fresh = self._offered.union(offer), self._fresh.union(offer)
        return release

    def read_grad(self, start: int, stop: int) -> Tensor:
        """A copy of what is offered for ``[start, stop)``: 1-D, on the CPU, in its dtype.

        Raises:
            ValueError: a part of it was not offered, or was used by a step.
        """
        found: list[tuple[int, Tensor]] = []
        for part in self._parts:
            for a, b in part.share.overlaps(start, stop):
                low, high = part.share.local(a), part.share.local(b)
                found.append((a, part.tier.read_grad(low, high)))
        return torch.cat([values for _, values in sorted(found, key=itemgetter(0))])

    def _begin_round(self) -> None:
        """What was offered before the last step is offered again: a new optimizer step begins.

        ``step`` may be called several times for one optimizer step, with other pieces each time.
        """

    def discard_grads(self) -> None:
        """Forget what was offered and no step has taken."""
        self._offered = self._fresh = Intervals()
        for part in self._parts:
            part.tier.discard_grads()

    def step(
        self, groups: Sequence[Mapping[str, Any]], active: Sequence[int], *, grad_scale: float
    ) -> None:
        """Update the pieces in ``active``: the host starts first, in its worker, then the device.

        Raises:
            ValueError: ``active`` is not sorted or names no piece, or a gradient is missing.
        """
        indices = check_active(self.geometry, active)
        self._check_offered(indices)  # a part must not have moved on when another refuses
        updated = self.geometry.padded_spans(indices)
        self._offered = self._offered.difference(updated)
        self._closed, self._fresh = self._closed.union(self._fresh), Intervals()
        self._groups = groups
        for part in self._parts:
            local = [own for i in indices for own in part.local.get(i, ())]
            self._step_part(part, local, grad_scale)

    def _step_part(self, part: Part, active: Sequence[int], grad_scale: float) -> None:
        part.tier.step(self._groups, active, grad_scale=grad_scale)

    def _check_offered(self, indices: Sequence[int]) -> None:
        for i in indices:
            piece = self.geometry.pieces[i]
            if not self._offered.covers(piece.start, piece.stop):
                missing = Intervals([(piece.start, piece.stop)]).difference(self._offered)
                start, stop = missing.spans[0]
                raise ValueError(
                    f"no gradient was offered for [{start}, {stop}), which a piece listed in "
                    f"`active` needs; call offer_grad before step"
                )

    def wait_params(self, start: int, stop: int) -> None:
        """Return once the parameter shards in ``[start, stop)`` hold their new values."""
        for part in self._parts:
            a, b = part.share.local(start), part.share.local(stop)
            if a < b:
                self._wait_part(part, a, b)

    def are_params_ready(self, start: int, stop: int) -> bool:
        """Whether `wait_params` would return at once, and make no stream wait."""
        spans = [(p, p.share.local(start), p.share.local(stop)) for p in self._parts]
        return all(p.tier.are_params_ready(a, b) for p, a, b in spans if a < b)

    def _wait_part(self, part: Part, start: int, stop: int) -> None:
        part.tier.wait_params(start, stop)

    def state_names(self) -> Sequence[str]:
        """``master_weight``, then each elementwise state that either part has."""
        return tuple(dict.fromkeys(n for part in self._parts for n in part.tier.state_names()))

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of one state over ``[start, stop)``: 1-D, on the CPU, zero where there is none.

        Raises:
            KeyError: neither part has such a state.
        """
        self.geometry.check_range(start, stop)
        owners = [part for part in self._parts if name in part.tier.state_names()]
        if not owners:
            raise KeyError(f"the optimizer has no state {name!r}, only {self.state_names()}")
        spans = [(p.share.local(start), p.share.local(stop)) for p in owners]
        found = [p.tier.read_state(name, *span) for p, span in zip(owners, spans, strict=True)]
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
        """Overwrite one state; ``master_weight`` reaches the parameter shards as well.

        Raises:
            KeyError: the optimizer has no such state.
        """
        stop = start + values.numel()
        self.geometry.check_range(start, stop)
        for part in self._parts:
            for a, b in part.share.overlaps(start, stop):
                part.write_state(name, part.share.local(a), values[a - start : b - start])

    def read_scalars(self, piece: int) -> Mapping[str, float]:
        """``num_steps`` and the optimizer's scalars; the parts of a cut piece agree."""
        part = next(part for part in self._parts if piece in part.local)
        return part.tier.read_scalars(part.local[piece][0])

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Restore what `read_scalars` gave, in every part of a cut piece."""
        for part in self._parts:
            for own in part.local.get(piece, ()):
                part.tier.write_scalars(own, scalars)

    @torch.no_grad()
    def recut(self, cut: int) -> None:
        """Let the host hold ``[0, cut)`` from now on, and the device the rest.

        Between steps; it waits for one under way. Nothing that the tier computes or tells changes
        but the byte counters, in which masters that are published again count. See
        [Note: a cut that moves].

        Raises:
            ValueError: ``cut`` is not within the flat space, or the host's share is not ``[0, k)``.
            RuntimeError: gradients have been offered for a step that has not been taken.
        """
        self.geometry.check_range(0, cut)
        cut = self.geometry.floor(cut, self._alignment)
        if self._host != Intervals([(0, self.cut)]):
            raise ValueError(f"the host's share is not [0, k) but chosen by name: {self._host}")
        if self._fresh:
            raise RuntimeError("a recut between offer_grad and step: step or discard first")
        if cut == self.cut:
            return
        self.wait_params(0, self.geometry.numel)
        scalars = [self.read_scalars(i) for i in range(len(self.geometry.pieces))]
        before, self._is_given_up = self._host, False
        try:
            self._replace_parts(Intervals([(0, cut)]), is_growing=cut > self.cut)
            for i, values in enumerate(scalars):
                self.write_scalars(i, values)
        except BaseException as error:
            if self._is_given_up:
                self._parts = [lost_part(self.geometry, error)]
            else:
                self._host = before  # there is no room for the new share; the old one is whole
            raise

    def _replace_parts(self, host: Intervals, *, is_growing: bool) -> None:
        self._host = host
        if is_growing:  # the host takes from the device what it gives up
            self._replace_host(host)
            self._replace_device(host.complement(self.geometry.numel))
        else:
            self._replace_device(host.complement(self.geometry.numel))
            self._replace_host(host)

    def _replace_host(self, share: Intervals) -> None:
        """Fill a new host tier from all old ones, then let go of the host's."""
        new = self._make_part(share, is_host=True) if share else None
        if new is not None:
            self._copy_out(new.write_state, share)
        self._drop(is_host=True)
        if new is not None:
            self._parts.insert(0, new)

    def _replace_device(self, share: Intervals) -> None:
        """Let go of the device's old tier before the new one is made, which the host then fills."""
        kept = share.difference(self._host_share_now())
        held = HeldState(kept.numel)
        self._copy_out(held.write_state, kept)
        self._drop(is_host=False)
        if not share:
            return
        new = self._make_part(share, is_host=False)
        move_state(held, kept, new.write_state, share)
        self._copy_out(new.write_state, share)
        self._parts.append(new)

    def _copy_out(self, write_state: Callable[[str, int, Tensor], None], share: Intervals) -> None:
        """Copy what the parts have of ``share``."""
        for part in self._parts:
            move_state(part.tier, part.share, write_state, share)

    def _host_share_now(self) -> Intervals:
        return next((part.share for part in self._parts if part.is_host), Intervals())

    def _drop(self, *, is_host: bool) -> None:
        """Forget the host's tier or the device's; its bytes stay counted."""
        for part in [part for part in self._parts if part.is_host == is_host]:
            down, up = self._gone_bytes
            down += getattr(part.tier, "bytes_d2h", 0)
            self._gone_bytes = (down, up + getattr(part.tier, "bytes_h2d", 0))
            self._is_given_up = True
            self._gone_stall_s += getattr(part.tier, "stall_s", 0.0)
            self._parts.remove(part)
