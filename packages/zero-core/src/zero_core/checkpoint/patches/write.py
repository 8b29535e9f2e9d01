"""Patches of the weights, written by all ranks.

Rank 0 writes. It holds the changes of one segment at a time, as other ranks send theirs.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryFile
from uuid import uuid4

import torch
from torch import Tensor

from zero_core.checkpoint.patches.document import (
    Document,
    PatchedTensor,
    Piece,
    WeightPatch,
    crc_of,
)
from zero_core.checkpoint.safetensors_files import TensorBuffer, dtype_name
from zero_core.checkpoint.storage import no_room
from zero_core.core.extension import Extension
from zero_core.errors import CheckpointError, PatchGapError
from zero_core.layout.arithmetic import Segment
from zero_core.sharded.changes import Form, Kind, encode, form_of, to_low_bits
from zero_core.sharded.sharded_state import ShardedState

_NONE = torch.empty(0, dtype=torch.uint8)


class PatchWriter(Extension):
    """Writer of an engine's patches."""

    def __init__(self, state: ShardedState) -> None:
        self._state = state
        self._engine = ""  # its name in patches, which the ranks share from the first one on
        self._buffers: dict[str, tuple[int, int]] = {}  # crc32, and the version that it came with

    @property
    def version(self) -> int:
        """The newest version: that of the last patch, or 0."""
        return 0 if self._state.changes is None else self._state.changes.version

    def begun(self) -> None:
        if self._state.changes is not None:
            self._state.changes.restart(self._state.params)
            self._buffers.update(self._changed_buffers(self.version))

    def write(self, since: int | None, path: Path | None) -> WeightPatch:
        """Write what changed since a version to ``path``. See `zero_core.Engine.weight_patch`."""
        control, changes = self._state.control, self._state.changes
        for flat in self._state.params:
            flat.source.wait_update()
        has_changed = changes is not None and changes.collect(self._state.params)
        new_buffers = self._changed_buffers(self.version + 1)
        has_changed |= bool(new_buffers)
        oldest = 0 if changes is None else changes.oldest
        own = torch.tensor([has_changed, oldest, -1 if since is None else since])
        facts = control.gather(own).view(-1, 3)
        if bool((facts[:, 2] != facts[0, 2]).any()):
            raise ValueError(
                f"weight_patch(since=...) differs between ranks: {facts[:, 2].tolist()} (-1 is "
                "None): pass the same version on all of them"
            )
        if since is not None:
            if changes is None:
                raise RuntimeError(
                    f"weight_patch(since={since}) needs the log of changes: set weight_patches in "
                    "the configuration, {} for its defaults, or take all by since=None"
                )
            if not 0 <= since <= self.version:
                raise ValueError(
                    f"weight_patch(since={since}): the newest version is {self.version}; pass the "
                    "version of an earlier patch of this engine, 0 for its start, or None for all"
                )
            if since < (oldest := int(facts[:, 1].max())):
                raise PatchGapError(
                    f"weight_patch(since={since}): changes are known since version {oldest} "
                    "alone; send all by since=None, or keep more by weight_patches.versions and "
                    "weight_patches.max_bytes"
                )
        is_new = changes is not None and bool(facts[:, 0].any())
        known = dict(self._buffers)
        self._buffers.update(new_buffers)
        try:
            patch = self._write(since, self.version + is_new, path)
        except BaseException:
            self._buffers = known  # the next patch has them
            raise
        if is_new:
            assert changes is not None
            changes.close()
        return patch

    def _changed_buffers(self, version: int) -> dict[str, tuple[int, int]]:
        """Return the buffers of rank 0 that have other values as of ``version``."""
        if self._state.control.rank != 0:
            return {}
        found = {name: crc_of(value) for name, value in self._state.buffers().items()}
        known = {name: crc for name, (crc, _) in self._buffers.items()}
        return {name: (crc, version) for name, crc in found.items() if known.get(name) != crc}

    def _write(self, since: int | None, version: int, path: Path | None) -> WeightPatch:
        control, buffer = self._state.control, TensorBuffer(io.BytesIO())
        if not self._engine:
            self._engine = control.gather_bytes(uuid4().hex.encode())[0].decode()
        new = None if path is None else path.with_name(path.name + ".tmp")
        failure: list[Exception] = []
        tensors: dict[PatchedTensor, list[Piece]] = {}

        def open_raw() -> None:
            if path is not None and control.rank == 0:
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    buffer.raw = TemporaryFile(dir=path.parent)  # noqa: SIM115
                except OSError as error:
                    raise no_room(path, error) from error

        def finish() -> Path | bytes | None:
            if failure:
                raise failure[0]
            if control.rank != 0:
                return None
            described = tuple(
                tensor.model_copy(update={"pieces": tuple(sorted(of, key=lambda p: p.start))})
                for tensor, of in tensors.items()
            )
            whole = Document(engine=self._engine, since=since, version=version, tensors=described)
            metadata = whole.to_metadata()
            if path is None or new is None:
                file = io.BytesIO()
                buffer.write_to(file, metadata)
                return file.getvalue()
            try:
                with new.open("wb") as named:
                    buffer.write_to(named, metadata)
                new.replace(path)
            except OSError as error:
                raise no_room(path, error) from error
            return path

        try:
            control.together("weight_patch: open", open_raw)
            try:
                numbers = count()
                for tensor, found, positions, values in self._changes(since):
                    if failure:  # a collective: to the end, after an error too
                        continue
                    piece = Piece(next(numbers), *found[1:])
                    tensors.setdefault(tensor, []).append(piece)
                    try:
                        buffer.add(f"{piece.number}.positions", positions)
                        buffer.add(f"{piece.number}.values", values)
                    except OSError as error:
                        failure.append(no_room(path, error))
            except CheckpointError as error:  # of rank 0, past the last exchange: all must hear
                failure.append(error)
            source = control.together("weight_patch: write", finish)
        finally:
            buffer.raw.close()
            if new is not None and control.rank == 0:
                with suppress(OSError):
                    new.unlink(missing_ok=True)
        size = len(source) if isinstance(source, bytes) else source.stat().st_size if source else 0
        return WeightPatch(since, version, size, source)

    def _changes(self, since: int | None) -> Iterator[tuple[PatchedTensor, Piece, Tensor, Tensor]]:
        """Yield the pieces of all ranks on rank 0, nothing on others. Every rank must iterate."""
        control = self._state.control
        for segment in self._state.layout.segments:
            if segment.is_opaque:  # a quantizer's bytes, which are never trained
                continue
            own, parts = self._own_pieces(segment, since)
            facts = json.dumps([own, [part.numel() for part in parts]]).encode()
            found = [json.loads(of_rank) for of_rank in control.gather_bytes(facts)]
            if not any(pieces for pieces, _ in found):
                continue
            data = torch.cat(parts) if parts else _NONE.to(self._state.device)
            received = [sum(sizes) if control.rank == 0 else 0 for _, sizes in found]
            sent = [data.numel()] + [0] * (control.world_size - 1)
            arrived = control.exchange(data, sent, received).cpu()
            if control.rank != 0:
                continue
            split = iter(torch.split(arrived, [size for _, sizes in found for size in sizes]))
            for slot, (number, start, numel, kind, form, *crcs) in chain(*(p for p, _ in found)):
                spec = self._state.layout.params[segment.slots[slot].param]
                tensor = PatchedTensor(
                    names=(spec.name, *spec.aliases),
                    shape=spec.shape,
                    dtype=dtype_name(spec.dtype, spec.name),
                    pieces=(),
                    order=spec.order,
                )
                positions, values = next(split).clone(), next(split).clone()
                if form == Form.VALUES:
                    values = values.view(spec.dtype)
                piece = Piece(number, start, numel, Kind(kind), Form(form), *crcs)
                yield tensor, piece, positions, values
        for name, value in self._state.buffers().items() if control.rank == 0 else ():
            if since is None or self._buffers[name][1] > since:
                kind = dtype_name(value.dtype, name)
                tensor = PatchedTensor(
                    names=(name,), shape=tuple(value.shape), dtype=kind, pieces=()
                )
                flat = value.contiguous().view(-1)
                crc = crc_of(flat)
                piece = Piece(0, 0, value.numel(), Kind.ALL, Form.VALUES, crc, crc)
                yield tensor, piece, _NONE, flat

    def _own_pieces(
        self, segment: Segment, since: int | None
    ) -> tuple[list[tuple[int, Piece]], list[Tensor]]:
        """Return slot and piece of each changed part of this rank's shard, and their bytes."""
        flat = self._state.params[segment.index]
        low, high = segment.shard_range(flat.rank)
        masks: list[tuple[Form, Tensor | None]] = [(Form.VALUES, None)]  # None: all
        if since is not None:
            assert self._state.changes is not None
            changed = self._state.changes.changed(segment.index, since, segment.shard_numel)
            if changed is None:
                return [], []
            near, far, num_updates = changed
            form = form_of(num_updates, segment.dtype.itemsize)
            masks = [(form, near), (Form.VALUES, far)]
            if form is Form.VALUES:
                masks = [(form, near | far)]
        shard = flat.source.read().detach()
        pieces: list[tuple[int, Piece]] = []
        parts: list[Tensor] = []
        for number, slot in enumerate(segment.slots):
            first, last = slot.common(low, high)
            own = slice(slot.start + first - low, slot.start + last - low)
            for form, mask in masks:
                part = None if mask is None else mask[own]
                if first == last or (part is not None and not bool(part.any())):
                    continue
                values, kind, positions = shard[own], Kind.ALL, _NONE
                if part is not None:
                    # Unchanged ones do no harm, but low bits are wrong for what moved far.
                    kind, positions = encode(part, values.itemsize if form is Form.VALUES else None)
                    if kind is not Kind.ALL:
                        values = values[part.to(values.device)]
                if form is Form.VALUES:
                    sent = values.contiguous().view(torch.uint8)
                else:
                    sent = to_low_bits(values, form)
                crcs = crc_of(positions, sent), crc_of(values)
                pieces.append((number, Piece(0, first, last - first, kind, form, *crcs)))
                parts += [tensor.to(self._state.device) for tensor in (positions, sent)]
        return pieces, parts
