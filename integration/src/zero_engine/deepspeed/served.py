"""DeepSpeed's module paths, and the module of this package that serves each.

    served   most modules stand under DeepSpeed's own path
    aliases  `ALIASES` has the paths whose content stands elsewhere
    refused  any other module of DeepSpeed can be imported, and its first use raises

Every served module has all of DeepSpeed's public names. The names that are not served are
`Unserved`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from zero_engine.deepspeed.refusal import (
    RefusedModule,
    names_by_module,
    reason_to_refuse,
    refuse_other_names,
)

__all__ = ["ALIASES", "serve"]

_HOME = "zero_engine.deepspeed"
_CHECKPOINTING = "runtime.activation_checkpointing"

ALIASES: Mapping[str, str] = {
    "checkpoint.utils": "checkpoint: clone_tensors_for_torch_save",
    "comm.comm": "comm",
    "launcher.runner": "launcher",
    "monitor.config": (
        "monitor: CSVConfig CometConfig DeepSpeedMonitorConfig TensorBoardConfig WandbConfig "
        "get_monitor_config"
    ),
    "monitor.monitor": "monitor: MonitorMaster",
    "ops.adagrad.cpu_adagrad": "ops.adagrad",
    "ops.adam.cpu_adam": "ops.adam: DeepSpeedCPUAdam",
    "ops.adam.fused_adam": "ops.adam: FusedAdam",
    "ops.lamb": "",
    "ops.lamb.fused_lamb": "",
    "ops.lion.cpu_lion": "ops.lion: DeepSpeedCPULion",
    "ops.lion.fused_lion": "ops.lion: FusedLion",
    "ops.op_builder.all_ops": "ops.op_builder: ALL_OPS",
    "ops.op_builder.builder": "ops.op_builder: OpBuilder",
    "runtime": "",
    _CHECKPOINTING: "",
    f"{_CHECKPOINTING}.checkpointing": "checkpointing",
    "runtime.base_optimizer": "engine.optimizer: DeepSpeedOptimizer",
    "runtime.config": "initialize: DeepSpeedConfigError",
    "runtime.dataloader": "dataloader",
    "runtime.engine": "engine.engine",
    "runtime.lr_schedules": "lr_schedules",
    "runtime.utils": "utils.usage",
    "runtime.zero": "zero",
    "runtime.zero.partition_parameters": "zero.partition_parameters",
}
"""DeepSpeed's path, and the module that has its names (all of ``__all__``, or those given)."""

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "accelerator": ("accelerator.real_accelerator",),
    "utils": (
        *("dataloader: RepeatingLoader", "utils.init_on_device", "utils.nvtx"),
        "utils.logging: log_dist log_dist_once logger set_log_level_from_string",
        *("utils.tensor_fragment", "utils.z3_leaf_module"),
    ),
    "zero": (
        "zero.external",
        "zero.partition_parameters: GatheredParameters Init ZeroParamStatus ZeroParamType "
        "unwrap_model_for_generation",
    ),
}
"""Packages that have no names but those of these modules."""

_DEEPSPEEDS: Mapping[str, str] = {
    "checkpointing": f"{_CHECKPOINTING}.checkpointing",
    "zero": "runtime.zero",
}
"""Modules under a name by which DeepSpeed has only an attribute, and their path there."""


def serve() -> None:
    """Make the modules of `ALIASES`, and refuse the other modules and names of DeepSpeed."""
    sys.meta_path.append(_Refused())
    for path, sources in PACKAGES.items():
        _fill(importlib.import_module(f"{_HOME}.{path}"), sources)
    for path, source in ALIASES.items():
        _make(path, source)
    for path in (*names_by_module(), *_DEEPSPEEDS):
        if f"{_HOME}.{path}".removesuffix(".") in sys.modules:
            refuse_other_names(path, _DEEPSPEEDS.get(path, path))


def _make(path: str, source: str) -> None:
    module = ModuleType(f"{_HOME}.{path}", f"``deepspeed.{path}``.")
    module.__spec__ = ModuleSpec(module.__name__, None)
    _fill(module, [source] if source else [])
    sys.modules[module.__name__] = module
    parent, _, name = module.__name__.rpartition(".")
    _make_package(sys.modules[parent])
    setattr(sys.modules[parent], name, module)


def _fill(module: ModuleType, sources: Sequence[str]) -> None:
    """Give ``module`` the names of ``sources``."""
    found: dict[str, Any] = {}
    for source in sources:
        home, _, names = source.partition(":")
        content = importlib.import_module(f"{_HOME}.{home}")
        found |= {name: getattr(content, name) for name in names.split() or content.__all__}
    vars(module).update(found, __all__=list(found))


def _make_package(module: ModuleType) -> None:
    """Let ``module``, which is one file or none, have submodules."""
    assert module.__spec__ is not None, "it was imported, or made here"
    if module.__spec__.submodule_search_locations is None:
        module.__path__ = module.__spec__.submodule_search_locations = []


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
