"""Passes of several micro-batches at once.

The micro-batches of a step are one forward and one backward here. `begin` enters the root. Each
micro-batch's forward runs on a thread of its own, one of them at a time, and enters and leaves the
root and the blocks by its hooks: a block stays gathered until the first of them enters the next
block. In backward `enter_block` gathers a unit for all of them, and `reduce` reduces one
micro-batch's gradient of it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from zero_core.core.grads import FlatGrads
from zero_core.core.passes import Driver, Passes
from zero_core.core.unit import Unit
from zero_core.vertical.turns import ForwardAbandoned
from zero_core.watch.place import OUTSIDE, Place


class TurnPasses:
    """Drives the passes of a step's micro-batches. See the note at the top of this file."""

    def __init__(self, passes: Passes, place: Place) -> None:
        self._passes = passes
        self._units = passes.units
        self._forward = passes.forward
        self._backward = passes.backward
        self._place = place

    # ---------------------------------------------------------------- forward

    def begin(self, model: nn.Module, take: Callable[[Unit, FlatGrads, int, Tensor], None]) -> None:
        """Begin the forward of all micro-batches. ``model`` is the root's module.

        Until `end` or `abandon` ``take`` gets the gradients.
        """
        self._forward.enter(self._units.units[0], model)
        self._units.saved.leave_thread()  # each micro-batch watches its own
        self._passes.driver = Driver(self._enter, self._leave, take)

    def _enter(self, unit: Unit, module: nn.Module) -> None:
        if unit.is_root and self._units.has_sharded_params:
            self._units.saved.watch_thread()
        self._forward.go_into(unit, module)

    def _leave(self, unit: Unit, *, needs_grad: bool, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, ForwardAbandoned):  # else it is noted
            self._forward.note_failure(unit, error)
        if self._forward.go_out_of(unit, needs_grad=needs_grad) and unit.is_root:
            self._units.saved.leave_thread()

    def end_forward(self) -> None:
        """End the forward of all micro-batches."""
        self._forward.leave(self._units.units[0], needs_grad=True, error=None)

    # --------------------------------------------------------------- backward

    def begin_backward(self) -> None:
        """Begin the backward of all micro-batches, unless it has begun."""
        if not self._backward.is_open:
            self._backward.open({unit.index: 0 for unit in self._units.units}, is_new=True)

    def enter_block(self, unit: Unit, *, is_used: bool) -> None:
        """Gather a block for the backward of all micro-batches, unless no rank needs it.

        ``is_used``: whether this rank's backward goes into it.
        """
        self._backward.enter_place(unit)
        if is_used or unit.index not in self._backward.order.left_out:
            self._units.saved.entered = unit
            if self._units.has_sharded_params:
                self._units.open(unit, backward=True)

    def begin_turn(self, unit: Unit) -> None:
        """Begin the backward of one micro-batch through ``unit``."""
        self._backward.reductions.begin_unit(unit.index)

    def add(self, unit: Unit, grads: FlatGrads, position: int, grad: Tensor) -> None:
        """Add the gradient that one micro-batch has of a parameter."""
        self._backward.reductions.finish_unit(unit.index)
        self._backward.add(grads, position, grad)

    def reduce(self, unit: Unit) -> None:
        """Reduce one micro-batch's gradient of ``unit``, which is complete."""
        if unit.grads and self._backward.will_reduce():
            self._backward.reductions.start(unit.index)

    def end(self) -> None:
        """End the backward of all micro-batches."""
        self._backward.reductions.finish()
        self._passes.drive_by_hooks()
        self._backward.order.end_backward()
        self._place.enter("backward")
        self._units.release_all()
        self._place.enter(OUTSIDE)
        self._backward.is_open = False

    def abandon(self) -> None:
        """End passes that failed. The next forward drops gradients that they have brought."""
        self._passes.drive_by_hooks()
        self._forward.abandon()
        self._units.release_all()
