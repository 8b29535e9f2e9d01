"""``deepspeed.utils.zero_to_fp32``: a checkpoint's model in fp32, read by one process.

It reads this engine's checkpoints, of any stage and world size. As a program:

    python -m zero_engine.deepspeed.utils.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from zero_core import CheckpointError, engine_of
from zero_core.adapters import is_refused, open_all
from zero_core.checkpoint import read_buffers, read_weights
from zero_core.protocols import PartitionedParam
from zero_engine.deepspeed.checkpoint import refuse_foreign, without_ties
from zero_engine.deepspeed.served import refuse_other_names
from zero_engine.machine import parse_bytes

_log = logging.getLogger(__name__)
_M = TypeVar("_M", bound=nn.Module)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return the whole state dict in fp32 on the CPU. Tied names share a tensor.

    ``checkpoint_dir`` is the folder that `save_checkpoint` was given. A ``tag`` of None is the
    newest. ``lazy_mode`` has no effect: tensors are always read one at a time. Raises
    CheckpointError if there is no such checkpoint, or DeepSpeed itself wrote it.
    """
    return _read(checkpoint_dir, tag, exclude_frozen_parameters, torch.float32)


def load_state_dict_from_zero_checkpoint(
    model: _M, checkpoint_dir: str | Path, tag: str | None = None
) -> _M:
    """Move ``model`` to the CPU and load the checkpoint's values in its dtypes. Returns ``model``.

    It needs no other rank. As in DeepSpeed, an engine of the model is closed, and training needs a
    new one. Within `GatheredParameters` of all stage-3 parameters with a ``modifier_rank``, the
    engine continues with that rank's values. A warning names parameters that the checkpoint lacks.
    Raises CheckpointError if there is no such checkpoint, or it has none of the model's parameters.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    names = [name for name, _ in model.named_parameters()]
    missing = [name for name in names if name not in state]
    if missing:
        few = f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}"
        num = f"{len(missing)} of the model's {len(names)} parameters"
        text = f"{checkpoint_dir} has no values of {num} ({few})"
        if len(missing) == len(names):
            raise CheckpointError(
                f"{text}: give the model whose engine saved it, found {list(state)[:5]}"
            )
        _log.warning("%s: they are left without", text)
    params = list(model.parameters())
    engines = {id(one): one for one in map(engine_of, params) if one is not None}
    for engine in engines.values():
        if not engine.is_gathered:
            engine.close()
    for name, param in model.named_parameters():
        is_left_empty = name not in state and is_refused(param)
        if engine_of(param) is None and not is_left_empty:  # its memory is not an engine's buffer
            open_all([param])
            if isinstance(param, PartitionedParam):
                param.make_ordinary()
            param.data = state.get(name, param.data).to("cpu", param.dtype, copy=True)
    model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    dtype: torch.dtype | str = torch.float32,
) -> None:
    """Make ``output_dir``, and write the state dict into it under Hugging Face's file names.

    A file's tensors have at most ``max_shard_size`` bytes, given as a number or as "5GB". A larger
    tensor gets its own file. If ``max_shard_size`` is None, one file is written.
    ``safe_serialization`` selects safetensors files instead of torch's. Torch's files hold only
    tensors. Floating-point values are converted to ``dtype``. Other arguments are those of
    `get_fp32_state_dict_from_zero_checkpoint`.
    """
    chosen = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    state = _read(checkpoint_dir, tag, exclude_frozen_parameters, chosen)
    stem, ending, write = "pytorch_model", "bin", torch.save
    if safe_serialization:
        state = without_ties(state)
        stem, ending, write = "model", "safetensors", partial(save_file, metadata={"format": "pt"})
    if isinstance(max_shard_size, str):
        max_shard_size = parse_bytes(max_shard_size, "max_shard_size =")
    parts = _split(state, max_shard_size)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if len(parts) == 1:
        write(state, folder / f"{stem}.{ending}")
        return
    names = [f"{stem}-{i + 1:05d}-of-{len(parts):05d}.{ending}" for i in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        write(part, folder / name)
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in state.values())},
        "weight_map": {key: n for n, part in zip(names, parts, strict=True) for key in part},
    }
    text = json.dumps(index, indent=2)
    (folder / f"{stem}.{ending}.index.json").write_text(text, encoding="utf-8")


convert_zero_checkpoint_to_fp32_state_dict = convert_zero_checkpoint_to_state_dict
"""DeepSpeed's older name of the function."""


def _read(
    directory: str | Path, tag: str | None, exclude_frozen: bool, dtype: torch.dtype
) -> dict[str, Tensor]:
    refuse_foreign(directory, tag)
    folder, chosen = Path(directory), None if tag is None else str(tag)
    state = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in read_buffers(folder, chosen).items()
    }
    for weight in read_weights(folder, chosen):
        if weight.is_trainable or not exclude_frozen:
            value = weight.value
            value = value.to(dtype) if value.is_floating_point() else value
            state |= dict.fromkeys(weight.names, value)
    return state


def _split(state: Mapping[str, Tensor], limit: int | None) -> list[dict[str, Tensor]]:
    parts: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, value in state.items():
        if limit is not None and parts[-1] and used + value.nbytes > limit:
            parts.append({})
            used = 0
        parts[-1][name] = value
        used += value.nbytes
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("checkpoint_dir")
    parser.add_argument("output_dir")
    parser.add_argument("--max_shard_size", default="5GB")
    parser.add_argument("--safe_serialization", action="store_true")
    parser.add_argument("-t", "--tag")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    convert_zero_checkpoint_to_fp32_state_dict(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
else:
    refuse_other_names("utils.zero_to_fp32")
