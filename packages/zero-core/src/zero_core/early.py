"""Updates of units while backward goes on, as soon as their gradient is complete.

The host works on one unit while the device still computes the one before. It is exact, and cannot
be undone: so it is done only where nothing that comes later in the step may change a gradient or
call the step off. That is, without clipping, without fp16's loss scale and without
``check_grad_overflow``; and whoever changes or drops gradients after all gets an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from zero_core.config import Config
from zero_core.flow import Flow
from zero_core.layout import Layout, Piece
from zero_core.optimizer import EngineOptimizer
from zero_core.protocols import StateTier
from zero_core.segment_grads import SegmentGrads

__all__ = ["EarlyUpdates", "updates_in_backward"]


def updates_in_backward(config: Config) -> bool:
    """Whether units are updated in backward; the key decides, else whether nothing forbids it."""
    offload = config.zero_optimization.offload_optimizer
    if offload.update_in_backward is not None:
        return offload.update_in_backward
    return offload.device != "none" and not (
        config.gradient_clipping or config.fp16.enabled or config.check_grad_overflow
    )


class EarlyUpdates:
    """What of a step has been updated before `Engine.step`."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        tier: StateTier,
        pieces: Sequence[Piece],
        flow: Flow,
    ) -> None:
        """Prepare; ``config`` says whether there are any, ``pieces`` are this rank's."""
        self._is_on = updates_in_backward(config)
        self._tier = tier
        self._params = [piece.param for piece in pieces]
        piece_of = {piece.param: index for index, piece in enumerate(pieces)}
        self._pieces = {
            s.index: sorted(piece_of[x.param] for x in s.slots if x.param in piece_of)
            for s in layout.segments
        }
        self._flow = flow
        self._updated: set[int] = set()
        self._settings = ""  # that they were updated with

    def update(self, grads: SegmentGrads, optimizer: EngineOptimizer) -> None:
        """The gradient of a segment was offered to the tier: have it used, if that may be.

        A parameter that got no gradient here waits for the end of the step, when it is known
        whether another rank has one.
        """
        if not self._is_on:
            return
        pieces = self._pieces[grads.segment.index]
        active = [i for i in pieces if self._params[i] in self._flow.fired]
        if active:
            self._settings = self._settings or repr(optimizer.hyperparameters())
            self._tier.step(optimizer.hyperparameters(), active, grad_scale=1.0)
            grads.is_used = True
            self._updated.update(active)
            self._flow.segment_changed(grads.segment)

    def rest(self, active: Sequence[int], optimizer: EngineOptimizer) -> list[int]:
        """Those of ``active`` that are not updated yet.

        Raises:
            RuntimeError: the optimizer's settings have changed since the others were.
        """
        if self._updated and repr(optimizer.hyperparameters()) != self._settings:
            self.check_none("changing the optimizer's settings between backward and step")
        return [i for i in active if i not in self._updated]

    def check_none(self, what: str) -> None:
        """Refuse ``what``, which needs the step not to have begun.

        Raises:
            RuntimeError: it has.
        """
        if self._updated:
            raise RuntimeError(
                f"{what}: too late, units have been updated during backward, as there is no "
                "clipping and check_grad_overflow is false. Set "
                "zero_optimization.offload_optimizer.update_in_backward to false; a step that "
                "broke off midway can only be repeated from a checkpoint"
            )

    def clear(self) -> None:
        """Start a new step."""
        self._updated.clear()
        self._settings = ""
