"""Names that moved, under their old import paths for one release, with a DeprecationWarning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import nn

from zero_core.plugins import install_command
from zero_core.sharded_model import ShardedModel

_PARTITIONED = "zero_engine.deepspeed.zero.partitioned"

_SAME_NAMES: Mapping[str, str] = {
    "access": "step.states: GRAD StateAccess",
    "accumulation": "optim.train_state: Accumulation",
    "activations": "plan.activations: trace_step",
    "adam": "optim.adam: Adam corrected_update moments_of",
    "arena": "sharded.pool: Allocate Arena BufferPool allocator; _libc: release_free_pages",
    "arrivals": "runtime.order: Forward",
    "autograd": "_torch: is_in_backward requires_grad",
    "buffers": "runtime.buffers: BufferSync",
    "checkpoint_files": (
        "checkpoint.files: FORMAT MANIFEST VALUE VERSION Reader Weight find read_buffers "
        "read_manifest read_weights"
    ),
    "collectives": (
        "comm.control: ControlGroup; comm.fused_sum: sum_in_rank_order; "
        "comm.device_library: all_gather_single"
    ),
    "comm_protocols": (
        "protocols: EXACT_GRADIENTS EXACT_PARAMETERS Collectives CollectivesFactory Work"
    ),
    "comm_report": "comm.meter: FACTS GRADIENTS PARAMETERS Meter",
    "compiling": "_torch: outside_graphs unless_compiling",
    "config_blocks": (
        "config.blocks: DTYPES ActivationCheckpointingConfig Bf16Config Config DataTypesConfig "
        "Fp16Config LeafModuleConfig LocoConfig OffloadOptimizerConfig OffloadParamConfig "
        "OptimizerConfig SchedulerConfig ZeroConfig as_whole"
    ),
    "config_rules": "config.blocks: UNNEEDED; config.rules: check_rules find_unneeded",
    "deferred": "init.deferred: deferred_init is_recorded_innermost recorded recordings_of",
    "discovery": "layout.discovery: Discovered LeafRule discover note_reader",
    "early": "step.speculation: updates_in_backward",
    "evaluation": "sharded_model: for_evaluation",
    "export": "checkpoint.export: export_safetensors full_state_dict",
    "forecast": "plan.forecast: Forecast MemoryUse buffer_bytes num_gathers",
    "initial": "init.values: InitialValues",
    "lion": "optim.lion: Lion",
    "lr_schedules": (
        "optim.schedules.factory: SCHEDULERS make_scheduler; optim.schedules.base: "
        "IterationSchedule Schedule; optim.schedules.one_cycle: LRRangeTest OneCycle; "
        "optim.schedules.warmup: WarmupCosineLR WarmupDecayLR WarmupLR"
    ),
    "memory": "sharded.memory: Memory; sharded.gradient_plan: accumulated_dtype communicated_dtype",
    "muon": "optim.muon: Muon split_groups tag_matrices",
    "native": "comm.device: share_memory",
    "one_cycle": "optim.schedules.one_cycle: LRRangeTest OneCycle",
    "offload_share": "blueprint: check_patterns",
    "optimizer": ("step.optimizer: EngineOptimizer; optim.factory: has_kernel_rule make_optimizer"),
    "owners": "sharded_model: engine_of",
    "parts": "plugins: COLLECTIVES KERNELS PARAM_TIERS TIERS has_part load_part",
    "plan_result": "plan.result: Choice Plan Table format_bytes",
    "precision": "optim.train_state: LossScaler; _torch: cast_floats; step.gradient: clip_factor",
    "pretrained": "checkpoint.pretrained: Loaded load_pretrained",
    "recompute": "runtime.recompute: Recompute",
    "resting": "sharded.param_offload: LocalStore",
    "schedule": (
        "optim.schedules.base: IterationSchedule Rate Schedule check_state per_group resume_rates "
        "set_rates torch_optimizer whole"
    ),
    "shared_memory": "comm.shared_memory: SharedMemory",
    "state": "sharded.sharded_state: MASTER ShardedState",
    "tape": "init.tape: Entry Recording Ref storage_of zeroed",
    "tier": "optim.device_tier: DeviceTier; optim.probe: optimizer_options",
    "topology": "comm.topology: Ranks count_per_node find_ranks",
    "traffic": "comm.meter: Links Traffic",
    "traffic_choices": "plan.choices: TrafficChoice",
    "unit": "sharded.unit: Unit",
    "warmup": "optim.schedules.warmup: WarmupCosineLR WarmupDecayLR WarmupLR",
    "weight_files": "checkpoint.safetensors_files: StoredTensor find_tensors",
    "wire": "comm.p2p: Kind",
}
"""Old module, and where its names are now, both below ``zero_core``: "new: names; new: names"."""

_FURTHER: Mapping[str, Mapping[str, str]] = {
    "zero_core.comm_protocols": {"NativeCollectives": "zero_core.protocols:TransportCollectives"},
    "zero_core.ending": {
        "give_back": "zero_core:give_back",
        "leave_parked": f"{_PARTITIONED}:leave_partitioned",
    },
    "zero_core.evaluation": {"EvaluationEngine": "zero_core:ShardedModel"},
    "zero_core.parked": {
        "make_ordinary": "zero_core.init.values:make_ordinary",
        "unparked": f"{_PARTITIONED}:gathered_params",
    },
    "zero_core.sharded_init": {
        "Made": f"{_PARTITIONED}_init:Made",
        "shard_module": f"{_PARTITIONED}_init:partition_module",
        "sharded_init": f"{_PARTITIONED}_init:partitioned_init",
    },
}
"""Old module, name in it, and where the object is now, of names that changed or left."""


def _moved() -> Mapping[str, Mapping[str, str]]:
    found = {old: dict(names) for old, names in _FURTHER.items()}
    for old, modules in _SAME_NAMES.items():
        places = found.setdefault(f"zero_core.{old}", {})
        for module in modules.split("; "):
            new, _, names = module.partition(": ")
            places |= {name: f"zero_core.{new}:{name}" for name in names.split()}
    return found


MOVED = _moved()
"""Old module, name in it, and where the object is now (``module:name``)."""


class _Moved(ModuleType):
    """A module under its old name, which serves the names of the new one."""

    def __getattr__(self, name: str) -> Any:
        place = MOVED[self.__name__].get(name)
        if place is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module, _, new_name = place.partition(":")
        warnings.warn(
            f"{self.__name__}.{name} is now {module}.{new_name}; the old name goes with the next "
            "release",
            DeprecationWarning,
            stacklevel=2,
        )
        try:
            return getattr(importlib.import_module(module), new_name)
        except ModuleNotFoundError as error:
            if error.name != "zero_engine":
                raise
            raise ImportError(
                f"{self.__name__}.{name} has left zero-core: it is {module}.{new_name} of "
                f"zero-engine, which is not installed here: {install_command('zero-engine')}"
            ) from None


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Moved(spec.name, __doc__)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing, as names are resolved at their first use."""


def give_back(
    engine: ShardedModel, *, dtype: torch.dtype | None = None, drops_partial: bool = False
) -> nn.Module:
    """Call `zero_core.ShardedModel.unwrap`, the new name."""
    warnings.warn(
        "zero_core.give_back(engine) is now engine.unwrap(); the old name goes with the next "
        "release",
        DeprecationWarning,
        stacklevel=2,
    )
    return engine.unwrap(dtype=dtype, drops_partial=drops_partial)


def install() -> None:
    """Serve the old modules to ``import``, after everything that Python finds by itself."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
