"""DeepSpeed's module paths, and the module of this package that serves each.

    served   most modules stand under DeepSpeed's own path
    aliases  `ALIASES` has the paths whose content stands elsewhere
    refused  any other module of DeepSpeed can be imported, and its first use raises

A served module has all of DeepSpeed's public names, which ``deepspeed_names.json`` lists. The names
that are not served are `Unserved`. So a module here needs no ``__all__``.
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
    complete,
    names_by_module,
    reason_to_refuse,
    served_among,
)

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
