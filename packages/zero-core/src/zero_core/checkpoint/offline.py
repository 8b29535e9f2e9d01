"""Checkpoints without an engine and without ranks: verified, described, exported, pruned."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from zero_core.checkpoint.files import Reader, find, read_latest
from zero_core.checkpoint.json_values import check_flattened
from zero_core.checkpoint.load import check_rng, read_progress
from zero_core.checkpoint.manifest import (
    BUFFERS,
    MANIFEST,
    RNG,
    VALUE,
    file_name,
    is_plain,
    read_manifest,
)
from zero_core.checkpoint.safetensors_files import ModelFiles
from zero_core.checkpoint.storage import Location, discard, local_path, location_of, modified_ns
from zero_core.core.extension import PREFIX
from zero_core.errors import CheckpointCorruptError, CheckpointError
from zero_core.sharded.sharded_state import MASTER

_log = logging.getLogger(__name__)
_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<step>[0-9]+)", re.DOTALL)
GIVEN_PREFIXES = ("step-", "global_step")
"""What the step follows in tags that this project gives."""


class Progress(Protocol):
    """Callback of a call that takes long, which has ``done`` a part of ``total``."""

    def __call__(self, done: int, total: int, /) -> None: ...


def verify_checkpoint(
    directory: str | Path, tag: str | None = None, *, progress: Progress | None = None
) -> int:
    """Check every byte of checkpoint ``tag``, or of the newest, and that nothing is missing.

    Whatever a load checks that needs no engine: weights, optimizer states and their numbers, states
    of random generators, counters and hyperparameters.

    Args:
        directory: the folder of all checkpoints.
        tag: of the checkpoint; None is the newest.
        progress: called with the bytes checked so far, and with the bytes in all.

    Returns:
        The bytes that were checked.

    Raises:
        CheckpointError: there is no such checkpoint, or it was removed or replaced meanwhile.
        CheckpointCorruptError: it is not what was written.
    """
    reader = Reader(find(location_of(directory), tag))
    manifest = reader.manifest
    total, done = sum(facts.bytes for facts in manifest.files.values()), 0
    with _staying(reader):
        for name, index in reader.chunks():
            reader.check([(name, index)])
            chunk = manifest.chunk_bytes
            done += min(chunk, manifest.files[name].bytes - index * chunk)
            if progress is not None:
                progress(done, total)
        for name in manifest.files:
            reader.tensors(name)
        for param in manifest.params:
            name, whole = param.name, manifest.whole_states.get(param.name)
            if whole is not None:
                check_flattened(whole.state, reader.tensors(whole.file))
            has_state = param.numel > 0 and reader.scalars(name)["num_steps"] > 0
            states = manifest.states if has_state and whole is None else (MASTER,)
            states = (*states, *(n for n in manifest.states if n.startswith(PREFIX)))
            if not param.is_trainable:
                states = (VALUE,) if manifest.has_frozen else ()
            for state in states:
                reader.parts(state, name, 0, reader.slot_numel(name))
        buffers = list(reader.tensors(BUFFERS))
        if len(set(buffers)) < len(buffers) or manifest.by_name.keys() & buffers:
            raise CheckpointCorruptError(
                f"{reader.folder / BUFFERS} has a name twice, or that of a parameter: {buffers[:4]}"
            )
        for rank in range(manifest.world_size):
            check_rng(reader, reader.read_tensor(file_name(RNG, rank), "torch"))
        read_progress(reader)
    return done


@contextmanager
def _staying(reader: Reader) -> Iterator[None]:
    """Say of an error in this context that the checkpoint was removed, if it was."""
    try:
        yield
    except CheckpointError as error:
        place, now = reader.folder, None
        with suppress(CheckpointError):
            now = read_manifest(place)
        if now is None or now.sha256 != reader.manifest.sha256:
            raise CheckpointError(
                f"{place} was removed or replaced while it was read (by keep_last of a run, or a "
                "save of the same tag): take another checkpoint"
            ) from error
        raise


def inspect_checkpoint(directory: str | Path, tag: str | None = None) -> dict[str, Any]:
    """Describe checkpoint ``tag``, or the newest, from its manifest, as JSON. Reads no tensor.

    Raises:
        CheckpointError: there is no such checkpoint.
        CheckpointCorruptError: its manifest is not what was written.
    """
    folder = location_of(directory)
    latest = read_latest(folder)
    place = find(folder, latest if tag is None else tag)
    manifest = read_manifest(place)
    trained = [param for param in manifest.params if param.is_trainable]
    return {
        "folder": str(place),
        "tag": latest if tag is None else tag,
        "version": manifest.version,
        "step": manifest.progress_step(),
        "world_size": manifest.world_size,
        "optimizer": manifest.optimizer,
        "states": list(manifest.states),
        "parameters": len(manifest.params),
        "elements": sum(param.numel for param in manifest.params),
        "trained_elements": sum(param.numel for param in trained),
        "has_frozen": manifest.has_frozen,
        "bytes": sum(facts.bytes for facts in manifest.files.values()),
        "files": len(manifest.files),
        "client_state": sorted(manifest.client_state),
        "latest": latest,
        "tags": list_checkpoints(folder),
    }


def export_checkpoint(
    directory: str | Path,
    output: str | Path,
    tag: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Write the model of a checkpoint as ``model.safetensors``, in Hugging Face's layout.

    Parameters are written one at a time. Tied weights are stored once. Nothing stands under the
    final names before the end.

    Args:
        directory: the folder of all checkpoints.
        output: a folder; it is made.
        tag: of the checkpoint; None is the newest.
        dtype: of floating values; None is each parameter's own.
        progress: called with the parameters written so far, and with the parameters in all.

    Returns:
        The names of the parameters that were written.

    Raises:
        CheckpointError: there is no such checkpoint, it lacks frozen values, or there is no room.
        CheckpointCorruptError: it is not what was written.
    """
    reader = Reader(find(location_of(directory), tag))
    manifest = reader.manifest
    if not manifest.has_frozen and any(not p.is_trainable for p in manifest.params):
        raise CheckpointError(
            f"{reader.folder} was saved without the values of frozen parameters: load it into an "
            "engine of the model, and export that"
        )
    files = ModelFiles(local_path(output, "an export"))
    written = []
    try:
        with _staying(reader):
            for weight in reader.weights():
                value = weight.value
                if value.is_floating_point() and weight.dtype.is_floating_point:
                    value = value.to(dtype or weight.dtype)
                files.add(weight.names[0], value)
                written.append(weight.names[0])
                if progress is not None:
                    progress(len(written), len(manifest.params))
            for name, buffer in reader.read_buffers().items():
                files.add(name, buffer)
        files.finish()
    except BaseException:
        files.discard()
        raise
    return written


def check_kept(keep_last: int | None, keep_every: int | None) -> None:
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise CheckpointError(f"{name} = {value}: expected 1 or more, or None")


def list_checkpoints(directory: Location) -> list[str]:
    """Return the tags of the complete checkpoints in ``directory``, oldest first.

    No manifest is read.
    """
    found = []
    try:
        places = [p for p in directory.iterdir() if is_plain(p.name) and p.is_dir()]
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error
    for place in places:
        with suppress(OSError):
            saved_at_ns = modified_ns(place / MANIFEST)
            found.append((saved_at_ns, split_tag(place.name)[1] or 0, place.name))
    return [tag for _, _, tag in sorted(found)]


def split_tag(tag: str) -> tuple[str, int | None]:
    """Return ``tag`` without the digits at its end, and these digits, None if there are none."""
    match = _NUMBERED.fullmatch(tag)
    return (tag, None) if match is None else (match["prefix"], int(match["step"]))


def prune(
    directory: Location,
    *,
    keep_last: int,
    keep_every: int | None,
    prefixes: Collection[str],
    newest: str | None = None,
    is_trial: bool = False,
) -> list[str]:
    """Do as `prune_checkpoints` does. ``newest`` is the tag that was just saved, if one was."""
    saved = []
    for tag in list_checkpoints(directory):
        prefix, step = split_tag(tag)
        if step is not None and prefix in prefixes:
            saved.append((tag, step))
    latest = read_latest(directory)
    prefix, reached = split_tag(newest or latest or "")
    if reached is None or prefix not in prefixes:
        reached = max((step for _, step in saved), default=0)
    # By step: a folder that was copied has new times. What is beyond the newest was given up.
    saved.sort(key=lambda one: (one[1] <= reached, one[1]))
    removed = []
    for tag, step in saved[: max(len(saved) - keep_last, 0)]:
        if tag in (newest, latest) or (keep_every and step % keep_every == 0):
            continue
        with suppress(CheckpointError):  # what cannot be read stays
            if read_manifest(directory / tag).progress_step() == step:
                removed.append(tag)
    for tag in () if is_trial else removed:
        try:
            discard(directory / tag)
        except OSError as error:
            _log.warning("%s stays, though it is not to be kept: %s", directory / tag, error)
    return removed


def prune_checkpoints(
    directory: str | Path,
    *,
    keep_last: int,
    keep_every: int | None = None,
    prefixes: Collection[str] = GIVEN_PREFIXES,
    is_trial: bool = False,
) -> list[str]:
    """Remove checkpoints that are not to be kept, and return their tags.

    Only those whose tag is one of ``prefixes`` and their step (``step-300``) are removed. What has
    a name of its own ("best", "best-300"), what cannot be read, the newest one and the one that
    ``latest`` names always stay.

    Args:
        directory: the folder of all checkpoints.
        keep_last: how many of those of the highest steps stay, up to the newest one's: what is
            beyond it was saved before the training went back.
        keep_every: those of steps that are multiples of it stay too.
        prefixes: what the step follows in their tags.
        is_trial: return the tags only.

    Raises:
        CheckpointError: a number is below 1, or there is no such folder.
    """
    check_kept(keep_last, keep_every)
    return prune(
        location_of(directory),
        keep_last=keep_last,
        keep_every=keep_every,
        prefixes=prefixes,
        is_trial=is_trial,
    )
