"""Extensions of an engine: objects that react to events of training.

An extension overrides the methods of `Extension` whose events it handles. For each event, an engine
calls only the overridden methods. An event without handlers costs one loop over an empty list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "extension."
"""Prefix of the names of extensions' states, in ``engine.states`` and in checkpoints."""


@dataclass(frozen=True)
class EndedStep:
    """One step that has ended on this rank.

    Attributes:
        number: number of optimizer steps so far, including skipped steps and this one.
        why_skipped: why parameters were not updated, or an empty string.
        rates: learning rates of the step, by parameter group.
        micro_steps: number of micro-steps in the step.
        client_state: the state that the program passed to `zero_core.Engine.step`.
    """

    number: int
    why_skipped: str
    rates: Sequence[float | Tensor]
    micro_steps: int
    client_state: Mapping[str, Any]


class Extension:
    """Base class of extensions. Every event is ignored unless a subclass overrides its method.

    If every rank must call an engine method, the events of this method occur on every rank.

    Attributes:
        handles: handles of hooks on modules. The engine removes these hooks at its end, and copies
            of the model do not have them.
    """

    handles: Sequence[Any] = ()

    def attach(self, state: Any) -> None:
        """Attach to the engine's `ShardedState`, which has no values yet."""

    def remove(self) -> None:
        """Undo `attach`, without communication."""

    def describe(self) -> str:
        """Return text that must be equal on all ranks: the class, and its settings if any."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    # ----------------------------------------------------------------- states

    def states(self) -> Mapping[str, Tensor]:
        """Return the states that checkpoints save with the optimizer's, by name.

        Called after `attach`. A state is a floating-point tensor, 1-D, [state.local_numel], on the
        CPU. Its elements correspond to this rank's master weights. The tensor object stays the
        same, and the extension changes its elements only in `reset` and `stepped`. In
        ``engine.states`` the state's name begins with `PREFIX`.
        """
        return {}

    def reset(self) -> None:
        """Set the states to the values that follow from the engine's current weights.

        Called at the end of `zero_core.build`, and in a load before the extensions' saved states
        are written.
        """

    # ----------------------------------------------- events outside of a step

    def begun(self) -> None:
        """Called when the engine is built and its memory holds the first values."""

    def before_write(self) -> None:
        """Called before an engine method that reads, writes or moves values for the program."""

    def saved(self, call: str, seconds: float) -> None:
        """Called after the engine method ``call`` has saved a checkpoint or started to."""

    def loaded(self, folder: str, seconds: float) -> None:
        """Called after states were loaded from the checkpoint in ``folder``."""

    def newer_state(
        self, directory: Any, last_step: int | None
    ) -> Callable[[], dict[str, Any]] | None:
        """Return a function that restores a state at least as new as the newest saved checkpoint.

        The checkpoints are in ``directory``. States of steps after ``last_step`` are ignored. The
        function returns the client state. Every rank must call this method and the function.
        Returns None if no such state exists.
        """
        return None

    def values_changed(self) -> None:
        """Called when shards have new values, or will have after the state tier's update.

        Other ranks gather the values after this event.
        """

    # --------------------------------------------------------- events of a step

    def called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Called when the program calls the engine with these arguments, before they are cast."""

    def scaled(self, loss: Tensor) -> None:
        """Called before backward with the unscaled loss."""

    def idled(self) -> None:
        """Called when a micro-step without data begins."""

    def begin_backward(self, *, is_new: bool) -> None:
        """Called when a backward has begun. An exception aborts the backward.

        ``is_new``: whether a forward has begun since the previous backward, outside of ``no_sync``.
        """

    def before_early_update(self) -> None:
        """Called at the start of a backward that may update units ahead of the step's decision."""

    def before_local_sums(self) -> None:
        """Called in ``no_sync()`` and ``set_requires_gradient_sync(False)``, at their start."""

    def before_update(self, number: int) -> None:
        """Called at the start of ``step()``, with the step's ``number``.

        An exception leaves all values unchanged, except those of units that backward has updated.
        """

    def fill(self, facts: Any) -> None:
        """Fill slots of the step's `zero_core.core.facts.Facts` with facts that this rank knows."""

    def agreed(self) -> None:
        """Called when the step's gradient is reduced and all ranks have exchanged their facts.

        All ranks may raise the same `UnusedParameterError` or `RankMismatchError` here, and the
        step can be repeated. After any other exception a checkpoint must be loaded. If an extension
        overrides this method, the engine does not enqueue updates ahead of the decision.
        """

    def before_decision(self, number: int) -> None:
        """Called when the ranks have agreed on the facts of step ``number``.

        An update enqueued ahead, or started in backward, may already have scaled gradients in
        place. Read gradients in `agreed` instead.
        """

    def stepped(self, ended: EndedStep) -> None:
        """Called when a step has ended."""


class Extensions:
    """The extensions of one engine, with the methods that handle each event, in order."""

    begun: Sequence[Callable[[], None]]
    before_write: Sequence[Callable[[], None]]
    saved: Sequence[Callable[[str, float], None]]
    loaded: Sequence[Callable[[str, float], None]]
    values_changed: Sequence[Callable[[], None]]
    newer_state: Sequence[Callable[[Any, int | None], Callable[[], dict[str, Any]] | None]]
    called: Sequence[Callable[[Sequence[Any], Mapping[str, Any]], None]]
    scaled: Sequence[Callable[[Tensor], None]]
    idled: Sequence[Callable[[], None]]
    begin_backward: Sequence[Callable[..., None]]
    before_early_update: Sequence[Callable[[], None]]
    before_local_sums: Sequence[Callable[[], None]]
    before_update: Sequence[Callable[[int], None]]
    fill: Sequence[Callable[[Any], None]]
    agreed: Sequence[Callable[[], None]]
    before_decision: Sequence[Callable[[int], None]]
    stepped: Sequence[Callable[[EndedStep], None]]

    def __init__(self, extensions: Sequence[Extension]) -> None:
        self.bind(extensions)

    def bind(self, extensions: Sequence[Extension]) -> None:
        """Replace all handlers by those of ``extensions``, in their order."""
        self.all = tuple(extensions)
        for event in Extensions.__annotations__:
            ignored = getattr(Extension, event)
            followers = [one for one in self.all if getattr(type(one), event) is not ignored]
            setattr(self, event, [getattr(one, event) for one in followers])
