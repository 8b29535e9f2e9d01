"""Content of a DeepSpeed checkpoint, and readers of stages 0 to 3 and of universal checkpoints.

Stages 1 to 3 have a file of optimizer states per rank. At stage 3 there is also a file of model
states per rank. A universal checkpoint has a folder per parameter: see ``ds_to_universal``.

[Note: what a file may hold]
A file of ``torch.save`` may hold what ``torch.load(weights_only=True)`` accepts: tensors, numbers,
strings and plain containers. Objects of DeepSpeed's classes (loss scalers, addresses of fragments)
become `Record`s. A file that names any other class or function is not unpickled.
Tensors are mapped: their bytes are read on use.

[Note: DeepSpeed's partitions]
Stages 1 and 2 concatenate each group's flattened parameters and cut the group into equal parts, one
per rank. A rank's file maps parameters to elements of its part (``param_slice_mappings``). Stage 3
cuts each parameter into equal parts, rounded up, and each rank concatenates its parts by sub-group.

[Note: names at stage 0]
The file numbers the optimizer's parameters and does not name them. In 16-bit training, a master
weight belongs to the parameter whose weights it rounds to. If several parameters have these weights
(new norms, all ones), the import is refused. In fp32 the shapes decide: all parameters of a shape
must be trained in one group, or be frozen. Parameters of one shape are assumed to be in the model's
order, and a note on stderr states this.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import stat
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zero_core import CheckpointError
from zero_core.checkpoint import is_plain
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
    is_dense = (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and value.is_contiguous()
    )
    if not is_dense:
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


_Shape = tuple[int, ...]
_Trained = Mapping[str, tuple[_Shape, Mapping[str, Sequence[Tensor]], int]]
"""Shape, fragments of each state, and number of steps of each trained parameter."""
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)")


def read_zero(place: Path, optim_files: Sequence[Path]) -> Source:
    files = in_rank_order(optim_files)
    states = [load_file(file)["optimizer_state_dict"] for file in files]
    counts = states[0]["partition_count"]
    expected = max(counts) if isinstance(counts, list) else counts
    if expected != len(files):
        raise CheckpointCorruptError(
            f"{place} has optimizer states of {len(files)} ranks, {expected} wrote it: "
            "copy the files of all ranks into one folder"
        )
    if "fp32_flat_groups" in states[0]:
        return _read_stage_3(place, states)
    return _read_stages_1_and_2(place, states)


def in_rank_order(files: Sequence[Path]) -> list[Path]:
    by_rank: dict[int, Path] = {}
    for file in files:
        found = _RANK.search(file.name)
        if found is None:
            raise CheckpointError(f"{file} is not one of the files of ZeRO's ranks")
        if int(found[2]) != 0:
            raise CheckpointError(
                f"{file} is of model-parallel rank {int(found[2])}: checkpoints of tensor and "
                "pipeline parallelism are not imported; convert it with DeepSpeed first"
            )
        by_rank[int(found[1])] = file
    missing = sorted(set(range(max(by_rank) + 1)) - by_rank.keys())
    if missing:
        raise CheckpointCorruptError(f"{files[0].parent} has no file of rank {missing[0]}")
    return [by_rank[rank] for rank in range(len(by_rank))]


def param_groups(state: Mapping[str, Any]) -> list[tuple[str, _Shape]]:
    return [
        (name, tuple(shape)) for group in state["param_shapes"] for name, shape in group.items()
    ]


def _read_stages_1_and_2(place: Path, states: Sequence[Mapping[str, Any]]) -> Source:
    model = load_file(place / "mp_rank_00_model_states.pt")
    if "param_slice_mappings" not in states[0]:
        raise CheckpointError(
            f"{place} was written by DeepSpeed {model.get('ds_version')}, whose optimizer states "
            "do not say which parameter they are of: load and save it with DeepSpeed 0.9 or later"
        )
    base = states[0]["base_optimizer_state"]
    if not isinstance(base, dict):
        raise CheckpointError(
            f"{place} is an elastic checkpoint (zero_optimization.elastic_checkpoint), which does "
            "not keep the groups' hyperparameters: load and save it without that key"
        )
    fragments: dict[str, dict[str, list[Tensor]]] = {}
    steps: dict[str, int] = {}
    for rank, state in enumerate(states):
        masters = state["single_partition_of_fp32_groups"]
        for group, master in enumerate(masters):
            where = f"{place}: group {group} of rank {rank}"
            kept = state["base_optimizer_state"]["state"].get(group, {})
            whole, step = split_states(kept, where, flat(master, f"{where}: master weights"))
            for name, address in state["param_slice_mappings"][group].items():
                if not isinstance(address, Record):
                    raise CheckpointCorruptError(
                        f"{where}: {type(address).__name__} is no address of a fragment"
                    )
                span = dict(zip(("numel", "start"), address.args, strict=False), **vars(address))
                start = int(span["start"])
                stop = start + int(span["numel"])
                steps[name] = step
                for kind, values in whole.items():
                    if not 0 <= start <= stop <= values.numel():
                        raise CheckpointCorruptError(
                            f"{where}: {kind} of {name} is at {start} to {stop} of {values.numel()}"
                        )
                    fragments.setdefault(name, {}).setdefault(kind, []).append(values[start:stop])
    trained = {
        name: (shape, fragments.get(name, {MASTER: []}), steps.get(name, 0))
        for name, shape in param_groups(model)
    }
    ties = {**storage_ties(model), **model["shared_params"]}
    params = _params(place, [model], named_like(model, ties), trained)
    return make_source(model, params, base["param_groups"], loss_scale_of(states[0]))


def _read_stage_3(place: Path, states: Sequence[Mapping[str, Any]]) -> Source:
    world = len(states)
    if states[0].get("ds_zero_partition_groups"):
        raise CheckpointError(f"{place} has experts over other ranks (AutoEP), not imported")
    models = [
        load_file(place / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        for rank in range(world)
    ]
    model = models[0]
    found: dict[str, tuple[_Shape, dict[str, list[Tensor]], int]] = {}
    for rank, state in enumerate(states):
        for index, shapes in enumerate(model["param_shapes"]):
            where = f"{place}: sub-group {index} of rank {rank}"
            kept = state["optimizer_state_dict"]["state"].get(index, {})
            master = flat(state["fp32_flat_groups"][index], f"{where}: master weights")
            whole, step = split_states(kept, where, master)
            start = 0
            for name, shape in shapes.items():
                numel = math.prod(shape)
                part = -(-numel // world)
                real = max(0, min(part, numel - rank * part))
                _, by_kind, _ = found.setdefault(name, (tuple(shape), {}, step))
                for kind, values in whole.items():
                    if start + real > values.numel():
                        raise CheckpointCorruptError(f"{where}: {kind} ends before {name}")
                    by_kind.setdefault(kind, []).append(values[start : start + real])
                start += part
    names = named_like(model, model["shared_params"])
    params = _params(place, models, names, found, is_stage_3=True)
    groups = states[0]["optimizer_state_dict"]["param_groups"]
    return make_source(model, params, groups, loss_scale_of(states[0]))


def _params(
    place: Path,
    models: Sequence[Mapping[str, Any]],
    names: Mapping[str, tuple[str, ...]],
    trained: _Trained,
    *,
    is_stage_3: bool = False,
) -> list[SourceParam]:
    """Return the parameters in the model's order. Those that are not ``trained`` are frozen.

    ``models`` are model states: of all ranks at stage 3, otherwise of rank 0.
    """
    params = []
    for first, all_names in names.items():
        value = models[0]["module"][first]
        shape = tuple(value.shape)
        if first in trained:
            shape, states, step = trained[first]
            params.append(SourceParam(all_names, shape, value.dtype, states, step=step))
            continue
        if is_stage_3:
            if first not in (models[0].get("frozen_param_shapes") or {}):
                raise CheckpointError(
                    f"{place} has no value of {first}, which was frozen: it was saved with "
                    "exclude_frozen_parameters; save it again without"
                )
            shape = tuple(models[0]["frozen_param_shapes"][first])
            values = [model["frozen_param_fragments"][first] for model in models]
            parts, left = [], math.prod(shape)
            for rank, fragment in enumerate(values):
                part = flat(fragment, f"{place}: {first} of rank {rank}")
                parts.append(part[: max(left, 0)])  # the last parts may end with padding
                left -= part.numel()
        else:
            parts = [flat(value, f"{place}: {first}")]
        params.append(SourceParam(all_names, shape, value.dtype, value=parts))
    return params


FOLDER = "zero"
_FILES = {MASTER: "fp32.pt", **{name: f"{name}.pt" for name in MOMENTS}}


def read_universal(place: Path) -> Source:
    files = sorted(place.glob("zero_pp_rank_*_model_states.pt"))
    is_stage_3 = bool(files)
    files = in_rank_order(files) if is_stage_3 else [place / "mp_rank_00_model_states.pt"]
    models = [load_file(file) for file in files]
    model = models[0]
    if model.get("mp_world_size", 1) != 1:
        raise CheckpointError(
            f"{place} is of tensor or pipeline parallelism, which is not imported"
        )
    optimizer = load_file(place / FOLDER / "optimizer_state.pt")
    names = named_like(model, {**storage_ties(model), **(model["shared_params"] or {})})
    by_group = optimizer.get("optimizer_state_dict", {}).get("state", {})
    step_of = {  # stage 3 has the steps by sub-group, not in a file per parameter
        name: int(by_group[index]["step"])
        for index, group in enumerate(model["param_shapes"])
        if "step" in by_group.get(index, {})
        for name in group
    }
    trained = {}
    for name, shape in param_groups(model):
        if name not in names:
            continue
        folder = place / FOLDER / name
        if not is_plain(name) or folder.is_symlink() or folder.parent.is_symlink():
            raise CheckpointCorruptError(
                f"{place}: parameter {name!r:.100} has no folder of its own in it"
            )
        states = {
            kind: (_value(folder / file),)
            for kind, file in _FILES.items()
            if kind == MASTER or (folder / file).exists()
        }
        step_file = folder / "step.pt"
        step = int(load_file(step_file)) if step_file.exists() else step_of.get(name, 0)
        trained[name] = shape, states, step
    where = place if is_stage_3 else files[0]
    params = _params(where, models, names, trained, is_stage_3=is_stage_3)
    return make_source(model, params, optimizer["param_groups"], loss_scale_of(optimizer))


def _value(path: Path) -> Tensor:
    content = load_file(path)
    if isinstance(content, Mapping):
        if content.get("vocab_tensor"):
            raise CheckpointError(f"{path} is cut to the vocabulary: Megatron's are not imported")
        content = content.get("param")
    if not isinstance(content, Tensor):
        raise CheckpointCorruptError(f"{path} has no tensor")
    return flat(content, str(path))


_States = dict[str, tuple[dict[str, Tensor], int]]
"""Elementwise states and number of steps of each parameter."""


def read_stage_0(place: Path, frozen: Iterable[str]) -> Source:
    """Read a checkpoint without ZeRO. ``frozen`` names parameters that were not trained."""
    model = load_file(place / "mp_rank_00_model_states.pt")
    saved = model["optimizer"]
    if saved is None:
        raise CheckpointError(
            f"{place} has no optimizer state: its files *_optim_states.pt are missing, or it was "
            "saved by an engine without an optimizer"
        )
    inner = saved.get("optimizer_state_dict", saved)
    names = named_like(model, storage_ties(model))
    unknown = sorted(set(frozen) - names.keys())
    if unknown:
        raise CheckpointError(f"{place} has no parameter {unknown[0]}: its names are {list(names)}")
    values = {n: model["module"][n] for n in names if n not in set(frozen)}
    if "fp32_groups_flat" in saved:
        found = _by_flat_masters(place, saved["fp32_groups_flat"], inner, values)
    elif "fp32_groups" in saved:
        found = _by_masters(place, saved["fp32_groups"], inner, values)
    else:
        found = _by_shape(place, inner, values)
    trained = {
        name: (tuple(values[name].shape), {kind: (t,) for kind, t in states.items()}, step)
        for name, (states, step) in found.items()
    }
    params = _params(place, [model], names, trained)
    return make_source(model, params, inner["param_groups"], loss_scale_of(saved, has_zero=False))


def _by_shape(place: Path, inner: Mapping[str, Any], values: Mapping[str, Tensor]) -> _States:
    """Identify parameters in fp32 by their shapes and the model's order."""
    by_shape: dict[Any, list[str]] = {}
    for name, value in values.items():
        by_shape.setdefault(value.shape, []).append(name)
    indices = [index for group in inner["param_groups"] for index in group["params"]]
    absent = [index for index in indices if not inner["state"].get(index)]
    shapes = {i: inner["state"][i]["exp_avg"].shape for i in indices if i not in absent}
    if len(inner["param_groups"]) == 1 and len(indices) == len(values):
        order = dict(zip(indices, values, strict=True))
    else:
        order = {}
        for shape, names in by_shape.items():
            alike = [index for index, found in shapes.items() if found == shape]
            owners = [g for g in inner["param_groups"] if set(alike) & set(g["params"])]
            if absent or len(owners) > 1 or len(alike) not in (0, len(names)):
                raise CheckpointError(
                    f"{place} does not say which parameters its optimizer states are of (stage 0 "
                    f"numbers them): {names} have the shape {tuple(shape)}, as {len(alike)} "
                    f"states in {len(owners)} groups. Name the parameters that were frozen, or "
                    "save the checkpoint at stage 1 with DeepSpeed"
                )
            order |= dict(zip(alike, names, strict=False))
    if any(len(names) > 1 for names in by_shape.values()) and order:
        print(
            "note: stage 0 in fp32 does not name parameters. Those of equal shapes are assumed to "
            "have been given to the optimizer in the model's order",
            file=sys.stderr,
            flush=True,
        )
    found: _States = {}
    for index, name in order.items():
        state = inner["state"].get(index) or {}
        where = f"{place}: optimizer state {index}"
        if state and shapes[index] != values[name].shape:
            raise CheckpointError(
                f"{where} has the shape {tuple(shapes[index])}, {name} has "
                f"{tuple(values[name].shape)}: name the parameters that were frozen"
            )
        found[name] = split_states(state, where, flat(values[name], f"{place}: {name}"))
    return found


def _by_masters(
    place: Path,
    groups: Sequence[Sequence[Tensor]],
    inner: Mapping[str, Any],
    values: Mapping[str, Tensor],
) -> _States:
    """Identify master weights by the weights that they round to."""
    found: _States = {}
    for number, masters in enumerate(groups):
        indices = inner["param_groups"][number]["params"]
        for index, master in zip(indices, masters, strict=True):
            where = f"{place}: master weight {index}"
            left = {n: v for n, v in values.items() if n not in found and v.shape == master.shape}
            name = _only(where, [n for n, v in left.items() if torch.equal(master.to(v.dtype), v)])
            state = inner["state"].get(index) or {}
            found[name] = split_states(state, where, flat(master, where))
    return found


def _by_flat_masters(
    place: Path, groups: Sequence[Tensor], inner: Mapping[str, Any], values: Mapping[str, Tensor]
) -> _States:
    """Identify slices of flat master weights by the weights that they round to."""
    found: _States = {}
    for number, group in enumerate(groups):
        where = f"{place}: group {number}"
        master = flat(group, where)
        (index,) = inner["param_groups"][number]["params"]
        whole, step = split_states(inner["state"].get(index) or {}, where, master)
        start = 0
        while start < master.numel():
            rest = master[start:]
            left = {
                n: v for n, v in values.items() if n not in found and 0 < v.numel() <= rest.numel()
            }
            alike = [
                n
                for n, v in left.items()
                if torch.equal(rest[: v.numel()].view(v.shape).to(v.dtype), v)
            ]
            name = _only(f"{where}, from element {start} on,", alike)
            stop = start + values[name].numel()
            found[name] = {kind: t[start:stop] for kind, t in whole.items()}, step
            start = stop
    return found


def _only(where: str, names: Sequence[str]) -> str:
    if not names:
        raise CheckpointError(
            f"{where} is of no parameter: the weights are not the master weights, rounded; save it "
            "at stage 1 with DeepSpeed"
        )
    if len(names) > 1:
        raise CheckpointError(
            f"{where} rounds to the weights of {len(names)} parameters, among them {names[:5]}, "
            "and stage 0 does not say whose it is. Name the parameters that were frozen, or save "
            "the checkpoint at stage 1 with DeepSpeed"
        )
    return names[0]
