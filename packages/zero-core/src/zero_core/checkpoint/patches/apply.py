"""Application of patches, to models in memory and to folders of safetensors files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from zero_core.checkpoint.patches.document import Version, WeightPatch
from zero_core.checkpoint.patches.folder import patch_folder
from zero_core.checkpoint.patches.received import ReceivedPatch, open_patch
from zero_core.errors import CheckpointError
from zero_core.layout.discovery import plain_name
from zero_core.layout.stored import flatten, unflatten
from zero_core.lifecycle import owner_of

_VERSION = "_zero_patch_version"


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
    with open_patch(patch) as received:
        if isinstance(target, nn.Module):
            _patch_model(target, received, version)
        else:
            patch_folder(Path(target), received, version)
        return received.document.version


def _patch_model(model: nn.Module, patch: ReceivedPatch, version: int | None) -> None:
    document = patch.document
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
    setattr(model, _VERSION, Version(engine=document.engine, version=document.version))
