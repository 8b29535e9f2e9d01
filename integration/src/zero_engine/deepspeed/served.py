"""DeepSpeed's module paths: the module of this package that serves each, or why it is refused.

    served   most modules stand under DeepSpeed's own path
    aliases  `ALIASES` has the paths whose content stands elsewhere
    refused  any other module of DeepSpeed can be imported. The first use (a call, a subclass, an
             attribute, a comparison) raises one error that says what to do

A served module has all of DeepSpeed's public names, which ``deepspeed_names.json`` lists. The names
that are not served are `Unserved`. So a module here needs no ``__all__``.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from zero_engine.deepspeed.errors import Unserved

VERSION = "0.19.8"
"""The release of DeepSpeed whose interface this is."""
INNER = "it is an inner part of DeepSpeed, which works differently here"

_NAMES_BY_REASON = {
    "there is no pipeline parallelism here; stage 3 with offload_param holds large models": (
        "pipe runtime.pipe PipelineEngine PipelineModule LayerSpec TiedLayerSpec"
    ),
    "there is no expert parallelism here; a model's own experts are sharded at stage 3": "moe",
    "this engine trains; serve the saved model with an inference library": (
        "inference model_implementations ops.transformer runtime.hybrid_engine "
        "runtime.hybrid_engine_graph runtime.rollout init_inference default_inference_config "
        "InferenceEngine DeepSpeedInferenceConfig DeepSpeedHybridEngine replace_transformer_layer "
        "revert_transformer_layer DeepSpeedTransformerLayer DeepSpeedTransformerConfig"
    ),
    "there is no tensor parallelism here; use zero_optimization stage 3": (
        "module_inject runtime.tensor_parallel runtime.domino tp_model_init set_autotp_mode"
    ),
    "there is no sequence parallelism here; use activation checkpointing": (
        "sequence runtime.sequence_parallel"
    ),
    "there is no compression of models here": "compression linear runtime.weight_quantizer",
    "there is no autotuner here; 'zero-engine plan' says what fits": "autotuning",
    "DeepSpeed's own kernels are not served; use torch's modules": (
        "ops.compile ops.deepspeed4science ops.fp_quantizer ops.gds ops.quantizer "
        "ops.random_ltd ops.triton_ops ops.pin_memory"
    ),
    "DeepSpeed has removed MiCS, too; use zero_optimization.zero_hpz_partition_size, which keeps a "
    "second shard of the parameters on each node": "runtime.zero.MiCS_Init runtime.zero.mics",
    "DeepSpeed's data pipeline is not served; use a torch DataLoader": "runtime.data_pipeline",
    "its step depends on the norm of whole parameters, and the engine updates slices: use "
    "FusedAdam or FusedLion": "ops.lamb",
    "checkpoints load at any stage and number of ranks; see deepspeed.utils.zero_to_fp32": (
        "checkpoint.DeepSpeedCheckpoint checkpoint.ZeROCheckpoint "
        "checkpoint.enable_universal_checkpoint"
    ),
    "a checkpoint is safetensors here: get_fp32_state_dict_from_zero_checkpoint(folder) reads its "
    "values": "utils.zero_to_fp32.get_optim_files utils.zero_to_fp32.get_model_state_file",
    INNER: (
        "compat compile constants datastates env_report git_version_info "
        "git_version_info_installed io nvme profiling accelerator checkpoint comm launcher monitor "
        "ops runtime utils"
    ),
}
"""DeepSpeed's modules (with all that is below them) and top-level names, by why they are refused.

A module that `zero_engine.deepspeed` has is served, wherever it stands here.
"""
_REASONS = {name: reason for reason, names in _NAMES_BY_REASON.items() for name in names.split()}


class RefusedModule(ModuleType):
    """A module of DeepSpeed that is not served: every name in it is an `Unserved`."""

    def __init__(self, name: str, served_name: str, reason: str) -> None:
        super().__init__(name, f"deepspeed.{served_name} is not served: {reason}")
        self._served_name = served_name
        self._reason = reason

    def __getattr__(self, name: str) -> Unserved:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return _unserved(f"{self._served_name}.{name}", self._reason)

    def __setattr__(self, name: str, value: object) -> None:
        # Nothing here would read what a script assigns.
        is_imports = name.startswith("_") or isinstance(value, ModuleType)
        if not is_imports:
            _unserved(f"{self._served_name}.{name}", self._reason)()
        super().__setattr__(name, value)


def reason_to_refuse(name: str) -> str | None:
    """Return why ``deepspeed.NAME`` is refused, None if DeepSpeed has no such name."""
    while name:
        if name in _REASONS:
            return _REASONS[name]
        name = name.rpartition(".")[0]
    return None


def complete(module: str, path: str) -> None:
    """Give ``zero_engine.deepspeed.MODULE`` DeepSpeed's public names.

    Those that it has become its ``__all__``, unless it has one. The others are `Unserved`.

    Args:
        module: without "zero_engine.deepspeed."; "" is that package.
        path: the path of DeepSpeed's module, without "deepspeed.".
    """
    full_name = f"zero_engine.deepspeed.{module}".removesuffix(".")
    found = sys.modules[full_name]
    names = names_by_module()[path]

    def find(name: str) -> Unserved:
        dotted = f"{path}.{name}".removeprefix(".")
        if name not in names and dotted not in _REASONS:
            raise AttributeError(f"module {full_name!r} has no attribute {name!r}")
        return _unserved(dotted, reason_to_refuse(dotted) or INNER)

    vars(found)["__getattr__"] = find
    vars(found).setdefault("__all__", list(served_among(names, found)))


def served_among(names: Iterable[str], module: ModuleType) -> dict[str, Any]:
    """Return those of ``names`` that ``module`` has. Its modules (``dist``) are not DeepSpeed's."""
    content = vars(module)
    own = {name: content[name] for name in names if name in content}
    return {name: value for name, value in own.items() if not isinstance(value, ModuleType)}


@cache
def names_by_module() -> dict[str, list[str]]:
    """Return the public names of DeepSpeed 0.19.8 by module, for the modules that are served.

    ``tests/support/deepspeed_names.py`` writes the table.
    """
    path = Path(__file__).parent / "deepspeed_names.json"
    table: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    return table


def _unserved(name: str, reason: str) -> Unserved:
    return Unserved(name, reason, could_be_ours=reason == INNER)


_HOME = "zero_engine.deepspeed"
_CHECKPOINTING = "runtime.activation_checkpointing"

ALIASES: Mapping[str, str] = {
    "utils": (
        "dataloader utils.logging utils.tensor_fragment utils.usage "
        "utils.z3_leaf_module:z3_leaf_module"
    ),
    "zero": "zero.partition_parameters:unregister_external_parameter zero.tiling",
    "accelerator.abstract_accelerator": "accelerator",
    "accelerator.cpu_accelerator": "accelerator:CpuAccelerator",
    "accelerator.real_accelerator": "accelerator",
    "checkpoint.utils": "checkpoint",
    "comm.comm": "comm",
    "launcher.runner": "launcher",
    "monitor.config": "monitor",
    "monitor.monitor": "monitor",
    "ops.adagrad": "ops.optimizers",
    "ops.adagrad.cpu_adagrad": "ops.optimizers",
    "ops.adam": "ops.optimizers",
    "ops.adam.cpu_adam": "ops.optimizers",
    "ops.adam.fused_adam": "ops.optimizers",
    "ops.lamb": "",
    "ops.lamb.fused_lamb": "",
    "ops.lion": "ops.optimizers",
    "ops.lion.cpu_lion": "ops.optimizers",
    "ops.lion.fused_lion": "ops.optimizers",
    "ops.aio": "ops.op_builder",
    "ops.op_builder.all_ops": "ops.op_builder",
    "ops.op_builder.builder": "ops.op_builder",
    "runtime": "",
    _CHECKPOINTING: "",
    f"{_CHECKPOINTING}.checkpointing": "checkpointing",
    "runtime.base_optimizer": "engine.optimizer",
    "runtime.config": "initialize config.deepspeed_config",
    "runtime.dataloader": "dataloader",
    "runtime.engine": "engine.engine",
    "runtime.lr_schedules": "lr_schedules",
    "runtime.utils": "utils.usage",
    "runtime.zero": "zero:unregister_external_parameter",
    "runtime.zero.offload_config": "zero.offload_config",
    "runtime.zero.partition_parameters": "zero.partition_parameters",
    "runtime.zero.tiling": "zero.tiling",
    "utils.init_on_device": "utils.usage",
    "utils.nvtx": "utils.usage",
}
"""DeepSpeed's path, and the modules that have its names.

"module:name" adds a name that DeepSpeed's module does not have. A row may use those above it.
"""

_DEEPSPEEDS: Mapping[str, str] = {
    "checkpointing": f"{_CHECKPOINTING}.checkpointing",
    "zero": "runtime.zero",
}
"""Modules under a name by which DeepSpeed has only an attribute, and their path there."""


def serve() -> None:
    """Make the modules of `ALIASES`, and refuse the other modules and names of DeepSpeed."""
    sys.meta_path.append(_Refused())
    for path, sources in ALIASES.items():
        _fill(_module(path), names_by_module()[_DEEPSPEEDS.get(path, path)], sources)
    for path in (*names_by_module(), *_DEEPSPEEDS):
        if f"{_HOME}.{path}".removesuffix(".") in sys.modules:
            complete(path, _DEEPSPEEDS.get(path, path))


def _module(path: str) -> ModuleType:
    """Return the module that serves ``path``, made if there is no such file here."""
    name = f"{_HOME}.{path}"
    if name not in sys.modules:
        sys.modules[name] = module = ModuleType(name, f"``deepspeed.{path}``.")
        module.__spec__ = ModuleSpec(name, None)
        outer, _, last = name.rpartition(".")
        parent = sys.modules[outer]
        assert parent.__spec__ is not None, "it was imported, or made here"
        if parent.__spec__.submodule_search_locations is None:  # one file or none, as yet
            parent.__path__ = parent.__spec__.submodule_search_locations = []
        setattr(parent, last, module)
    return sys.modules[name]


def _fill(module: ModuleType, names: Sequence[str], sources: str) -> None:
    """Give ``module`` those of ``names`` that ``sources`` have, and those that they add."""
    found: dict[str, Any] = {}
    for source in sources.split():
        home, _, added = source.partition(":")
        found |= served_among([*names, added], importlib.import_module(f"{_HOME}.{home}"))
    vars(module).update(found, __all__=list(found))


class _Refused(MetaPathFinder, Loader):
    """Finder of DeepSpeed's modules that are not served. Asked after all others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix(f"{_HOME}.")
        is_refused = name != fullname and reason_to_refuse(name) is not None
        return ModuleSpec(fullname, self, is_package=True) if is_refused else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        name = spec.name.removeprefix(f"{_HOME}.")
        return RefusedModule(spec.name, name, reason_to_refuse(name) or "")

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it was made."""
