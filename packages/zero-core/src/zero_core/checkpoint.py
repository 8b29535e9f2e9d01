"""Checkpoints that last: safetensors and one JSON manifest, for any stage and world size.

A checkpoint is a folder. Each rank writes, per state (``master_weight``, ``exp_avg``, ...), one
safetensors file with its slice of every segment; ``manifest.json`` says which parameter lies where,
and holds everything that is not a tensor. A reader takes the ranges it needs, by parameter name, so
that stage, world size, Twin-Flow's ratio and tier may all differ from the writer's.

It is written to a hidden folder beside its place, synced, then renamed: a killed save leaves the
previous checkpoint whole. ``latest`` names the newest one. The manifest holds a CRC-32 of each
file, checked before anything is restored. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from zero_core.checkpoint_files import (
    FORMAT,
    MANIFEST,
    VALUE,
    VERSION,
    Reader,
    find,
    read_manifest,
)
from zero_core.errors import CheckpointCorruptError, CheckpointError
from zero_core.state import MASTER, ShardedState, load_buffers

__all__ = ["PARTS", "load", "read_client_state", "save"]

PARTS = ("frozen", "optimizer", "lr_scheduler", "progress")
"""What a checkpoint can be loaded without; "frozen" are the values of parameters that were frozen,
"optimizer" its states and hyperparameters: the engine may then have another one, and other frozen
parameters. "progress" are the counters, the loss scale and the states of random generators."""


def save(
    state: ShardedState,
    directory: Path,
    tag: str,
    *,
    progress: Mapping[str, Any],
    client_state: Mapping[str, Any],
    has_frozen: bool = True,
    is_latest: bool = True,
) -> Path:
    """Write checkpoint ``tag``; see `zero_core.Engine.save_checkpoint`.

    ``progress`` and ``client_state`` are JSON objects and come back from `load`. Without
    ``has_frozen`` the values of frozen parameters are left out; without ``is_latest`` the file
    ``latest`` stays as it is.
    """
    aside, place = directory / f".{tag}.saving", directory / tag
    control = state.control

    def prepare() -> None:
        if not tag or tag.startswith(".") or os.sep in tag or tag == "latest":
            raise CheckpointError(f"a tag must be a plain folder name, found {tag!r}")
        _encode([progress, client_state])
        if control.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()

    control.together("checkpoint: prepare", prepare)
    names = _all_state_names(state)
    written: dict[str, dict[str, int]] = {}
    control.together(
        "checkpoint: write",
        lambda: written.update(_write_tensors(state, aside, names, has_frozen=has_frozen)),
    )
    scalars = {
        spec.name: dict(state.tier.read_scalars(index)) for index, spec in state.owned_params()
    }
    rows = control.gather_bytes(json.dumps([written, scalars, _python_rng()]).encode())

    def finish() -> None:
        if control.rank != 0:
            return
        facts = [json.loads(row) for row in rows]
        manifest = _manifest(state, facts, names, progress, client_state)
        manifest["has_frozen"] = has_frozen
        _write_synced(aside / MANIFEST, json.dumps(manifest).encode())
        _sync_folder(aside)
        _swap_in(aside, place)
        if is_latest:
            _write_synced(directory / ".latest.saving", tag.encode())
            (directory / ".latest.saving").replace(directory / "latest")
        _sync_folder(directory)

    control.together("checkpoint: finish", finish)
    return place


def load(
    state: ShardedState,
    directory: Path,
    tag: str | None,
    *,
    without: Collection[str] = (),
    check: Callable[[Mapping[str, Any]], None] = lambda progress: None,
) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Restore a checkpoint; its folder, the progress and the client state.

    Of what is ``without`` (`PARTS`), nothing is restored. ``check`` is given the progress before
    anything is written, and may raise.
    """
    found: list[tuple[Path, dict[str, Any]]] = []

    def look() -> None:
        _check_parts(without)
        place = find(directory, tag)
        manifest = read_manifest(place)
        _match(state, manifest, place, without)
        _check_frozen(manifest, place, without)
        check(_decode(manifest["progress"]))
        found.append((place, manifest))

    state.control.together("checkpoint: find", look)
    ((place, manifest),) = found
    state.control.together("checkpoint: verify", lambda: _verify(state, place, manifest))
    reader = Reader(place, manifest)

    def restore() -> None:
        _restore(state, reader, manifest, without)

    try:
        match = partial(_match_buffers, state, reader, place)
        state.control.together("checkpoint: buffers", match)
        state.quiesce()
        state.control.together("checkpoint: restore", restore)
    finally:
        reader.close()
    return place, _decode(manifest["progress"]), _decode(manifest["client_state"])


def read_client_state(directory: Path, tag: str | None = None) -> dict[str, Any]:
    """The client state of checkpoint ``tag``, or of the newest; by one process alone.

    Raises:
        CheckpointError: there is no such checkpoint.
        CheckpointCorruptError: it cannot be read.
    """
    return dict(_decode(read_manifest(find(directory, tag))["client_state"]))


def _all_state_names(state: ShardedState) -> list[str]:
    """The states that any rank's tier knows: one that has updated nothing may know fewer."""
    rows = state.control.gather_bytes(json.dumps(list(state.tier.state_names())).encode())
    return list(dict.fromkeys(name for row in rows for name in json.loads(row)))


def _encode(value: Any) -> Any:
    """``value`` as JSON that `_decode` gives back exactly; CheckpointError if it cannot be."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_encode(v) for v in value]
    if isinstance(value, tuple):
        return {"__tuple__": [_encode(v) for v in value]}
    if isinstance(value, Mapping):
        items = [[_encode(k), _encode(v)] for k, v in value.items()]
        if isinstance(value, Counter):  # MultiStepLR keeps its milestones in one
            return {"__counter__": items}
        if all(isinstance(k, str) and not k.startswith("__") for k in value):
            return dict(items)
        return {"__items__": items}
    raise CheckpointError(
        "client and scheduler state must be JSON (numbers, strings, lists, mappings), found "
        f"{type(value).__name__}: {value!r:.60}"
    )


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__tuple__"}:
        return tuple(_decode(v) for v in value["__tuple__"])
    if value.keys() == {"__counter__"}:
        return Counter({_decode(k): _decode(v) for k, v in value["__counter__"]})
    if value.keys() == {"__items__"}:
        return {_decode(k): _decode(v) for k, v in value["__items__"]}
    return {k: _decode(v) for k, v in value.items()}


# ------------------------------------------------------------------------ write


def _write_tensors(
    state: ShardedState, folder: Path, names: list[str], *, has_frozen: bool
) -> dict[str, dict[str, int]]:
    """Write this rank's files; size and CRC of each."""
    rank = state.control.rank
    trainable = [s.index for s in state.layout.segments if s.is_trainable]
    frozen = [s.index for s in state.layout.segments if not s.is_trainable]
    written: dict[str, dict[str, int]] = {}
    for name in names:
        # One state at a time: the copies of only one are in memory.
        tensors = {str(s): state.own_state(s, name) for s in trainable}
        written |= _write_file(folder, f"{name}-{rank:05d}.safetensors", tensors)
    if has_frozen:
        tensors = {str(s): state.own_slice(s) for s in frozen}
        written |= _write_file(folder, f"{VALUE}-{rank:05d}.safetensors", tensors)
    written |= _write_file(folder, f"rng-{rank:05d}.safetensors", _rng_states())
    if rank == 0:
        written |= _write_file(folder, "buffers.safetensors", state.buffers())
    return written


def _write_file(folder: Path, name: str, tensors: dict[str, Tensor]) -> dict[str, dict[str, int]]:
    path = folder / name
    save_file({key: t.contiguous() for key, t in tensors.items()}, path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return {name: _fingerprint(path)}


def _fingerprint(path: Path) -> dict[str, int]:
    crc, size = 0, 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return {"bytes": size, "crc32": crc}


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
    for written, owned, _ in rows:
        files |= written
        scalars |= owned
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
        "python_rng": [rng for _, _, rng in rows],
        "files": files,
        "progress": _encode(progress),
        "client_state": _encode(client_state),
    }


def _swap_in(aside: Path, place: Path) -> None:
    """Rename ``aside`` to ``place``; what was there stays readable until then."""
    old = place.with_name(f".{place.name}.old")
    if place.exists():
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
    aside.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------- read


def _match(
    state: ShardedState, manifest: Mapping[str, Any], place: Path, without: Collection[str]
) -> None:
    """Refuse a checkpoint of another model, naming the first difference."""
    is_any = "optimizer" in without  # trained or frozen, by whatever optimizer
    saved = {
        p["name"]: (tuple(p["shape"]), p["is_trainable"] or is_any) for p in manifest["params"]
    }
    own = {p.name: (p.shape, p.is_trainable or is_any) for p in state.layout.params}
    missing, extra = sorted(set(own) - set(saved)), sorted(set(saved) - set(own))
    if missing or extra:
        raise CheckpointError(
            f"{place} belongs to another model: it lacks {missing[:3]} and has {extra[:3]} besides"
        )
    for name, mine in own.items():
        if saved[name] != mine:
            raise CheckpointError(
                f"{place}: parameter {name} has (shape, is_trainable) {saved[name]} there and "
                f"{mine} in the model" + _HINT * (saved[name][0] == mine[0])
            )
    if not is_any and manifest["optimizer"] != state.optimizer:
        raise CheckpointError(
            f"{place} was trained by {manifest['optimizer']}, this engine has {state.optimizer}: "
            "build it with the same optimizer" + _HINT
        )


_HINT = '; load without=("optimizer", "lr_scheduler", "progress") for the weights alone'


def _match_buffers(state: ShardedState, reader: Reader, place: Path) -> None:
    """Refuse buffers that the model lacks, lacks itself, or has in another shape."""
    file = reader.open("buffers.safetensors")
    saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    buffers = state.module.named_buffers(remove_duplicate=False)
    own = {name: tuple(buffer.shape) for name, buffer in buffers}
    kept = own.keys() & set(state.names())
    missing, extra = sorted(kept - saved.keys()), sorted(saved.keys() - own.keys())
    if missing or extra:
        raise CheckpointError(
            f"{place} belongs to another model: it lacks the buffers {missing[:3]} and has "
            f"{extra[:3]} besides"
        )
    for name, shape in saved.items():
        if own[name] != shape:
            raise CheckpointError(
                f"{place}: buffer {name} has shape {shape} there and {own[name]} in the model"
            )


def _check_parts(without: Collection[str]) -> None:
    unknown = sorted(set(without) - set(PARTS))
    if unknown:
        raise CheckpointError(f"without {unknown[0]!r}: a checkpoint's parts are {PARTS}")


def _check_frozen(manifest: Mapping[str, Any], place: Path, without: Collection[str]) -> None:
    is_complete = manifest.get("has_frozen", True) or all(
        p["is_trainable"] for p in manifest["params"]
    )
    if not is_complete and "frozen" not in without:
        raise CheckpointError(
            f"{place} was saved without the values of frozen parameters: give the model its own "
            "first, and load without 'frozen'"
        )


def _verify(state: ShardedState, place: Path, manifest: Mapping[str, Any]) -> None:
    """Check this rank's share of the files against their fingerprints."""
    control = state.control
    for index, (name, expected) in enumerate(sorted(manifest["files"].items())):
        if index % control.world_size != control.rank:
            continue
        try:
            found = _fingerprint(place / name)
        except OSError as error:
            raise CheckpointCorruptError(f"{place / name} cannot be read: {error}") from error
        if found != expected:
            raise CheckpointCorruptError(
                f"{place / name} is damaged: expected {expected}, found {found}; "
                "load an older checkpoint by its tag"
            )


def _restore(
    state: ShardedState, reader: Reader, manifest: Mapping[str, Any], without: Collection[str]
) -> None:
    sources = {p["name"]: MASTER if p["is_trainable"] else VALUE for p in manifest["params"]}
    names = [MASTER] if "optimizer" in without else manifest["states"]
    for name in names:
        for piece in state.pieces:
            spec = state.layout.params[piece.param]
            if name != MASTER and manifest["scalars"][spec.name]["num_steps"] == 0:
                continue  # never updated: it has no such state
            source = sources[spec.name] if name == MASTER else name
            if source == VALUE and "frozen" in without:
                continue
            stop = piece.offset + piece.stop - piece.start
            values = reader.read(source, spec.name, piece.offset, stop)
            state.tier.write_state(name, piece.start, values)
    if "optimizer" not in without:
        for index, piece in enumerate(state.pieces):
            saved = manifest["scalars"][state.layout.params[piece.param].name]
            state.tier.write_scalars(index, saved)
    for store, name, low, high in state.frozen_parts():
        if sources[name] == MASTER or "frozen" not in without:
            store(reader.read(sources[name], name, low, high))
    buffers = reader.open("buffers.safetensors")
    load_buffers(state.module, {key: buffers.get_tensor(key) for key in buffers.keys()})  # noqa: SIM118
    if "progress" not in without and manifest["world_size"] == state.control.world_size:
        _restore_rng(state, reader, manifest)


# -------------------------------------------------------------------------- rng


def _rng_states() -> dict[str, Tensor]:
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _python_rng() -> list[Any]:
    version, numbers, gauss = random.getstate()
    return [version, list(numbers), gauss]


def _restore_rng(state: ShardedState, reader: Reader, manifest: Mapping[str, Any]) -> None:
    file = reader.open(f"rng-{state.control.rank:05d}.safetensors")
    torch.set_rng_state(file.get_tensor("torch"))
    if "cuda" in file.keys() and torch.cuda.is_available():  # noqa: SIM118
        torch.cuda.set_rng_state(file.get_tensor("cuda"))
    version, numbers, gauss = manifest["python_rng"][state.control.rank]
    random.setstate((version, tuple(numbers), gauss))
