"""Saving of checkpoints: safetensors and one JSON manifest, for any stage and world size.

A checkpoint is a folder. Each rank writes, per state (``master_weight``, ``exp_avg``, ...), one
safetensors file with its slice of every segment. ``manifest.json`` holds the position of every
parameter and everything that is not a tensor. A reader takes the ranges it needs by parameter name,
so that stage, world size, Twin-Flow's ratio and tier may all differ from the writer's. States of
whole parameters are in their owner's file ``whole``.

The folder is written under a hidden name beside its place, synced, then renamed: a killed save
leaves the previous checkpoint whole. What is written to where there are no renames is in
`zero_core.checkpoint.storage.remote`. ``latest`` names the newest one. The manifest vouches for
itself and holds checksums of each file, computed as it is written. Nothing is pickled.

A file that would be written again is linked to that of the last save: states where no step was
taken since, and frozen values and buffers whose checksums are the same.

A save that fails removes what it wrote. What a killed one left is removed by the next save into
the folder; a save that is under way elsewhere holds a lock on its folder, and is left alone.

Ranks may have folders of their own: disks of their machines, or what the program gives each. Every
folder then holds the files of its ranks and the manifest of all; their union is the checkpoint.
"""

from __future__ import annotations

import json
import logging
import random
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from zero_core.checkpoint.files import check_tag
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
from zero_core.checkpoint.retention import prune, split_tag
from zero_core.checkpoint.safetensors_files import Blocks, arrange, bytes_of
from zero_core.checkpoint.storage import ADVICE
from zero_core.checkpoint.storage.local import no_room, write_all
from zero_core.checkpoint.storage.location import Location, Staging, entry
from zero_core.checkpoint.whole_states import flatten
from zero_core.comm.control import Exchange
from zero_core.errors import CheckpointError
from zero_core.optim.train_state import TrainState
from zero_core.optim.whole_tier import WholeTier
from zero_core.sharded.sharded_state import MASTER, ShardedState
from zero_core.sharded.snapshot import Snapshot

_log = logging.getLogger(__name__)
_BLOCK_BYTES = 1 << 20
"""Bytes written at once: they stay in the processor's cache for their checksum."""
_Facts = dict[str, dict[str, Any]]
"""Size and checksums of files, by name."""


@dataclass(frozen=True)
class SaveOptions:
    """Arguments of `zero_core.Engine.save_checkpoint`, of the same names."""

    has_frozen: bool = True
    is_latest: bool = True
    keep_last: int | None = None
    keep_every: int | None = None

    def check(self) -> None:
        for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if value is not None and value < 1:
                raise CheckpointError(f"{name} = {value}: expected 1 or more, or None")


class KnownFile(NamedTuple):
    """A file of an engine's last save. If it would be written again, it is linked."""

    path: Location
    inode: tuple[int, ...]  # of what was written there: see `LocalEntry.inode`
    facts: dict[str, Any]  # size and checksums
    version: int | None  # of the states in it, None if that is not known


@dataclass
class Save:
    """One checkpoint under way.

    Making one takes what is small; every rank must do so. `write` does the rest, at once or in
    another thread.
    """

    state: ShardedState  # frozen values are read from it as long as `write` runs
    snapshot: Snapshot  # its trainable segments' states
    progress: TrainState
    previous: Mapping[str, KnownFile]  # this rank's files of the last save
    version: int | None  # of the states. Equal ones stand for equal values. None: not known
    directory: Location  # of all checkpoints: a load needs all ranks' files in one
    tag: str
    client_state: Mapping[str, Any]
    options: SaveOptions
    known: dict[str, KnownFile] = field(default_factory=dict)  # once it is complete

    @property
    def place(self) -> Location:
        return self.directory / self.tag

    def __post_init__(self) -> None:
        state, rank = self.state, self.state.control.rank
        # The states of any rank's tier: one without updates may have fewer.
        own = json.dumps(list(state.tier.state_names())).encode()
        rows = [json.loads(row) for row in state.control.gather_bytes(own)]
        self._names = list(dict.fromkeys(name for row in rows for name in row))
        self._tensors: dict[str, dict[str, Tensor]] = {}  # by file
        self._sliced: dict[str, dict[str, Tensor]] = {}  # by state
        self._wholes: dict[str, Any] = {}
        kept = self.progress.state_dict()

        def prepare() -> None:
            check_tag(self.tag)
            self.options.check()
            self._words = {
                "progress": encode(kept, "progress"),
                "client_state": encode(self.client_state, "client_state"),
            }
            self._scalars = own_scalars(state)
            self._python_rng = random.getstate()
            self._tensors[file_name(RNG, rank)] = random_states()
            if rank == 0:
                self._tensors[BUFFERS] = state.buffers()
            if isinstance(state.tier, WholeTier):
                whole = self._tensors[file_name(WHOLE, rank)] = {}
                self._wholes = whole_states(state, state.tier, whole)
            self.directory.mkdir(parents=True, exist_ok=True)

        state.control.together("checkpoint: prepare", prepare)

    def detach(self) -> None:
        """Copy what steps may change before `write` reads it, beside the snapshot's states."""
        state, rank = self.state, self.state.control.rank
        whole = self._tensors.get(file_name(WHOLE, rank), {})
        whole.update({key: t.detach().to("cpu", copy=True) for key, t in whole.items()})
        if isinstance(state.tier, WholeTier):
            self._sliced = {n: slices(state, state.tier, n) for n in self._names if n != MASTER}
        if self.options.has_frozen:
            self._tensors[file_name(VALUE, rank)] = frozen_slices(state)
        for name in state.extension_states():
            self._tensors[file_name(name, rank)] = state.extension_slices(name)

    def write(self, exchange: Exchange) -> Location:
        """Write the checkpoint. Every rank must call it, and ``exchange`` is theirs."""
        token = exchange.gather_bytes(uuid.uuid4().hex.encode())[0].decode()
        staging = entry(self.directory).staging(self.tag, token)
        is_first = _is_first_in(self.directory, token, exchange)
        options, tag = self.options, self.tag

        def describe() -> None:
            if is_first:
                gathered = [json.loads(row) for row in rows]
                content = fill(
                    frame_of(self.state), gathered, [*self._names, *self.state.extension_states()]
                )
                write_manifest(staging, content | self._words | {"has_frozen": options.has_frozen})

        def finish() -> None:
            if not is_first:
                return
            staging.commit(is_latest=options.is_latest)
            prefix, number = split_tag(tag)
            is_step = number == self._words["progress"]["global_steps"]
            try:
                prune(
                    self.directory,
                    keep_last=options.keep_last if is_step else None,
                    keep_every=options.keep_every,
                    newest=tag,
                    prefixes=(prefix,),
                )
            except (OSError, CheckpointError) as error:  # this one is committed
                _log.warning("checkpoints beside %s stay: %s", self.place, error)

        try:
            exchange.together("checkpoint: prepare", lambda: staging.make() if is_first else None)
            written = exchange.together(
                "checkpoint: write", lambda: self._write_files(staging.folder)
            )
            row = [written, self._scalars, self._python_rng, self._wholes]
            rows = exchange.gather_bytes(json.dumps(row).encode())
            exchange.together("checkpoint: write", describe)
            exchange.together("checkpoint: finish", finish)
        finally:
            staging.remove()
        return self.place

    def _write_files(self, folder: Location) -> _Facts:
        """Write this rank's files, and return size and checksums of each."""
        state, rank = self.state, self.state.control.rank
        trainable = [s.index for s in state.layout.segments if s.is_trainable]
        written: _Facts = {}
        for name in self._names:
            # One state at a time: the copies of only one are in memory.
            tensors: Mapping[str, Tensor | Blocks]
            if name == MASTER or not isinstance(state.tier, WholeTier):
                tensors = {str(s): self.snapshot.tensor(s, name) for s in trainable}
            elif name in self._sliced:
                tensors = self._sliced.pop(name)
            else:
                tensors = slices(state, state.tier, name)
            file = file_name(name, rank)
            known = self.previous.get(file)
            is_same = known is not None and known.version == self.version is not None
            written |= self._put(folder, file, tensors, known if is_same else None, self.version)
        if self.options.has_frozen:
            self._tensors.setdefault(file_name(VALUE, rank), frozen_slices(state))
        for name in state.extension_states():
            if file_name(name, rank) not in self._tensors:
                self._tensors[file_name(name, rank)] = state.extension_slices(name)
        for file, values in self._tensors.items():
            known = self.previous.get(file) if file.startswith((VALUE, BUFFERS)) else None
            is_same = known is not None and known.facts == _write_summed(values)
            written |= self._put(folder, file, values, known if is_same else None)
        return written

    def _put(
        self,
        folder: Location,
        name: str,
        tensors: Mapping[str, Tensor | Blocks],
        same: KnownFile | None,
        version: int | None = None,
    ) -> _Facts:
        """Link a file to ``same``, which has the same content, or write it."""
        path = folder / name
        if same is not None and entry(path).link_to(same.path, same.inode):
            facts = {name: same.facts}
        else:
            facts = write_file(folder, name, tensors)
        inode = entry(path).inode()
        if inode is not None:
            self.known[name] = KnownFile(self.place / name, inode, facts[name], version)
        return facts


def _is_first_in(directory: Location, token: str, exchange: Exchange) -> bool:
    """Whether no lower rank has the same ``directory``. Every rank must call it.

    A path does not say: machines have folders of the same path. So each rank leaves a mark in its
    own and looks for the others', whose names are new, by ``token``: a network's file system knows
    nothing about them from before.
    """
    marks = [directory / f".{token}-{rank}" for rank in range(exchange.rank + 1)]
    try:
        exchange.together("checkpoint: prepare", marks[-1].touch)
        return exchange.together(
            "checkpoint: prepare", lambda: not any(mark.exists() for mark in marks[:-1])
        )
    finally:
        marks[-1].unlink(missing_ok=True)


def frozen_slices(state: ShardedState) -> dict[str, Tensor]:
    frozen = [s.index for s in state.layout.segments if not s.is_trainable]
    return {str(s): state.own_state(s) for s in frozen}


def random_states() -> dict[str, Tensor]:
    found = {"torch": torch.get_rng_state()}
    return found | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def slices(state: ShardedState, tier: WholeTier, name: str) -> dict[str, Tensor]:
    """Return this rank's slices of state ``name``, of the parameters that have no owner."""
    found: dict[str, Tensor] = {}
    for piece in state.pieces:
        low, high = state.own_span(piece.segment)
        low, high = max(low, piece.start), min(high, piece.stop)
        if tier.owner_of(piece.param) is None and low < high:
            key = slice_key(state.layout.params[piece.param].name)
            found[key] = tier.read_state(name, low, high)
    return found


def whole_states(
    state: ShardedState, tier: WholeTier, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Add this rank's whole states to ``tensors``. Return file and structure of each, by name."""
    rank, found = state.control.rank, {}
    for param in tier.updated_params():
        spec = state.layout.params[param]
        kept = tier.read_whole_state(param)
        if tier.owner_of(param) == rank:
            flat = flatten(kept, spec.name, tensors)
            found[spec.name] = {"file": file_name(WHOLE, rank), "state": flat}
    return found


def own_scalars(state: ShardedState) -> dict[str, dict[str, float]]:
    """Return the scalars of the parameters whose first element this rank has, by name."""
    return {
        state.layout.params[piece.param].name: dict(state.tier.read_scalars(index))
        for index, piece in enumerate(state.pieces)
        if piece.offset == 0
    }


def write_file(
    folder: Location, name: str, tensors: Mapping[str, Tensor | Blocks | Sequence[Tensor]]
) -> dict[str, dict[str, Any]]:
    """Write a safetensors file through to the disk. Return size and checksums. See `arrange`."""
    path = folder / name
    try:
        with entry(path).writing() as file:
            facts = _write_summed(tensors, file)
    except OSError as error:
        raise no_room(path, error, ADVICE) from error
    return {name: facts}


def _write_summed(
    tensors: Mapping[str, Tensor | Blocks | Sequence[Tensor]], file: IO[bytes] | None = None
) -> dict[str, Any]:
    """Return size and checksums of a safetensors file, and append each block to ``file``."""
    size, crcs = 0, [0]
    header, _, values = arrange(tensors)
    for value in chain([torch.frombuffer(bytearray(header), dtype=torch.uint8)], values):
        data = bytes_of(value)
        while data.nbytes:
            used = size % CHUNK_BYTES
            if size and not used:
                crcs.append(0)
            block = data[: min(CHUNK_BYTES - used, _BLOCK_BYTES)]
            crcs[-1] = zlib.crc32(block, crcs[-1])
            if file is not None:
                write_all(file, block)
            size += block.nbytes
            data = data[block.nbytes :]
    return {"bytes": size, "crc32": crcs}


def fill(frame: Mapping[str, Any], rows: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Return what a manifest has of the ranks: what `frame_of` returned, and their own ``rows``.

    A row has the files, scalars, state of Python's generator and whole states of a rank, in rank
    order. ``names`` are those of all states.
    """
    files, scalars, rng, wholes = zip(*rows, strict=True)
    return {
        **frame,
        "states": list(names),
        "scalars": {k: v for row in scalars for k, v in row.items()},
        "whole_states": {k: v for row in wholes for k, v in row.items()},
        "python_rng": list(rng),
        "files": {k: v for row in files for k, v in row.items()},
    }


def frame_of(state: ShardedState) -> dict[str, Any]:
    """Return the part of a manifest that follows from the layout."""
    layout = state.layout
    return {
        "format": FORMAT,
        "version": VERSION,
        "chunk_bytes": CHUNK_BYTES,
        "world_size": layout.world_size,
        "optimizer": state.optimizer,
        "params": [
            {
                "name": spec.name,
                "aliases": list(spec.aliases),
                "shape": list(spec.shape),
                "dtype": str(spec.dtype).removeprefix("torch."),
                "is_trainable": spec.is_trainable,
                **({"memory_order": list(spec.order)} if spec.order else {}),
            }
            for spec in layout.params
        ],
        "segments": [
            {
                "is_trainable": s.is_trainable,
                "shard_numel": s.shard_numel,
                "slots": [[layout.params[x.param].name, x.start, x.stop] for x in s.slots],
            }
            for s in layout.segments
        ],
    }


def write_manifest(staging: Staging, content: Mapping[str, Any]) -> None:
    """Check a manifest, and give it to the checkpoint under way."""
    if staging.subfolder is not None:
        content = {**content, "subfolder": staging.subfolder}
    data = seal(content)
    parse(data, MANIFEST)  # nothing is saved that could not be loaded
    staging.describe(data)
