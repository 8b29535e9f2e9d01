"""Content of a DeepSpeed checkpoint of any stage, and the reading of its files.

[Note: what a file may hold]
A file of ``torch.save`` may hold what ``torch.load(weights_only=True)`` accepts: tensors, numbers,
strings and plain containers. Objects of DeepSpeed's classes (loss scalers, addresses of fragments)
become `Record`s. A file that names any other class or function is not unpickled.
Tensors are mapped: their bytes are read on use.
"""

from __future__ import annotations

import math
import os
import pickle
import stat
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zero_core import CheckpointError
from zero_core.errors import CheckpointCorruptError

MASTER = "master_weight"
OWN_STATE = "zero_engine.deepspeed"
"""Client state key of the DeepSpeed engine's own counters."""
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""Adam's states. Other states are refused, because their meaning differs by package."""
_NOT_HYPERPARAMETERS = {
    *("params", "param_names", "step"),
    *("foreach", "fused", "capturable", "differentiable"),  # these change no result
}
_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd"),
    *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size"),
    *("checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info"),
    *("num_experts", "ds_autoep_layers", "autoep_layers", "sparse_tensor_module_names"),
    *("csr_tensor_module_names", "folding"),
}
"""DeepSpeed's entries of a file of model states. The other entries are the client state."""


_INERT = "deepspeed."
"""Start of the class names whose objects become records."""


class Record:
    """Constructor arguments and attributes of an object whose class is not imported."""

    args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> Record:
        record = super().__new__(cls)
        record.args = args
        return record


def load_file(path: Path) -> Any:
    """Return the content of a file of ``torch.save``: see [Note: what a file may hold]."""
    if not os.path.lexists(path):
        raise CheckpointError(f"there is no file {path}: the checkpoint is not whole")
    if not stat.S_ISREG(path.lstat().st_mode):
        raise CheckpointCorruptError(
            f"{path} is not a regular file; links are not followed: copy the files"
        )
    if not zipfile.is_zipfile(path):
        raise CheckpointCorruptError(
            f"{path} is not a zip file of torch.save: it is damaged, or of torch's format before "
            "1.6. Load the checkpoint and save it again with DeepSpeed"
        )
    try:
        named = get_unsafe_globals_in_checkpoint(path)
        foreign = sorted(name for name in named if not name.startswith(_INERT))
        if foreign:
            raise CheckpointError(
                f"{path} names {', '.join(foreign[:5])}: objects other than tensors, plain "
                "containers and DeepSpeed's own records are not loaded. If it is of your "
                "client_state, save the checkpoint again without it"
            )
        records = [(type(name, (Record,), {}), name) for name in named]
        # A mapped read does not check the CRC-32 of the records.
        with zipfile.ZipFile(path) as archive:
            packed = [i for i in archive.infolist() if i.compress_type != zipfile.ZIP_STORED]
            name = packed[0].filename if packed else archive.testzip()
        if name is not None:
            raise CheckpointCorruptError(f"{path} is damaged: {name} in it is not what was written")
        with safe_globals(records):  # type: ignore[arg-type]
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a malicious file may raise anything
        first_line = str(error).strip().split("\n")[0][:300]
        if isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(f"{path} is refused: {first_line}") from error
        reason = f"{type(error).__name__}: {first_line}"
        raise CheckpointCorruptError(f"{path} cannot be read: {reason}") from error


def flat(value: Any, where: str) -> Tensor:
    is_plain = (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and value.is_contiguous()
    )
    if not is_plain:
        raise CheckpointCorruptError(f"{where} is no dense tensor: found {type(value).__name__}")
    found: Tensor = value.detach().reshape(-1)
    return found


@dataclass(frozen=True)
class SourceParam:
    """A parameter: its first name and tied names, whole shape, compute dtype, and number of steps.

    Attributes:
        states: fragments of each state and of the master weight, 1-D and mapped, in order. None for
            a frozen parameter.
        value: fragments of a frozen parameter's value.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    states: Mapping[str, Sequence[Tensor]] | None = None
    value: Sequence[Tensor] = ()
    step: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __post_init__(self) -> None:
        kinds = {"value": self.value} if self.states is None else self.states
        for kind, fragments in kinds.items():
            found = sum(fragment.numel() for fragment in fragments)
            if found != self.numel or len({fragment.dtype for fragment in fragments}) > 1:
                raise CheckpointCorruptError(
                    f"{kind} of {self.names[0]}: the files have {found} elements of the "
                    f"{self.numel} of shape {self.shape}, or of several dtypes"
                )


@dataclass(frozen=True)
class Source:
    """Content of a checkpoint, with parameters in the model's order.

    Attributes:
        groups: hyperparameters of each group.
        loss_scale: state of a dynamic loss scale, in `zero_core`'s form, or {}.
        global_steps: steps of the engine, including ``skipped_steps``.
        optimizer: type and arguments in the saved configuration, or None if a script made it.
    """

    params: Sequence[SourceParam]
    buffers: Mapping[str, Tensor]
    groups: Sequence[Mapping[str, Any]]
    loss_scale: Mapping[str, float]
    global_steps: int
    skipped_steps: int
    global_samples: int
    schedule: Any
    optimizer: tuple[str, Mapping[str, Any]] | None
    client_state: Mapping[str, Any]

    def check_extent(self, limit_bytes: int) -> None:
        """Refuse tensors that overlap or exceed ``limit_bytes``, which could fill a disk."""
        params = [
            fragment
            for param in self.params
            for fragments in ([param.value] if param.states is None else param.states.values())
            for fragment in fragments
            if fragment.numel()
        ]
        end = 0
        for start, nbytes in sorted((one.data_ptr(), one.nbytes) for one in params):
            if start < end:
                raise CheckpointCorruptError("the checkpoint gives elements to several parameters")
            end = start + nbytes
        total = sum(one.nbytes for one in (*params, *self.buffers.values()))
        if total > limit_bytes:
            raise CheckpointCorruptError(
                f"the checkpoint's tensors take {total} bytes, more than its files hold"
            )


def make_source(
    model: Mapping[str, Any],
    params: Sequence[SourceParam],
    groups: Sequence[Mapping[str, Any]],
    loss_scale: Mapping[str, float],
) -> Source:
    config = model.get("ds_config")
    given = config.get("optimizer") if isinstance(config, Mapping) else None
    named = None
    if isinstance(given, Mapping):
        arguments = given.get("params") or {}
        if not isinstance(given.get("type"), str) or not isinstance(arguments, Mapping):
            raise CheckpointCorruptError("the saved configuration's optimizer has no type")
        named = given["type"], arguments
    buffers: dict[str, Tensor] = {}
    for name in model["buffer_names"]:
        value = model["module"][name]
        buffers[name] = flat(value, f"buffer {name}").view(value.shape)
    counts = {}
    for key in ("global_steps", "skipped_steps", "global_samples"):
        counts[key] = int(model.get(key, 0))
        if counts[key] < 0:
            raise CheckpointCorruptError(f"the checkpoint has {key} = {counts[key]}")
    return Source(
        params=params,
        buffers=buffers,
        groups=[
            {
                k: tuple(v) if k == "betas" else v
                for k, v in g.items()
                if k not in _NOT_HYPERPARAMETERS
            }
            for g in groups
        ],
        loss_scale=loss_scale,
        schedule=model.get("lr_scheduler"),
        optimizer=named,
        client_state={k: v for k, v in model.items() if k not in _KEYS},
        **counts,
    )


def split_states(
    state: Mapping[str, Any], where: str, master: Tensor
) -> tuple[dict[str, Tensor], int]:
    """Return flat elementwise states, with ``master`` added, and the number of steps."""
    found = {k: v for k, v in state.items() if k != "step" and v is not None}
    strange = sorted(found.keys() - set(MOMENTS))
    if strange or (found and not set(MOMENTS[:2]) <= found.keys()):
        raise CheckpointError(
            f"{where} has the optimizer states {sorted(found)}: states of Adam and AdamW are "
            f"imported ({', '.join(MOMENTS)}). The weights alone can be taken over by "
            "DeepSpeed's zero_to_fp32.py and zero_core.load_pretrained"
        )
    states = {k: flat(v, f"{where}: {k}") for k, v in found.items()}
    return {**states, MASTER: master}, int(state.get("step", 0))


def named_like(model: Mapping[str, Any], ties: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Map first names to all names of a parameter. ``ties`` maps the other names to first names."""
    buffers, found = set(model["buffer_names"]), {}
    for name in model["module"]:
        if name not in buffers and name not in ties:
            found[name] = [name]
    for name, first in ties.items():
        found[first].append(name)
    return {first: tuple(names) for first, names in found.items()}


def storage_ties(model: Mapping[str, Any]) -> dict[str, str]:
    """Map tied names to first names. Tied values share memory, also after torch.save."""
    seen: dict[Any, str] = {}
    ties: dict[str, str] = {}
    for name, value in model["module"].items():
        if isinstance(value, Tensor) and value.numel() and name not in model["buffer_names"]:
            first = seen.setdefault((value.data_ptr(), value.shape, value.dtype), name)
            if first != name:
                ties[name] = first
    return ties


def loss_scale_of(state: Mapping[str, Any], *, has_zero: bool = True) -> dict[str, float]:
    """Return a dynamic loss scale in `zero_core`'s form, or {} for a constant one."""
    found: Any = state
    if has_zero:
        scaler = state.get("loss_scaler")
        found = vars(scaler) if isinstance(scaler, Record) else None
    if found is None or not state.get("dynamic_loss_scale"):
        return {}
    return {
        "scale": float(found["cur_scale"]),
        "hysteresis_left": int(found.get("cur_hysteresis", 1)),
        "steps_since_change": int(found["cur_iter"]) - int(found["last_overflow_iter"]) - 1,
    }
