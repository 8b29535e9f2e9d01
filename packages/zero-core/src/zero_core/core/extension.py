"""Extensions of an engine: parts that follow a training without being part of its walk.

An extension overrides the methods of `Extension` whose events it follows. An engine calls those
methods alone: an event that nobody follows costs the loop over an empty list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

PREFIX = "extension."
"""Begins the names of extensions' states, in ``engine.states`` and in checkpoints."""


@dataclass(frozen=True)
class EndedStep:
    """One step that has ended on this rank.

    Attributes:
        number: optimizer steps so far, this one included.
        why_skipped: why parameters were not updated, or an empty string.
        rates: learning rates of the step, by parameter group.
        micro_steps: the step's micro-steps.
        client_state: what the program gave to `zero_core.Engine.step`.
    """

    number: int
    why_skipped: str
    rates: Sequence[float | Tensor]
    micro_steps: int
    client_state: Mapping[str, Any]


class Extension:
    """Base of extensions. Every event is ignored unless a subclass overrides it.

    An event of a call that every rank must make takes place on every rank.

    Attributes:
        handles: of hooks on modules. The engine removes them at its end, and a copy of the model
            has none of them.
    """

    handles: Sequence[Any] = ()

    def attach(self, state: Any) -> None:
        """Take the engine's `ShardedState`, which has no values yet."""

    def remove(self) -> None:
        """Release what `attach` took. Local to this rank."""

    def describe(self) -> str:
        """Return what must be equal on all ranks: the kind, and settings if there are any."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    # ----------------------------------------------------------------- states

    def states(self) -> Mapping[str, Tensor]:
        """Return states that checkpoints keep beside the optimizer's, by name. After `attach`.

        Each is floating, 1-D, [state.local_numel], on the CPU, and parallel to this rank's master
        weights. It stays the same tensor, and changes in `reset` and `stepped` alone.
        ``engine.states`` has it under `PREFIX` and the name.
        """
        return {}

    def reset(self) -> None:
        """Set the states to what belongs to the weights that the engine has now.

        Called at the end of `zero_core.build`, and by each load before it writes the states that
        the checkpoint has.
        """

    # -------------------------------------------------------- life of an engine

    def begun(self) -> None:
        """The engine is built, and its memory has the first values."""

    def before_write(self) -> None:
        """The program is about to read or write states outside of a step."""

    def saved(self, call: str, seconds: float) -> None:
        """The engine's ``call`` has saved a checkpoint, or begun to."""

    def loaded(self, folder: str, seconds: float) -> None:
        """States were loaded from the checkpoint in ``folder``."""

    def newer_state(
        self, directory: Any, last_step: int | None
    ) -> Callable[[], dict[str, Any]] | None:
        """Return what restores a state that is as new as the newest checkpoint in ``directory``.

        It returns the client state. Every rank must call both. ``last_step``: no later state
        counts. Returns None if no such state exists.
        """
        return None

    # ----------------------------------------------------------------- a step

    def called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The program calls the engine with these arguments, before they are cast."""

    def scaled(self, loss: Tensor) -> None:
        """Called before backward with the unscaled loss."""

    def idled(self) -> None:
        """A micro-step without data begins."""

    def begin_backward(self, *, is_new: bool) -> None:
        """A backward has begun. An exception aborts it.

        ``is_new``: it is that of a forward which has begun since the backward before it, outside of
        ``no_sync``.
        """

    def before_early_update(self) -> None:
        """Units are about to be updated in backward, before the step is decided."""

    def before_local_sums(self) -> None:
        """Gradients are about to add up on their rank, unreduced."""

    def before_update(self, number: int) -> None:
        """Called first in ``step()``, of step ``number``.

        An exception leaves values as they are, but for units that were updated in backward.
        """

    def fill(self, facts: Any) -> None:
        """Fill slots of the step's `zero_core.core.facts.Facts` with what this rank knows."""

    def agreed(self) -> None:
        """The ranks have exchanged what they know of the step's gradient, and all of it is reduced.

        All ranks may raise the same `UnusedParameterError` here: the step can be repeated. After
        any other exception the engine needs a load. An extension that follows this event keeps
        updates from being enqueued ahead.
        """

    def before_decision(self, number: int) -> None:
        """The ranks have agreed on step ``number``.

        An update may have been enqueued ahead, or have begun in backward, and have scaled gradients
        in place: read them in `agreed`.
        """

    def stepped(self, ended: EndedStep) -> None:
        """A step has ended."""


class Extensions:
    """The extensions of one engine: for each event, the methods that follow it, in order."""

    begun: Sequence[Callable[[], None]]
    before_write: Sequence[Callable[[], None]]
    saved: Sequence[Callable[[str, float], None]]
    loaded: Sequence[Callable[[str, float], None]]
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
        """Have ``extensions`` alone follow events, in their order."""
        self.all = tuple(extensions)
        for event in Extensions.__annotations__:
            ignored = getattr(Extension, event)
            followers = [one for one in self.all if getattr(type(one), event) is not ignored]
            setattr(self, event, [getattr(one, event) for one in followers])
