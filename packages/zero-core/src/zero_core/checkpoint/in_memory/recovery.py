"""Recovery from copies in memory: which snapshot is whole, and a reader of it.

The markers of all ranks make a manifest, and the files are those of a checkpoint: they are restored
as from a disk, at any stage and number of ranks. A rank that lacks a file, on a node that is new,
gets it from one that has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_core.checkpoint.files import Reader, crc_of
from zero_core.checkpoint.in_memory.slot import Slot, read_markers, slot_folders
from zero_core.checkpoint.manifest import (
    BUFFERS,
    CHUNK_BYTES,
    RNG,
    VALUE,
    WHOLE,
    file_name,
    parse,
    seal,
)
from zero_core.checkpoint.save import fill
from zero_core.checkpoint.storage.location import open_regular, size_of
from zero_core.comm.control import PIECE_BYTES
from zero_core.sharded.sharded_state import ShardedState


class Snapshot(NamedTuple):
    """A snapshot that is whole over all ranks."""

    serial: int  # the slot is the remainder by two
    attempt: str  # the start of the job that wrote it
    step: int  # optimizer steps at which it was taken
    holders: tuple[int, ...]  # of each writing rank's files: the lowest rank here whose host has it


def find_newest(state: ShardedState, folder: Path, last_step: int | None) -> Snapshot | None:
    """Return the newest whole snapshot up to rank 0's ``last_step``. Every rank must call it."""
    own = [
        [m["serial"], m["attempt"], m["step"], m["world_size"], rank]
        for slot in slot_folders(folder)
        for rank, m in read_markers(slot).items()
    ]
    cards = state.control.gather_bytes(json.dumps([last_step, own]).encode())
    lasts, rows = zip(*map(json.loads, cards), strict=True)
    holders: dict[tuple[int, str, int, int], dict[int, int]] = {}
    for holder, row in enumerate(rows):
        for serial, attempt, step, world_size, rank in row:
            if lasts[0] is None or step <= lasts[0]:
                key = (serial, attempt, step, world_size)
                holders.setdefault(key, {}).setdefault(rank, holder)
    whole = [key for key, found in holders.items() if found.keys() == set(range(key[-1]))]
    if not whole:
        return None
    serial, attempt, step, world_size = newest = max(whole)
    return Snapshot(serial, attempt, step, tuple(holders[newest][r] for r in range(world_size)))


def open_snapshot(state: ShardedState, folder: Path, snapshot: Snapshot) -> Reader:
    """Return a reader of a snapshot, and fetch the files that are not here, on all ranks."""
    control = state.control
    place = slot_folders(folder)[snapshot.serial % 2]
    here = {
        rank: marker
        for rank, marker in read_markers(place).items()
        if (marker["serial"], marker["attempt"]) == (snapshot.serial, snapshot.attempt)
    }
    own = {r: here[r] for r, holder in enumerate(snapshot.holders) if holder == control.rank}
    markers = _merged(control.gather_bytes(json.dumps(own).encode()))
    names = list(
        dict.fromkeys(name for rank in sorted(markers) for name in markers[rank]["states"])
    )
    frame = markers[0]["frame"]
    measured = control.together(
        "memory_checkpoint: read",
        lambda: {rank: _measure(place, rank, m, names, frame) for rank, m in own.items()},
    )
    facts = _merged(control.gather_bytes(json.dumps(measured).encode()))
    rows = [[facts[rank], *markers[rank]["row"]] for rank in sorted(markers)]
    content = {**fill(frame, rows, names), "has_frozen": True}
    reader = Reader(place, parse(seal(content), f"the copies in memory ({place})"))
    owners = {name: rank for rank in facts for name in facts[rank]}
    lacking = [n for n in sorted(_needed(state, reader)) if owners[n] not in here]
    _fetch(state, reader, place, lacking, {n: snapshot.holders[owners[n]] for n in owners})
    return reader


def _merged(rows: Iterable[bytes]) -> dict[int, Any]:
    return {int(rank): value for row in rows for rank, value in json.loads(row).items()}


def _measure(
    place: Path, rank: int, marker: Mapping[str, Any], names: list[str], frame: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return size and checksums of a rank's files, and write zeros for states it did not know."""
    dtypes = {param["name"]: param["dtype"] for param in frame["params"]}
    slot = Slot(place)
    for name in [name for name in names if name not in marker["states"]]:
        zeros = {}
        for index, segment in enumerate(frame["segments"]):
            if segment["is_trainable"]:
                is_wide = any(dtypes[param] == "float64" for param, _, _ in segment["slots"])
                dtype = torch.float64 if is_wide else torch.float32
                zeros[str(index)] = torch.zeros(segment["shard_numel"], dtype=dtype)
        slot.write(file_name(name, rank), zeros)
    found = {}
    for file in dict.fromkeys((*marker["files"], *(file_name(name, rank) for name in names))):
        with open_regular(place / file, follows_links=False) as opened:
            size = size_of(opened)
            starts = range(0, max(size, 1), CHUNK_BYTES)
            crcs = [crc_of(opened, min(CHUNK_BYTES, size - s), place / file) for s in starts]
            found[file] = {"bytes": size, "crc32": crcs}
    return found


def _needed(state: ShardedState, reader: Reader) -> set[str]:
    """Return the files that this rank restores from."""
    manifest = reader.manifest
    is_trained = {param.name: param.is_trainable for param in manifest.params}
    ranges = [
        (state.layout.params[p.param], p.offset, p.offset + p.stop - p.start) for p in state.pieces
    ]
    ranges += [(spec, low, high) for _, spec, low, high in state.frozen_parts()]
    found = {BUFFERS}
    if manifest.world_size == state.control.world_size:
        found.add(file_name(RNG, state.control.rank))
    for spec, low, high in ranges:
        span = (low, high) if reader.has_order_of(spec) else (0, spec.numel)
        for kind in manifest.states if is_trained[spec.name] else (VALUE,):
            found |= {file_name(kind, rank) for rank in reader.ranks_of(spec.name, *span)}
    if manifest.whole_states:
        found |= {name for name in manifest.files if name.startswith(WHOLE)}
    return found


def _fetch(
    state: ShardedState, reader: Reader, place: Path, lacking: list[str], sources: Mapping[str, int]
) -> None:
    """Have every rank get the files of ``place`` that it lacks from ranks that have them."""
    control, slot = state.control, Slot(place)
    asked = [json.loads(row) for row in control.gather_bytes(json.dumps(lacking).encode())]
    for name in sorted({name for row in asked for name in row}):
        size = reader.manifest.files[name].bytes
        path, aside = place / name, place / f".{name}.{control.rank}"
        for start in range(0, size, PIECE_BYTES):
            piece = torch.empty(min(PIECE_BYTES, size - start), dtype=torch.uint8)
            if sources[name] == control.rank:
                with open_regular(path, follows_links=False) as file:
                    file.seek(start)
                    piece = torch.frombuffer(bytearray(file.read(piece.numel())), dtype=torch.uint8)
            piece = piece.to(state.device)
            control.broadcast(piece, source=sources[name])
            if name in lacking:
                slot.file(aside.name, size)[start : start + piece.numel()] = piece.cpu()
        if name in lacking:
            aside.replace(path)
    control.together(
        "memory_checkpoint: verify",
        lambda: reader.check(chunk for chunk in reader.chunks() if chunk[0] in set(lacking)),
    )
