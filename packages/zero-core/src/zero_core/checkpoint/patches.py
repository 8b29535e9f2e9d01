"""Weight patches: the ranks of a training run write them, and other programs apply them.

[Note: the file]
A patch is a safetensors file. Its metadata has two strings: ``zero_patch``, a `Document` as JSON,
and ``crc32``, the checksum of that JSON. Each changed parameter or buffer is a `PatchedTensor`. Its
pieces are ranges of its flattened elements, each in one rank's shard. Piece ``NUMBER`` has two
tensors. ``NUMBER.positions``, uint8, encodes which positions of the piece have changed.
``NUMBER.values`` has the new values in the order of the positions, or their lowest bits: see
`zero_core.sharded.changes`. A piece also has two checksums: of these tensors, and of the new
values. With low bits, the latter detects receivers that do not have the values of their version.

[Note: a patched folder]
A file with changes is written again in full. If a folder has one file, the new file replaces it by
a rename. If a folder has several files and an index, new files get new names. The new index then
replaces the old one in a single rename, and the old files are removed.
"""

from __future__ import annotations

import io
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Annotated, Any, Literal, NamedTuple, TypeVar
from uuid import uuid4

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from zero_core.checkpoint.safetensors_files import (
    INDEX,
    StoredTensor,
    TensorBuffer,
    bytes_of,
    dtype_name,
    dtype_of,
    first_error,
    make_header,
    model_files,
    read_open,
)
from zero_core.checkpoint.storage import (
    open_regular,
    storing,
    sync_folder,
    write_all,
    write_synced,
    writing,
)
from zero_core.core.extension import Extension
from zero_core.errors import CheckpointCorruptError, CheckpointError, PatchGapError
from zero_core.layout.arithmetic import Segment, flatten, unflatten
from zero_core.layout.discovery import plain_name
from zero_core.lifecycle import owner_of
from zero_core.sharded.changes import (
    Form,
    Kind,
    decode,
    encode,
    form_of,
    from_low_bits,
    to_low_bits,
)
from zero_core.sharded.sharded_state import ShardedState

_METADATA_KEY = "zero_patch"
_CHECKSUM_KEY = "crc32"
_VERSION = "_zero_patch_version"  # attribute of a patched model
_VERSION_KEY = "zero_patch_version"  # metadata key of a patched folder
_VERSION_SUFFIX = re.compile(r"-patch(\d+)$")
_ADVICE = "copy it again, or take all by engine.weight_patch(since=None)"
_NONE = torch.empty(0, dtype=torch.uint8)
_Value = TypeVar("_Value", Tensor, StoredTensor)
_Count = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Piece(NamedTuple):
    """Changes in a range of a tensor's flattened elements."""

    number: _Count  # number of the piece in the file
    start: _Count  # first element of the range
    numel: _Count  # elements of the range
    kind: Kind  # encoding of the positions
    form: Form  # whether whole values or only their lowest bits are sent
    data_crc: int  # crc32 of the tensors of positions and values
    result_crc: int  # crc32 of the new values


class PatchedTensor(_Part):
    """A parameter or buffer that has changed."""

    names: Annotated[tuple[str, ...], Field(min_length=1)]  # several if the parameter is tied
    shape: tuple[_Count, ...]  # shape of the whole tensor
    dtype: str  # its name in safetensors
    pieces: tuple[Piece, ...]  # sorted by start
    order: tuple[_Count, ...] = ()  # dimensions, slowest first; () is the order of ``shape``


class Document(_Part):
    """Description of a patch."""

    format: Literal[1] = 1  # version of the file format
    engine: str  # identity of the writing engine, because engines count versions independently
    since: _Count | None  # oldest version that the patch applies to. None: it has all values
    version: _Count  # the receiver's version afterwards
    tensors: tuple[PatchedTensor, ...]


class Version(_Part):
    """Version of a receiver's weights, as stored with these weights."""

    engine: str
    version: int


@dataclass(frozen=True)
class WeightPatch:
    """A patch of the weights.

    Attributes:
        since: oldest version that the patch applies to. None: it has all values.
        version: the receiver's version afterwards. Pass it as ``since`` for the next patch.
        nbytes: bytes of the file. 0 on ranks other than 0.
        source: the file, or its bytes. None on ranks other than 0.
    """

    since: int | None
    version: int
    nbytes: int
    source: Path | bytes | None


def _crc_of(*tensors: Tensor) -> int:
    crc = 0
    for tensor in tensors:
        data = tensor.cpu().contiguous()  # keeps the memory alive while its bytes are read
        crc = zlib.crc32(bytes_of(data), crc)
    return crc


_Change = tuple[PatchedTensor, Piece, Tensor, Tensor]
"""A piece of a tensor, with its positions and values."""


class PatchWriter(Extension):
    """Writer of an engine's patches.

    Rank 0 writes the file, and receives the changes of one segment at a time.
    """

    def __init__(self, state: ShardedState) -> None:
        self._state = state
        self._engine = ""  # identity of the engine in patches, set by the first patch
        # By buffer name: crc32, and the first version with this crc32.
        self._buffers: dict[str, tuple[int, int]] = {}

    @property
    def version(self) -> int:
        """Version of the newest patch. 0 before the first one, and without a log of changes."""
        return 0 if self._state.changes is None else self._state.changes.version

    def begun(self) -> None:
        if self._state.changes is not None:
            self._state.changes.restart(self._state.params)
            self._buffers.update(self._changed_buffers(self.version))

    def write(self, since: int | None, path: Path | None) -> WeightPatch:
        """Write a patch. See `zero_core.Engine.weight_patch`."""
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
        is_new = bool(facts[:, 0].any())
        known = dict(self._buffers)
        self._buffers.update(new_buffers)
        try:
            patch = self._write(since, self.version + (changes is not None and is_new), path)
        except BaseException:
            self._buffers = known  # the next patch then includes the new buffers
            raise
        if changes is not None and is_new:
            changes.close()
        return patch

    def _changed_buffers(self, version: int) -> dict[str, tuple[int, int]]:
        """Return crc32 and ``version`` of each changed buffer, by name, on rank 0 only."""
        if self._state.control.rank != 0:
            return {}
        found = {name: (_crc_of(value), version) for name, value in self._state.buffers().items()}
        return {n: new for n, new in found.items() if self._buffers.get(n, (None,))[0] != new[0]}

    def _write(self, since: int | None, version: int, path: Path | None) -> WeightPatch:
        control, numbers = self._state.control, count()
        if not self._engine:
            self._engine = control.gather_json(uuid4().hex)[0]

        def write(changes: Iterator[_Change]) -> Path | bytes:
            tensors: dict[PatchedTensor, list[Piece]] = {}
            with storing(path), ExitStack() as stack:
                raw: IO[bytes] = io.BytesIO()
                if path is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    raw = stack.enter_context(TemporaryFile(dir=path.parent))
                buffer = TensorBuffer(raw)
                every = chain(changes, self._buffer_changes(since, numbers))
                for tensor, piece, positions, values in every:
                    tensors.setdefault(tensor, []).append(piece)
                    buffer.add(f"{piece.number}.positions", positions)
                    buffer.add(f"{piece.number}.values", values)
                found = tuple(
                    tensor.model_copy(update={"pieces": tuple(sorted(of, key=lambda p: p.start))})
                    for tensor, of in tensors.items()
                )
                whole = Document(engine=self._engine, since=since, version=version, tensors=found)
                text = whole.model_dump_json()
                metadata = {_METADATA_KEY: text, _CHECKSUM_KEY: str(zlib.crc32(text.encode()))}
                if path is None:
                    file = io.BytesIO()
                    buffer.write_to(file, metadata)
                    return file.getvalue()
                new = path.with_name(path.name + ".tmp")
                stack.callback(new.unlink, missing_ok=True)
                with new.open("wb") as named:
                    buffer.write_to(named, metadata)
                new.replace(path)
                return path

        changes = self._changes(since, numbers)
        source = control.on_first_rank("weight_patch: write", changes, write)
        size = len(source) if isinstance(source, bytes) else source.stat().st_size if source else 0
        return WeightPatch(since, version, size, source)

    def _changes(self, since: int | None, numbers: Iterator[int]) -> Iterator[_Change]:
        """Yield all ranks' pieces of parameters, on rank 0. Every rank must iterate to the end."""
        control, layout = self._state.control, self._state.layout
        for segment in layout.segments:
            if segment.is_opaque:  # bytes of a quantized parameter, which never change
                continue
            own, parts = self._own_pieces(segment, since)
            found = control.gather_json([own, [part.numel() for part in parts]])
            if not any(pieces for pieces, _ in found):
                continue
            # Refuse a dtype on all ranks, because each must take part in the exchanges.
            dtype = dtype_name(segment.dtype, layout.params[segment.slots[0].param].name)
            data = torch.cat(parts) if parts else _NONE.to(self._state.device)
            received = [sum(sizes) if control.rank == 0 else 0 for _, sizes in found]
            sent = [data.numel()] + [0] * (control.world_size - 1)
            arrived = control.exchange(data, sent, received).cpu()
            if control.rank != 0:
                continue
            split = iter(torch.split(arrived, [size for _, sizes in found for size in sizes]))
            for slot, start, numel, kind, form, *crcs in chain(*(pieces for pieces, _ in found)):
                spec = layout.params[segment.slots[slot].param]
                tensor = PatchedTensor(
                    names=(spec.name, *spec.aliases),
                    shape=spec.shape,
                    dtype=dtype,
                    order=spec.order,
                    pieces=(),
                )
                positions, values = next(split).clone(), next(split).clone()
                if form == Form.VALUES:
                    values = values.view(spec.dtype)
                piece = Piece(next(numbers), start, numel, Kind(kind), Form(form), *crcs)
                yield tensor, piece, positions, values

    def _buffer_changes(self, since: int | None, numbers: Iterator[int]) -> Iterator[_Change]:
        for name, value in self._state.buffers().items():
            if since is None or self._buffers[name][1] > since:
                dtype = dtype_name(value.dtype, name)
                shape = tuple(value.shape)
                tensor = PatchedTensor(names=(name,), shape=shape, dtype=dtype, pieces=())
                flat = value.contiguous().view(-1)
                crc = _crc_of(flat)
                whole = Piece(next(numbers), 0, value.numel(), Kind.ALL, Form.VALUES, crc, crc)
                yield tensor, whole, _NONE, flat

    def _own_pieces(
        self, segment: Segment, since: int | None
    ) -> tuple[list[tuple[int | str, ...]], list[Tensor]]:
        """Return this rank's changed pieces, and two tensors of each: positions and values.

        A piece is the index of its slot, followed by the fields of `Piece` except the number.
        """
        flat = self._state.params[segment.index]
        low, high = segment.shard_range(flat.rank)
        masks: list[tuple[Form, Tensor | None]] = [(Form.VALUES, None)]  # None: all elements
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
        pieces: list[tuple[int | str, ...]] = []
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
                    # Low bits must exclude unmasked positions, whose values may have moved too far.
                    kind, positions = encode(part, values.itemsize if form is Form.VALUES else None)
                    if kind is not Kind.ALL:
                        values = values[part.to(values.device)]
                if form is Form.VALUES:
                    sent = values.contiguous().view(torch.uint8)
                else:
                    sent = to_low_bits(values, form)
                crcs = _crc_of(positions, sent), _crc_of(values)
                pieces.append((number, first, last - first, kind, form, *crcs))
                parts += [tensor.to(self._state.device) for tensor in (positions, sent)]
        return pieces, parts


def apply_patch(
    target: nn.Module | str | Path,
    patch: WeightPatch | bytes | str | Path,
    *,
    version: int | None = None,
) -> int:
    """Apply a patch that `zero_core.Engine.weight_patch` wrote.

    The target is a model in memory, on any devices, or a folder of safetensors files as written by
    transformers. Afterwards the tensors in the patch are bit-identical to those of the engine at
    the patch's version. All checks precede the first change of the model or of its files. The
    version is recorded in an attribute of the model, or in the folder's metadata.

    Args:
        target: a model that no engine owns, or a folder.
        patch: the object, its bytes, or its file.
        version: version of the target's values, if no patch has set them: 0 for a copy of the model
            that ``build`` received, `zero_core.Engine.patch_version` for an export. None: the
            recorded version.

    Returns:
        The target's version afterwards.

    Raises:
        PatchGapError: the target is older than ``since`` of the patch. Write a patch since the
            target's version, or of all values.
        CheckpointError: the patch is from another engine or older than the target, the target's
            version is unknown, an engine owns the target, or a name, shape, dtype or value differs.
        CheckpointCorruptError: the patch or a file of the folder is damaged.
        CheckpointFailedError: a file could not be written.
        ValueError: the patch object is from a rank other than 0, and has no content.
    """
    source = patch.source if isinstance(patch, WeightPatch) else patch
    if source is None:
        raise ValueError("the patch is on rank 0: apply it there, or send its bytes or file")
    name = "the patch" if isinstance(source, bytes) else str(source)
    with io.BytesIO(source) if isinstance(source, bytes) else open_regular(Path(source)) as file:
        received = _ReceivedPatch(file, name)
        if isinstance(target, nn.Module):
            _patch_model(target, received, version)
        else:
            _patch_folder(Path(target), received, version)
        return received.version.version


class _ReceivedPatch:
    """An open patch whose content was checked. Applying it gives a receiver its ``version``."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._name = name  # for error messages
        self._file = file
        self._stored, metadata = read_open(file, Path(name))
        text = metadata.get(_METADATA_KEY)
        if text is None:
            raise CheckpointError(f"{name} is no patch: engine.weight_patch() writes them")
        if metadata.get(_CHECKSUM_KEY) != str(zlib.crc32(text.encode())):
            raise CheckpointCorruptError(f"{name}: its description is damaged; {_ADVICE}")
        try:
            self._document = Document.model_validate_json(text)
        except ValidationError as error:
            raise CheckpointError(
                f"{name} is a patch of another format: {first_error(error)}; use one release of "
                "zero-core on both sides"
            ) from error
        self.version = Version(engine=self._document.engine, version=self._document.version)
        for tensor in self._document.tensors:
            if tensor.order and sorted(tensor.order) != list(range(len(tensor.shape))):
                raise self._damaged(tensor, f"order {tensor.order} of shape {tensor.shape}")
            for piece in tensor.pieces:
                self._content(tensor, piece)

    def apply(self, tensor: PatchedTensor, values: Tensor, *, is_trial: bool = False) -> None:
        """Check the changes of ``tensor``, and unless ``is_trial`` write them to 1-D ``values``."""
        for piece in tensor.pieces:
            index, new = self._content(tensor, piece)
            part = values[piece.start : piece.start + piece.numel]
            place = index.to(values.device) if isinstance(index, Tensor) else index
            if piece.form is not Form.VALUES:
                new = from_low_bits(part[place].cpu(), new, piece.form)
            if _crc_of(new) != piece.result_crc:
                raise CheckpointError(
                    f"{self._name}: {tensor.names[0]} has not the values of the version that it is "
                    "taken for: something else has changed it; apply a patch of all values "
                    "(since=None)"
                )
            if not is_trial:
                part[place] = new.to(values.device)

    def check_version(self, known: Version | None, given: int | None, what: str) -> None:
        """Raise if the patch does not apply to version ``given``, by default to ``known``."""
        document = self._document
        if document.since is None:
            return
        if given is None:
            if known is None:
                raise CheckpointError(
                    f"the patch applies to version {document.since} and newer ones, and that of "
                    f"{what} is not known: apply a patch of all values first (since=None), or pass "
                    "version="
                )
            if known.engine != document.engine:
                raise CheckpointError(
                    f"{what} has version {known.version} of another engine than the patch: after "
                    "a new build(), apply a patch of all values first (since=None)"
                )
            given = known.version
        if given < document.since:
            raise PatchGapError(
                f"{what} has version {given}, and the patch applies to {document.since} and "
                f"newer ones: ask the engine for weight_patch(since={given}), or for all by "
                "since=None"
            )
        if given > document.version:
            raise CheckpointError(
                f"{what} has version {given}, which is newer than that of the patch, "
                f"{document.version}: apply patches in their order"
            )

    def match(
        self, there: Sequence[tuple[str, _Value]], required: Mapping[str, _Value], what: str
    ) -> list[tuple[str, PatchedTensor, _Value]]:
        """Return name, `PatchedTensor` and value of each tensor in ``there`` that is patched."""
        by_name = {name: tensor for tensor in self._document.tensors for name in tensor.names}
        found = [(name, by_name[name], value) for name, value in there if name in by_name]
        known = {tensor.names for _, tensor, _ in found}
        for tensor in self._document.tensors:
            if tensor.names not in known:
                raise CheckpointError(
                    f"the patch changes {tensor.names[0]}, which {what} lacks: it has "
                    f"{', '.join(sorted(name for name, _ in there)[:4])}, ...; use the model of "
                    "the training, or an export of it"
                )
        for name, tensor, value in found:
            if tuple(value.shape) != tensor.shape or value.dtype != dtype_of(tensor.dtype):
                raise CheckpointError(
                    f"{name} is {tuple(value.shape)} in {value.dtype} in {what}, and "
                    f"{tensor.shape} in {dtype_of(tensor.dtype)} in the patch: use the training's "
                    "model, or an export of it, in its compute dtype"
                )
        given = {id(value) for _, _, value in found}
        lacking = [
            n for n, v in required.items() if id(v) not in given and v.dtype.is_floating_point
        ]
        if self._document.since is None and lacking:
            raise CheckpointError(
                f"the patch has all values of the training's model, and none for {lacking[:4]} in "
                f"{what}: use the model of the training"
            )
        return found

    def _content(self, tensor: PatchedTensor, piece: Piece) -> tuple[Tensor | slice, Tensor]:
        """Check and return the positions in a piece, and the values or low bits sent for them."""
        try:
            found = [self._stored[f"{piece.number}.{part}"] for part in ("positions", "values")]
            positions, sent = (one.read_from(self._file) for one in found)
            if _crc_of(positions, sent) != piece.data_crc:
                raise ValueError("its checksum is wrong")
            if piece.start + piece.numel > math.prod(tensor.shape):
                raise ValueError(f"{piece.numel} elements from {piece.start} on")
            index = decode(piece.kind, positions, piece.numel)
            count = index.numel() if isinstance(index, Tensor) else piece.numel
            num_sent, dtype = count, dtype_of(tensor.dtype)
            if piece.form is not Form.VALUES:
                num_sent, dtype = -(-count * piece.form.num_bits // 8), torch.uint8
            if sent.numel() != num_sent or sent.dtype != dtype:
                raise ValueError(f"{sent.numel()} values, {sent.dtype}, for {count} positions")
        except (ValueError, KeyError) as error:
            raise self._damaged(tensor, error) from error
        return index, sent

    def _damaged(self, tensor: PatchedTensor, reason: object) -> CheckpointCorruptError:
        return CheckpointCorruptError(
            f"{self._name} is damaged: {tensor.names[0]}: {reason}; {_ADVICE}"
        )


def _patch_model(model: nn.Module, patch: _ReceivedPatch, version: int | None) -> None:
    patch.check_version(getattr(model, _VERSION, None), version, "the model")
    params = {plain_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    buffers = {plain_name(n): b for n, b in model.named_buffers(remove_duplicate=False)}
    if any(owner_of(p) is not None for p in params.values()):
        raise CheckpointError(
            "the model belongs to an engine, whose shards a patch does not reach: apply the patch "
            "to a plain model, or load a checkpoint"
        )
    there: dict[str, Tensor] = {**params, **buffers}
    found = patch.match(list(there.items()), {n: there[n] for n in params}, "the model")
    targets = {id(value): (tensor, value) for _, tensor, value in found}  # deduplicate tied names
    with torch.no_grad():
        for is_trial in (True, False):
            for tensor, target in targets.values():
                flat = flatten(target, tensor.order)
                patch.apply(tensor, flat, is_trial=is_trial)
                if not is_trial and flat.data_ptr() != target.data_ptr():  # ``flat`` is a copy
                    target.copy_(unflatten(flat, tensor.shape, tensor.order))
    setattr(model, _VERSION, patch.version)


def _patch_folder(folder: Path, patch: _ReceivedPatch, version: int | None) -> None:
    """Rewrite the files with changes in ``folder``. See [Note: a patched folder]."""
    if not folder.is_dir():
        raise CheckpointError(
            f"apply_patch() takes a model or a folder of safetensors files, found {folder}: pass "
            "the folder that has the files"
        )
    files = model_files(folder)
    stored: dict[str, dict[str, StoredTensor]] = {}
    metadata: dict[str, dict[str, str]] = {}
    for path in files:
        with open_regular(path) as file:
            stored[path.name], metadata[path.name] = read_open(file, path)
    index: dict[str, Any] | None = None  # None if there is a single file
    if files == [folder / "model.safetensors"]:
        facts = metadata[files[0].name]
    else:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        facts = index.get("metadata") or {}
    kept = facts.get(_VERSION_KEY)
    try:
        known = None if kept is None else Version.model_validate_json(kept)
    except ValidationError as error:
        raise CheckpointCorruptError(
            f"{folder} has a version that is none, {kept!r}: export the model again"
        ) from error
    patch.check_version(known, version, str(folder))
    there = [(name, value) for of in stored.values() for name, value in of.items()]
    required = {f"{name} in {value.path.name}": value for name, value in there}
    changed: dict[str, dict[str, PatchedTensor]] = {}
    for name, tensor, value in patch.match(there, required, str(folder)):
        changed.setdefault(value.path.name, {})[name] = tensor
    facts = {**facts, _VERSION_KEY: patch.version.model_dump_json()}
    with storing(folder):
        if index is None:
            (old,) = files
            new = old.with_name(old.name + ".tmp")
            _rewrite(stored[old.name], new, facts, changed.get(old.name, {}), patch)
            new.replace(old)
            sync_folder(folder)
            return
        new_names: dict[str, str] = {}
        for file_name, tensors in changed.items():
            # Do not number files by version, because versions of two engines may be equal.
            old = Path(file_name)
            found = _VERSION_SUFFIX.search(old.stem)
            number = 1 if found is None else int(found[1]) + 1
            new = folder / f"{_VERSION_SUFFIX.sub('', old.stem)}-patch{number}{old.suffix}"
            _rewrite(stored[file_name], new, metadata[file_name], tensors, patch)
            new_names[file_name] = new.name
        weights = {t: new_names.get(name, name) for t, name in index["weight_map"].items()}
        text = json.dumps({**index, "metadata": facts, "weight_map": weights}, indent=2)
        new_index = folder / (INDEX + ".tmp")
        new_index.unlink(missing_ok=True)
        write_synced(new_index, text.encode())
        new_index.replace(folder / INDEX)
        sync_folder(folder)
        for name in new_names:
            (folder / name).unlink(missing_ok=True)


def _rewrite(
    stored: Mapping[str, StoredTensor],
    new: Path,
    metadata: dict[str, str],
    changed: Mapping[str, PatchedTensor],
    patch: _ReceivedPatch,
) -> None:
    ordered = sorted(stored.items(), key=lambda item: item[1].start)
    new.unlink(missing_ok=True)  # left over from a failed attempt
    with writing(new) as file:
        write_all(file, make_header(((n, t.dtype, t.shape) for n, t in ordered), metadata))
        for name, tensor in ordered:
            values = tensor.value()
            if name in changed:
                order = changed[name].order
                flat = flatten(values, order)
                patch.apply(changed[name], flat)
                values = unflatten(flat, tensor.shape, order).contiguous()
            write_all(file, bytes_of(values))
