"""Reductions of units' gradients, and who takes what is reduced.

One unit's reduction is under way while backward computes the next unit. Which unit is reduced when
is the runtime's to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zero_core.core.facts import Filler
from zero_core.core.grads import FlatGrads, SequentialGrads
from zero_core.core.unit import Unit


class GradientSink(Protocol):
    """Takes reduced gradients and knows where in a step the training is.

    `zero_core.step.gradient.StepGradient` is the one implementation.

    Attributes:
        params_with_grad: parameters that got a gradient on this rank since the last step; the
            runtime adds to it.
    """

    params_with_grad: set[int]

    @property
    def is_boundary(self) -> bool:
        """Whether the current micro-step is the last one of its step."""

    @property
    def is_reduced(self) -> bool:
        """Whether every segment's gradient has been added."""

    def begin_backward(self, *, is_new_round: bool) -> None:
        """Check, at the first sign of a backward, that it may add to the gradient.

        ``is_new_round``: a forward has begun since the backward before, outside of ``no_sync``.

        Raises:
            RuntimeError: units have been updated already, or fp16's loss scale is missing.
        """

    def add(self, grads: FlatGrads, *, is_last: bool) -> bool:
        """Take a segment's reduced gradient and offer it to the state tier.

        ``is_last``: whether it is that of the last micro-step of its step.

        Returns:
            Whether the segment's parameters have been updated with it.
        """

    def broken(self) -> None:
        """Restart the step: a forward found that the last backward did not end.

        Raises:
            RuntimeError: units have been updated already.
        """

    def drop_untaken(self) -> bool:
        """Drop gradients that were left on parameters by a backward that ended before their hooks.

        Returns:
            Whether there were any.
        """

    def reopen(self) -> None:
        """Note that more is to be added to the gradient. All ranks agree on its statistics anew."""

    def agree(self, filler: Filler) -> None:
        """Start to sum the step's facts over all ranks. Every rank must call it.

        Nothing is done if they are known of the gradient as it is. ``filler`` has facts besides.
        """

    def void_update(self) -> None:
        """Drop an update that was enqueued ahead of the decision: more is to be reduced."""

    def clear(self) -> None:
        """Drop the gradient and start a new step."""


class Reductions:
    """Reduces units, one at a time, and offers what is reduced to the sink.

    Attributes:
        has_peers: whether there are other ranks.
        is_due_per_backward: whether every backward reduces, and not the last of a step alone: one
            rank has nothing to reduce before, unless its tier adds up each micro-step's gradient.
    """

    def __init__(
        self, units: Sequence[Unit], sink: GradientSink, ready: set[int], *, has_peers: bool
    ) -> None:
        """``ready``: units whose parameters hold the current values.

        A unit that the sink updates is taken out of it.
        """
        self.has_peers = has_peers
        self._units = units
        self._grads = [grads for unit in units for grads in unit.grads]
        self._sequential = [grads for grads in self._grads if isinstance(grads, SequentialGrads)]
        self.is_due_per_backward = has_peers or any(g.is_passed_on_each for g in self._grads)
        self._sink = sink
        self._ready = ready
        # With whether they are those of the last micro-step of their step.
        self._in_flight: tuple[tuple[FlatGrads, bool], ...] = ()

    def begin_backward(self) -> None:
        for grads in self._sequential:
            grads.begin_backward()

    def begin_unit(self, index: int) -> None:
        """Begin the backward of one micro-batch through a unit."""
        for grads in self._units[index].grads:
            if isinstance(grads, SequentialGrads):
                grads.begin_backward()

    def finish_unit(self, index: int) -> None:
        """`finish`, if reductions of this unit are under way: more is to be added to it."""
        if any(grads.segment.unit == index for grads, _ in self._in_flight):
            self.finish()

    def start(self, index: int) -> None:
        """Start to reduce a unit, when the one before it has been reduced."""
        if self._in_flight:
            self.finish()
        for grads in self._units[index].grads:
            grads.reduce()
            self._in_flight += ((grads, self._sink.is_boundary),)
        if not self.has_peers:
            self.finish()

    def finish(self) -> None:
        """Wait for the reductions under way, and offer what they bring to the sink."""
        for grads, is_last in self._in_flight:
            grads.finish()
            if is_last or grads.is_passed_on_each:
                self.offer(grads, is_last=is_last)
        self._in_flight = ()

    def offer(self, grads: FlatGrads, *, is_last: bool) -> None:
        """Offer a reduced gradient to the sink. If it updates the segment, its values are stale."""
        if self._sink.add(grads, is_last=is_last):
            unit = grads.segment.unit
            for flat in self._units[unit].params:
                if flat.segment is grads.segment:
                    flat.updated_early()
            self._ready.discard(unit)

    def accumulate_locally(self) -> None:
        """Have gradients added up over several backwards before they are reduced."""
        for grads in self._grads:
            grads.accumulate_locally()

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients were added that no reduction has carried yet.

        They came within ``no_sync``, or after their unit had been reduced (reentrant activation
        checkpointing of a block that is used twice).
        """
        return any(grads.has_unreduced for grads in self._grads)

    def discard(self) -> None:
        """Wait for the reductions under way, and drop all gradients."""
        for grads, _ in self._in_flight:
            grads.finish()
        self._in_flight = ()
        for grads in self._grads:
            grads.clear()

    def synchronize(self) -> None:
        """Wait until nothing reads or writes gradients' memory any more."""
        for grads in self._grads:
            grads.synchronize()
