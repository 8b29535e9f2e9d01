"""Saving of checkpoints: safetensors and one JSON manifest, for any stage and world size.

A checkpoint is a folder. Each rank writes, per state (``master_weight``, ``exp_avg``, ...), one
safetensors file with its slice of every segment. ``manifest.json`` holds the position of every
parameter and everything that is not a tensor. A reader takes the ranges it needs by parameter name,
so that stage, world size, Twin-Flow's ratio and tier may all differ from the writer's. States of
whole parameters are in their owner's file ``whole``.

The folder is written under a hidden name beside its place, synced, then renamed: a killed save
leaves the previous checkpoint whole. ``latest`` names the newest one. The manifest holds a CRC-32
of each file, checked before anything is restored. Nothing is pickled.

Ranks may have folders of their own: disks of their machines, or what the program gives each. Every
folder then holds the files of its ranks and the manifest of all; their union is the checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from zero_core.checkpoint.files import (
    BUFFERS,
    FORMAT,
    MANIFEST,
    VALUE,
    VERSION,
    WHOLE,
    fingerprint,
    slice_key,
)
from zero_core.checkpoint.json_values import encode
from zero_core.checkpoint.whole_states import flatten
from zero_core.comm.control import ControlGroup
from zero_core.errors import CheckpointError
from zero_core.optim.train_state import TrainState
from zero_core.protocols import WholeStateTier
from zero_core.sharded.sharded_state import MASTER, ShardedState


def save_checkpoint(
    state: ShardedState,
    directory: Path,
    tag: str,
    progress: TrainState,
    *,
    client_state: Mapping[str, Any],
    has_frozen: bool = True,
    is_latest: bool = True,
) -> Path:
    """Write checkpoint ``tag``, as `zero_core.Engine.save_checkpoint` describes.

    ``directory`` holds all checkpoints, and its file ``latest`` names this one if ``is_latest``.
    Where ranks have folders of their own, a load needs all files in one folder. With
    ``has_frozen`` the values of frozen parameters are written too.

    Raises:
        CheckpointError: ``tag`` or ``client_state`` cannot be stored, or a rank failed.
    """
    aside, place = directory / f".{tag}.saving", directory / tag
    kept = progress.state_dict()
    control = state.control

    def prepare() -> None:
        if not tag or tag.startswith(".") or os.sep in tag or tag == "latest":
            raise CheckpointError(f"a tag must be a plain folder name, found {tag!r}")
        encode(kept, "progress")
        encode(client_state, "client_state")
        directory.mkdir(parents=True, exist_ok=True)

    def make_aside() -> None:
        if is_first:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()

    control.together("checkpoint: prepare", prepare)
    is_first = _is_first_in(directory, control)
    control.together("checkpoint: prepare", make_aside)
    names = _all_state_names(state)
    written = control.together(
        "checkpoint: write", lambda: _write_tensors(state, aside, names, has_frozen=has_frozen)
    )
    wholes = control.together(
        "checkpoint: write", lambda: _write_whole_states(state, aside, written)
    )
    scalars = control.together("checkpoint: write", lambda: _scalars(state))
    row = [written, scalars, random.getstate(), wholes]
    rows = control.gather_bytes(json.dumps(row).encode())

    def finish() -> None:
        if not is_first:
            return
        gathered = [json.loads(row) for row in rows]
        manifest = _manifest(state, gathered, names, kept, client_state)
        manifest["has_frozen"] = has_frozen
        _write_synced(aside / MANIFEST, json.dumps(manifest).encode())
        _sync(aside)
        _swap_in(aside, place)
        if is_latest:
            _write_synced(directory / ".latest.saving", tag.encode())
            (directory / ".latest.saving").replace(directory / "latest")
        _sync(directory)

    control.together("checkpoint: finish", finish)
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
) -> dict[str, dict[str, int]]:
    """Write this rank's files, and return size and CRC of each."""
    rank = state.control.rank
    trainable = [s.index for s in state.layout.segments if s.is_trainable]
    frozen = [s.index for s in state.layout.segments if not s.is_trainable]
    written: dict[str, dict[str, int]] = {}
    for name in names:
        # One state at a time: the copies of only one are in memory.
        if name != MASTER and isinstance(state.tier, WholeStateTier):
            tensors = _slices(state, state.tier, name)
        else:
            tensors = {str(s): state.own_state(s, name) for s in trainable}
        written |= _write_file(folder, f"{name}-{rank:05d}.safetensors", tensors)
    if has_frozen:
        tensors = {str(s): state.own_slice(s) for s in frozen}
        written |= _write_file(folder, f"{VALUE}-{rank:05d}.safetensors", tensors)
    rng = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    written |= _write_file(folder, f"rng-{rank:05d}.safetensors", rng)
    if rank == 0:
        written |= _write_file(folder, BUFFERS, state.buffers())
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


def _write_whole_states(
    state: ShardedState, folder: Path, written: dict[str, dict[str, int]]
) -> dict[str, Any]:
    """Write this rank's states of whole parameters, and add their file to ``written``.

    Returns:
        File and structure of each state, by the parameter's name.
    """
    tier, rank = state.tier, state.control.rank
    if not isinstance(tier, WholeStateTier):
        return {}
    name, found = f"{WHOLE}-{rank:05d}.safetensors", {}
    tensors: dict[str, Tensor] = {}
    for param in tier.updated_params():
        spec = state.layout.params[param]
        kept = tier.read_whole_state(param)
        if tier.owner_of(param) == rank:
            found[spec.name] = {"file": name, "state": flatten(kept, spec.name, tensors)}
    written |= _write_file(folder, name, tensors)
    return found


def _scalars(state: ShardedState) -> dict[str, dict[str, float]]:
    """Return the scalars of the parameters whose first element this rank has, by name."""
    return {spec.name: dict(state.tier.read_scalars(index)) for index, spec in state.owned_params()}


def _write_file(folder: Path, name: str, tensors: dict[str, Tensor]) -> dict[str, dict[str, int]]:
    path = folder / name
    save_file({key: t.contiguous() for key, t in tensors.items()}, path)
    _sync(path)
    return {name: fingerprint(path)}


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
        "world_size": layout.world_size,
        "optimizer": state.optimizer,
        "states": names,
        "params": [
            {
                "name": p.name,
                "aliases": list(p.aliases),
                "shape": list(p.shape),
                "dtype": str(p.dtype).removeprefix("torch."),
                "is_trainable": p.is_trainable,
            }
            for p in layout.params
        ],
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


def _swap_in(aside: Path, place: Path) -> None:
    """Rename ``aside`` to ``place``, whose old content stays readable until then."""
    old = place.with_name(f".{place.name}.old")
    if place.exists():
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
    aside.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _write_synced(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    _sync(path)


def _sync(path: Path) -> None:
    """Write a file's content, or a folder's names, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
