"""Patches of the weights, written by all ranks.

Rank 0 writes. It holds the changes of one segment at a time, as other ranks send theirs.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import torch
from torch import Tensor

from zero_core.checkpoint.model_files import TensorBuffer
from zero_core.checkpoint.patches.document import (
    Document,
    PatchedTensor,
    Piece,
    WeightPatch,
    crc_of,
    positions_key,
    to_metadata,
    values_key,
)
from zero_core.checkpoint.safetensors_files import dtype_name
from zero_core.checkpoint.storage.disk import no_room
from zero_core.core.extension import Extension
from zero_core.errors import CheckpointError, PatchGapError
from zero_core.layout.arithmetic import Segment
from zero_core.sharded.changes.positions import Form, Kind, encode, form_of, to_low_bits
from zero_core.sharded.sharded_state import ShardedState

_NONE = torch.empty(0, dtype=torch.uint8)
_Facts = tuple[list[tuple[int, list[Any]]], list[int]]
"""Slots and pieces of a rank's shard, and the bytes of each one's positions and values."""


@dataclass
class _Collected:
    """Tensors of a patch so far, on rank 0.

    Attributes:
        tensors: their descriptions by name; their pieces are in ``pieces``.
    """

    buffer: TensorBuffer
    tensors: dict[str, PatchedTensor] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    num_pieces: int = 0

    def add(self, tensor: PatchedTensor, piece: Piece, positions: Tensor, values: Tensor) -> None:
        name = tensor.names[0]
        piece = Piece(self.num_pieces, *piece[1:])
        self.num_pieces += 1
        self.tensors[name] = tensor
        self.pieces.setdefault(name, []).append(piece)
        self.buffer.add(positions_key(piece), positions)
        self.buffer.add(values_key(piece), values)

    def describe(self) -> tuple[PatchedTensor, ...]:
        return tuple(
            tensor.model_copy(
                update={"pieces": tuple(sorted(self.pieces[name], key=lambda p: p.start))}
            )
            for name, tensor in self.tensors.items()
        )


class PatchWriter(Extension):
    """Writer of an engine's patches."""

    def __init__(self, state: ShardedState) -> None:
        self._state = state
        self._engine: str | None = None
        self._buffers: dict[str, tuple[int, int]] = {}  # crc32, and the version that it came with

    @property
    def version(self) -> int:
        """The newest version: that of the last patch, or 0."""
        return 0 if self._state.changes is None else self._state.changes.version

    def begun(self) -> None:
        """Begin with the current values."""
        if self._state.changes is not None:
            self._state.changes.restart(self._state.params)
            self._buffers.update(self._changed_buffers(self.version))

    def write(self, since: int | None, path: Path | None) -> WeightPatch:
        """Write what changed since a version to ``path``. See `zero_core.Engine.weight_patch`."""
        control, changes = self._state.control, self._state.changes
        for flat in self._state.params:
            flat.wait_update()
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
        self._check_since(since)
        if since is not None and since < (oldest := int(facts[:, 1].max())):
            raise PatchGapError(
                f"weight_patch(since={since}): changes are known since version {oldest} alone; "
                "send all by since=None, or keep more by weight_patches.versions and "
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

    def _check_since(self, since: int | None) -> None:
        if since is None:
            return
        if self._state.changes is None:
            raise RuntimeError(
                f"weight_patch(since={since}) needs the log of changes: set weight_patches in the "
                "configuration, {} for its defaults, or take all by since=None"
            )
        if not 0 <= since <= self.version:
            raise ValueError(
                f"weight_patch(since={since}): the newest version is {self.version}; pass the "
                "version of an earlier patch of this engine, 0 for its start, or None for all"
            )

    def _changed_buffers(self, version: int) -> dict[str, tuple[int, int]]:
        """Return the buffers of rank 0 that have other values as of ``version``."""
        if self._state.control.rank != 0:
            return {}
        found = {name: crc_of(value) for name, value in self._state.buffers().items()}
        known = {name: crc for name, (crc, _) in self._buffers.items()}
        return {name: (crc, version) for name, crc in found.items() if known.get(name) != crc}

    def _write(self, since: int | None, version: int, path: Path | None) -> WeightPatch:
        control = self._state.control
        if self._engine is None:
            self._engine = control.gather_bytes(uuid4().hex.encode())[0].decode()
        failure: list[Exception] = []
        raw = control.together("weight_patch: open", lambda: self._open(path))
        collected = _Collected(TensorBuffer(raw))
        try:
            for added in self._changes(since):  # a collective: to the end, after an error too
                try:
                    if not failure:
                        collected.add(*added)
                except OSError as error:
                    failure.append(no_room(path, error))
        except CheckpointError as error:  # of rank 0, past the last exchange: all must hear of it
            failure.append(error)
        except BaseException:
            raw.close()
            _remove(path)
            raise

        def finish() -> Path | bytes | None:
            if failure:
                raise failure[0]
            if control.rank != 0:
                return None
            assert self._engine is not None
            document = Document(
                engine=self._engine,
                since=since,
                version=version,
                tensors=collected.describe(),
            )
            return _finish(collected.buffer, to_metadata(document), path)

        try:
            source = control.together("weight_patch: write", finish)
        finally:
            raw.close()
            if control.rank == 0:
                _remove(path)
        size = len(source) if isinstance(source, bytes) else source.stat().st_size if source else 0
        return WeightPatch(since, version, size, source)

    def _open(self, path: Path | None) -> IO[bytes]:
        """Open what tensors wait in."""
        if path is None or self._state.control.rank != 0:
            return io.BytesIO()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return _raw(path).open("w+b")
        except OSError as error:
            raise no_room(path, error) from error

    def _changes(self, since: int | None) -> Iterator[tuple[PatchedTensor, Piece, Tensor, Tensor]]:
        """Yield the pieces of all ranks on rank 0, nothing on others. Every rank must iterate."""
        control = self._state.control
        for segment in self._state.layout.segments:
            if segment.is_opaque:  # a quantizer's bytes, which are never trained
                continue
            own, parts = self._own_pieces(segment, since)
            data = torch.cat(parts) if parts else _NONE.to(self._state.device)
            sizes = [part.numel() for part in parts]
            facts = json.dumps([own, sizes])
            found = [json.loads(of_rank) for of_rank in control.gather_bytes(facts.encode())]
            if not any(pieces for pieces, _ in found):
                continue
            totals = [sum(of_rank) for _, of_rank in found]
            sent = [data.numel()] + [0] * (control.world_size - 1)
            received = totals if control.rank == 0 else [0] * control.world_size
            arrived = control.exchange(data, sent, received).cpu()
            if control.rank == 0:
                yield from self._unpack(segment, found, arrived)
        if control.rank == 0:
            yield from self._buffer_pieces(since)

    def _own_pieces(
        self, segment: Segment, since: int | None
    ) -> tuple[list[tuple[int, Piece]], list[Tensor]]:
        """Return slot and piece of each changed part of this rank's shard, and their bytes."""
        flat = self._state.params[segment.index]
        low, high = segment.shard_range(flat.rank)
        numel, size = segment.shard_numel, segment.dtype.itemsize
        masks: list[tuple[Form, Tensor | None]] = [(Form.VALUES, None)]
        if since is not None:
            assert self._state.changes is not None
            changed = self._state.changes.changed(segment.index, since, numel)
            if changed is None:
                return [], []
            near = form_of(changed.num_updates, size)
            masks = [(near, changed.near), (Form.VALUES, changed.far)]
            if near is Form.VALUES:
                masks = [(near, changed.near | changed.far)]
        shard = flat.read_shard().detach()
        pieces: list[tuple[int, Piece]] = []
        parts: list[Tensor] = []
        for number, slot in enumerate(segment.slots):
            first, last = slot.common(low, high)
            base = slot.start + first - low
            for form, mask in masks:
                part = None if mask is None else mask[base : base + last - first]
                if first == last or (part is not None and not bool(part.any())):
                    continue
                piece, own = _encode(first, shard[base : base + last - first], part, form)
                pieces.append((number, piece))
                parts += [tensor.to(self._state.device) for tensor in own]
        return pieces, parts

    def _unpack(
        self,
        segment: Segment,
        found: Sequence[_Facts],
        data: Tensor,
    ) -> Iterator[tuple[PatchedTensor, Piece, Tensor, Tensor]]:
        parts = iter(torch.split(data, [size for _, sizes in found for size in sizes]))
        for number, facts in (piece for pieces, _ in found for piece in pieces):
            spec = self._state.layout.params[segment.slots[number].param]
            tensor = PatchedTensor(
                names=(spec.name, *spec.aliases),
                shape=spec.shape,
                dtype=dtype_name(spec.dtype, spec.name),
                pieces=(),
                order=spec.order,
            )
            positions, values = next(parts).clone(), next(parts).clone()
            first, start, numel, kind, form, data_crc, result_crc = facts
            piece = Piece(first, start, numel, Kind(kind), Form(form), data_crc, result_crc)
            if piece.form == Form.VALUES:
                values = values.view(spec.dtype)
            yield tensor, piece, positions, values

    def _buffer_pieces(
        self, since: int | None
    ) -> Iterator[tuple[PatchedTensor, Piece, Tensor, Tensor]]:
        for name, value in self._state.buffers().items():
            if since is not None and self._buffers[name][1] <= since:
                continue
            kind = dtype_name(value.dtype, name)
            tensor = PatchedTensor(names=(name,), shape=tuple(value.shape), dtype=kind, pieces=())
            flat = value.contiguous().view(-1)
            crcs = crc_of(flat), crc_of(flat)
            yield tensor, Piece(0, 0, value.numel(), Kind.ALL, Form.VALUES, *crcs), _NONE, flat


def _encode(
    start: int, values: Tensor, mask: Tensor | None, form: Form
) -> tuple[Piece, tuple[Tensor, Tensor]]:
    """Return a piece of the ``values`` that ``mask`` has, or of all, with its bytes."""
    numel, kind, positions = values.numel(), Kind.ALL, _NONE
    if mask is not None:
        # Unchanged ones do no harm, but low bits are wrong for what moved far.
        kind, positions = encode(mask, values.itemsize if form is Form.VALUES else None)
        if kind is not Kind.ALL:
            values = values[mask.to(values.device)]
    sent = _as_bytes(values) if form is Form.VALUES else to_low_bits(values, form)
    crcs = crc_of(positions, sent), crc_of(values)
    return Piece(0, start, numel, kind, form, *crcs), (positions, sent)


def _as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _raw(path: Path) -> Path:
    return path.with_name(path.name + ".raw.tmp")


def _unnamed(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _finish(buffer: TensorBuffer, metadata: Mapping[str, str], path: Path | None) -> Path | bytes:
    """Write the file under its name, or return it."""
    if path is None:
        file = io.BytesIO()
        buffer.write_to(file, dict(metadata))
        return file.getvalue()
    try:
        with _unnamed(path).open("wb") as named:
            buffer.write_to(named, dict(metadata))
        _unnamed(path).replace(path)
    except OSError as error:
        raise no_room(path, error) from error
    return path


def _remove(path: Path | None) -> None:
    if path is not None:
        for left in (_raw(path), _unnamed(path)):
            with suppress(OSError):
                left.unlink(missing_ok=True)
