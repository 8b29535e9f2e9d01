"""Extensions of an engine: parts that follow a training without being part of its walk.

An extension overrides the methods of `Extension` whose events it follows. An engine calls those
methods alone: an event that nobody follows costs the loop over an empty tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


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

    An event takes place on all ranks alike if the engine's call must be made on all ranks.
    """

    def attach(self, state: Any) -> None:
        """Take the engine's `ShardedState`, which has no values yet."""

    def states(self) -> Mapping[str, Tensor]:
        """Return states that checkpoints keep beside the optimizer's, by name. After `attach`.

        Each is 1-D, [state.local_numel], on the CPU, and parallel to this rank's master weights.
        It stays the same tensor, and changes in `begun` and `stepped` alone. ``engine.states`` has
        it as ``extension.`` and the name.
        """
        return {}

    def begun(self) -> None:
        """The engine is built, and its memory has the first values."""

    def called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The program calls the engine with these arguments, before they are cast."""

    def scaled(self, loss: Tensor) -> None:
        """A backward of ``loss`` follows, which is not scaled yet."""

    def idled(self) -> None:
        """A micro-step without data begins."""

    def begin_backward(self, *, is_new: bool) -> None:
        """A backward has begun. What is raised here ends it.

        ``is_new``: it is that of a forward which has begun since the backward before it, outside of
        ``no_sync``.
        """

    def before_early_update(self) -> None:
        """Units are about to be updated in backward, before the step is decided."""

    def before_local_sums(self) -> None:
        """Gradients are about to add up on their rank, unreduced."""

    def before_update(self, number: int) -> None:
        """Step ``number`` is about to be decided. What is raised here leaves values as they are."""

    def agreed(self) -> None:
        """The ranks have exchanged what they know of the step's gradient, and all of it is reduced.

        All ranks may raise the same `UnusedParameterError` here: the step can be repeated.
        """

    def stepped(self, ended: EndedStep) -> None:
        """A step has ended."""

    def remove(self) -> None:
        """End with the engine, on this rank alone."""

    def fill(self, facts: Any) -> None:
        """Fill slots of the step's `zero_core.sharded.facts.Facts` with what this rank knows."""

    def before_decision(self, number: int) -> None:
        """The ranks have agreed on step ``number``, and its update has not begun."""

    def before_write(self) -> None:
        """States are about to be written outside of a step: by a load, or by name."""

    def saved(self, call: str, seconds: float) -> None:
        """The engine's ``call`` has saved a checkpoint, or begun to."""

    def loaded(self, folder: str, seconds: float) -> None:
        """States were loaded from ``folder``."""

    def newer_state(
        self, directory: Any, last_step: int | None
    ) -> Callable[[], dict[str, Any]] | None:
        """Return what restores a state that is as new as the newest checkpoint in ``directory``.

        It returns the client state. None: there is no such state. Every rank must call both.
        ``last_step``: no later state counts.
        """
        return None


class Extensions:
    """The extensions of one engine: for each event, the methods that follow it, in order."""

    def __init__(self, extensions: Sequence[Extension] = ()) -> None:
        self._all = list(extensions)
        self._bind()

    def add_first(self, extension: Extension) -> None:
        """Add an extension in front: its events precede those of the others."""
        self._all.insert(0, extension)
        self._bind()

    def discard(self, extension: Extension) -> None:
        """Call ``extension`` no more."""
        self._all = [one for one in self._all if one is not extension]
        self._bind()

    def _bind(self) -> None:
        every, base = self._all, Extension
        self.begun = [one.begun for one in every if type(one).begun is not base.begun]
        self.called = [one.called for one in every if type(one).called is not base.called]
        self.scaled = [one.scaled for one in every if type(one).scaled is not base.scaled]
        self.idled = [one.idled for one in every if type(one).idled is not base.idled]
        self.begin_backward = [
            one.begin_backward
            for one in every
            if type(one).begin_backward is not base.begin_backward
        ]
        self.before_early_update = [
            one.before_early_update
            for one in every
            if type(one).before_early_update is not base.before_early_update
        ]
        self.fill = [one.fill for one in every if type(one).fill is not base.fill]
        self.before_decision = [
            one.before_decision
            for one in every
            if type(one).before_decision is not base.before_decision
        ]
        self.before_local_sums = [
            one.before_local_sums
            for one in every
            if type(one).before_local_sums is not base.before_local_sums
        ]
        self.before_update = [
            one.before_update for one in every if type(one).before_update is not base.before_update
        ]
        self.before_write = [
            one.before_write for one in every if type(one).before_write is not base.before_write
        ]
        self.agreed = [one.agreed for one in every if type(one).agreed is not base.agreed]
        self.stepped = [one.stepped for one in every if type(one).stepped is not base.stepped]
        self.saved = [one.saved for one in every if type(one).saved is not base.saved]
        self.loaded = [one.loaded for one in every if type(one).loaded is not base.loaded]
        self.newer_state = [
            one.newer_state for one in every if type(one).newer_state is not base.newer_state
        ]
