"""Single keys that scripts ask a DeepSpeed engine for, by the method that is named after each."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import nn

from zero_core import Config, Engine
from zero_engine.deepspeed.settings import Settings

__all__ = ["BlockFacts"]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_Method = Callable[[Any], Any]


def _key(path: str) -> _Method:
    """A method that tells what the configuration in effect says under ``path``."""

    def method(self: BlockFacts) -> Any:
        return reduce(getattr, path.split("."), self.core.config)

    method.__doc__ = f"``{path}``."
    return method


def _setting(path: str) -> _Method:
    """A method that tells what was asked for beside zero-core's configuration."""

    def method(self: BlockFacts) -> Any:
        return reduce(getattr, path.split("."), self.settings)

    method.__doc__ = f"``{path}``."
    return method


def _always(value: Any, why: str) -> _Method:
    """A method that tells ``value``, and ``why`` it is always that."""

    def method(self: BlockFacts) -> Any:
        return value

    method.__doc__ = f"{value}: {why}."
    return method


class BlockFacts:
    """Answers by key; a base of the engine.

    Attributes:
        core: the engine that trains.
        settings: what was asked for beside it.
        module: the model itself.
    """

    core: Engine
    settings: Settings
    module: nn.Module

    # ------------------------------------------------------------------- ZeRO

    zero_reduce_scatter = _key("zero_optimization.reduce_scatter")
    zero_overlap_comm = _key("zero_optimization.overlap_comm")
    zero_sub_group_size = _key("zero_optimization.sub_group_size")
    zero_reduce_bucket_size = _key("zero_optimization.reduce_bucket_size")
    zero_multi_rank_bucket_allreduce = _key("zero_optimization.use_multi_rank_bucket_allreduce")
    zero_allgather_bucket_size = _key("zero_optimization.allgather_bucket_size")
    zero_allgather_partitions = _key("zero_optimization.allgather_partitions")
    zero_allgather_sequential = _key("zero_optimization.stage3_allgather_sequential")
    zero_compute_grad_norm = _key("zero_optimization.compute_grad_norm")
    zero_contiguous_gradients = _key("zero_optimization.contiguous_gradients")
    zero_load_from_fp32_weights = _key("zero_optimization.load_from_fp32_weights")
    zero_elastic_checkpoint = _key("zero_optimization.elastic_checkpoint")
    zero_max_live_parameters = _key("zero_optimization.stage3_max_live_parameters")
    zero_max_reuse_distance = _key("zero_optimization.stage3_max_reuse_distance")
    zero_prefetch_bucket_size = _key("zero_optimization.stage3_prefetch_bucket_size")
    zero_module_granularity_threshold = _key(
        "zero_optimization.stage3_module_granularity_threshold"
    )
    zero_param_persistence_threshold = _key("zero_optimization.stage3_param_persistence_threshold")
    zero_model_persistence_threshold = _key("zero_optimization.stage3_model_persistence_threshold")
    zero_legacy_stage1 = _key("zero_optimization.legacy_stage1")
    zero_ignore_unused_parameters = _key("zero_optimization.ignore_unused_parameters")
    zero_round_robin_gradients = _key("zero_optimization.round_robin_gradients")
    zero_parameter_alignment = _key("zero_optimization.parameter_alignment")
    zero_hpz_partition_size = _key("zero_optimization.zero_hpz_partition_size")
    zero_quantized_weights = _key("zero_optimization.zero_quantized_weights")
    zero_quantized_nontrainable_weights = _key(
        "zero_optimization.zero_quantized_nontrainable_weights"
    )
    zero_quantized_gradients = _key("zero_optimization.zero_quantized_gradients")
    zero_partial_offload = _key("zero_optimization.offload_optimizer.ratio")

    def is_first_weights_partition_group(self) -> bool:
        """Whether parameters are sharded: all ranks are one group."""
        return self.core.config.zero_optimization.stage == 3

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether optimizer state is in files."""
        return self.core.config.zero_optimization.offload_optimizer.device == "nvme"

    # -------------------------------------------------------------- precision

    fp16_master_weights_and_gradients = _key("fp16.fp16_master_weights_and_grads")
    bf16_master_weights_and_gradients = _key("bf16.bf16_master_weights_and_grads")
    bf16_optimizer_states = _key("bf16.bf16_optimizer_states")
    torch_autocast_enabled = _always(False, "call the model under torch.autocast yourself")
    torch_autocast_dtype = _always(None, "see torch_autocast_enabled")

    @property
    def communication_data_type(self) -> torch.dtype:
        """What gradients are reduced in: the configuration's, or that of the parameters."""
        config: Config = self.core.config
        named = config.communication_data_type
        return _DTYPES[named] if named is not None else config.compute_dtype or torch.float32

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """The dynamic loss scale's parameters, under DeepSpeed's names."""
        fp16 = self.core.config.fp16
        return {
            "init_scale": 2**fp16.initial_scale_power,
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }

    # --------------------------------------------------------------- watching

    memory_breakdown = _setting("memory_breakdown")
    log_level = _setting("log_level")
    flops_profiler_enabled = _setting("flops_profiler.enabled")
    flops_profiler_recompute_fwd_factor = _setting("flops_profiler.recompute_fwd_factor")
    flops_profiler_profile_step = _setting("flops_profiler.profile_step")
    flops_profiler_module_depth = _setting("flops_profiler.module_depth")
    flops_profiler_top_modules = _setting("flops_profiler.top_modules")
    flops_profiler_detailed = _setting("flops_profiler.detailed")
    flops_profiler_output_file = _setting("flops_profiler.output_file")

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether the ranks' tags are compared when they save."""
        return self.settings.tag_validation != "IGNORE"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether different tags are an error."""
        return self.settings.tag_validation == "FAIL"

    # ------------------------------------------------------- what there is not

    get_model_parallel_rank = _always(0, "every rank is a data-parallel one")
    get_tensor_parallel_rank = _always(0, "every rank is a data-parallel one")
    get_sequence_parallel_group = _always(None, "every rank is a data-parallel one")
    autotp_size = _always(0, "no layer is split")
    managed_gradient_accumulation = _always(True, "unless a boundary is declared")
    postscale_gradients = _always(True, "sums are in fp32, either order gives the same")
    gradient_predivide_factor = _always(1.0, "sums are in fp32")
    load_universal_checkpoint = _always(False, "every checkpoint is for any number of ranks")
    use_node_local_storage = _always(False, "a checkpoint is one folder")
    autotuning_enabled = _always(False, "zero-engine plan says what fits")
    autotuning_profile_model_info = _always(False, "zero-engine plan says what fits")
    curriculum_learning_enabled = _always(False, "give a sampler of your own")
    data_efficiency_enabled = _always(False, "give a sampler of your own")
    data_sampling_enabled = _always(False, "give a sampler of your own")
    random_ltd_enabled = _always(False, "it is not served")
    super_offload = _always(False, "it is not served")
    compile_autosp = _always(False, "DeepCompile is not served")
    compile_autotp = _always(False, "DeepCompile is not served")
    is_deepcompile_enabled = _always(False, "DeepCompile is not served")
    is_deepcompile_active = _always(False, "DeepCompile is not served")
