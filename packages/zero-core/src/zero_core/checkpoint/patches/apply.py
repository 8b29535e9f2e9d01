"""Application of patches, to models in memory and to folders of safetensors files.

A file with changes is written anew. Where a folder has one file, the new one takes its name. Where
it has several and an index, new files have new names, and the new index replaces the old one: that
is the moment of the change. Old files go afterwards.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from zero_core.checkpoint.patches.document import (
    PatchedTensor,
    ReceivedPatch,
    Version,
    WeightPatch,
)
from zero_core.checkpoint.safetensors_files import (
    INDEX,
    StoredTensor,
    bytes_of,
    make_header,
    model_files,
    read_open,
)
from zero_core.checkpoint.storage import (
    create,
    no_room,
    open_regular,
    sync_folder,
    write_all,
    write_synced,
)
from zero_core.errors import CheckpointCorruptError, CheckpointError
from zero_core.layout.arithmetic import flatten, unflatten
from zero_core.layout.discovery import plain_name
from zero_core.lifecycle import owner_of

_VERSION = "_zero_patch_version"
_KEY = "zero_patch_version"
_VERSION_SUFFIX = re.compile(r"-patch(\d+)$")


def apply_patch(
    target: nn.Module | str | Path,
    patch: WeightPatch | bytes | str | Path,
    *,
    version: int | None = None,
) -> int:
    """Apply a patch of the weights: what `zero_core.Engine.weight_patch` wrote.

    The target is a model in memory, on any devices, or a folder of safetensors files as
    transformers writes it. Its values are those of the engine afterwards, bit by bit, in tensors
    that the patch describes. Everything is checked before the first value changes. The files of a
    folder are replaced, not changed: a reader finds the old model or the new one. Which version a
    target has is kept with it: in an attribute of the model, in the metadata of the folder.

    Args:
        target: not an engine's module.
        patch: the object, its bytes, or its file.
        version: of the target's values, if it took them elsewhere than from a patch: 0 for a copy
            of the model that ``build`` got, `zero_core.Engine.patch_version` at an export. None:
            what is kept with it.

    Returns:
        The target's version afterwards.

    Raises:
        PatchGapError: the target is older than what the patch starts from: take one since its
            version, or all.
        CheckpointError: the patch is another engine's or older than the target, the target's
            version is not known, or a name, shape or dtype differs.
        CheckpointCorruptError: the patch or a file of the folder is damaged.
        CheckpointFailedError: a file could not be written.
    """
    source = patch.source if isinstance(patch, WeightPatch) else patch
    if source is None:
        raise ValueError("the patch is on rank 0: apply it there, or send its bytes or file")
    name = "the patch" if isinstance(source, bytes) else str(source)
    with io.BytesIO(source) if isinstance(source, bytes) else open_regular(Path(source)) as file:
        received = ReceivedPatch(file, name)
        if isinstance(target, nn.Module):
            _patch_model(target, received, version)
        else:
            _patch_folder(Path(target), received, version)
        return received.document.version


def _patch_model(model: nn.Module, patch: ReceivedPatch, version: int | None) -> None:
    patch.check_version(getattr(model, _VERSION, None), version, "the model")
    params = {plain_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    buffers = {plain_name(n): b for n, b in model.named_buffers(remove_duplicate=False)}
    if any(owner_of(p) is not None for p in params.values()):
        raise CheckpointError(
            "the model belongs to an engine, whose shards a patch does not reach: apply the patch "
            "to a plain model, or load a checkpoint"
        )
    there: dict[str, Tensor] = {**params, **buffers}
    found = patch.match(list(there.items()), {n: there[n] for n in params}, "the model")
    targets = {id(value): (tensor, value) for _, tensor, value in found}  # tied ones once
    with torch.no_grad():
        for is_trial in (True, False):
            for tensor, target in targets.values():
                flat = flatten(target, tensor.order)
                patch.apply(tensor, flat, is_trial=is_trial)
                if not is_trial and flat.data_ptr() != target.data_ptr():  # a copy
                    target.copy_(unflatten(flat, tensor.shape, tensor.order))
    setattr(model, _VERSION, patch.version)


def _patch_folder(folder: Path, patch: ReceivedPatch, version: int | None) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"apply_patch() takes a model or a folder of safetensors files, found {folder}: pass "
            "the folder that has the files"
        )
    files = model_files(folder)
    is_indexed = files != [folder / "model.safetensors"]
    stored: dict[str, dict[str, StoredTensor]] = {}
    metadata: dict[str, dict[str, str]] = {}
    for path in files:
        with open_regular(path) as file:
            stored[path.name], metadata[path.name] = read_open(file, path)
    index: dict[str, Any] = {}
    if is_indexed:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        facts = index.get("metadata") or {}
    else:
        facts = metadata[files[0].name]
    kept = facts.get(_KEY)
    try:
        known = None if kept is None else Version.model_validate_json(kept)
    except ValidationError as error:
        raise CheckpointCorruptError(
            f"{folder} has a version that is none, {kept!r}: export the model again"
        ) from error
    patch.check_version(known, version, str(folder))
    there = [(name, value) for of in stored.values() for name, value in of.items()]
    required = {f"{name} in {value.path.name}": value for name, value in there}
    changed: dict[str, dict[str, PatchedTensor]] = {}
    for name, tensor, value in patch.match(there, required, str(folder)):
        changed.setdefault(value.path.name, {})[name] = tensor
    facts = {**facts, _KEY: patch.version.model_dump_json()}
    try:
        if not is_indexed:
            (old,) = files
            new = old.with_name(old.name + ".tmp")
            _rewrite(stored[old.name], new, facts, changed.get(old.name, {}), patch)
            new.replace(old)
            sync_folder(folder)
            return
        new_names: dict[str, str] = {}
        for file_name, tensors in changed.items():
            # A new name each time: versions of two engines may have one number.
            old = Path(file_name)
            found = _VERSION_SUFFIX.search(old.stem)
            number = 1 if found is None else int(found[1]) + 1
            new = folder / f"{_VERSION_SUFFIX.sub('', old.stem)}-patch{number}{old.suffix}"
            _rewrite(stored[file_name], new, metadata[file_name], tensors, patch)
            new_names[file_name] = new.name
        weights = {t: new_names.get(name, name) for t, name in index["weight_map"].items()}
        text = json.dumps({**index, "metadata": facts, "weight_map": weights}, indent=2)
        new_index = folder / (INDEX + ".tmp")
        new_index.unlink(missing_ok=True)
        write_synced(new_index, text.encode())
        new_index.replace(folder / INDEX)
        sync_folder(folder)
        for name in new_names:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise no_room(folder, error) from error


def _rewrite(
    stored: Mapping[str, StoredTensor],
    new: Path,
    metadata: dict[str, str],
    changed: Mapping[str, PatchedTensor],
    patch: ReceivedPatch,
) -> None:
    """Write a file's tensors to ``new``, one after another, with their changes."""
    ordered = sorted(stored.items(), key=lambda item: item[1].start)
    new.unlink(missing_ok=True)  # an earlier attempt's
    with create(new) as file:
        write_all(file, make_header(((n, t.dtype, t.shape) for n, t in ordered), metadata))
        for name, tensor in ordered:
            values = tensor.value()
            if name in changed:
                order = changed[name].order
                flat = flatten(values, order)
                patch.apply(changed[name], flat)
                values = unflatten(flat, tensor.shape, order).contiguous()
            write_all(file, bytes_of(values))
        os.fsync(file.fileno())
