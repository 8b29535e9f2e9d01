"""Master weights, gradients and optimizer states by parameter name, to read and to set.

[Note: full and local]
full    the whole parameter in its shape; every rank must call
local   the part that this rank's optimizer state covers, 1-D: at stage 0 the whole parameter, else
        a slice, which may be empty

What is set of a state must be set by every rank, each its part, and agree where parts overlap
(stage 0). ``"grad"`` is the gradient of the step to come, between its last backward and ``step``:
unscaled, as far as it is clipped already. All values are on the CPU, fp32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zero_core.facts import GradientFacts
from zero_core.layout import Segment, Slot
from zero_core.segment_grads import SegmentGrads
from zero_core.state import MASTER, ShardedState

__all__ = ["GRAD", "StateAccess"]

GRAD = "grad"


class StateAccess:
    """See the top of this file; ``engine.states``."""

    def __init__(
        self,
        state: ShardedState,
        facts: GradientFacts,
        *,
        complete_gradient: Callable[[], float],
        replace_gradient: Callable[[SegmentGrads, int], None],
        values_changed: Callable[[], None],
    ) -> None:
        """Made by the engine.

        Args:
            state: what is sharded.
            facts: where gradients are.
            complete_gradient: has the gradient reduced; its factor to the true scale. May raise.
            replace_gradient: called when the gradient of a segment and parameter was set.
            values_changed: called when parameters were set.
        """
        self._state = state
        self._facts = facts
        self._complete_gradient = complete_gradient
        self._replace_gradient = replace_gradient
        self._values_changed = values_changed
        self._piece_of = {piece.param: index for index, piece in enumerate(state.pieces)}
        self._home: dict[str, tuple[Segment, Slot]] = {}
        for segment in state.layout.segments:
            for slot in segment.slots:
                spec = state.layout.params[slot.param]
                self._home |= dict.fromkeys((spec.name, *spec.aliases), (segment, slot))

    def has_gradient(self) -> bool:
        """Whether "grad" can be read and set: a step's last backward has run; every rank must call.

        Within ``no_sync``, and where gradients have been dropped, it can't.
        """
        has_any = torch.tensor([float(self._facts.is_whole())], device=self._state.device)
        return self._state.control.sum(has_any).item() > 0

    @property
    def holds_gradient(self) -> bool:
        """Whether this rank has a gradient of the step to come, or of a part of its micro-steps."""
        return self._facts.has_any

    def get_full(self, name: str, what: str = MASTER) -> Tensor:
        """``what`` of parameter ``name``, whole; every rank must call it.

        Args:
            name: as in ``named_parameters``, tied names included.
            what: "master_weight", "grad", or a state of the optimizer: "exp_avg", "exp_avg_sq", ...

        Raises:
            KeyError: no such parameter or state, or a frozen parameter's gradient or state.
            RuntimeError: the gradient is not complete here.
        """
        segment, slot = self._find(name, what)
        if what == GRAD:
            factor = self._complete_gradient()
            own = _widened(self._facts.grads[segment.index].values().cpu()) * factor
        elif what == MASTER:
            own = _widened(self._state.own_slice(segment.index))
        else:
            self._check_known(what)
            own = _widened(self._state.own_state(segment.index, what))
        full = self._state.control.gather(own)
        return full[slot.start : slot.stop].view(self._state.layout.params[slot.param].shape)

    def get_local(self, name: str, what: str = MASTER) -> Tensor:
        """This rank's part of ``what``, 1-D. For "grad" every rank must call it. See `get_full`."""
        segment, slot = self._find(name, what, is_local=True)
        factor = self._complete_gradient() if what == GRAD else 1.0
        if slot.param not in self._piece_of:
            return torch.empty(0)
        piece = self._state.pieces[self._piece_of[slot.param]]
        if what == GRAD:
            final = self._facts.grads[segment.index].covered()
            low = piece.offset + slot.start - self._state.covered(segment.index)[0]
            return _widened(final[low : low + piece.stop - piece.start].cpu()) * factor
        if what not in self._state.tier.state_names():
            raise KeyError(_unknown(what))
        return _widened(self._state.tier.read_state(what, piece.start, piece.stop))

    @torch.no_grad()
    def set_full(self, name: str, value: Tensor, what: str = MASTER) -> None:
        """Set ``what`` of parameter ``name``; every rank must call it, with the same ``value``.

        Raises:
            ValueError: ``value`` does not have the parameter's shape.
            KeyError, RuntimeError: as in `get_full`; or the parameter has no such state before its
                first step.
        """
        segment, slot = self._find(name, what)
        shape = self._state.layout.params[slot.param].shape
        if value.shape != shape:
            raise ValueError(f"{name} has shape {shape}, found {tuple(value.shape)}")
        flat = value.detach().reshape(-1)
        if not segment.is_trainable:
            self._set_frozen(segment, slot, flat)
        else:
            index = self._piece_of.get(slot.param)
            piece = None if index is None else self._state.pieces[index]
            part = flat[:0] if piece is None else flat[piece.offset :][: piece.stop - piece.start]
            self._set_part(segment, slot, part, what)

    @torch.no_grad()
    def set_local(self, name: str, values: Tensor, what: str = MASTER) -> None:
        """Set this rank's part; every rank must call it, if with an empty part. See `set_full`."""
        segment, slot = self._find(name, what, is_local=True)
        index = self._piece_of.get(slot.param)
        piece = None if index is None else self._state.pieces[index]
        numel = 0 if piece is None else piece.stop - piece.start
        if values.shape != (numel,):
            raise ValueError(
                f"rank {self._state.control.rank} has {numel} elements of {name}, found shape "
                f"{tuple(values.shape)}"
            )
        self._set_part(segment, slot, values.detach(), what)

    def _find(self, name: str, what: str, *, is_local: bool = False) -> tuple[Segment, Slot]:
        if name not in self._home:
            raise KeyError(f"no parameter {name!r}")
        segment, slot = self._home[name]
        if not segment.is_trainable and (is_local or what != MASTER):
            raise KeyError(
                f"{name} is frozen: it has a value, for get_full() and set_full(), and no {what}"
            )
        return segment, slot

    def _check_known(self, what: str) -> None:
        """A rank that owns no element knows no state: ask all."""
        is_known = torch.tensor([float(what in self._state.tier.state_names())])
        if self._state.control.sum(is_known.to(self._state.device)).item() == 0:
            raise KeyError(_unknown(what))

    def _set_part(self, segment: Segment, slot: Slot, part: Tensor, what: str) -> None:
        if what == GRAD:
            self._set_gradient(segment, slot, part)
            return
        if what == MASTER:
            self._state.quiesce()  # others may still be gathering the old values
        else:
            self._check_known(what)
            self._check_stepped(slot.param)
        if part.numel():
            piece = self._state.pieces[self._piece_of[slot.param]]
            self._state.tier.write_state(what, piece.start, part)
        if what == MASTER:
            self._values_changed()

    def _check_stepped(self, param: int) -> None:
        steps = torch.zeros(1, device=self._state.device)
        if param in self._piece_of:
            steps += self._state.tier.read_scalars(self._piece_of[param])["num_steps"]
        if self._state.control.sum(steps).item() == 0:
            name = self._state.layout.params[param].name
            raise RuntimeError(f"{name} has no optimizer state before its first step")

    def _set_gradient(self, segment: Segment, slot: Slot, part: Tensor) -> None:
        """``part`` is of what the state covers; the gradient's shard may be a part of that."""
        factor = self._complete_gradient()
        grads = self._facts.grads[segment.index]
        base, _ = segment.shard_range(self._state.control.rank)
        low, high = max(slot.start, base), min(slot.stop, base + segment.shard_numel)
        if low < high:
            first = max(slot.start, self._state.covered(segment.index)[0])
            grads.replace(low - base, _widened(part[low - first : high - first]) / factor)
        self._replace_gradient(grads, slot.param)

    def _set_frozen(self, segment: Segment, slot: Slot, flat: Tensor) -> None:
        values = self._state.values[segment.index]
        self._state.quiesce()  # others may still be gathering the old values
        values.overwrite(slot.start, flat)
        self._values_changed()


def _widened(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def _unknown(what: str) -> str:
    return f"no state {what!r}: the optimizer has none of that name, or none before its first step"
