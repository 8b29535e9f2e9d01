"""Loading of checkpoints at any stage and world size. `zero_core.checkpoint.save` writes them."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_core.checkpoint.files import PARTS, Reader, find
from zero_core.checkpoint.json_values import find_classes, restore, safe_class
from zero_core.checkpoint.manifest import BUFFERS, MANIFEST, RNG, VALUE, file_name
from zero_core.checkpoint.storage import Location
from zero_core.core.extension import PREFIX
from zero_core.errors import CheckpointError
from zero_core.layout.arithmetic import ParamSpec, unflatten
from zero_core.optim.train_state import TrainState
from zero_core.optim.whole_tier import WholeTier
from zero_core.protocols import StateTier
from zero_core.sharded import MASTER
from zero_core.sharded.sharded_state import ShardedState, load_buffers, named_buffers

_log = logging.getLogger(__name__)
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
    """Restore a checkpoint. Return its folder and client state: see `Engine.load_checkpoint`.

    The ranks check all bytes before the first value changes, so a failed check changes nothing.
    Every rank must call it.
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
    # ``own`` identifies the manifest that this rank sees, and so the files beside it.
    own: list[Any] = [str(reader.folder), reader.manifest.sha256]
    if isinstance(reader.folder, Path):
        found = (reader.folder / MANIFEST).stat()
        own = [found.st_ino, found.st_mtime_ns, found.st_ctime_ns, reader.manifest.sha256]
    rows = control.gather_json(own)
    digests = [row[-1] for row in rows]
    if len(set(digests)) > 1:
        raise CheckpointError(
            f"ranks see different checkpoints: {reader.folder} has sha256 {digests[0][:16]} on "
            f"rank 0 and others on ranks {[r for r, d in enumerate(digests) if d != digests[0]]}: "
            "give every rank the same files"
        )
    # Ranks that see the same files check different chunks. Others see copies on other disks.
    peers = [rank for rank, row in enumerate(rows) if row == own]
    share = reader.chunks()[peers.index(control.rank) :: len(peers)]
    control.together("checkpoint: verify", lambda: reader.check(share))
    return reader.folder, restore_from(reader, state, progress, without)


def check_fits(
    state: ShardedState, reader: Reader, progress: TrainState, without: Collection[str] = ()
) -> None:
    """Raise CheckpointError if the manifest does not fit the engine. Reads no other file."""
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
            'first, and call load_checkpoint(..., without=("frozen",))'
        )
    progress.check(reader.read_progress()[0], without)


def restore_from(
    reader: Reader, state: ShardedState, progress: TrainState, without: Collection[str] = ()
) -> dict[str, Any]:
    """Restore a checkpoint whose files the ranks have checked. Return the client state.

    A parameter that is trained now but was frozen starts from its saved value, which had the
    compute dtype, and from initial optimizer states. A parameter that is frozen now but was trained
    gets its saved master weights, rounded. Every rank must call it.
    """
    write = state.control.together("checkpoint: check", partial(_find_all, state, reader, without))
    state.quiesce()
    state.control.place.unfinished = "a load"
    state.control.together("checkpoint: restore", write)
    if state.control.rank == 0 and "optimizer" not in without:
        saved = reader.manifest.by_name
        changed = [p for p in state.layout.params if p.is_trainable != saved[p.name].is_trainable]
        fresh = ", ".join(p.name for p in changed if p.is_trainable)
        frozen = ", ".join(p.name for p in changed if not p.is_trainable)
        told = [f"trained now, they start with fresh optimizer states: {fresh}"] * bool(fresh)
        told += [f"frozen now, they keep their values: {frozen}"] * bool(frozen)
        if told:
            _log.warning("%s has other parameters frozen; %s", reader.folder, "; ".join(told))
    saved_progress, client_state = reader.read_progress()
    progress.load_state_dict(saved_progress, without)
    return client_state


def _find_all(state: ShardedState, reader: Reader, without: Collection[str]) -> Callable[[], None]:
    """Check that all tensors for this rank can be restored. Return a function that restores them.

    The check reads no parameters or optimizer states.
    """
    reader.trust()  # every chunk was checked by one of the ranks
    manifest, tier = reader.manifest, state.tier
    sources = {p.name: MASTER if p.is_trainable else VALUE for p in manifest.params}
    parts = [
        (write, _find(reader, sources[spec.name], spec, low, high))
        for write, spec, low, high in state.value_parts()
        if sources[spec.name] == MASTER or "frozen" not in without
    ]
    extension_parts: list[tuple[Callable[[Tensor], None], _Read]] = []
    in_slices = set()  # names of the tier's states to restore
    names = set() if "optimizer" in without else {*manifest.states} - {MASTER, *without}
    for name in sorted(names):
        is_extensions = name.startswith(PREFIX)
        for piece in state.pieces:
            spec = state.layout.params[piece.param]
            if is_extensions:  # for parameters that were frozen, `Extension.reset` sets the states
                is_read = sources[spec.name] == MASTER
            else:  # parameters that were never updated have no saved states
                is_sliced = _is_sliced(tier, piece.param)
                is_read = is_sliced and reader.scalars(spec.name)["num_steps"] > 0
            if is_read:
                stop = piece.offset + piece.stop - piece.start
                read = _find(reader, name, spec, piece.offset, stop)
                write = partial(state.write_state, name, piece.start)
                (extension_parts if is_extensions else parts).append((write, read))
                if not is_extensions:
                    in_slices.add(name)
    numbers: list[Mapping[str, float]] = []  # scalars of each piece in ``state.pieces``
    if "optimizer" not in without:
        numbers = [reader.scalars(state.layout.params[piece.param].name) for piece in state.pieces]
        _check_optimizer(state, reader, in_slices, numbers)
    _check_buffers(state, reader)
    generators: dict[str, Tensor] = {}  # states of torch's generators to restore
    rank = state.control.rank
    if {"progress", RNG}.isdisjoint(without) and manifest.world_size == state.control.world_size:
        has_cuda = "cuda" in reader.tensors(file_name(RNG, rank)) and torch.cuda.is_available()
        for kind in ("torch", "cuda") if has_cuda else ("torch",):
            generators[kind] = reader.read_random_state(rank, kind)

    def write_all() -> None:
        for store, read in parts:
            store(read())
        for extension in state.extensions:  # after the weights, which reset() may read
            extension.reset()
        for store, read in extension_parts:
            store(read())
        for index, scalars in enumerate(numbers):
            tier.write_scalars(index, scalars)
        if "optimizer" not in without and isinstance(tier, WholeTier):
            for param in tier.updated_params():
                name = state.layout.params[param].name
                if sources[name] == MASTER:
                    saved = manifest.whole_states.get(name)  # None if never updated
                    whole = {}
                    if saved is not None:
                        whole = restore(saved.state, partial(reader.read_tensor, saved.file))
                    tier.write_whole_state(param, whole)
        load_buffers(state.module, reader.read_buffers())
        if generators:
            torch.set_rng_state(generators["torch"])
            if "cuda" in generators:
                torch.cuda.set_rng_state(generators["cuda"])
            random.setstate(manifest.python_rng[rank])

    return write_all


def _is_sliced(tier: StateTier, param: int) -> bool:
    return not isinstance(tier, WholeTier) or tier.owner_of(param) is None


def _find(reader: Reader, state: str, spec: ParamSpec, low: int, high: int) -> _Read:
    if reader.has_order_of(spec):
        return partial(reader.read_parts, reader.parts(state, spec.name, low, high))
    # In another memory order, the range is scattered, so all elements are read and rearranged.
    whole = reader.parts(state, spec.name, 0, spec.numel)
    order = reader.manifest.by_name[spec.name].memory_order or ()

    def read() -> Tensor:
        values = unflatten(reader.read_parts(whole), spec.shape, order)
        return spec.to_elements(values)[low:high]

    return read


def _check_optimizer(
    state: ShardedState,
    reader: Reader,
    in_slices: Collection[str],
    numbers: Sequence[Mapping[str, float]],
) -> None:
    tier = state.tier
    needed = {piece.param for piece in state.pieces if _is_sliced(tier, piece.param)}
    if isinstance(tier, WholeTier):
        needed |= set(tier.updated_params())
    for param in sorted(needed):
        name, is_sliced = state.layout.params[param].name, _is_sliced(tier, param)
        whole = reader.manifest.whole_states.get(name)
        if whole is not None:
            for path in sorted(find_classes(whole.state, reader.tensors(whole.file))):
                safe_class(path)
        if is_sliced == (whole is not None) and reader.scalars(name)["num_steps"]:
            raise CheckpointError(
                f"{reader.folder}: the state of {name} was saved "
                f"{'whole' if is_sliced else 'in slices'}, and this engine updates "
                f"{'slices' if is_sliced else 'whole parameters'}: does the optimizer declare "
                "is_elementwise and is_elementwise_group as it did?" + _HINT
            )
    try:
        tier.check_states(sorted(in_slices), numbers)
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{reader.folder}: {error.args[0]}" + _HINT) from error


def _check_buffers(state: ShardedState, reader: Reader) -> None:
    place = reader.folder
    saved = {name: stored.shape for name, stored in reader.tensors(BUFFERS).items()}
    own = {name: tuple(buffer.shape) for name, buffer in named_buffers(state.module).items()}
    missing = sorted((own.keys() & set(state.names())) - saved.keys())
    extra = sorted(saved.keys() - own.keys())
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
