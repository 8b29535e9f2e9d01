"""Checkpoints without an engine and without ranks: verified, described, exported, pruned."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from zero_core.checkpoint.files import Reader, find, read_latest, read_weights
from zero_core.checkpoint.manifest import VALUE, read_manifest
from zero_core.checkpoint.model_files import ModelFiles
from zero_core.checkpoint.retention import GIVEN_PREFIXES, list_checkpoints, prune
from zero_core.errors import CheckpointError
from zero_core.sharded.sharded_state import MASTER


def verify_checkpoint(directory: str | Path, tag: str | None = None) -> Iterator[tuple[int, int]]:
    """Check every byte of checkpoint ``tag``, or of the newest, and that all tensors are there.

    Iterate to the end: the check is done as you go.

    Yields:
        Bytes checked so far, and bytes in all.

    Raises:
        CheckpointError: there is no such checkpoint.
        CheckpointCorruptError: it is not what was written.
    """
    place = find(Path(directory), tag)
    manifest = read_manifest(place)
    reader = Reader(place, manifest)
    total, done = sum(facts.bytes for facts in manifest.files.values()), 0
    for name, index in reader.chunks():
        reader.check([(name, index)])
        chunk, size = manifest.crcs(name)[0], manifest.files[name].bytes
        done += min(chunk, size - index * chunk)
        yield done, total
    for name in manifest.files:
        reader.tensors(name)
    for param in manifest.params:
        start, stop = reader.span(param.name)
        if param.is_trainable:
            reader.parts(MASTER, param.name, 0, stop - start)
        elif manifest.has_frozen:
            reader.parts(VALUE, param.name, 0, stop - start)


def inspect_checkpoint(directory: str | Path, tag: str | None = None) -> dict[str, Any]:
    """Describe checkpoint ``tag``, or the newest, from its manifest, as JSON. Reads no tensor.

    Raises:
        CheckpointError: there is no such checkpoint.
        CheckpointCorruptError: its manifest is not what was written.
    """
    folder = Path(directory)
    place = find(folder, tag)
    manifest = read_manifest(place)
    trained = [param for param in manifest.params if param.is_trainable]
    return {
        "folder": str(place),
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
        "latest": read_latest(folder),
        "tags": [one.tag for one in list_checkpoints(folder)],
    }


def export_checkpoint(
    directory: str | Path,
    output: str | Path,
    tag: str | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Iterator[str]:
    """Write the model of a checkpoint as ``model.safetensors``, in Hugging Face's layout.

    Iterate to the end: parameters are written as you go, one at a time. Tied weights are stored
    once. Nothing stands under the final names before the end.

    Args:
        directory: the folder of all checkpoints.
        output: a folder; it is made.
        tag: of the checkpoint; None is the newest.
        dtype: of floating values; None is each parameter's own.

    Yields:
        The name of each parameter that was written.

    Raises:
        CheckpointError: there is no such checkpoint, it lacks frozen values, or there is no room.
        CheckpointCorruptError: it is not what was written.
    """
    place = find(Path(directory), tag)
    manifest = read_manifest(place)
    if not manifest.has_frozen and any(not p.is_trainable for p in manifest.params):
        raise CheckpointError(
            f"{place} was saved without the values of frozen parameters: load it into an engine "
            "of the model, and export that"
        )
    files = ModelFiles(Path(output))
    try:
        for weight in read_weights(Path(directory), tag):
            value = weight.value
            if value.is_floating_point() and weight.dtype.is_floating_point:
                value = value.to(dtype or weight.dtype)
            files.add(weight.names[0], value)
            yield weight.names[0]
        for name, buffer in Reader(place, manifest).read_buffers().items():
            files.add(name, buffer)
        files.finish()
    except BaseException:
        files.discard()
        raise


def prune_checkpoints(
    directory: str | Path,
    *,
    keep_last: int,
    keep_every: int | None = None,
    prefixes: Collection[str] = GIVEN_PREFIXES,
    is_trial: bool = False,
) -> list[str]:
    """Remove checkpoints that are not to be kept: see `zero_core.checkpoint.retention.prune`.

    Raises:
        CheckpointError: a number is below 1, or there is no such folder.
    """
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise CheckpointError(f"{name} = {value}: expected 1 or more")
    return prune(
        Path(directory),
        keep_last=keep_last,
        keep_every=keep_every,
        prefixes=prefixes,
        is_trial=is_trial,
    )
