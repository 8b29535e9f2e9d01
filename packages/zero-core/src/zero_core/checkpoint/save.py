"""Saving of checkpoints, synchronously or in a thread: safetensors files and a JSON manifest.

A checkpoint is a folder. Each rank writes, per state (``master_weight``, ``exp_avg``, ...), one
safetensors file with its slice of every segment. ``manifest.json`` has the position of every
parameter and all data other than tensors. A reader finds elements by parameter name, so stage,
world size, offload ratio and state tier may differ from the writer's. States of whole parameters
are in the file ``whole-RANK`` of the rank that owns the parameter. Nothing is pickled.

If a local file would equal that of the last save, it becomes a hard link: for states that have not
changed since then, and for frozen values and buffers with equal checksums. Ranks may have separate
folders on disks of their machines. Each folder then has the files of its ranks and the manifest of
all ranks. The checkpoint is the union of these folders.

[Note: a save beside training]
``async_save`` copies small tensors and makes a snapshot of the states, which copies a part when a
step is about to change it (`zero_core.sharded.snapshot`). A thread writes the files. The ranks'
threads communicate by torch's store (`zero_core.comm.groups.StoreExchange`). States that the
snapshot has not copied, and frozen values in host memory, are read by the thread where they are.
`ShardedState.quiesce` waits for the thread before values are written outside of a step.
"""

from __future__ import annotations

import logging
import random
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from zero_core._libc import use_one_core
from zero_core.checkpoint.files import check_kept, check_tag, prune, split_tag
from zero_core.checkpoint.json_values import encode, flatten
from zero_core.checkpoint.manifest import (
    BUFFERS,
    RNG,
    VALUE,
    WHOLE,
    file_name,
    fill,
    frame_of,
    slice_key,
    write_manifest,
)
from zero_core.checkpoint.safetensors_files import write_file, write_summed
from zero_core.checkpoint.storage import Aside, Location, Staging, Upload, inode_of, link
from zero_core.comm.control import Exchange
from zero_core.errors import CheckpointError, CheckpointFailedError, CollectiveError
from zero_core.optim.train_state import TrainState
from zero_core.optim.whole_tier import WholeTier
from zero_core.protocols import SnapshotTier
from zero_core.sharded import MASTER
from zero_core.sharded.sharded_state import ShardedState
from zero_core.sharded.snapshot import Snapshot, StateBlocks, StateWatch, stream_after

if TYPE_CHECKING:
    from zero_core.checkpoint.safetensors_files import Tensors

_log = logging.getLogger(__name__)
_Files = dict[str, dict[str, Tensor]]
"""For each file name, tensors by name."""
OnPending = Literal["wait", "refuse"]


@dataclass(frozen=True)
class SaveRequest:
    """Arguments of `zero_core.Engine.save_checkpoint` with the same names."""

    directory: Location
    tag: str
    client_state: Mapping[str, Any]
    has_frozen: bool
    is_latest: bool
    keep_last: int | None
    keep_every: int | None

    @property
    def place(self) -> Location:
        return self.directory / self.tag


class PendingSave(Future[Location]):
    """Future of a save in a thread. Its result is the folder of the checkpoint.

    ``result()`` waits for the save and raises its error: `CheckpointError` on all ranks, or
    `CollectiveError` if a rank is dead. If all ranks have retrieved the error from their futures,
    the engine does not raise it again.
    """

    def __init__(self, tag: str, snapshot: Snapshot) -> None:
        super().__init__()
        self.tag = tag
        self._snapshot = snapshot
        self.is_asked = False

    @property
    def peak_bytes(self) -> int:
        return self._snapshot.peak_bytes

    def result(self, timeout: float | None = None) -> Location:
        self.exception(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        found = super().exception(timeout)
        self.is_asked = True
        return found


class _KnownFile(NamedTuple):
    """A file of an engine's last save. The next save links an equal file to it."""

    path: str
    inode: tuple[int, ...]  # result of `inode_of` after the write
    facts: dict[str, Any]  # size and checksums
    version: int | None  # `StateWatch.num_changes` at the save; None: not compared


@dataclass(frozen=True)
class _Taken:
    """Data of this rank, collected before files are written."""

    request: SaveRequest
    state_names: list[str]
    words: dict[str, Any]  # progress, client_state and has_frozen of the `Manifest`
    row: list[Any]  # this rank's scalars, Python generator state and whole states
    # For each file, a function that returns its tensors, and `_KnownFile.version`.
    reads: dict[str, tuple[Callable[[], Tensors], int | None]]


class Saver:
    """Writer of one engine's checkpoints. See [Note: a save beside training]."""

    def __init__(self, state: ShardedState, progress: TrainState, exchange: Exchange) -> None:
        """Create the saver. ``exchange`` serves the threads of saves only."""
        self._state = state
        self._progress = progress
        self._exchange = exchange
        self._watch: StateWatch | None = None
        self._pending: PendingSave | None = None
        self._known: Mapping[str, _KnownFile] = {}  # this rank's files of the last save, by name

    def save(self, request: SaveRequest) -> Location:
        """Write a checkpoint in the calling thread. Every rank must call it."""
        self._settle("wait")
        taken = self._take(request, Snapshot(self._state, None), is_beside=False)
        self._write(taken, self._state.control)
        return request.place

    def start(
        self, request: SaveRequest, *, on_pending: OnPending, max_bytes: int | None
    ) -> PendingSave:
        """Start a save in a thread: see `Engine.async_save`. Every rank must call it."""
        self._settle(on_pending)
        snapshot = Snapshot(self._state, self._watch, max_bytes)
        pending = PendingSave(request.tag, snapshot)

        def run() -> None:
            failure = None
            try:
                use_one_core()
                with torch.no_grad(), stream_after(snapshot.ready, self._state.device):
                    self._write(taken, self._exchange)
            except BaseException as error:
                failure, rank = error, self._exchange.rank
                _log.error("rank %d: the save of %s failed: %s", rank, request.tag, error)
            snapshot.end()
            self._exchange.leave()  # before the result is set, which lets the next save begin
            if failure is None:
                pending.set_result(request.place)
            else:
                pending.set_exception(failure)

        try:
            taken = self._take(request, snapshot, is_beside=True)
            if self._watch is None:
                snapshot.keep(0, self._state.local_numel)  # copy all: the tier announces no changes
            threading.Thread(target=run, name=f"zero-core save of {request.tag}").start()
        except BaseException:
            snapshot.end()
            raise
        self._pending = pending
        self._state.readers[:] = [pending]
        return pending

    def _settle(self, on_pending: OnPending) -> None:
        """Wait for the pending save, or refuse. Raise its error unless all ranks retrieved it."""

        def settle() -> None:
            pending = self._pending
            if on_pending == "refuse" and pending is not None and not pending.done():
                raise CheckpointError(
                    f"the save of {pending.tag} is under way, and on_pending is 'refuse': save "
                    "later, wait for result() of that one, or choose on_pending='wait'"
                )
            try:
                self.finish()
            except CollectiveError as error:  # from the store, possibly on this rank only
                raise CheckpointFailedError(str(error)) from error

        self._state.control.together("checkpoint: prepare", settle)
        if self._watch is None and isinstance(self._state.tier, SnapshotTier):
            self._watch = StateWatch(self._state.tier)

    def finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and not pending.is_asked:
            pending.result()

    def remove(self) -> None:
        """Wait for the pending save, but do not raise its error, which has been logged."""
        if self._pending is not None:
            wait([self._pending])

    def _take(self, request: SaveRequest, snapshot: Snapshot, *, is_beside: bool) -> _Taken:
        """Collect the data of a save. Every rank must call it.

        ``is_beside``: read the tensors that ``snapshot`` lacks here, because a step may change them
        before a thread writes them.
        """
        state, tier, rank = self._state, self._state.tier, self._state.control.rank
        version = None if self._watch is None else self._watch.num_changes
        names = state.every_tiers_state_names()
        kept = self._progress.state_dict()

        def prepare() -> tuple[dict[str, Any], list[Any], _Files]:
            check_tag(request.tag)
            check_kept(request.keep_last, request.keep_every)
            if not isinstance(cast("object", request.client_state), Mapping):
                raise CheckpointError(f"client_state = {request.client_state!r:.60}: give a dict")
            words = {
                "progress": encode(kept, "progress"),
                "client_state": encode(request.client_state, "client_state"),
                "has_frozen": request.has_frozen,
            }
            wholes, of_wholes = whole_states(state)
            if isinstance(request.directory, Path) and request.directory.is_file():
                raise CheckpointError(f"{request.directory} is a file: give a folder")
            request.directory.mkdir(parents=True, exist_ok=True)
            row = [own_scalars(state), random.getstate(), wholes]
            return words, row, small_files(state) | of_wholes

        words, row, small = state.control.together("checkpoint: prepare", prepare)

        reads: dict[str, tuple[Callable[[], Tensors], int | None]] = {}
        for name in names:
            reads[file_name(name, rank)] = partial(tier_slices, state, name, snapshot), version
        in_snapshot = {file_name(MASTER, rank)} if isinstance(tier, WholeTier) else set(reads)
        reads |= {file: (partial(dict, tensors), None) for file, tensors in small.items()}
        if request.has_frozen:
            reads[file_name(VALUE, rank)] = partial(own_slices, state, VALUE), None
        for name in state.extension_states():
            reads[file_name(name, rank)] = partial(own_slices, state, name), None
            names.append(name)
        if is_beside:
            for file in [file for file in reads if file not in in_snapshot]:
                read, version = reads[file]
                reads[file] = partial(dict, read()), version
        return _Taken(request, names, words, row, reads)

    def _write(self, taken: _Taken, exchange: Exchange) -> None:
        """Write the files of ``taken`` and commit them. Every rank must call it."""
        request, directory, tag = taken.request, taken.request.directory, taken.request.tag
        cards = exchange.gather_json([uuid.uuid4().hex, str(request.place)])
        token, place = cards[0]
        others = {rank: card[1] for rank, card in enumerate(cards) if card[1] != place}
        if others and exchange.rank == 0:
            rank = min(others)
            _log.warning(
                "save_checkpoint(): rank 0 saves to %s, rank %d to %s. Neither folder is a whole "
                "checkpoint: a load needs the files of all ranks in one. Give every rank the same "
                "folder and tag",
                *(place, rank, others[rank]),
            )
        if isinstance(directory, Path):
            staging: Staging = Aside(directory, tag)
        else:
            staging = Upload(directory, tag, token)
        is_first = _is_first_in(directory, token, exchange)

        def describe() -> None:
            if is_first:
                content = fill(frame_of(self._state), rows, taken.state_names)
                write_manifest(staging, content | taken.words)

        def finish() -> None:
            if not is_first:
                return
            staging.commit(is_latest=request.is_latest)
            prefix, number = split_tag(tag)
            if request.keep_last is None or number != taken.words["progress"]["global_steps"]:
                return
            try:
                prune(directory, request.keep_last, request.keep_every, (prefix,), newest=tag)
            except (OSError, CheckpointError) as error:  # the new checkpoint is already committed
                _log.warning("checkpoints beside %s stay: %s", request.place, error)

        try:
            exchange.together("checkpoint: prepare", lambda: staging.make() if is_first else None)
            written = exchange.together(
                "checkpoint: write", lambda: self._write_files(taken, staging.folder)
            )
            files = {name: file.facts for name, file in written.items()}
            rows = exchange.gather_json([files, *taken.row])
            exchange.together("checkpoint: write", describe)
            exchange.together("checkpoint: finish", finish)
        finally:
            staging.remove()
        self._known = written

    def _write_files(self, taken: _Taken, folder: Location) -> dict[str, _KnownFile]:
        """Write this rank's files, or link them to equal files of the last save."""
        written: dict[str, _KnownFile] = {}
        summed = (BUFFERS, file_name(VALUE, self._state.control.rank))
        for file in list(taken.reads):
            read, version = taken.reads.pop(file)
            tensors = read()  # read here, so that only one file's copies are in memory
            known, path = self._known.get(file), folder / file
            facts = None
            if known is not None and isinstance(path, Path):
                is_same = known.version == version is not None or (
                    file in summed and known.facts == write_summed(tensors)
                )
                if is_same and link(known.path, known.inode, path):
                    facts = known.facts
            facts = facts or write_file(folder, file, tensors)[file]
            inode = inode_of(path) if isinstance(path, Path) else ()
            written[file] = _KnownFile(str(taken.request.place / file), inode, facts, version)
        return written


def _is_first_in(directory: Location, token: str, exchange: Exchange) -> bool:
    """Whether this is the lowest rank that sees ``directory``. Every rank must call it.

    Machines may have different folders of the same path, so each rank writes a mark and searches
    for lower ranks' marks. ``token`` is new, so no network file system has cached the marks' names.
    """
    marks = [directory / f".{token}-{rank}" for rank in range(exchange.rank + 1)]
    try:
        exchange.together("checkpoint: prepare", partial(marks[-1].write_bytes, b""))
        return exchange.together(
            "checkpoint: prepare", lambda: not any(mark.exists() for mark in marks[:-1])
        )
    finally:
        marks[-1].unlink(missing_ok=True)


def own_slices(state: ShardedState, name: str) -> dict[str, Tensor]:
    segments = [s.index for s in state.layout.segments if s.is_trainable == (name != VALUE)]
    return {str(s): state.own_state(s, name) for s in segments}


def small_files(state: ShardedState) -> _Files:
    """Return states of torch's generators and, on rank 0, the buffers, by file. All are copies."""
    random_states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        random_states["cuda"] = torch.cuda.get_rng_state()
    rank = state.control.rank
    found = {file_name(RNG, rank): random_states}
    return found | ({BUFFERS: state.buffers()} if rank == 0 else {})


def tier_slices(
    state: ShardedState, name: str, snapshot: Snapshot
) -> Mapping[str, Tensor | StateBlocks]:
    """Return this rank's slices of a state by segment, from ``snapshot`` or from the tier.

    For a `WholeTier`, states other than master weights are slices of the parameters without an
    owner, by `slice_key`. The call reads them from the tier, because no snapshot has them.
    """
    tier = state.tier
    found: dict[str, Tensor] = {}
    if name == MASTER or not isinstance(tier, WholeTier):
        trainable = [s.index for s in state.layout.segments if s.is_trainable]
        return {str(s): snapshot.tensor(s, name) for s in trainable}
    for piece in state.pieces:
        low, high = state.own_span(piece.segment)
        low, high = max(low, piece.start), min(high, piece.stop)
        if tier.owner_of(piece.param) is None and low < high:
            key = slice_key(state.layout.params[piece.param].name)
            found[key] = tier.read_state(name, low, high)
    return found


def whole_states(state: ShardedState) -> tuple[dict[str, Any], _Files]:
    """Return this rank's whole states as JSON, by parameter, and their tensors, by file."""
    tier, rank = state.tier, state.control.rank
    if not isinstance(tier, WholeTier):
        return {}, {}
    found, file, tensors = {}, file_name(WHOLE, rank), dict[str, Tensor]()
    for param in tier.updated_params():
        spec = state.layout.params[param]
        kept = tier.read_whole_state(param)
        if tier.owner_of(param) == rank:
            found[spec.name] = {"file": file, "state": flatten(kept, spec.name, tensors)}
    return found, {file: tensors}


def own_scalars(state: ShardedState) -> dict[str, dict[str, float]]:
    """Return the optimizer's scalars of parameters whose first element is on this rank, by name."""
    return {
        state.layout.params[piece.param].name: dict(state.tier.read_scalars(index))
        for index, piece in enumerate(state.pieces)
        if piece.offset == 0
    }
