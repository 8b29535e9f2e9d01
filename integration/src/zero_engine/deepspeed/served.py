"""DeepSpeed's module paths, and the modules of this package that serve them.

A served module has DeepSpeed's own path (`_OWN`), or takes its names from modules with other paths
(`ALIASES`). Its other public names are `Unserved`. The remaining modules of DeepSpeed are refused:
they can be imported, and all their names are `Unserved`. A call, a subclass or an attribute of an
`Unserved` raises `NotServedError` with advice.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from zero_engine.deepspeed.errors import INNER, Unserved

VERSION = "0.19.8"
"""Release of DeepSpeed that has this interface."""

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
    "second shard of the parameters on each node": (
        "runtime.zero.MiCS_Init runtime.zero.mics zero.MiCS_Init zero.mics"
    ),
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
        "ops runtime utils zero"
    ),
}
"""DeepSpeed's modules (with their submodules) and top-level names, by the reason of refusal.

A module of `zero_engine.deepspeed` is served even if its name is here.
"""
_REASONS = {name: reason for reason, names in _NAMES_BY_REASON.items() for name in names.split()}


_HOME = "zero_engine.deepspeed"
_OWN = (
    "accelerator checkpoint checkpointing comm launcher monitor ops ops.op_builder utils "
    "utils.groups utils.logging utils.tensor_fragment utils.z3_leaf_module zero"
)
"""Modules at DeepSpeed's own path, except ``utils.zero_to_fp32``, which serves itself."""

_SERVED: Mapping[str, tuple[str, str]] = {
    "accelerator": (
        "accelerator",
        "DeepSpeedAccelerator get_accelerator is_current_accelerator_supported",
    ),
    "accelerator.abstract_accelerator": ("accelerator", "DeepSpeedAccelerator"),
    "accelerator.cpu_accelerator": ("accelerator", "CpuAccelerator DeepSpeedAccelerator"),
    "accelerator.real_accelerator": (
        "accelerator",
        "get_accelerator is_current_accelerator_supported",
    ),
    "checkpoint.utils": ("checkpoint", "clone_tensors_for_torch_save"),
    "checkpointing runtime.activation_checkpointing.checkpointing": (
        "checkpointing",
        "checkpoint configure get_* is_* model_parallel_cuda_manual_seed non_reentrant_checkpoint "
        "reset",
    ),
    "comm comm.comm": (
        "comm",
        "ProcessGroup ReduceOp all* barrier batch_isend_irecv broadcast* destroy_process_group "
        "gather get_* has_* inference_all_reduce init_distributed initialize_mesh_device irecv "
        "is_* isend log_summary monitored_barrier new_group recv reduce* scatter send",
    ),
    "launcher.runner": ("launcher", "DEEPSPEED_ENVIRONMENT_NAME main"),
    "monitor.config": ("monitor", "*Config get_monitor_config"),
    "monitor.monitor": ("monitor", "Monitor MonitorMaster"),
    "ops.adagrad ops.adagrad.cpu_adagrad": ("ops.optimizers", "DeepSpeedCPUAdagrad"),
    "ops.adam": ("ops.optimizers", "DeepSpeedCPUAdam FusedAdam"),
    "ops.adam.cpu_adam": ("ops.optimizers", "DeepSpeedCPUAdam"),
    "ops.adam.fused_adam": ("ops.optimizers", "FusedAdam"),
    "ops.aio": ("ops.op_builder", "AsyncIOBuilder"),
    "ops.lion": ("ops.optimizers", "DeepSpeedCPULion FusedLion"),
    "ops.lion.cpu_lion": ("ops.optimizers", "DeepSpeedCPULion"),
    "ops.lion.fused_lion": ("ops.optimizers", "FusedLion"),
    "ops.op_builder": ("ops.op_builder", "AsyncIOBuilder Fused*Builder OpBuilder"),
    "ops.op_builder.all_ops": ("ops.op_builder", "ALL_OPS"),
    "ops.op_builder.builder": ("ops.op_builder", "OpBuilder"),
    "runtime.base_optimizer": ("engine.optimizer", "DeepSpeedOptimizer"),
    "runtime.config": ("initialize config.deepspeed_config", "*_OPTIMIZER DeepSpeedConfig*"),
    "runtime.dataloader": ("dataloader", "DeepSpeedDataLoader RepeatingLoader"),
    "runtime.engine": ("engine.engine", "DeepSpeedDataLoader DeepSpeedEngine Offload*Enum"),
    "runtime.lr_schedules": (
        "lr_schedules",
        "[A-Z]*_* LRRangeTest OneCycle Warmup* add_tuning_arguments get_* override_* "
        "parse_arguments update_lr",
    ),
    "runtime.utils": ("utils.usage", "clip_grad_norm_ logger see_memory_usage set_random_seed"),
    "runtime.zero zero": (
        "zero.partition_parameters",
        "GatheredParameters Init TiledLinear* ZeroParam* *register_external_parameter "
        "unwrap_model_for_generation",
    ),
    "runtime.zero.offload_config zero.offload_config": ("engine.engine", "Offload*Enum"),
    "runtime.zero.partition_parameters": (
        "zero.partition_parameters",
        "GatheredParameters Init ZeroParam* get_accelerator init_distributed is_zero_param "
        "*register_external_parameter zero_wrapper_for_fp_tensor_constructor",
    ),
    "runtime.zero.tiling zero.tiling": ("zero.partition_parameters", "TiledLinear*"),
    "utils": (
        "dataloader utils.logging utils.tensor_fragment utils.usage utils.z3_leaf_module",
        "OnDevice RepeatingLoader instrument_w_nvtx log_dist* logger safe_* "
        "set_log_level_from_string *z3_leaf_*",
    ),
    "utils.groups": ("utils.groups", "get_*"),
    "utils.init_on_device": ("utils.usage", "OnDevice"),
    "utils.logging": ("utils.logging", "log_dist* logger set_log_level_from_string warning_once"),
    "utils.nvtx": ("utils.usage", "instrument_w_nvtx"),
    "utils.tensor_fragment": ("utils.tensor_fragment", "safe_*"),
    "utils.z3_leaf_module": ("utils.z3_leaf_module", "*z3_leaf_*"),
    "utils.zero_to_fp32": ("utils.zero_to_fp32", "convert_* get_fp32_* load_state_dict_*"),
}
"""DeepSpeed's paths, the modules here that they get names from, and patterns of the names."""
ALIASES: Mapping[str, str] = {
    path: sources
    for paths, (sources, _) in _SERVED.items()
    for path in paths.split()
    if path not in sources.split()
}
"""DeepSpeed's paths that are no paths here, and ``zero`` and ``utils``, with their modules here."""
_PATTERNS = {path: names.split() for paths, (_, names) in _SERVED.items() for path in paths.split()}

_SUBMODULES_BY_PACKAGE = {
    "accelerator": (
        "cuda_accelerator hpu_accelerator klxpu_accelerator mlu_accelerator mps_accelerator "
        "npu_accelerator sdaa_accelerator supa_accelerator xpu_accelerator"
    ),
    "checkpoint": (
        "affine affine_transfer autoep_affine autoep_universal autoep_zero3_metadata constants "
        "deepspeed_checkpoint ds_to_universal reshape_3d_utils reshape_meg_2d reshape_utils "
        "universal_checkpoint zero_checkpoint"
    ),
    "comm": "backend ccl config constants mori pg_utils reduce_op torch utils",
    "launcher": "constants launch launcher_helper multinode_runner",
    "monitor": "comet csv_monitor tensorboard utils wandb",
    "ops.adam": "multi_tensor_apply zenflow_cpu_adam zenflow_torch_adam",
    "ops.lion": "multi_tensor_apply",
    "ops.op_builder": (
        "async_io cpu dc evoformer_attn fp_quantizer fused_adam fused_lamb fused_lion gds hpu "
        "inference_core_ops inference_cutlass_builder klxpu mlu mps npu pin_memory "
        "pin_memory_load quantizer ragged_ops ragged_utils random_ltd sdaa spatial_inference "
        "stochastic_transformer supa transformer transformer_inference utils xpu"
    ),
    "runtime": (
        "bf16_optimizer checkpoint_engine chunked_cross_entropy comm compiler config_utils "
        "constants fp16 keep_in_fp32 model_checkpointing precision_config python_gc sparse_tensor "
        "state_dict_factory superoffload swap_tensor torch_autocast zenflow"
    ),
    "runtime.activation_checkpointing": "config offload_activations",
    "runtime.zero": (
        "config contiguous_memory_allocator leaf_module_config linear muon offload_states "
        "parameter_offload partitioned_param_coordinator partitioned_param_profiler stage3 "
        "stage_1_and_2 test utils"
    ),
    "utils": (
        "bwc comms_logging config debug exceptions mixed_precision_linkage module_utils numa "
        "pin_memory pin_memory_tracker static_cache timer torch types zero_to_fp32 zero_to_torch"
    ),
}
_SUBMODULES = {
    f"{package}.{name}"
    for package, names in _SUBMODULES_BY_PACKAGE.items()
    for name in names.split()
}
"""Refused modules in served packages. An import finds them. An attribute look-up fails."""


class RefusedModule(ModuleType):
    """A module of DeepSpeed that is not served. Its names resolve to an `Unserved`."""

    def __init__(self, name: str, served_name: str, reason: str) -> None:
        super().__init__(name, f"deepspeed.{served_name} is not served: {reason}")
        self._served_name = served_name
        self._reason = reason

    def __getattr__(self, name: str) -> Unserved:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return Unserved(f"{self._served_name}.{name}", self._reason)

    def __setattr__(self, name: str, value: object) -> None:
        # A script that patches DeepSpeed expects an effect, and there would be none.
        is_imports = name.startswith("_") or isinstance(value, ModuleType)
        if not is_imports:
            Unserved(f"{self._served_name}.{name}", self._reason)()
        super().__setattr__(name, value)


def reason_to_refuse(name: str) -> str | None:
    """Return why ``deepspeed.NAME`` is refused, or None."""
    while name:
        if name in _REASONS:
            return _REASONS[name]
        name = name.rpartition(".")[0]
    return None


def refuse_other_names(path: str) -> None:
    """Resolve public names that ``zero_engine.deepspeed.PATH`` lacks to an `Unserved`."""
    full_name = f"{_HOME}.{path}".removesuffix(".")
    module = sys.modules[full_name]

    def find(name: str) -> Unserved:
        dotted = f"{path}.{name}".removeprefix(".")
        if name.startswith("_") or dotted in _SUBMODULES:
            raise AttributeError(f"module {full_name!r} has no attribute {name!r}")
        return Unserved(dotted, reason_to_refuse(dotted) or INNER)

    vars(module)["__getattr__"] = find
    if path:
        vars(module)["__all__"] = list(_served_names(path, vars(module)))


def _served_names(path: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``content`` that ``deepspeed.PATH`` has."""
    return {
        name: value
        for name, value in content.items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and any(fnmatchcase(name, pattern) for pattern in _PATTERNS.get(path, ()))
    }


def serve() -> None:
    """Make the modules of `ALIASES`, and resolve other names of DeepSpeed to an `Unserved`."""
    sys.meta_path.append(_Refused())
    for path, sources in ALIASES.items():
        module = _module(path)
        for source in sources.split():
            content = vars(importlib.import_module(f"{_HOME}.{source}"))
            vars(module).update(_served_names(path, content))
    for path in ("", *_OWN.split(), *ALIASES):
        refuse_other_names(path)


def _module(path: str) -> ModuleType:
    name = f"{_HOME}.{path}".removesuffix(".")
    if name not in sys.modules:
        outer, _, last = path.rpartition(".")
        parent = _module(outer)
        sys.modules[name] = module = ModuleType(name, f"``deepspeed.{path}``.")
        module.__spec__ = ModuleSpec(name, None)
        assert parent.__spec__ is not None, "it was imported, or made here"
        if parent.__spec__.submodule_search_locations is None:  # a file so far, not a package
            parent.__path__ = parent.__spec__.submodule_search_locations = []
        setattr(parent, last, module)
        refuse_other_names(path)
    return sys.modules[name]


class _Refused(MetaPathFinder, Loader):
    """Finder of DeepSpeed's modules that are not served. Python asks it last."""

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
        """Do nothing: the module is complete."""
