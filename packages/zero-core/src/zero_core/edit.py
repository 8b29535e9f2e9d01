"""Changes that one rank makes to gathered parameters, brought to all shards and master weights.

Of master weights only the elements that were changed are taken over: one that was not touched keeps
the bits that its rounded copy lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero_core.layout import Slot
from zero_core.segment_values import SegmentValues
from zero_core.state import MASTER, ShardedState

__all__ = ["Edit", "Whole"]

_SAME, _CHANGED, _RESHAPED = 0.0, 1.0, 2.0


@dataclass(frozen=True)
class Whole:
    """One parameter while it is gathered.

    Attributes:
        values: its segment's.
        position: which of the segment's slots it is.
        tensor: the values, in the parameter's shape: where it points.
    """

    values: SegmentValues
    position: int
    tensor: Tensor

    @property
    def param(self) -> nn.Parameter:
        """The model's parameter."""
        return self.values.params[self.position]

    @property
    def slot(self) -> Slot:
        """Where it lies in its segment."""
        return self.values.segment.slots[self.position]


class Edit:
    """From when parameters are gathered until `publish`, rank ``rank`` may change them."""

    def __init__(self, state: ShardedState, rank: int, wholes: Sequence[Whole]) -> None:
        """Remember the values on ``rank``; takes their memory there once more.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < state.control.world_size:
            raise ValueError(
                f"modifier_rank = {rank}: expected a rank below {state.control.world_size}"
            )
        self._state = state
        self._rank = rank
        self._wholes = list(wholes)
        self._is_own = state.control.rank == rank
        self._before = [w.tensor.clone() for w in self._wholes] if self._is_own else []
        self._pieces = {piece.param: piece for piece in state.pieces}

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the values of ``rank`` to every rank; every rank must call it.

        Raises:
            ValueError: a parameter was given another shape, on all ranks.
        """
        self._state.quiesce()  # others may still be gathering the old values
        if not self._wholes:
            return
        found = torch.tensor([self._compare(i) for i in range(len(self._wholes))])
        found = found.to(self._state.device)
        self._state.control.broadcast(found, source=self._rank)
        for whole, change in zip(self._wholes, found.tolist(), strict=True):
            if change == _RESHAPED:
                name = self._state.layout.params[whole.slot.param].name
                raise ValueError(
                    f"{name} was given another shape within gathered(), on rank {self._rank}: "
                    f"expected {tuple(whole.tensor.shape)}; change shapes before build()"
                )
        for index, change in enumerate(found.tolist()):
            self._take_over(index, is_changed=change == _CHANGED)

    def _compare(self, index: int) -> float:
        if not self._is_own:
            return _SAME
        now, before = self._wholes[index].param.data, self._before[index]
        if now.shape != before.shape:
            return _RESHAPED
        # What replaced ``data`` may have another dtype and device.
        return _CHANGED if bool(_differs(now.to(before), before).any()) else _SAME

    def _take_over(self, index: int, *, is_changed: bool) -> None:
        whole = self._wholes[index]
        mask = torch.zeros_like(whole.tensor, dtype=torch.uint8)
        if self._is_own:
            whole.tensor.copy_(whole.param.data)
            mask.copy_(_differs(whole.tensor, self._before[index]))
        # Unchanged ones too: other ranks may have written to theirs.
        self._state.control.broadcast(whole.tensor, source=self._rank)
        flat = whole.tensor.reshape(-1)
        whole.values.overwrite(whole.slot.start, flat)
        if is_changed and whole.values.local_span is not None:
            self._state.control.broadcast(mask, source=self._rank)
            self._write_master(whole.slot, flat, mask.reshape(-1).bool())

    def _write_master(self, slot: Slot, flat: Tensor, mask: Tensor) -> None:
        piece = self._pieces.get(slot.param)
        if piece is None:  # other ranks update all of it
            return
        own = slice(piece.offset, piece.offset + piece.stop - piece.start)
        old = self._state.tier.read_state(MASTER, piece.start, piece.stop)
        new = flat[own].cpu().to(old.dtype)
        self._state.tier.write_state(MASTER, piece.start, torch.where(mask[own].cpu(), new, old))


def _differs(now: Tensor, before: Tensor) -> Tensor:
    return (now != before) & ~(now.isnan() & before.isnan())
