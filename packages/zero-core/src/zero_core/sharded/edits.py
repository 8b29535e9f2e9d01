"""Values that programs write into parameters past the engine, between its steps.

[Note: edits past the engine]
``p.clamp_()``, ``p.data.copy_()`` or ``module.load_state_dict()`` change what a parameter shows.
The next update starts from the master weight, and would undo them where that is other memory. So
they are brought there before it. Where the master weight is the value itself, versions alone are
marks, and ranks are compared.

A mark is a suspicion: a version that moved (an operator in place), or a read of ``data``, which may
have been for a norm. Of a marked parameter this rank compares its own slice with the rounding of
its master weights, and takes over the elements that differ, no others.

Every rank must write the same, as with DDP. If the step's all-reduce counts any parameters that
were written, ranks compare them before the update, and refuse the step where they differ. Only then
do master weights change (`apply`). A save or an export compares nothing: it brings this rank's part
there before. What a rank writes through ``data`` alone, and only into elements that others update,
is not seen if these do not write it too.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from concurrent.futures import wait

import torch
from torch import Tensor

from zero_core.core import access
from zero_core.core.extension import Extension
from zero_core.core.facts import Facts
from zero_core.errors import RankMismatchError
from zero_core.layout.arithmetic import Piece
from zero_core.sharded.sharded_state import MASTER, ShardedState


class Edits(Extension):
    """Keeps what programs write past the engine. See [Note: edits past the engine]."""

    def __init__(self, state: ShardedState, facts: Facts) -> None:
        self._state = state
        self._facts = facts
        self._kept = [flat for flat in state.params if flat.is_kept and flat.segment.is_trainable]
        # By name of what was marked since the last step: a checksum if it was written, else None.
        self._marked: dict[str, int | None] = {}
        # By name of what master weights lack: this rank's piece, and the parameter's elements.
        self._pending: dict[str, tuple[Piece, Tensor]] = {}

    def begin(self) -> None:
        """Mark what is written from now on, until `remove`."""
        for flat in self._kept:
            if flat.shown.has_masters_apart:
                access.watch(flat.shown.read_params)
            flat.shown.forget_marks()

    def remove(self) -> None:
        for flat in self._kept:
            access.stop_watching(flat.shown.read_params)

    def is_marked(self, name: str) -> bool:
        return name in self._marked

    def fill(self, facts: Facts) -> None:
        facts.put("written", sum(checksum is not None for checksum in self._marked.values()))

    def before_early_update(self) -> None:
        self.find()
        self.apply()

    def before_decision(self, number: int) -> None:
        """Bring what was written to the master weights, if the ranks have written the same.

        Raises:
            RankMismatchError: they have not, with names. All ranks raise it.
        """
        if self._facts.is_any("written"):
            rows = self._state.control.gather_bytes(json.dumps(self._marked).encode())
            found: list[dict[str, int | None]] = [json.loads(row) for row in rows]
            differing = []
            for name in sorted({name for row in found for name in row}):
                checksums = {row[name] for row in found if row.get(name) is not None}
                is_marked_by_all = all(name in row for row in found)
                if len(checksums) > 1 or (checksums and not is_marked_by_all):
                    differing.append(name)
            if differing:
                more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
                raise RankMismatchError(
                    f"rank {self._state.control.rank}, step {number}: not updated, as ranks have "
                    f"written different values into {', '.join(differing[:4])}{more} since the "
                    "last step: write the same on every rank, or one rank's within "
                    f"{self._state.cures.write}"
                )
        self.apply()
        self.forget()

    @torch.no_grad()
    def find(self) -> None:
        """Find what was written into parameters since the last call, and change nothing."""
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
                    self._pending[name] = piece, elements
                    flat.edited.add(position)
                if is_written:
                    self._marked[name] = zlib.crc32(bytes(elements.cpu().view(torch.uint8).numpy()))
                else:
                    self._marked.setdefault(name, None)

    @property
    def is_pending(self) -> bool:
        return bool(self._pending)

    @torch.no_grad()
    def apply(self) -> None:
        """Bring what `find` has found to the master weights."""
        pending, self._pending = self._pending, {}
        for piece, elements in pending.values():
            self.write_back(piece, elements)

    def write_back(self, piece: Piece, elements: Tensor, is_new: Tensor | None = None) -> None:
        """Overwrite the master weights of ``piece`` that ``elements`` are no rounding of.

        ``is_new``: elements to overwrite as well. Where a parameter's memory is the upper half of
        its split master weights, new values beside old lower halves are roundings of each other.
        """
        changed, own, old = self._compare(piece, elements)
        if is_new is not None:
            changed |= is_new[piece.offset : piece.offset + piece.stop - piece.start].cpu()
        if changed.any():
            wait(self._state.readers)
            new = torch.where(changed, own.to(old.dtype), old)
            self._state.tier.write_state(MASTER, piece.start, new)

    def _compare(self, piece: Piece, elements: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return where this rank's part of ``elements`` was written, the part, and its masters."""
        own = elements[piece.offset : piece.offset + piece.stop - piece.start].cpu()
        old = self._state.tier.read_state(MASTER, piece.start, piece.stop)
        rounded = old.to(own.dtype)
        differs = (own != rounded) & ~(own.isnan() & rounded.isnan())
        # Of a tie both neighbours are roundings: a tier may round it as it likes.
        is_tie = (own.to(old.dtype) - old).abs() == (rounded.to(old.dtype) - old).abs()
        return differs & ~is_tie, own, old

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Forget what was written to parameters, all or ``names``: all ranks have the same."""
        for name in list(self._marked) if names is None else names:
            self._marked.pop(name, None)
            self._pending.pop(name, None)
