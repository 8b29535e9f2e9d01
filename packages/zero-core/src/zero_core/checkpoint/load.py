"""Loading of the checkpoints of `zero_core.checkpoint.save` at any stage and world size."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_core.checkpoint.files import Reader, find
from zero_core.checkpoint.json_values import decode
from zero_core.checkpoint.manifest import (
    BUFFERS,
    MANIFEST,
    RNG,
    VALUE,
    Manifest,
    file_name,
    read_manifest,
)
from zero_core.checkpoint.storage.location import Location, entry, location_of
from zero_core.checkpoint.whole_states import check as check_state
from zero_core.checkpoint.whole_states import check_classes, restore
from zero_core.comm.control import ControlGroup
from zero_core.errors import CheckpointCorruptError, CheckpointError
from zero_core.layout.arithmetic import ParamSpec, Piece
from zero_core.layout.stored import unflatten
from zero_core.optim.train_state import TrainState, check_progress
from zero_core.optim.whole_tier import WholeTier
from zero_core.sharded.sharded_state import MASTER, ShardedState, load_buffers, named_buffers

_log = logging.getLogger(__name__)

PARTS = ("frozen", "optimizer", "lr_scheduler", "progress")
"""Parts of a checkpoint that may be left out in loading. "frozen" are values of parameters that
were frozen, "optimizer" states and hyperparameters: the engine may then have another optimizer.
"progress" are the counters, the loss scale and the states of random
generators."""

_HINT = '; load without=("optimizer", "lr_scheduler", "progress") for the weights alone'


def load_checkpoint(
    state: ShardedState,
    directory: Location,
    tag: str | None,
    progress: TrainState,
    *,
    without: Collection[str] = (),
) -> tuple[Location, dict[str, Any]]:
    """Restore a checkpoint, and return its folder and the client state.

    Overwrites ``state`` and ``progress``, except for the parts ``without``, of `PARTS`. ``tag``
    names one of the checkpoints in ``directory``; None is the newest.

    All checks, of all bytes and on all ranks, come before the first write: a checkpoint that is
    refused has changed nothing. Every rank must call it.

    Raises:
        CheckpointError: there is none, it does not fit, or a rank failed.
        CheckpointCorruptError: it is damaged.
    """
    control = state.control

    def look() -> Reader:
        unknown = sorted(set(without) - set(PARTS))
        if unknown:
            raise CheckpointError(f"without {unknown[0]!r}: a checkpoint's parts are {PARTS}")
        reader = Reader.of(find(directory, tag))
        check_fits(state, reader, progress, without)
        return reader

    reader = control.together("checkpoint: find", look)
    peers = _ranks_with_the_same_files(control, reader)
    control.together("checkpoint: verify", lambda: _verify(control.rank, peers, reader))
    return reader.folder, restore_from(reader, state, progress, without)


def check_fits(
    state: ShardedState, reader: Reader, progress: TrainState, without: Collection[str] = ()
) -> None:
    """Refuse a checkpoint whose manifest says that it cannot be restored here.

    Raises:
        CheckpointError: it belongs to another model, optimizer or schedule.
    """
    manifest, place = reader.manifest, reader.folder
    _match(state, reader, without)
    _check_frozen(manifest, place, without)
    progress.check(read_progress(reader), without)


def read_progress(reader: Reader) -> dict[str, Any]:
    """Return the progress that was saved. The client state is checked with it.

    Raises:
        CheckpointCorruptError: one is not what was written.
    """
    manifest = reader.manifest
    progress = decode(manifest.progress)
    if not isinstance(progress, dict) or not isinstance(decode(manifest.client_state), dict):
        raise CheckpointCorruptError(f"{reader.folder}: progress or client state is no mapping")
    check_progress(progress)
    return progress


def restore_from(
    reader: Reader, state: ShardedState, progress: TrainState, without: Collection[str] = ()
) -> dict[str, Any]:
    """Restore the checkpoint of ``reader``, whose files were checked. Returns the client state.

    Every rank must call it.

    Raises:
        CheckpointError: it does not fit, or a rank failed.
    """
    restoring = Restoring(state, reader, without)
    state.control.together("checkpoint: check", restoring.check)
    state.quiesce()
    state.control.place.unfinished = "a load"
    state.control.together("checkpoint: restore", restoring.write)
    if state.control.rank == 0 and "optimizer" not in without:
        _warn_of_frozen(state, reader)
    progress.load_state_dict(decode(reader.manifest.progress), without)
    return dict(decode(reader.manifest.client_state))


def read_client_state(directory: Path | str, tag: str | None = None) -> dict[str, Any]:
    """Return the client state of checkpoint ``tag``, or of the newest, on one process.

    Raises:
        CheckpointError: there is no such checkpoint.
        CheckpointCorruptError: it is not what was written.
    """
    return dict(decode(read_manifest(find(location_of(directory), tag)).client_state))


def check_rng(reader: Reader, saved: Tensor, device: str = "cpu") -> None:
    """Refuse what is no state of a random generator of ``device``.

    Raises:
        CheckpointCorruptError: it is none.
    """
    try:
        torch.Generator(device).set_state(saved)
    except (RuntimeError, TypeError) as error:
        raise CheckpointCorruptError(
            f"{reader.folder}: no state of a random generator: {error}"
        ) from error


def _match(state: ShardedState, reader: Reader, without: Collection[str]) -> None:
    """Refuse a checkpoint of another model, naming the first difference."""
    manifest, place = reader.manifest, reader.folder
    is_any = "optimizer" in without
    saved, own = manifest.by_name, {spec.name: spec for spec in state.layout.params}
    missing, extra = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if missing or extra:
        raise CheckpointError(
            f"{place} belongs to another model: it lacks {missing[:3]} and has {extra[:3]} besides"
        )
    for name, mine in own.items():
        if saved[name].shape != mine.shape:
            raise CheckpointError(
                f"{place}: parameter {name} has shape {saved[name].shape} there and {mine.shape} "
                "in the model"
            )
        if reader.is_quantized(saved[name]) and not mine.is_opaque:
            raise CheckpointError(
                f"{place}: parameter {name} is quantized there ({saved[name].dtype}) and "
                f"{mine.dtype} in the model: quantize the model as the saved one was"
            )
    kinds = [text.rpartition(" with ")[0] for text in (manifest.optimizer, state.optimizer)]
    if not is_any and kinds[0] != kinds[1]:
        raise CheckpointError(
            f"{place} was trained by {manifest.optimizer}, this engine has {state.optimizer}: "
            "build it with the same optimizer" + _HINT
        )
    is_whole = bool(manifest.whole_states)
    if not is_any and is_whole and not isinstance(state.tier, WholeTier):
        raise CheckpointError(
            f"{place}: its optimizer updated whole parameters, and {state.optimizer} of this "
            "engine updates slices: was is_elementwise declared since?" + _HINT
        )


def _warn_of_frozen(state: ShardedState, reader: Reader) -> None:
    """Warn of parameters that are trained here and were frozen in the checkpoint, or the reverse.

    Those trained now start as ones that torch's optimizer has never seen: their states are those
    before a first step, with a count of steps of their own, and their master weights are the values
    that were saved, in the compute dtype. Those frozen now keep their master weights, rounded.
    """
    saved = reader.manifest.by_name
    changed = [p for p in state.layout.params if p.is_trainable != saved[p.name].is_trainable]
    fresh = ", ".join(p.name for p in changed if p.is_trainable)
    frozen = ", ".join(p.name for p in changed if not p.is_trainable)
    told = [f"trained now, they start with fresh optimizer states: {fresh}"] * bool(fresh)
    told += [f"frozen now, they keep their values: {frozen}"] * bool(frozen)
    if told:
        _log.warning("%s has other parameters frozen; %s", reader.folder, "; ".join(told))


def _is_sliced(state: ShardedState, param: int) -> bool:
    """Whether the states of a trainable parameter are sliced."""
    return not isinstance(state.tier, WholeTier) or state.tier.owner_of(param) is None


def _match_buffers(state: ShardedState, reader: Reader, place: Location) -> None:
    """Refuse buffers that the model lacks, lacks itself, or has in another shape."""
    saved = {name: stored.shape for name, stored in reader.tensors(BUFFERS).items()}
    own = {name: tuple(buffer.shape) for name, buffer in named_buffers(state.module).items()}
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


def _check_frozen(manifest: Manifest, place: Location, without: Collection[str]) -> None:
    is_complete = manifest.has_frozen or all(p.is_trainable for p in manifest.params)
    if not is_complete and "frozen" not in without:
        raise CheckpointError(
            f"{place} was saved without the values of frozen parameters: give the model its own "
            "first, and load without 'frozen'"
        )


def _ranks_with_the_same_files(control: ControlGroup, reader: Reader) -> list[int]:
    """Return the ranks that see this rank's files: the others have a copy on another disk.

    Raises:
        CheckpointError: a rank sees another checkpoint.
    """
    own = [*entry(reader.folder / MANIFEST).identity(), reader.manifest.sha256]
    rows = [json.loads(row) for row in control.gather_bytes(json.dumps(own).encode())]
    digests = [row[-1] for row in rows]
    if len(set(digests)) > 1:
        raise CheckpointError(
            f"ranks see different checkpoints: {reader.folder} has sha256 {digests[0][:16]} on "
            f"rank 0 and others on ranks {[r for r, d in enumerate(digests) if d != digests[0]]}: "
            "give every rank the same files"
        )
    return [rank for rank, row in enumerate(rows) if row == own]


def _verify(rank: int, peers: Sequence[int], reader: Reader) -> None:
    """Check this rank's share of the files' bytes, and that of all files there are the tensors."""
    share = peers.index(rank)
    reader.check(reader.chunks()[share :: len(peers)])


class Restoring:
    """Restoring of one rank's part of a checkpoint: `check` all of it, then `write`."""

    def __init__(self, state: ShardedState, reader: Reader, without: Collection[str]) -> None:
        self._state = state
        self._reader = reader
        self._manifest = manifest = reader.manifest
        self._without = without
        self._sources = {p.name: MASTER if p.is_trainable else VALUE for p in manifest.params}
        self._parts: list[tuple[Callable[[Tensor], None], Callable[[], Tensor]]] = []
        self._sliced: set[str] = set()  # names of the states that are written in slices
        self._numbers: list[Mapping[str, float]] = []  # of each piece

    # ---------------------------------------------------------------- checks

    def check(self) -> None:
        """Find all that is going to be read. Changes nothing, and allocates nothing large.

        Raises:
            CheckpointError: it does not fit.
            CheckpointCorruptError: something is missing or has another form.
        """
        self._reader.trust()  # every chunk was compared, by one of the ranks
        state = self._state
        self._find_slices()
        for store, spec, low, high in state.frozen_parts():
            if self._sources[spec.name] == MASTER or "frozen" not in self._without:
                self._parts.append((store, self._find(self._sources[spec.name], spec, low, high)))
        if "optimizer" not in self._without:
            self._check_optimizer()
        _match_buffers(state, self._reader, self._reader.folder)
        if self._restores_rng:
            self._check_rng()

    def _find_slices(self) -> None:
        names = (MASTER,) if "optimizer" in self._without else self._manifest.states
        for name in names:
            for piece in self._state.pieces:
                spec = self._state.layout.params[piece.param]
                source = self._sources[spec.name] if name == MASTER else name
                if source == VALUE and "frozen" in self._without:
                    continue
                if name != MASTER and not self._has_slices(spec, piece):
                    continue
                stop = piece.offset + piece.stop - piece.start
                store = partial(self._state.tier.write_state, name, piece.start)
                self._parts.append((store, self._find(source, spec, piece.offset, stop)))
                self._sliced.add(name)

    def _find(self, state: str, spec: ParamSpec, low: int, high: int) -> Callable[[], Tensor]:
        """Find ``[low, high)`` of a parameter's slot, of its ``state``. Returns their reader."""
        read = self._reader.read_parts
        if self._reader.has_order_of(spec):
            return partial(read, self._reader.parts(state, spec.name, low, high))
        whole = self._reader.parts(state, spec.name, 0, spec.numel)  # in another order
        return lambda: spec.to_elements(self._shaped(spec, read(whole)))[low:high]

    def _shaped(self, spec: ParamSpec, values: Tensor) -> Tensor:
        """Return all saved elements of a parameter's state, 1-D, in its shape."""
        return unflatten(values, spec.shape, self._manifest.by_name[spec.name].memory_order or ())

    def _has_slices(self, spec: ParamSpec, piece: Piece) -> bool:
        """Whether the checkpoint has this rank's slice of the states of a parameter."""
        if not _is_sliced(self._state, piece.param):
            return False
        # Never updated: it has no such states.
        return bool(self._reader.scalars(spec.name)["num_steps"])

    def _check_optimizer(self) -> None:
        state = self._state
        needed = {piece.param for piece in state.pieces if _is_sliced(state, piece.param)}
        if isinstance(state.tier, WholeTier):
            needed |= set(state.tier.updated_params())
        for param in sorted(needed):
            name, is_sliced = state.layout.params[param].name, _is_sliced(state, param)
            whole = self._manifest.whole_states.get(name)
            if whole is not None:
                check_state(whole.state, self._reader.tensors(whole.file))
                check_classes(whole.state)
            if is_sliced == (whole is not None) and self._reader.scalars(name)["num_steps"]:
                raise CheckpointError(
                    f"{self._reader.folder}: the state of {name} was saved "
                    f"{'whole' if is_sliced else 'in slices'}, and this engine updates "
                    f"{'slices' if is_sliced else 'whole parameters'}: does the optimizer declare "
                    "is_elementwise and is_elementwise_group as it did?" + _HINT
                )
        self._numbers = [
            self._reader.scalars(state.layout.params[piece.param].name) for piece in state.pieces
        ]
        try:
            state.tier.check_states(sorted(self._sliced), self._numbers)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{self._reader.folder}: {error.args[0]}" + _HINT) from error

    def _check_rng(self) -> None:
        for kind, saved in self._rng().items():
            check_rng(self._reader, saved, "cpu" if kind == "torch" else kind)

    # ---------------------------------------------------------------- writes

    def write(self) -> None:
        """Write what `check` found into the engine's state."""
        state, reader = self._state, self._reader
        for store, read in self._parts:
            store(read())
        if "optimizer" not in self._without:
            self._write_optimizer()
        load_buffers(state.module, reader.read_buffers())
        if self._restores_rng:
            self._write_rng()

    def _write_optimizer(self) -> None:
        state = self._state
        for index, numbers in enumerate(self._numbers):
            state.tier.write_scalars(index, numbers)
        if isinstance(state.tier, WholeTier):
            for param in state.tier.updated_params():
                spec = state.layout.params[param]
                if self._sources[spec.name] == MASTER:
                    saved = self._manifest.whole_states.get(spec.name)  # None: never updated
                    whole = {} if saved is None else restore(saved.state, self._reader, saved.file)
                    state.tier.write_whole_state(param, whole)

    @property
    def _restores_rng(self) -> bool:
        is_same = self._manifest.world_size == self._state.control.world_size
        return is_same and "progress" not in self._without

    def _rng(self) -> dict[str, Tensor]:
        """Return the saved states of torch's random generators that there are here."""
        file = file_name(RNG, self._state.control.rank)
        names = ["torch"]
        if "cuda" in self._reader.tensors(file) and torch.cuda.is_available():
            names.append("cuda")
        return {name: self._reader.read_tensor(file, name) for name in names}

    def _write_rng(self) -> None:
        saved = self._rng()
        torch.set_rng_state(saved["torch"])
        if "cuda" in saved:
            torch.cuda.set_rng_state(saved["cuda"])
        random.setstate(self._manifest.python_rng[self._state.control.rank])
