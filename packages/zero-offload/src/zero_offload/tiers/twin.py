"""Twin-Flow: optimizer state that host and device update at the same time.

As in DeepSpeed ZeRO-Offload++ (Twin-Flow) the host updates a set of elements, either at one end of
the flat space or in parameters chosen by name, and the device all others. A piece that is split has
equal scalars on host and device, so a checkpoint stores them once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry, Intervals, check_active
from zero_offload.protocols import Groups
from zero_offload.tiers.factory import OffloadTiers
from zero_offload.tiers.flat_tier import FlatTier
from zero_offload.tiers.shares import AnyPart, Shares, state_bytes, within_budget


class TwinTier(Shares):
    """A StateTier made of a host tier for some elements and a device tier for all others."""

    owns_grads = True

    def __init__(
        self, geometry: Geometry, groups: Groups, host: Intervals, factory: OffloadTiers
    ) -> None:
        super().__init__(geometry, groups, host, factory)
        self._offered = Intervals()  # ranges with a gradient that no step has used
        self._fresh = Intervals()  # ranges offered since the last call of step
        # ranges offered before the last call of step, in the same optimizer step
        self._closed = Intervals()

    def offer_grad(self, start: int, grad: Tensor) -> Callable[[], None] | None:
        """Copy the gradient of ``[start, start + grad.numel())`` to host and device memory.

        Return None, or a function to call before the memory of ``grad`` is overwritten.
        """
        stop = start + grad.numel()
        self._begin_offer(start, stop, self._closed)
        release = None  # Copies to the host are in order, so the last release covers all of them.
        for part in self.parts:
            for a, b in part.share.overlaps(start, stop):
                own = grad[a - start : b - start]
                release = part.offer_grad(part.share.local(a), own) or release
        offer = Intervals([(start, stop)])
        self._offered, self._fresh = self._offered.union(offer), self._fresh.union(offer)
        return release

    def add_grad(self, start: int, grad: Tensor, *, is_last: bool) -> Callable[[], None] | None:
        """Add to the gradient of ``[start, start + grad.numel())`` on host and device.

        Gradients since the range's last step are added in order, in the master weights' dtype. The
        first gradient of a range after its step also drops older gradients of other ranges that no
        step has used. See [Note: layers] of `zero_offload.transfers.mover`.

        Return None, or a function to call before the memory of ``grad`` is overwritten.
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
        offer = Intervals([(start, stop)])
        self._offered, self._fresh = self._offered.union(offer), self._fresh.union(offer)
        return release

    def square_sum(self, start: int, stop: int) -> Callable[[], Tensor]:
        """Start to compute the sum of squares of the gradient of ``[start, stop)``.

        Return a function that returns the result, a float64 scalar tensor on the CPU or the device.
        It waits for the host. Only the rounding depends on the split.
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
        """Check the range. If it overlaps ``ended``, begin a new optimizer step."""
        self.geometry.check_range(start, stop)
        if any(ended.overlaps(start, stop)):
            self.check_whole()
            left = self._closed.difference(self._fresh)
            self._closed, self._offered = Intervals(), self._fresh
            host = self._host_part  # on the device the next gradient replaces the dropped one
            if host is not None:
                for a, b in host.share.intersection(left).spans:
                    host.tier.drop_grads(host.share.local(a), host.share.local(b))
            self.begin_round()

    def _check_offered(self, needed: Intervals) -> None:
        missing = needed.difference(self._offered)
        if missing:
            start, stop = missing.spans[0]
            raise ValueError(
                f"no gradient was offered for [{start}, {stop}), or a step has used it; call "
                f"offer_grad or add_grad before step, read_grad and square_sum"
            )

    def read_grad(self, start: int, stop: int) -> Tensor:
        self._check_offered(Intervals([(start, stop)]))
        found = [
            (a, part.tier.read_grad(part.share.local(a), part.share.local(b)))
            for part in self.parts
            for a, b in part.share.overlaps(start, stop)
        ]
        return torch.cat([values for _, values in sorted(found, key=itemgetter(0))])

    def begin_round(self) -> None:
        """Do nothing. Called at a new optimizer step, which may have several ``step`` calls."""

    def discard_grads(self) -> None:
        self._offered = self._fresh = Intervals()
        for part in self.parts:
            part.tier.discard_grads()

    def step(self, groups: Groups, active: Sequence[int], *, grad_scale: float) -> None:
        indices = check_active(self.geometry, active)
        pieces = (self.geometry.pieces[i] for i in indices)
        # Invalid arguments must raise before any part is updated.
        self._check_offered(Intervals((p.start, p.stop) for p in pieces))
        self._groups = groups
        for part in self.parts:  # the host first: it may raise for a failed sum
            local = [own for i in indices for own in part.local.get(i, ())]
            self.step_part(part, local, grad_scale)
        self._offered = self._offered.difference(self.geometry.padded_spans(indices))
        self._closed, self._fresh = self._closed.union(self._fresh), Intervals()

    def step_part(self, part: AnyPart, active: Sequence[int], grad_scale: float) -> None:
        part.tier.step(self._groups, active, grad_scale=grad_scale)

    def may_move(self, host: Intervals) -> bool:
        """Return whether ``host`` differs from the host's elements. If so, wait for all steps."""
        if self._fresh:
            raise RuntimeError("a resplit between offer_grad and step: step or discard first")
        is_moving = super().may_move(host)
        if is_moving:
            self.wait_params(0, self.geometry.numel)
        return is_moving

    def wait_params(self, start: int, stop: int) -> None:
        for part in self.parts:
            a, b = part.share.local(start), part.share.local(stop)
            if a < b:
                self.wait_part(part, a, b)

    def wait_part(self, part: AnyPart, start: int, stop: int) -> None:
        part.tier.wait_params(start, stop)

    def are_params_ready(self, start: int, stop: int) -> bool:
        spans = [(p, p.share.local(start), p.share.local(stop)) for p in self.parts]
        return all(p.tier.are_params_ready(a, b) for p, a, b in spans if a < b)

    def state_names(self) -> Sequence[str]:
        return tuple(dict.fromkeys(n for part in self.parts for n in part.tier.state_names()))

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        return self._joined(name, start, stop, is_peek=False)

    def peek_state(self, name: str, start: int, stop: int) -> Tensor:
        return self._joined(name, start, stop, is_peek=True)

    def _joined(self, name: str, start: int, stop: int, *, is_peek: bool) -> Tensor:
        self.geometry.check_range(start, stop)
        owners = [part for part in self.parts if name in part.tier.state_names()]
        if not owners:
            raise KeyError(f"the optimizer has no state {name!r}, only {self.state_names()}")
        spans = [(p.share.local(start), p.share.local(stop)) for p in owners]
        reads = [p.tier.peek_state if is_peek else p.tier.read_state for p in owners]
        found = [read(name, *span) for read, span in zip(reads, spans, strict=True)]
        for values in found:
            if values.numel() == stop - start:
                return values
        whole = torch.zeros(stop - start, dtype=found[0].dtype, device="cpu")
        for part, (base, _), values in zip(owners, spans, found, strict=True):
            for a, b in part.share.overlaps(start, stop):
                at = part.share.local(a) - base
                whole[a - start : b - start] = values[at : at + b - a]
        return whole

    def speculate(self, groups: Groups, active: Sequence[int], *, grad_scale: float) -> None:
        """Begin a step over the host's elements of ``active`` before the step is confirmed.

        No value is published before ``step`` with the same settings and scale, which completes it.
        [Note: speculation] of `zero_offload.tiers.flat_tier` lists the calls that undo it. The
        device's elements are updated by ``step`` only.
        """
        if not self._has_undo:
            raise RuntimeError("speculate without enable_undo: call that once before")
        self.check_whole()
        indices, host = check_active(self.geometry, active), self._host_part
        if host is not None:
            local = [own for i in indices for own in host.local.get(i, ())]
            host.tier.speculate(groups, local, grad_scale=grad_scale)

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        stop = start + values.numel()
        self.geometry.check_range(start, stop)
        for part in self.parts:
            for a, b in part.share.overlaps(start, stop):
                part.write_state(name, part.share.local(a), values[a - start : b - start])

    def round_values(self, start: int, values: Tensor, out: Tensor) -> None:
        """Write ``values``, master weights from ``start`` on, to ``out``, rounded as in a step."""
        out.copy_(values)
        for part in self.parts:
            for a, b in part.share.overlaps(start, start + values.numel()):
                span = slice(a - start, b - start)
                if isinstance(part.tier, FlatTier):
                    part.tier.round_values(part.share.local(a), values[span], out[span])

    def check_states(self, names: Collection[str], scalars: Sequence[Mapping[str, float]]) -> None:
        for part in self.parts:
            part.check_states(names, scalars)


class BudgetTier(TwinTier):
    """A `TwinTier` whose device part fits in a budget of device memory."""

    _has_state = False  # whether `write_state` or `write_scalars` was called

    def expect_micro_steps(self, count: int) -> None:
        """Choose the host's elements again, because sums may be wider than gradients."""
        if self._has_state or self._offered or self._closed:
            raise RuntimeError(
                "expect_micro_steps after state was written or a gradient offered: with "
                "device_budget it decides on the host's share, so call it before"
            )
        factory = self._factory
        assert factory.device_budget is not None, "this tier is made for one"
        share = within_budget(
            self.geometry,
            factory.device_budget,
            state_bytes(factory.optimizer_class, self._groups, self.geometry.master_dtype),
            factory.end,
            is_accelerated=factory.device.type != "cpu",
            adds_grads=True,
        )
        self._num_micro_steps = count
        self.make_parts(self.geometry.align(share, self._alignment))

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        self._has_state = True
        super().write_state(name, start, values)

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        self._has_state = True
        super().write_scalars(piece, scalars)
