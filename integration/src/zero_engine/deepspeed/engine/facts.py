"""Facts that scripts ask a DeepSpeed engine for, by methods of DeepSpeed's names."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_core import Config, Engine, ShardedModel
from zero_engine.deepspeed.config.deepspeed_config import DeepSpeedConfig
from zero_engine.deepspeed.config.settings import Settings
from zero_engine.deepspeed.utils.groups import get_data_parallel_group

_UNSERVED = """
    aio_config all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_no_retain
    autotuning_end_profile_step autotuning_metric autotuning_metric_path
    autotuning_model_info_path autotuning_start_profile_step buffered_allreduce_fallback
    checkpoint_serialization_enabled checkpoint_writer_enabled clip_fp32_gradients
    collect_python_gc compile_zero_optimization_stage cpuadam_cores_perc
    curriculum_learning_config data_efficiency_config data_sampling_config get_autosp_backend
    get_autotp_backend get_compile_time get_deepcompile_backend get_deepspeed_compile_backend
    get_optimizer_configuration get_wall_clock_timers is_iterable_style_dataset
    is_map_style_dataset is_sanity_checks_enabled load_moe_state_dict
    optimizer_legacy_fusion print_forward_breakdown random_ltd_config random_ltd_initialize
    register_compile_pass set_custom_curriculum_learning_schedule
    set_data_post_process_func set_train_micro_batch_size sparse_all_gather sparse_allreduce
    sparse_allreduce_bucket sparse_allreduce_no_retain swap_tensor_config tensor_parallel_config
    uses_parallelization_pass_only zenflow_config
    zero_log_trace_cache_warnings zero_save_muon_momentum_buffer_in_memory
"""
UNSERVED = frozenset(_UNSERVED.split())
"""Public methods of DeepSpeed's engine that this one does not have: asked for, they are refused."""
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_SAFE_MODULES = (
    *("torch.nn.modules.linear.Linear", "torch.nn.modules.conv.Conv1d"),
    *("torch.nn.modules.conv.Conv2d", "torch.nn.modules.conv.Conv3d"),
)
_Method = Callable[[Any], Any]


def value_of(path: str) -> _Method:
    """Return a method that returns the object's ``path``, dotted."""

    def method(self: Any) -> Any:
        return reduce(getattr, path.split("."), self)

    method.__doc__ = f"Return ``{path}``."
    return method


def _key(path: str) -> _Method:
    """Return a method that reads the configuration in effect under ``path``."""
    return value_of(f"core.config.{path}")


def _zero(name: str) -> _Method:
    return _key(f"zero_optimization.{name}")


def _as_given(name: str) -> _Method:
    """Return a method that returns attribute ``name`` of the configuration as it was given."""
    return value_of(f"_config.{name}")


def _always(value: Any, why: str) -> _Method:
    """Return a method that returns ``value``. ``why`` becomes its docstring."""

    def method(self: Facts) -> Any:
        return value

    method.__doc__ = f"Return {value}: {why}."
    return method


class Facts:
    """Values of the configuration in effect and the engine's counters. A base of the engine."""

    core: ShardedModel
    settings: Settings
    module: nn.Module
    client_optimizer: Any
    _config: DeepSpeedConfig

    def _training_core(self, what: str) -> Engine:
        """Return the core, of which ``what`` is asked, if it trains."""
        if not isinstance(self.core, Engine):
            raise RuntimeError(
                f"{what}() of an engine without an optimizer: give initialize() one, or name one "
                "in the configuration"
            )
        return self.core

    def _live_core(self, what: str) -> Engine:
        """Return the core, of which ``what`` is asked, if it trains and has not ended."""
        core = self._training_core(what)
        if not any(map(core.owns, core.module.parameters())):
            raise RuntimeError(
                f"{what}() of an engine that was ended, by destroy() or by another initialize() of "
                "its model: use the newer one"
            )
        return core

    # -------------------------------------------------------------- the engine

    global_steps = property(value_of("core.global_steps"))
    micro_steps = property(value_of("core.micro_steps"))
    skipped_steps = property(value_of("core.skipped_steps"))
    device = property(value_of("core.device"))
    global_rank = property(value_of("core.rank"))
    world_size = dp_world_size = property(value_of("core.world_size"))
    get_data_parallel_rank = value_of("core.rank")
    train_micro_batch_size_per_gpu = value_of("core.train_micro_batch_size_per_gpu")
    gradient_accumulation_steps = value_of("core.gradient_accumulation_steps")

    def train_batch_size(self) -> int:
        """Return the samples per step, of all ranks."""
        steps, ranks = self.core.gradient_accumulation_steps, self.core.world_size
        return self.core.train_micro_batch_size_per_gpu * steps * ranks

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return samples per step, samples per rank and micro-step, micro-steps per step."""
        micro = self.core.train_micro_batch_size_per_gpu
        return self.train_batch_size(), micro, self.core.gradient_accumulation_steps

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        return get_data_parallel_group()

    # ------------------------------------------------------------------- ZeRO

    zero_reduce_scatter = _zero("reduce_scatter")
    zero_overlap_comm = _zero("overlap_comm")
    zero_sub_group_size = _zero("sub_group_size")
    zero_reduce_bucket_size = _zero("reduce_bucket_size")
    zero_multi_rank_bucket_allreduce = _zero("use_multi_rank_bucket_allreduce")
    zero_allgather_bucket_size = _zero("allgather_bucket_size")
    zero_allgather_partitions = _zero("allgather_partitions")
    zero_allgather_sequential = _zero("stage3_allgather_sequential")
    zero_compute_grad_norm = _zero("compute_grad_norm")
    zero_contiguous_gradients = _zero("contiguous_gradients")
    zero_load_from_fp32_weights = _zero("load_from_fp32_weights")
    zero_elastic_checkpoint = _zero("elastic_checkpoint")
    zero_max_live_parameters = _zero("stage3_max_live_parameters")
    zero_max_reuse_distance = _zero("stage3_max_reuse_distance")
    zero_prefetch_bucket_size = _zero("stage3_prefetch_bucket_size")
    zero_module_granularity_threshold = _zero("stage3_module_granularity_threshold")
    zero_param_persistence_threshold = _zero("stage3_param_persistence_threshold")
    zero_model_persistence_threshold = _zero("stage3_model_persistence_threshold")
    zero_legacy_stage1 = _zero("legacy_stage1")
    zero_ignore_unused_parameters = _zero("ignore_unused_parameters")
    zero_round_robin_gradients = _zero("round_robin_gradients")
    zero_parameter_alignment = _zero("parameter_alignment")
    zero_hpz_partition_size = _zero("zero_hpz_partition_size")
    zero_quantized_weights = _zero("zero_quantized_weights")
    zero_quantized_nontrainable_weights = _zero("zero_quantized_nontrainable_weights")
    zero_quantized_gradients = _zero("zero_quantized_gradients")
    zero_partial_offload = _zero("offload_optimizer.ratio")

    zero_optimization_stage = _zero("stage")

    def zero_optimization(self) -> bool:
        return self.core.config.zero_optimization.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        return self.core.config.zero_optimization.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.core.config.zero_optimization.stage == 3

    is_first_weights_partition_group = zero_optimization_partition_weights

    def zero_offload_optimizer(self) -> Any:
        """Return the block ``offload_optimizer``, None where the state is on the device."""
        block = self.core.config.zero_optimization.offload_optimizer
        return None if block.device == "none" else block

    def zero_offload_param(self) -> Any:
        """Return the block ``offload_param``, None where parameters are on the device."""
        block = self.core.config.zero_optimization.offload_param
        return None if block.device == "none" else block

    def zero_use_cpu_optimizer(self) -> bool:
        return self.zero_offload_optimizer() is not None

    def zero_cpu_offload(self) -> bool:
        return self.core.config.zero_optimization.offload_optimizer.device == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        return self.core.config.zero_optimization.offload_optimizer.device == "nvme"

    zero_gather_16bit_weights_on_model_save = value_of(
        "settings.gather_16bit_weights_on_model_save"
    )
    zero_allow_untested_optimizer = _as_given("zero_allow_untested_optimizer")
    zero_force_ds_cpu_optimizer = _as_given("zero_force_ds_cpu_optimizer")

    # -------------------------------------------------------------- precision

    fp16_enabled = _key("fp16.enabled")
    bfloat16_enabled = _key("bf16.enabled")
    loss_scale = _key("fp16.loss_scale")
    gradient_clipping = _key("gradient_clipping")
    fp16_auto_cast = value_of("settings.fp16_auto_cast")
    fp16_master_weights_and_gradients = _key("fp16.fp16_master_weights_and_grads")
    bf16_master_weights_and_gradients = _key("bf16.bf16_master_weights_and_grads")
    bf16_optimizer_states = _key("bf16.bf16_optimizer_states")
    torch_autocast_enabled = _key("torch_autocast.enabled")
    torch_autocast_dtype = _key("autocast_dtype")

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        """Return the classes that were given, or DeepSpeed's. Autocast chooses by operation."""
        return list(self._config.torch_autocast_lower_precision_safe_modules or _SAFE_MODULES)

    @property
    def communication_data_type(self) -> torch.dtype:
        """Dtype in which gradients are reduced: the configuration's, or that of the parameters."""
        config: Config = self.core.config
        named = config.communication_data_type
        return _DTYPES[named] if named is not None else config.compute_dtype or torch.float32

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        fp16 = self.core.config.fp16
        return {
            "init_scale": 2**fp16.initial_scale_power,
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }

    def dynamic_loss_scale(self) -> bool:
        return self.core.config.fp16.loss_scale == 0.0

    def initial_dynamic_scale(self) -> float:
        return float(2.0**self.core.config.fp16.initial_scale_power)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of the parameters and of gradients as they are accumulated."""
        grads = _DTYPES[self.core.config.data_types.grad_accum_dtype or "fp32"]
        return self.core.config.compute_dtype or torch.float32, grads

    # --------------------------------------------------------------- watching

    steps_per_print = value_of("settings.steps_per_print")
    wall_clock_breakdown = value_of("settings.wall_clock_breakdown")
    dump_state = value_of("settings.dump_state")
    dataloader_drop_last = value_of("settings.dataloader_drop_last")
    memory_breakdown = value_of("settings.memory_breakdown")
    log_level = value_of("settings.log_level")
    flops_profiler_enabled = value_of("settings.flops_profiler.enabled")
    flops_profiler_recompute_fwd_factor = value_of("settings.flops_profiler.recompute_fwd_factor")
    flops_profiler_profile_step = value_of("settings.flops_profiler.profile_step")
    flops_profiler_module_depth = value_of("settings.flops_profiler.module_depth")
    flops_profiler_top_modules = value_of("settings.flops_profiler.top_modules")
    flops_profiler_detailed = value_of("settings.flops_profiler.detailed")
    flops_profiler_output_file = value_of("settings.flops_profiler.output_file")

    checkpoint_tag_validation_enabled = _as_given("checkpoint_tag_validation_enabled")
    checkpoint_tag_validation_fail = _as_given("checkpoint_tag_validation_fail")
    load_universal_checkpoint = _as_given("load_universal_checkpoint")
    use_node_local_storage = _as_given("use_node_local_storage")
    data_efficiency_enabled = _as_given("data_efficiency_enabled")

    # ------------------------------------------------------- what there is not

    mp_world_size = property(_always(1, "every rank is a data-parallel one"))
    get_model_parallel_rank = _always(0, "every rank is a data-parallel one")
    get_tensor_parallel_rank = _always(0, "every rank is a data-parallel one")
    sparse_tensor_module_names = property(_always(frozenset(), "gradients are dense"))
    get_sequence_parallel_group = _always(None, "every rank is a data-parallel one")
    autotp_size = _always(0, "no layer is split")
    managed_gradient_accumulation = value_of("settings.managed_gradient_accumulation")
    postscale_gradients = _always(True, "sums are in fp32, either order gives the same")
    gradient_predivide_factor = _always(1.0, "sums are in fp32")
    autotuning_enabled = _always(False, "zero-engine plan says what fits")
    autotuning_profile_model_info = _always(False, "zero-engine plan says what fits")
    curriculum_learning_enabled = _always(False, "give a sampler of your own")
    data_sampling_enabled = _always(False, "give a sampler of your own")
    random_ltd_enabled = _always(False, "it is not served")
    super_offload = _always(False, "it is not served")
    compile_autosp = _always(False, "DeepCompile is not served")
    compile_autotp = _always(False, "DeepCompile is not served")
    is_deepcompile_enabled = _always(False, "DeepCompile is not served")
    is_deepcompile_active = _always(False, "DeepCompile is not served")

    # ------------------------------------------------- the configuration as given

    def optimizer_name(self) -> str | None:
        """Return ``optimizer.type``, in DeepSpeed's spelling, or the class of the one given."""
        if self.client_optimizer is not None:
            return type(self.client_optimizer).__name__
        return self._config.optimizer_name

    optimizer_params = _as_given("optimizer_params")
    scheduler_name = _as_given("scheduler_name")
    scheduler_params = _as_given("scheduler_params")
