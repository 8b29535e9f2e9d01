"""Checkpoints under DeepSpeed's names: ``global_step{N}``, ``latest``, a client state.

What is in the folder is `zero_core.checkpoint`'s: safetensors and a manifest, for any stage and
number of ranks. Nothing is pickled, so a client state must be JSON.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from zero_core import CheckpointError
from zero_core.checkpoint_files import find, read_manifest

if TYPE_CHECKING:
    from zero_engine.deepspeed.engine import DeepSpeedEngine

__all__ = ["consolidated", "load", "save", "save_16bit_model"]

_log = logging.getLogger(__name__)
_OWN = "zero_engine.deepspeed"
"""Key of the client state under which the DeepSpeed engine's own counters are kept."""


def save(
    engine: DeepSpeedEngine,
    directory: str | Path,
    tag: Any,
    client_state: Mapping[str, Any],
    *,
    save_latest: bool = True,
    exclude_frozen: bool = False,
) -> bool:
    """See `DeepSpeedEngine.save_checkpoint`.

    Raises:
        ValueError: ``directory`` is empty.
        CheckpointError: a value of the client state isn't JSON, or a step is under way.
    """
    if not str(directory):
        raise ValueError("save_checkpoint() needs a directory, found ''")
    check_json(client_state, "client_state")
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    _check_tag(engine, name)
    engine.core.save_checkpoint(
        directory,
        name,
        {**client_state, _OWN: {"global_samples": engine.global_samples}},
        has_frozen=not exclude_frozen,
        is_latest=save_latest,
    )
    return True


def load(
    engine: DeepSpeedEngine,
    directory: str | Path,
    tag: Any,
    *,
    is_strict: bool = True,
    with_optimizer: bool = True,
    with_scheduler: bool = True,
    with_progress: bool = True,
) -> tuple[str | None, dict[str, Any] | None]:
    """See `DeepSpeedEngine.load_checkpoint`.

    Without ``is_strict`` frozen parameters that the checkpoint doesn't hold keep their values.
    """
    if tag is None and not (Path(directory) / "latest").is_file():
        _log.warning("%s holds no checkpoint: there is no file 'latest' in it", directory)
        return None, None
    left_out = {
        "frozen": not is_strict and not _has_frozen(Path(directory), tag),
        "optimizer": not with_optimizer,
        "lr_scheduler": not with_scheduler,
        "progress": not with_progress,
    }
    place, client_state = engine.core.load_checkpoint(
        directory,
        None if tag is None else str(tag),
        without=[part for part, is_out in left_out.items() if is_out],
    )
    own = client_state.pop(_OWN, {})
    if with_progress:
        samples = engine.global_steps * engine.train_batch_size()
        engine.global_samples = own.get("global_samples", samples)
    engine.core.publish()
    return str(place), client_state


def _check_tag(engine: DeepSpeedEngine, tag: str) -> None:
    """As ``checkpoint.tag_validation`` says; rank 0's tag is the one that is used."""
    validation = engine.settings.tag_validation
    if validation == "IGNORE" or engine.world_size == 1:
        return
    tags: list[Any] = [None] * engine.world_size
    dist.all_gather_object(tags, tag)
    if len(set(tags)) > 1:
        text = f"the ranks save a checkpoint under different tags: {tags}; pass the same to all"
        if validation == "FAIL":
            raise CheckpointError(text)
        _log.warning("%s", text)


def _has_frozen(directory: Path, tag: Any) -> bool:
    manifest = read_manifest(find(directory, None if tag is None else str(tag)))
    return bool(manifest.get("has_frozen", True))


def check_json(value: Any, path: str) -> None:
    """Refuse what a checkpoint cannot keep, naming the key.

    Raises:
        CheckpointError: something in ``value`` is no number, string, list or mapping.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            check_json(inner, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            check_json(inner, f"{path}[{index}]")
    else:
        raise CheckpointError(
            f"{path} is a {type(value).__name__}: a checkpoint keeps numbers, strings, lists and "
            "mappings of them; pass its numbers, or save it to a file of its own"
        )


def consolidated(
    engine: DeepSpeedEngine, *, exclude_frozen: bool = False
) -> dict[str, Tensor] | None:
    """The whole model in the compute dtype, on the CPU on rank 0; None elsewhere.

    Every rank must call it. Tied names share a tensor.
    """
    state = engine.core.full_state_dict(rank=0)
    if engine.core.rank != 0:
        return None
    if exclude_frozen:
        for spec in engine.core.layout.params:
            for name in () if spec.is_trainable else (spec.name, *spec.aliases):
                state.pop(name, None)
    return state


def save_16bit_model(
    engine: DeepSpeedEngine, directory: Path, filename: str, *, exclude_frozen: bool = False
) -> bool:
    """Write `consolidated` as ``directory/filename``; whether it was done.

    Every rank must call it. A name that ends in ``.safetensors`` gets that format, any other one
    torch's, of tensors alone: read it by ``torch.load(..., weights_only=True)``. At stage 3 it is
    not done unless ``stage3_gather_16bit_weights_on_model_save`` is true, as in DeepSpeed.
    """
    is_sharded = engine.zero_optimization_partition_weights()
    if is_sharded and not engine.zero_gather_16bit_weights_on_model_save():
        _log.warning(
            "%s is not written: at stage 3 that needs "
            "zero_optimization.stage3_gather_16bit_weights_on_model_save = true",
            directory / filename,
        )
        return False
    state = consolidated(engine, exclude_frozen=exclude_frozen)
    if state is not None:
        directory.mkdir(parents=True, exist_ok=True)
        _write(state, directory / filename)
    if engine.world_size > 1:
        dist.barrier()
    return True


def _write(state: dict[str, Tensor], path: Path) -> None:
    if path.suffix != ".safetensors":
        torch.save(state, path)
        return
    once: dict[int, str] = {}  # tied names share a tensor; the format has each once
    for name, value in state.items():
        once.setdefault(value.data_ptr() if value.numel() else id(value), name)
    kept = {name: state[name].contiguous() for name in once.values()}
    save_file(kept, path, metadata={"format": "pt"})
