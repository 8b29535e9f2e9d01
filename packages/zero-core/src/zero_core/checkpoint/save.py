"""Saving of checkpoints: safetensors and one JSON manifest, for any stage and world size.

A checkpoint is a folder. Each rank writes, per state (``master_weight``, ``exp_avg``, ...), one
safetensors file with its slice of every segment. ``manifest.json`` holds the position of every
parameter and everything that is not a tensor. A reader takes the ranges it needs by parameter name,
so that stage, world size, Twin-Flow's ratio and tier may all differ from the writer's. States of
whole parameters are in their owner's file ``whole``.

The folder is written under a hidden name beside its place, synced, then renamed: a killed save
leaves the previous checkpoint whole. ``latest`` names the newest one. The manifest vouches for
itself and holds checksums of each file, computed as it is written. Nothing is pickled.

A save that fails removes what it wrote. What a killed one left is removed by the next save into
the folder; a save that is under way elsewhere holds a lock on its folder, and is left alone.

Ranks may have folders of their own: disks of their machines, or what the program gives each. Every
folder then holds the files of its ranks and the manifest of all; their union is the checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from zero_core.checkpoint.disk import create, no_room, sync_folder, write_all, write_synced
from zero_core.checkpoint.files import LATEST, check_tag
from zero_core.checkpoint.json_values import encode
from zero_core.checkpoint.manifest import (
    BUFFERS,
    CHUNK_BYTES,
    FORMAT,
    MANIFEST,
    RNG,
    VALUE,
    VERSION,
    WHOLE,
    file_name,
    parse,
    seal,
    slice_key,
)
from zero_core.checkpoint.retention import Aside, prune, remove_stale
from zero_core.checkpoint.safetensors_files import bytes_of, make_header
from zero_core.checkpoint.whole_states import flatten
from zero_core.comm.control import ControlGroup
from zero_core.errors import CheckpointError
from zero_core.layout.arithmetic import ParamSpec
from zero_core.optim.train_state import TrainState
from zero_core.protocols import WholeStateTier
from zero_core.sharded.sharded_state import MASTER, ShardedState

_BLOCK_BYTES = 1 << 20
"""Bytes written at once: they stay in the processor's cache for their checksum."""
_ADVICE = "save to another folder; checkpoints that were there before are whole"
_Facts = dict[str, dict[str, Any]]
"""Size and checksums of files, by name."""


def save_checkpoint(
    state: ShardedState,
    directory: Path,
    tag: str,
    progress: TrainState,
    *,
    client_state: Mapping[str, Any],
    has_frozen: bool = True,
    is_latest: bool = True,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> Path:
    """Write checkpoint ``tag``, as `zero_core.Engine.save_checkpoint` describes.

    ``directory`` holds all checkpoints, and its file ``latest`` names this one if ``is_latest``.
    Where ranks have folders of their own, a load needs all files in one folder. With
    ``has_frozen`` the values of frozen parameters are written too. For ``keep_last`` and
    ``keep_every`` see `zero_core.checkpoint.retention.prune`.

    Raises:
        CheckpointError: ``tag`` or ``client_state`` cannot be stored, or a rank failed.
    """
    place = directory / tag
    kept = progress.state_dict()
    control = state.control
    aside = Aside(directory, tag)

    def prepare() -> None:
        check_tag(tag)
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise CheckpointError(f"{name} = {value}: expected 1 or more, or None")
        encode(kept, "progress")
        encode(client_state, "client_state")
        directory.mkdir(parents=True, exist_ok=True)

    def make_aside() -> None:
        if is_first:
            remove_stale(directory)
            aside.make()

    control.together("checkpoint: prepare", prepare)
    is_first = _is_first_in(directory, control)
    try:
        control.together("checkpoint: prepare", make_aside)
        names = _all_state_names(state)
        written = control.together(
            "checkpoint: write",
            lambda: _write_tensors(state, aside.folder, names, has_frozen=has_frozen),
        )
        wholes = control.together(
            "checkpoint: write", lambda: _write_whole_states(state, aside.folder, written)
        )
        scalars = control.together("checkpoint: write", lambda: _scalars(state))
        row = [written, scalars, random.getstate(), wholes]
        rows = control.gather_bytes(json.dumps(row).encode())

        def describe() -> None:
            if not is_first:
                return
            gathered = [json.loads(row) for row in rows]
            manifest = _manifest(state, gathered, names, kept, client_state)
            write_manifest(aside.folder, {**manifest, "has_frozen": has_frozen})

        def finish() -> None:
            if is_first:
                swap_in(aside, place, is_latest=is_latest)
                prune(directory, keep_last=keep_last, keep_every=keep_every, newest=tag)

        control.together("checkpoint: write", describe)
        control.together("checkpoint: finish", finish)
    finally:
        aside.remove()
    return place


def _is_first_in(directory: Path, control: ControlGroup) -> bool:
    """Whether no lower rank has the same ``directory``. Every rank must call it.

    A path does not say: machines have folders of the same path. So each rank leaves a mark in its
    own and looks for the others', whose names are new: a network's file system knows nothing about
    them from before.
    """
    token = control.gather_bytes(uuid.uuid4().hex.encode())[0].decode()
    marks = [directory / f".{token}-{rank}" for rank in range(control.rank + 1)]
    try:
        control.together("checkpoint: prepare", marks[-1].touch)
        return control.together(
            "checkpoint: prepare", lambda: not any(mark.exists() for mark in marks[:-1])
        )
    finally:
        marks[-1].unlink(missing_ok=True)


def _all_state_names(state: ShardedState) -> list[str]:
    """Return the states of any rank's tier. A tier without updates may have fewer."""
    rows = state.control.gather_bytes(json.dumps(list(state.tier.state_names())).encode())
    return list(dict.fromkeys(name for row in rows for name in json.loads(row)))


def _write_tensors(
    state: ShardedState, folder: Path, names: list[str], *, has_frozen: bool
) -> _Facts:
    """Write this rank's files, and return size and checksums of each."""
    rank = state.control.rank
    trainable = [s.index for s in state.layout.segments if s.is_trainable]
    frozen = [s.index for s in state.layout.segments if not s.is_trainable]
    written: _Facts = {}
    for name in names:
        # One state at a time: the copies of only one are in memory.
        if name != MASTER and isinstance(state.tier, WholeStateTier):
            tensors = _slices(state, state.tier, name)
        else:
            tensors = {str(s): state.own_state(s, name) for s in trainable}
        written |= write_file(folder, file_name(name, rank), tensors)
    if has_frozen:
        tensors = {str(s): state.own_slice(s) for s in frozen}
        written |= write_file(folder, file_name(VALUE, rank), tensors)
    rng = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    written |= write_file(folder, file_name(RNG, rank), rng)
    if rank == 0:
        written |= write_file(folder, BUFFERS, state.buffers())
    return written


def _slices(state: ShardedState, tier: WholeStateTier, name: str) -> dict[str, Tensor]:
    """Return this rank's slices of state ``name``, of the parameters that have no owner."""
    found: dict[str, Tensor] = {}
    for piece in state.pieces:
        low, high = state.own_span(piece.segment)
        low, high = max(low, piece.start), min(high, piece.stop)
        if tier.owner_of(piece.param) is None and low < high:
            key = slice_key(state.layout.params[piece.param].name)
            found[key] = tier.read_state(name, low, high)
    return found


def _write_whole_states(state: ShardedState, folder: Path, written: _Facts) -> dict[str, Any]:
    """Write this rank's states of whole parameters, and add their file to ``written``.

    Returns:
        File and structure of each state, by the parameter's name.
    """
    tier, rank = state.tier, state.control.rank
    if not isinstance(tier, WholeStateTier):
        return {}
    name, found = file_name(WHOLE, rank), {}
    tensors: dict[str, Tensor] = {}
    for param in tier.updated_params():
        spec = state.layout.params[param]
        kept = tier.read_whole_state(param)
        if tier.owner_of(param) == rank:
            found[spec.name] = {"file": name, "state": flatten(kept, spec.name, tensors)}
    written |= write_file(folder, name, tensors)
    return found


def _scalars(state: ShardedState) -> dict[str, dict[str, float]]:
    """Return the scalars of the parameters whose first element this rank has, by name."""
    return {spec.name: dict(state.tier.read_scalars(index)) for index, spec in state.owned_params()}


def write_file(
    folder: Path, name: str, tensors: Mapping[str, Tensor | Sequence[Tensor]]
) -> dict[str, dict[str, Any]]:
    """Write a safetensors file through to the disk, and return its size and checksums.

    A sequence of 1-D tensors stands for their concatenation, which is not made.

    Raises:
        CheckpointError: there is no room, or a file of that name.
    """
    path = folder / name
    parts = {key: (t,) if isinstance(t, Tensor) else tuple(t) for key, t in tensors.items()}
    # The order of the safetensors library: every tensor is aligned to its elements.
    ordered = sorted(parts.items(), key=lambda item: (-item[1][0].dtype.itemsize, item[0]))
    header = make_header(((key, ts[0].dtype, _joined_shape(ts)) for key, ts in ordered), {})
    summed = _Summed()
    try:
        with create(path) as file:
            summed.write(file, memoryview(header))
            for tensor in (t for _, ts in ordered for t in ts):
                value = tensor.contiguous()  # as long as its bytes are written
                summed.write(file, bytes_of(value))
            os.fsync(file.fileno())
    except OSError as error:
        raise no_room(path, error, _ADVICE) from error
    return {name: {"bytes": summed.size, "crc32": summed.crcs}}


def _joined_shape(parts: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(parts[0].shape) if len(parts) == 1 else (sum(t.numel() for t in parts),)


class _Summed:
    """Size of a file that is written, and the CRC-32 of each of its chunks."""

    def __init__(self) -> None:
        self.size = 0
        self.crcs = [0]

    def write(self, file: IO[bytes], data: memoryview) -> None:
        """Append ``data`` in blocks, each summed while it is in the processor's cache."""
        while data.nbytes:
            used = self.size % CHUNK_BYTES
            if self.size and not used:
                self.crcs.append(0)
            block = data[: min(CHUNK_BYTES - used, _BLOCK_BYTES)]
            self.crcs[-1] = zlib.crc32(block, self.crcs[-1])
            write_all(file, block)
            self.size += block.nbytes
            data = data[block.nbytes :]


def _manifest(
    state: ShardedState,
    rows: list[Any],
    names: list[str],
    progress: Mapping[str, Any],
    client_state: Mapping[str, Any],
) -> dict[str, Any]:
    layout = state.layout
    files: dict[str, Any] = {}
    scalars: dict[str, Any] = {}
    wholes: dict[str, Any] = {}
    for written, owned, _, of_rank in rows:
        files |= written
        scalars |= owned
        wholes |= of_rank
    return {
        "format": FORMAT,
        "version": VERSION,
        "chunk_bytes": CHUNK_BYTES,
        "world_size": layout.world_size,
        "optimizer": state.optimizer,
        "states": names,
        "params": [_describe(spec) for spec in layout.params],
        "segments": [
            {
                "is_trainable": s.is_trainable,
                "shard_numel": s.shard_numel,
                "slots": [[layout.params[x.param].name, x.start, x.stop] for x in s.slots],
            }
            for s in layout.segments
        ],
        "scalars": scalars,
        "whole_states": wholes,
        "python_rng": [rng for _, _, rng, _ in rows],
        "files": files,
        "progress": encode(progress, "progress"),
        "client_state": encode(client_state, "client_state"),
    }


def _describe(spec: ParamSpec) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": spec.name,
        "aliases": list(spec.aliases),
        "shape": list(spec.shape),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "is_trainable": spec.is_trainable,
    }
    return {**found, "memory_order": list(spec.order)} if spec.is_opaque else found


def swap_in(aside: Aside, place: Path, *, is_latest: bool) -> None:
    """Rename ``aside`` to ``place``, whose old content stays readable until then."""
    directory, old = place.parent, place.with_name(f".{place.name}.old")
    mark = directory / f".{LATEST}.{uuid.uuid4().hex}.saving"
    try:
        if is_latest:
            write_synced(mark, place.name.encode())
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
            place.rename(old)
        aside.rename_to(place)
        shutil.rmtree(old, ignore_errors=True)
        if is_latest:
            mark.replace(directory / LATEST)
        sync_folder(directory)
    except OSError as error:
        raise no_room(place, error, _ADVICE) from error
    finally:
        mark.unlink(missing_ok=True)


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Check a manifest, and write it and the names in ``folder`` through to the disk.

    Raises:
        CheckpointError: it could not be loaded, or there is no room.
    """
    data = seal(content)
    parse(data, MANIFEST)  # nothing is saved that could not be loaded
    try:
        write_synced(folder / MANIFEST, data)
        sync_folder(folder)
    except OSError as error:
        raise no_room(folder / MANIFEST, error, _ADVICE) from error
