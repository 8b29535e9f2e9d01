"""Loading of the checkpoints of `zero_core.checkpoint.save` at any stage and world size."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from zero_core.checkpoint.files import BUFFERS, VALUE, Reader, find, fingerprint, read_manifest
from zero_core.checkpoint.json_values import decode
from zero_core.checkpoint.whole_states import restore
from zero_core.comm.control import ControlGroup
from zero_core.errors import CheckpointCorruptError, CheckpointError
from zero_core.layout.arithmetic import ParamSpec, Piece
from zero_core.layout.discovery import plain_name
from zero_core.optim.train_state import TrainState
from zero_core.protocols import WholeStateTier
from zero_core.sharded.sharded_state import MASTER, ShardedState, load_buffers, named_buffers

PARTS = ("frozen", "optimizer", "lr_scheduler", "progress")
"""Parts of a checkpoint that may be left out in loading. "frozen" are values of parameters that
were frozen, "optimizer" states and hyperparameters: the engine may then have another optimizer and
other frozen parameters. "progress" are the counters, the loss scale and the states of random
generators."""

_HINT = '; load without=("optimizer", "lr_scheduler", "progress") for the weights alone'


def load_checkpoint(
    state: ShardedState,
    directory: Path,
    tag: str | None,
    progress: TrainState,
    *,
    without: Collection[str] = (),
) -> tuple[Path, dict[str, Any]]:
    """Restore a checkpoint, and return its folder and the client state.

    Overwrites ``state`` and ``progress``, except for the parts ``without``, of `PARTS`. ``tag``
    names one of the checkpoints in ``directory``; None is the newest.

    Raises:
        CheckpointError: there is none, it does not fit, or a rank failed.
        CheckpointCorruptError: it is damaged.
    """
    control = state.control

    def look() -> tuple[Path, dict[str, Any]]:
        unknown = sorted(set(without) - set(PARTS))
        if unknown:
            raise CheckpointError(f"without {unknown[0]!r}: a checkpoint's parts are {PARTS}")
        place = find(directory, tag)
        manifest = read_manifest(place)
        _match(state, manifest, place, without)
        _check_frozen(manifest, place, without)
        progress.check(decode(manifest["progress"]), without)
        return place, manifest

    place, manifest = control.together("checkpoint: find", look)
    control.together("checkpoint: verify", lambda: _verify(control, place, manifest))
    reader = Reader(place, manifest)
    control.together("checkpoint: buffers", lambda: _match_buffers(state, reader, place))
    state.quiesce()
    control.together("checkpoint: restore", lambda: _restore(state, reader, manifest, without))
    progress.load_state_dict(decode(manifest["progress"]), without)
    return place, decode(manifest["client_state"])


def read_client_state(directory: Path, tag: str | None = None) -> dict[str, Any]:
    """Return the client state of checkpoint ``tag``, or of the newest, on one process.

    Raises:
        CheckpointError: there is no such checkpoint.
        CheckpointCorruptError: it cannot be read.
    """
    return dict(decode(read_manifest(find(directory, tag))["client_state"]))


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
    is_whole = bool(manifest.get("whole_states"))
    if not is_any and is_whole and not isinstance(state.tier, WholeStateTier):
        raise CheckpointError(
            f"{place}: its optimizer updated whole parameters, and {state.optimizer} of this "
            "engine updates slices: was is_elementwise declared since?" + _HINT
        )


def _is_sliced(state: ShardedState, param: int) -> bool:
    """Whether the states of a trainable parameter are sliced."""
    return not isinstance(state.tier, WholeStateTier) or state.tier.owner_of(param) is None


def _match_buffers(state: ShardedState, reader: Reader, place: Path) -> None:
    """Refuse buffers that the model lacks, lacks itself, or has in another shape."""
    saved = {plain_name(name): stored.shape for name, stored in reader.tensors(BUFFERS).items()}
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


def _check_frozen(manifest: Mapping[str, Any], place: Path, without: Collection[str]) -> None:
    is_complete = manifest.get("has_frozen", True) or all(
        p["is_trainable"] for p in manifest["params"]
    )
    if not is_complete and "frozen" not in without:
        raise CheckpointError(
            f"{place} was saved without the values of frozen parameters: give the model its own "
            "first, and load without 'frozen'"
        )


def _verify(control: ControlGroup, place: Path, manifest: Mapping[str, Any]) -> None:
    """Check this rank's share of the files against their fingerprints."""
    for index, (name, expected) in enumerate(sorted(manifest["files"].items())):
        if index % control.world_size != control.rank:
            continue
        try:
            found = fingerprint(place / name)
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
            if name != MASTER and not _is_sliced(state, piece.param):
                continue
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
            spec = state.layout.params[piece.param]
            scalars = dict(manifest["scalars"][spec.name])
            if _is_sliced(state, piece.param) and spec.name in manifest.get("whole_states", {}):
                scalars |= _write_slices(state, piece, _whole_state(spec, reader, manifest))
            state.tier.write_scalars(index, scalars)
    for store, name, low, high in state.frozen_parts():
        if sources[name] == MASTER or "frozen" not in without:
            store(reader.read(sources[name], name, low, high))
    if "optimizer" not in without and isinstance(state.tier, WholeStateTier):
        for param in state.tier.updated_params():
            whole = _whole_state(state.layout.params[param], reader, manifest)
            state.tier.write_whole_state(param, whole)
    load_buffers(state.module, {key: t.value() for key, t in reader.tensors(BUFFERS).items()})
    if "progress" not in without and manifest["world_size"] == state.control.world_size:
        _restore_rng(state, reader, manifest)


def _write_slices(state: ShardedState, piece: Piece, whole: Mapping[str, Any]) -> dict[str, float]:
    """Write this rank's part of a state that was saved whole, and return the numbers in it.

    Versions before updated Muon's groups of AdamW as whole parameters.
    """
    shape = state.layout.params[piece.param].shape
    stop = piece.offset + piece.stop - piece.start
    numbers: dict[str, float] = {}
    for name, value in whole.items():
        if isinstance(value, torch.Tensor) and value.shape == shape and name != "step":
            state.tier.write_state(name, piece.start, value.reshape(-1)[piece.offset : stop])
        else:
            numbers[name] = value if isinstance(value, int) else float(value)
    return numbers


def _whole_state(spec: ParamSpec, reader: Reader, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of a whole parameter, empty before its first update.

    Versions before sliced the states of Muon: there they are elementwise, with scalars.
    """
    saved = manifest.get("whole_states", {}).get(spec.name)
    scalars = manifest["scalars"].get(spec.name, {})
    if saved is not None:
        restored: Mapping[str, Any] = restore(saved["state"], reader.tensors(saved["file"]))
        return restored
    names = [name for name in manifest["states"] if name != MASTER]
    if manifest["optimizer"].startswith("Muon") and "step" not in scalars:
        names = ["exp_avg"]  # a matrix: the other states are those of AdamW's groups, zeros here
    if not names or not scalars.get("num_steps"):
        return {}
    return {
        **{k: torch.tensor(v, dtype=torch.float32) for k, v in scalars.items() if k != "num_steps"},
        **{n: reader.read(n, spec.name, 0, spec.numel).view(spec.shape) for n in names},
    }


def _restore_rng(state: ShardedState, reader: Reader, manifest: Mapping[str, Any]) -> None:
    stored = reader.tensors(f"rng-{state.control.rank:05d}.safetensors")
    torch.set_rng_state(stored["torch"].value())
    if "cuda" in stored and torch.cuda.is_available():
        torch.cuda.set_rng_state(stored["cuda"].value())
    version, numbers, gauss = manifest["python_rng"][state.control.rank]
    random.setstate((version, tuple(numbers), gauss))
