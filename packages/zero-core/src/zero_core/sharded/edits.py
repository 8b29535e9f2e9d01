"""Detection of parameter values that user code writes directly, between two steps.

[Note: edits past the engine]
``p.clamp_()``, ``p.data.copy_()`` or ``module.load_state_dict()`` change the value of a parameter.
If the master weight is separate memory, the next update would overwrite the change. So changes are
copied to the master weights before the update. If the master weight is the value itself, writes are
detected by version counters only, and compared between ranks.

A *mark* means that a parameter may have been written: its version counter changed (an in-place
operator), or its ``data`` was read, perhaps only to compute a norm. For a marked parameter this
rank compares its slice with the rounded master weights. Only elements that differ are copied.

Every rank must write the same values, as with DDP. If the step's all-reduce counts any written
parameters, the ranks compare them before the update, and refuse the step if they differ. Otherwise
`apply` changes the master weights. A save, an export and a backward that updates units apply this
rank's changes without comparing ranks. One case is not detected: a rank that writes through
``data``, only into elements that other ranks update, while these ranks do not write them.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable
from concurrent.futures import wait
from typing import Any

import torch
from torch import Tensor

from zero_core.comm.watch import join_few
from zero_core.core import access
from zero_core.core.extension import Extension
from zero_core.core.facts import Facts
from zero_core.errors import RankMismatchError
from zero_core.layout.arithmetic import Piece
from zero_core.sharded import MASTER
from zero_core.sharded.sharded_state import ShardedState


class _Watched:
    """Base of the classes of open parameters whose ``data`` accesses are recorded."""

    __slots__ = ()

    @property
    def data(self) -> Any:
        """The memory of the parameter, which the reader may write to."""
        access.aliased.add(id(self))
        return access.get_data(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        access.aliased.add(id(self))
        access.set_data(self, value)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        watched = type(self)
        access.use_class([self], _unwatched(watched))
        try:
            return copy.deepcopy(self, memo)
        finally:
            access.use_class([self], watched)


def _unwatched(watched: type) -> type:
    return watched.__mro__[watched.__mro__.index(_Watched) + 1]


class Edits(Extension):
    """Extension that applies user code's direct writes. See [Note: edits past the engine]."""

    def __init__(self, state: ShardedState, facts: Facts) -> None:
        self._state = state
        self._facts = facts
        self._kept = [flat for flat in state.params if flat.is_kept and flat.segment.is_trainable]
        self.is_needed = bool(self._kept)  # sharded parameters are written within `gathered` only
        # Parameters marked since the last step, by name: a checksum if written, otherwise None.
        self.marked: dict[str, int | None] = {}
        # Parameters with writes to apply, by name: this rank's piece, and all elements.
        self.pending: dict[str, tuple[Piece, Tensor]] = {}

    def begin(self) -> None:
        """Record writes to parameters from now on, until `remove`."""
        for flat in self._kept:
            if flat.shown.has_masters_apart:
                for param in flat.shown.read_params:
                    watched = access.derive(_Watched, access.own_class(param))
                    access.use_class([param], watched)
            flat.shown.forget_marks()

    def remove(self) -> None:
        for flat in self._kept:
            for param in flat.shown.read_params:
                own = access.own_class(param)
                if issubclass(own, _Watched):
                    access.use_class([param], _unwatched(own))

    def fill(self, facts: Facts) -> None:
        facts.put("written", sum(checksum is not None for checksum in self.marked.values()))

    def before_update(self, number: int) -> None:
        self.find()

    def before_early_update(self) -> None:
        self.find()
        self.apply()

    def before_decision(self, number: int) -> None:
        """Apply writes to the master weights, if all ranks have written the same.

        Raises:
            RankMismatchError: ranks wrote different values. All ranks raise it, with parameter
                names.
        """
        if self._facts.is_any("written"):
            found: list[dict[str, int | None]] = self._state.control.gather_json(self.marked)
            differing = []
            for name in sorted({name for row in found for name in row}):
                checksums = {row[name] for row in found if row.get(name) is not None}
                is_marked_by_all = all(name in row for row in found)
                if len(checksums) > 1 or (checksums and not is_marked_by_all):
                    differing.append(name)
            if differing:
                raise RankMismatchError(
                    f"rank {self._state.control.rank}, step {number}: not updated, as ranks have "
                    f"written different values into {join_few(differing)} since the "
                    "last step: write the same on every rank, or one rank's within "
                    f"{self._state.cures.write}"
                )
        self.apply()
        self.forget()

    @torch.no_grad()
    def find(self) -> None:
        """Find parameters written since the last call. Changes no value."""
        for flat in self._kept:
            marks = flat.shown.take_marks()
            if marks:
                flat.source.wait_update()
            for position, is_written in marks:
                slot = flat.segment.slots[position]
                name = self._state.layout.params[slot.param].name
                assert flat.full is not None, "it is kept"
                elements = flat.full[slot.start : slot.stop]
                piece = self._state.piece_of(slot.param) if flat.shown.has_masters_apart else None
                if piece is not None and self._compare(piece, elements)[0].any():
                    is_written = True
                    self.pending[name] = piece, elements
                    flat.edited.add(position)
                if is_written:
                    self.marked[name] = zlib.crc32(bytes(elements.cpu().view(torch.uint8).numpy()))
                else:
                    self.marked.setdefault(name, None)

    @torch.no_grad()
    def apply(self) -> None:
        """Apply the writes that `find` has found to the master weights."""
        pending, self.pending = self.pending, {}
        for piece, elements in pending.values():
            self.write_back(piece, elements)

    def write_back(self, piece: Piece, elements: Tensor, is_new: Tensor | None = None) -> None:
        """Overwrite master weights of ``piece`` whose rounding differs from ``elements``.

        ``is_new``: mask of elements to overwrite in any case. Split master weights need the mask:
        their upper half is the parameter's memory, so their rounding may equal the new value.
        """
        changed, own, old = self._compare(piece, elements)
        if is_new is not None:
            changed |= is_new[piece.offset : piece.offset + piece.stop - piece.start].cpu()
        if changed.any():
            wait(self._state.readers)
            new = torch.where(changed, own.to(old.dtype), old)
            self._state.tier.write_state(MASTER, piece.start, new)

    def _compare(self, piece: Piece, elements: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for this rank's part: mask of written elements, elements, and master weights."""
        own = elements[piece.offset : piece.offset + piece.stop - piece.start].cpu()
        old = self._state.tier.read_state(MASTER, piece.start, piece.stop)
        rounded = old.to(own.dtype)
        differs = (own != rounded) & ~(own.isnan() & rounded.isnan())
        # A tier may round a tie in either direction, so both neighbors count as equal.
        is_tie = (own.to(old.dtype) - old).abs() == (rounded.to(old.dtype) - old).abs()
        return differs & ~is_tie, own, old

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Forget recorded writes to all parameters, or only to ``names``."""
        for name in list(self.marked) if names is None else names:
            self.marked.pop(name, None)
            self.pending.pop(name, None)
