"""Loading of the checkpoints of `zero_core.checkpoint.save` at any stage and world size."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_core.checkpoint.files import Reader, find
from zero_core.checkpoint.json_values import check_flattened, decode, restore, safe_class
from zero_core.checkpoint.manifest import BUFFERS, MANIFEST, RNG, VALUE, file_name, read_manifest
from zero_core.checkpoint.storage import Location, identity, location_of
from zero_core.core.extension import PREFIX
from zero_core.errors import CheckpointCorruptError, CheckpointError
from zero_core.layout.arithmetic import ParamSpec
from zero_core.layout.stored import unflatten
from zero_core.optim.train_state import TrainState, check_progress
from zero_core.optim.whole_tier import WholeTier
from zero_core.sharded.sharded_state import MASTER, ShardedState, load_buffers, named_buffers

_log = logging.getLogger(__name__)

PARTS = ("frozen", "optimizer", "lr_scheduler", "progress")
"""Parts of a checkpoint that may be left out in loading. "frozen" are values of parameters that
were frozen, "optimizer" states and hyperparameters: the engine may then have another optimizer.
"progress" are the counters, the loss scale and the states of random generators."""

_Read = Callable[[], Tensor]
_HINT = '; load without=("optimizer", "lr_scheduler", "progress") for the weights alone'


def load_checkpoint(
    state: ShardedState,
    directory: Location,
    tag: str | None,
    progress: TrainState,
    *,
    without: Collection[str] = (),
) -> tuple[Location, dict[str, Any]]:
    """Restore a checkpoint, and return its folder and the client state. See `Engine`'s.

    All checks, of all bytes and on all ranks, precede the first write: a checkpoint that is
    refused has changed nothing. Every rank must call it.
    """
    control = state.control

    def look() -> Reader:
        unknown = sorted(p for p in {*without} - {*PARTS} if not p.startswith(PREFIX))
        if unknown:
            raise CheckpointError(f"without {unknown[0]!r}: a checkpoint's parts are {PARTS}")
        reader = Reader(find(directory, tag))
        check_fits(state, reader, progress, without)
        return reader

    reader = control.together("checkpoint: find", look)
    own = [*identity(reader.folder / MANIFEST), reader.manifest.sha256]
    rows = [json.loads(row) for row in control.gather_bytes(json.dumps(own).encode())]
    digests = [row[-1] for row in rows]
    if len(set(digests)) > 1:
        raise CheckpointError(
            f"ranks see different checkpoints: {reader.folder} has sha256 {digests[0][:16]} on "
            f"rank 0 and others on ranks {[r for r, d in enumerate(digests) if d != digests[0]]}: "
            "give every rank the same files"
        )
    # Ranks that see the same files share their check. Others have a copy on another disk.
    peers = [rank for rank, row in enumerate(rows) if row == own]
    share = reader.chunks()[peers.index(control.rank) :: len(peers)]
    control.together("checkpoint: verify", lambda: reader.check(share))
    return reader.folder, restore_from(reader, state, progress, without)


def check_fits(
    state: ShardedState, reader: Reader, progress: TrainState, without: Collection[str] = ()
) -> None:
    """Refuse a checkpoint whose manifest says that it cannot be restored here."""
    manifest, place = reader.manifest, reader.folder
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
    if "optimizer" not in without:
        kinds = [text.rpartition(" with ")[0] for text in (manifest.optimizer, state.optimizer)]
        if kinds[0] != kinds[1]:
            raise CheckpointError(
                f"{place} was trained by {manifest.optimizer}, this engine has {state.optimizer}: "
                "build it with the same optimizer" + _HINT
            )
        if manifest.whole_states and not isinstance(state.tier, WholeTier):
            raise CheckpointError(
                f"{place}: its optimizer updated whole parameters, and {state.optimizer} of this "
                "engine updates slices: was is_elementwise declared since?" + _HINT
            )
        saved_states = {name for name in manifest.states if name.startswith(PREFIX)}
        if differing := sorted((saved_states ^ state.extension_states().keys()) - set(without)):
            does = "has" if differing[0] in saved_states else "lacks"
            raise CheckpointError(
                f"{place} {does} {differing[0]}, a state of an extension of build(), and this "
                f"engine {'lacks' if does == 'has' else 'has'} it: give build() the same "
                f"extensions, or call load_checkpoint(..., without={tuple(differing)}), which "
                "begins such states anew"
            )
    is_complete = manifest.has_frozen or all(p.is_trainable for p in manifest.params)
    if not is_complete and "frozen" not in without:
        raise CheckpointError(
            f"{place} was saved without the values of frozen parameters: give the model its own "
            "first, and load without 'frozen'"
        )
    progress.check(read_progress(reader), without)


def read_progress(reader: Reader) -> dict[str, Any]:
    """Return the progress that was saved. The client state is checked with it."""
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

    Parameters that are trained here and were frozen get the saved values, in the compute dtype, as
    master weights, and the states of before a first step. Those that are frozen here and were
    trained get their master weights, rounded. Every rank must call it.
    """
    restoring = _Restoring(state, reader, without)
    state.control.together("checkpoint: check", restoring.check)
    state.quiesce()
    state.control.place.unfinished = "a load"
    state.control.together("checkpoint: restore", restoring.write)
    if state.control.rank == 0 and "optimizer" not in without:
        saved = reader.manifest.by_name
        changed = [p for p in state.layout.params if p.is_trainable != saved[p.name].is_trainable]
        fresh = ", ".join(p.name for p in changed if p.is_trainable)
        frozen = ", ".join(p.name for p in changed if not p.is_trainable)
        told = [f"trained now, they start with fresh optimizer states: {fresh}"] * bool(fresh)
        told += [f"frozen now, they keep their values: {frozen}"] * bool(frozen)
        if told:
            _log.warning("%s has other parameters frozen; %s", reader.folder, "; ".join(told))
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
    """Refuse what is no state of a random generator of ``device``."""
    try:
        torch.Generator(device).set_state(saved)
    except (RuntimeError, TypeError) as error:
        raise CheckpointCorruptError(
            f"{reader.folder}: no state of a random generator: {error}"
        ) from error


class _Restoring:
    """Restoring of one rank's part of a checkpoint: `check` all of it, then `write`."""

    def __init__(self, state: ShardedState, reader: Reader, without: Collection[str]) -> None:
        self._state = state
        self._reader = reader
        self._without = without
        self._sources = {
            p.name: MASTER if p.is_trainable else VALUE for p in reader.manifest.params
        }
        self._parts: list[tuple[Callable[[Tensor], None], _Read]] = []
        self._extension_parts: list[tuple[Callable[[Tensor], None], _Read]] = []
        self._numbers: list[Mapping[str, float]] = []  # of each piece
        self._generators: dict[str, Tensor] = {}  # torch's states that are restored here

    def check(self) -> None:
        """Find all that is going to be read. Changes nothing, and allocates nothing large."""
        state, reader, without = self._state, self._reader, self._without
        reader.trust()  # every chunk was compared, by one of the ranks
        names = {MASTER} if "optimizer" in without else {*reader.manifest.states} - {*without}
        in_slices = set()
        for name in sorted(names):
            for piece in state.pieces:
                spec = state.layout.params[piece.param]
                source, is_extensions = self._sources[spec.name], name.startswith(PREFIX)
                if name == MASTER:
                    is_read = source == MASTER or "frozen" not in without
                elif is_extensions:  # frozen there: it stays as `Extension.reset` has set it
                    is_read = source == MASTER
                else:  # a parameter that was never updated has no such states
                    is_read = self._is_sliced(piece.param) and bool(
                        reader.scalars(spec.name)["num_steps"]
                    )
                if not is_read:
                    continue
                stop = piece.offset + piece.stop - piece.start
                kept = source if name == MASTER else name
                read = self._find(kept, spec, piece.offset, stop)
                parts = self._extension_parts if is_extensions else self._parts
                parts.append((partial(state.write_state, name, piece.start), read))
                if not is_extensions:
                    in_slices.add(name)
        for store, spec, low, high in state.frozen_parts():
            if self._sources[spec.name] == MASTER or "frozen" not in without:
                self._parts.append((store, self._find(self._sources[spec.name], spec, low, high)))
        if "optimizer" not in without:
            self._check_optimizer(in_slices)
        self._check_buffers()
        if "progress" not in without and reader.manifest.world_size == state.control.world_size:
            file = file_name(RNG, state.control.rank)
            has_cuda = "cuda" in reader.tensors(file) and torch.cuda.is_available()
            for name in ("torch", "cuda") if has_cuda else ("torch",):
                self._generators[name] = reader.read_tensor(file, name)
                check_rng(reader, self._generators[name], "cpu" if name == "torch" else name)

    def _is_sliced(self, param: int) -> bool:
        """Whether the states of a trainable parameter are sliced here."""
        tier = self._state.tier
        return not isinstance(tier, WholeTier) or tier.owner_of(param) is None

    def _find(self, state: str, spec: ParamSpec, low: int, high: int) -> _Read:
        """Find ``[low, high)`` of a parameter's slot, of its ``state``. Returns their reader."""
        reader = self._reader
        if reader.has_order_of(spec):
            return partial(reader.read_parts, reader.parts(state, spec.name, low, high))
        # In another order: all elements are read, and put into that of the shape.
        whole = reader.parts(state, spec.name, 0, spec.numel)
        order = reader.manifest.by_name[spec.name].memory_order or ()

        def read() -> Tensor:
            values = unflatten(reader.read_parts(whole), spec.shape, order)
            return spec.to_elements(values)[low:high]

        return read

    def _check_optimizer(self, in_slices: Collection[str]) -> None:
        """Compare whole states and numbers with the tier, whose states ``in_slices`` are read."""
        state, reader = self._state, self._reader
        needed = {piece.param for piece in state.pieces if self._is_sliced(piece.param)}
        if isinstance(state.tier, WholeTier):
            needed |= set(state.tier.updated_params())
        for param in sorted(needed):
            name, is_sliced = state.layout.params[param].name, self._is_sliced(param)
            whole = reader.manifest.whole_states.get(name)
            if whole is not None:
                for path in sorted(check_flattened(whole.state, reader.tensors(whole.file))):
                    safe_class(path)
            if is_sliced == (whole is not None) and reader.scalars(name)["num_steps"]:
                raise CheckpointError(
                    f"{reader.folder}: the state of {name} was saved "
                    f"{'whole' if is_sliced else 'in slices'}, and this engine updates "
                    f"{'slices' if is_sliced else 'whole parameters'}: does the optimizer declare "
                    "is_elementwise and is_elementwise_group as it did?" + _HINT
                )
        self._numbers = [reader.scalars(state.layout.params[p.param].name) for p in state.pieces]
        try:
            state.tier.check_states(sorted(in_slices), self._numbers)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{reader.folder}: {error.args[0]}" + _HINT) from error

    def _check_buffers(self) -> None:
        """Refuse buffers that one of model and checkpoint lacks, or has in another shape."""
        state, place = self._state, self._reader.folder
        saved = {name: stored.shape for name, stored in self._reader.tensors(BUFFERS).items()}
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

    def write(self) -> None:
        state, reader = self._state, self._reader
        for store, read in self._parts:
            store(read())
        for extension in state.extensions:  # once the weights are there
            extension.reset()
        for store, read in self._extension_parts:
            store(read())
        for index, numbers in enumerate(self._numbers):
            state.tier.write_scalars(index, numbers)
        if "optimizer" not in self._without and isinstance(state.tier, WholeTier):
            for param in state.tier.updated_params():
                spec = state.layout.params[param]
                if self._sources[spec.name] == MASTER:
                    saved = reader.manifest.whole_states.get(spec.name)  # None: never updated
                    whole = {} if saved is None else restore(saved.state, reader, saved.file)
                    state.tier.write_whole_state(param, whole)
        load_buffers(state.module, reader.read_buffers())
        if self._generators:
            torch.set_rng_state(self._generators["torch"])
            if "cuda" in self._generators:
                torch.cuda.set_rng_state(self._generators["cuda"])
            random.setstate(reader.manifest.python_rng[state.control.rank])
