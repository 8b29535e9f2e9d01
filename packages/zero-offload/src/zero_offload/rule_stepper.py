"""What every stepper over a `Rule` shares, wherever its memory is."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch

from zero_offload.geometry import Geometry
from zero_offload.rules import Rule
from zero_offload.stepper import Stepper, check_num_steps

__all__ = ["RuleStepper"]


class RuleStepper(Stepper):
    """A stepper in host memory, or beyond it, whose update is a kernel's.

    Args:
        geometry: the flat space.
        rule: the update, before its ``for_params``.
        groups: the optimizer's ``param_groups``, for what states hold at first.
        is_in_place: see `Stepper`.
        split: see `Stepper`.
    """

    def __init__(
        self,
        geometry: Geometry,
        rule: Rule,
        groups: Sequence[Mapping[str, Any]],
        *,
        is_in_place: bool,
        split: Collection[int],
    ) -> None:
        super().__init__(geometry, torch.device("cpu"), is_in_place=is_in_place, split=split)
        self._rule = rule
        self._initial = [{name: rule.initial(name, g) for name in rule.states} for g in groups]

    def _fill(self, piece: int, *, is_fresh: bool) -> None:
        """Give a piece's states what they hold at first; fresh storage is zero already."""
        span = self.geometry.pieces[piece]
        for name, value in self._initial[span.group].items():
            if value or not is_fresh:
                first = torch.full((span.stop - span.start,), value, device="cpu")
                self.write(name, span.start, first)

    def _settings(
        self, active: Sequence[int], groups: Sequence[Mapping[str, Any]]
    ) -> dict[int, Hashable]:
        """Of the coming update of each active piece; equal ones may share a call."""
        pieces = self.geometry.pieces
        return {i: self._rule.hyper(groups[pieces[i].group], self.num_steps[i] + 1) for i in active}

    def state_dtypes(self) -> Mapping[str, torch.dtype]:
        """The rule's states, as a checkpoint sees them."""
        return self._rule.states

    def read_scalars(self, piece: int) -> dict[str, float]:
        """The count, and the same as torch's optimizer keeps it, if it does."""
        count = self.num_steps[piece]
        own = dict.fromkeys(self._rule.scalars, float(count)) if count else {}
        return {"num_steps": count, **own}

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Take the count; torch's ``step`` beside it says the same."""
        count = check_num_steps(scalars)
        unknown = sorted(set(scalars) - {"num_steps", "step"})
        if unknown:
            raise ValueError(
                f"{type(self._rule).__name__} has no scalars {unknown}; the state is another "
                f"optimizer's"
            )
        if count == 0:
            self._fill(piece, is_fresh=False)
        self.num_steps[piece] = count
