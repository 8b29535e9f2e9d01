"""Methods under DeepSpeed's names that return an engine's configuration and counters."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import nn

from zero_core import Config, Engine, ShardedModel
from zero_core.config import DTYPES
from zero_engine.deepspeed.config.deepspeed_config import DeepSpeedConfig
from zero_engine.deepspeed.config.reader import Settings
from zero_engine.deepspeed.utils.groups import get_data_parallel_group

_SAFE_MODULES = (
    *("torch.nn.modules.linear.Linear", "torch.nn.modules.conv.Conv1d"),
    *("torch.nn.modules.conv.Conv2d", "torch.nn.modules.conv.Conv3d"),
)


def value_of(path: str) -> Callable[[Any], Any]:

    def method(self: Any) -> Any:
        return reduce(getattr, path.split("."), self)

    method.__doc__ = f"Return ``{path}``."
    return method


class Facts:
    """Base class of the engine: its configuration and counters."""

    core: ShardedModel
    settings: Settings
    module: nn.Module
    client_optimizer: Any
    _config: DeepSpeedConfig

    def _training_core(self, what: str) -> Engine:
        """Return ``self.core``. Raises RuntimeError if the engine only evaluates."""
        if not isinstance(self.core, Engine):
            raise RuntimeError(
                f"{what}() of an engine without an optimizer: give initialize() one, or name one "
                "in the configuration"
            )
        return self.core

    def _live_core(self, what: str) -> Engine:
        """Return ``self.core``. Raises RuntimeError if the engine only evaluates or has ended."""
        core = self._training_core(what)
        if not any(map(core.owns, core.module.parameters())):
            raise RuntimeError(
                f"{what}() of an engine that was ended, by destroy() or by another initialize() of "
                "its model: use the newer one"
            )
        return core

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
        steps, ranks = self.core.gradient_accumulation_steps, self.core.world_size
        return self.core.train_micro_batch_size_per_gpu * steps * ranks

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return samples per step, samples per rank and micro-step, micro-steps per step."""
        micro = self.core.train_micro_batch_size_per_gpu
        return self.train_batch_size(), micro, self.core.gradient_accumulation_steps

    local_rank = property(lambda self: int(os.environ.get("LOCAL_RANK", "0")))
    data_parallel_group = property(lambda self: get_data_parallel_group())

    zero_optimization_stage = value_of("core.config.zero_optimization.stage")
    zero_optimization = value_of("_config.zero_enabled")
    zero_partial_offload = value_of("core.config.zero_optimization.offload_optimizer.ratio")
    zero_multi_rank_bucket_allreduce = value_of(
        "core.config.zero_optimization.use_multi_rank_bucket_allreduce"
    )
    zero_gather_16bit_weights_on_model_save = value_of(
        "settings.gather_16bit_weights_on_model_save"
    )
    loss_scale = value_of("core.config.fp16.loss_scale")
    fp16_enabled = value_of("core.config.fp16.enabled")
    gradient_predivide_factor = value_of("core.config.gradient_predivide_factor")
    fp16_master_weights_and_gradients = value_of("core.config.fp16.fp16_master_weights_and_grads")
    bfloat16_enabled = value_of("core.config.bf16.enabled")
    bf16_master_weights_and_gradients = value_of("core.config.bf16.bf16_master_weights_and_grads")
    bf16_optimizer_states = value_of("core.config.bf16.bf16_optimizer_states")

    def zero_optimization_partition_gradients(self) -> bool:
        return self.core.config.zero_optimization.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.core.config.zero_optimization.stage == 3

    is_first_weights_partition_group = zero_optimization_partition_weights

    def zero_offload_optimizer(self) -> Any:
        block = self.core.config.zero_optimization.offload_optimizer
        return None if block.device == "none" else block

    def zero_offload_param(self) -> Any:
        block = self.core.config.zero_optimization.offload_param
        return None if block.device == "none" else block

    def zero_use_cpu_optimizer(self) -> bool:
        return self.zero_offload_optimizer() is not None

    def zero_cpu_offload(self) -> bool:
        return self.core.config.zero_optimization.offload_optimizer.device == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        return self.core.config.zero_optimization.offload_optimizer.device == "nvme"

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        """Return the configured classes, or DeepSpeed's defaults. Neither has an effect here."""
        return list(self._config.torch_autocast_lower_precision_safe_modules or _SAFE_MODULES)

    @property
    def communication_data_type(self) -> torch.dtype:
        """Dtype in which gradients are reduced: the configured one, or that of the parameters."""
        config: Config = self.core.config
        named = config.communication_data_type
        return DTYPES[named] if named is not None else config.compute_dtype or torch.float32

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

    def postscale_gradients(self) -> bool:
        return not self.core.config.prescale_gradients

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        grads = DTYPES[self.core.config.data_types.grad_accum_dtype or "fp32"]
        return self.core.config.compute_dtype or torch.float32, grads

    mp_world_size = property(lambda self: 1)  # every rank is a data-parallel one
    sparse_tensor_module_names = property(lambda self: frozenset())  # gradients are dense

    def optimizer_name(self) -> str | None:
        """Return ``optimizer.type`` in DeepSpeed's spelling, or the given optimizer's class."""
        if self.client_optimizer is not None:
            return type(self.client_optimizer).__name__
        return self._config.optimizer_name


_ZERO = "core.config.zero_optimization"
_KEYS = {
    ("zero_KEY", f"{_ZERO}.KEY"): """
        reduce_scatter overlap_comm sub_group_size reduce_bucket_size allgather_bucket_size
        allgather_partitions compute_grad_norm contiguous_gradients load_from_fp32_weights
        elastic_checkpoint legacy_stage1 ignore_unused_parameters round_robin_gradients
        parameter_alignment
    """,
    ("zero_KEY", f"{_ZERO}.stage3_KEY"): """
        allgather_sequential max_live_parameters max_reuse_distance prefetch_bucket_size
        module_granularity_threshold param_persistence_threshold model_persistence_threshold
    """,
    ("KEY", f"{_ZERO}.KEY"): """
        zero_hpz_partition_size zero_quantized_weights zero_quantized_gradients
        zero_quantized_nontrainable_weights
    """,
    ("flops_profiler_KEY", "settings.flops_profiler.KEY"): """
        enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file
    """,
    ("KEY", "settings.KEY"): """
        fp16_auto_cast steps_per_print wall_clock_breakdown dump_state dataloader_drop_last
        memory_breakdown log_level managed_gradient_accumulation
    """,
    ("KEY", "_config.KEY"): """
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer checkpoint_tag_validation_enabled
        checkpoint_tag_validation_fail load_universal_checkpoint use_node_local_storage
        data_efficiency_enabled optimizer_params scheduler_name scheduler_params gradient_clipping
        torch_autocast_enabled torch_autocast_dtype
    """,
}
"""Keys that have a method, by the method's name and the path of its value."""
_ABSENT = {
    **dict.fromkeys(("get_model_parallel_rank", "get_tensor_parallel_rank", "autotp_size"), 0),
    "get_sequence_parallel_group": None,
    **dict.fromkeys(
        (
            *("autotuning_enabled", "autotuning_profile_model_info", "curriculum_learning_enabled"),
            *("data_sampling_enabled", "random_ltd_enabled", "super_offload", "compile_autosp"),
            *("compile_autotp", "is_deepcompile_enabled", "is_deepcompile_active"),
        ),
        False,
    ),
}
"""Methods of DeepSpeed's engine that return the same value for every configuration."""


for (_name, _path), _keys in _KEYS.items():
    for _key in _keys.split():
        setattr(Facts, _name.replace("KEY", _key), value_of(_path.replace("KEY", _key)))
for _name, _value in _ABSENT.items():
    setattr(Facts, _name, lambda self, value=_value: value)
