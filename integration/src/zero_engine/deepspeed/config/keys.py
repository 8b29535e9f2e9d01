"""DeepSpeed's keys beside those that zero-core reads, and what each one does here.

A key is honoured (`HONOURED`), accepted because nothing here needs it (`UNNEEDED` says why), or
refused unless it asks for what holds anyway (`REFUSED`). ``docs/deepspeed-config.md`` has them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from zero_core.config import as_kind
from zero_core.errors import ConfigError


class Refusal(NamedTuple):
    """A key that is refused, but for the values that change nothing."""

    harmless: tuple[Any, ...]
    """Values that say what holds anyway; a block that is not enabled always is one."""
    reason: str


FLAGS = frozenset(
    {
        "activation_checkpointing.cpu_checkpointing",
        "dataloader_drop_last",
        "disable_python_gc",
        "dump_state",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "wall_clock_breakdown",
    }
)
"""Booleans that are fields of `Settings`."""
HONOURED = FLAGS | frozenset(
    {
        "checkpoint.tag_validation",
        "log_level",
        "comet",
        "comms_logger",
        "csv_monitor",
        "flops_profiler",
        "tensorboard",
        "timers.throughput",
        "wandb",
        "zero_allow_untested_optimizer",
    }
)
"""Keys, and blocks of keys, that end up in `Settings` and not in zero-core's configuration."""

_DEEPCOMPILE = (
    "autoep_non_moe free_activation free_activation_threshold offload_activation "
    "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log "
    "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather "
    "sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes"
)
_NVME = "block_size queue_depth intra_op_parallelism single_submit overlap_events"


def _alike(block: str, keys: str, reason: str) -> dict[str, str]:
    return dict.fromkeys((f"{block}.{key}" for key in keys.split()), reason)


UNNEEDED: Mapping[str, str] = {
    "activation_checkpointing.partition_activations": "there are no model-parallel ranks",
    "activation_checkpointing.contiguous_memory_optimization": "a block keeps its inputs alone",
    "activation_checkpointing.number_checkpoints": "each call is one checkpoint",
    "activation_checkpointing.synchronize_checkpoint_boundary": (
        "nothing waits for the host at a checkpoint's border"
    ),
    "activation_checkpointing.profile": "wall_clock_breakdown tells forward and backward",
    **_alike(
        "aio",
        _NVME,
        "files are read and written by zero-offload, which has its own block size and queue",
    ),
    "checkpoint.load_universal": "every checkpoint loads at any stage and world size",
    **_alike(
        "checkpoint",
        "parallel_write checkpoint_serialization writer",
        "checkpoints are written as safetensors, each rank its own part",
    ),
    **_alike("compile", _DEEPCOMPILE, "used with compile.deepcompile only, which is not served"),
    "data_parallel_size": "every rank is a data-parallel one",
    "disable_allgather": "DeepSpeed does nothing with it either",
    "flops_profiler.recompute_fwd_factor": "backward is counted, not taken for twice the forward",
    "optimizer.legacy_fusion": "of optimizers that are no longer there",
    "optimizer.params.set_grad_none": "gradients never stay on the parameters",
    "pipeline": "used with a PipelineModule only, which is not served",
    "seq_parallel_communication_data_type": "there are no sequence-parallel ranks",
    "timers.throughput.synchronized": "the device is waited for when a line is written only",
    "vocabulary_size": "DeepSpeed only warns if it is no multiple of 8",
    "zero_force_ds_cpu_optimizer": (
        "the host's kernel computes the rule of the optimizer that was given"
    ),
}
"""Keys that are accepted, and why nothing here needs them."""

_GONE = "removed from DeepSpeed, too"
_NO_MODEL_PARALLEL = "all ranks are data-parallel: leave it out"

REFUSED: Mapping[str, Refusal] = {
    "aio.use_gds": Refusal((False,), "GPUDirect Storage is not served: set it to false"),
    "amp": Refusal((), f"{_GONE}: use bf16 or fp16"),
    "autotuning": Refusal((), "`zero-engine plan` says what fits: leave it out"),
    "checkpoint.use_node_local_storage": Refusal(
        (False,), "all ranks write into one folder: save to a file system that all nodes share"
    ),
    "compile.deepcompile": Refusal((False,), "call engine.compile(), or torch.compile a block"),
    "compression_training": Refusal((), _GONE),
    "curriculum_learning": Refusal((), _GONE),
    "data_efficiency": Refusal((), "give a sampler of your own to the data loader"),
    "data_types.keep_in_fp32_modules": Refusal(
        ([],), "buffers keep the dtype that the model gives them unless buffer_dtype is set"
    ),
    "datastates_ckpt": Refusal((False,), "checkpoints are safetensors: leave it out"),
    "eigenvalue": Refusal((), _GONE),
    "elasticity": Refusal((), f"{_GONE}: every checkpoint loads at any world size"),
    "expert_parallel": Refusal((), _NO_MODEL_PARALLEL),
    "graph_harvesting": Refusal((False,), _GONE),
    "hybrid_engine": Refusal((), "generate with engine.module.generate(), at any stage"),
    "msamp": Refusal((), "MS-AMP is not served: use bf16 or fp16"),
    "nebula": Refusal((), _GONE),
    "optimizer.params.max_grad_norm": Refusal((0,), "use gradient_clipping"),
    "progressive_layer_drop": Refusal((), _GONE),
    "quantize_training": Refusal((), _GONE),
    "sequence_parallel_size": Refusal((1,), _NO_MODEL_PARALLEL),
    "sparse_attention": Refusal((), _GONE),
    "sparse_gradients": Refusal((False,), f"{_GONE}: embeddings need sparse=False"),
    "tensor_parallel": Refusal((), _NO_MODEL_PARALLEL),
    "use_data_before_expert_parallelism": Refusal((False,), _NO_MODEL_PARALLEL),
    "weight_quantization": Refusal((), "see zero_quantized_weights for weights on the wire"),
}
"""Keys that are refused unless they ask for what holds anyway."""


def check_refused(path: str, value: Any) -> None:
    """Refuse ``path``, one of `REFUSED`, unless the value says what holds anyway."""
    harmless, reason = REFUSED[path]
    if isinstance(value, Mapping):
        is_block = "enabled" in value
        asked = [as_kind(value["enabled"], bool)] if is_block else list(value.values())
        is_off = not any(v is True or v not in (None, False, 0, 1, {}) for v in asked)
    else:
        is_off = as_kind(value, bool) in harmless
    if not is_off:
        raise ConfigError(f"{path} = {value!r} is not served: {reason}")
