"""Attributes of DeepSpeed's configuration object that are not keys of the top level.

The engine needs few of them, but scripts ask for what they have put into the file. Attributes of
what is refused (model parallelism, the hybrid engine, ...) are not served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from zero_engine.deepspeed.config.settings import Settings
from zero_engine.monitoring.settings import CommsLoggerSettings

_KEYS: Mapping[str, tuple[str, Any]] = {
    "buffer_dtype": ("data_types.buffer_dtype", None),
    "checkpoint_parallel_write_pipeline": ("checkpoint.parallel_write.pipeline_stage", False),
    "data_efficiency_enabled": ("data_efficiency.enabled", False),
    "disable_allgather": ("disable_allgather", False),
    "grad_accum_dtype": ("data_types.grad_accum_dtype", None),
    "keep_in_fp32_modules": ("data_types.keep_in_fp32_modules", "auto"),
    "load_universal_checkpoint": ("checkpoint.load_universal", False),
    "optimizer_legacy_fusion": ("optimizer.legacy_fusion", False),
    "param_dtype": ("data_types.param_dtype", None),
    "torch_autocast_lower_precision_safe_modules": (
        "torch_autocast.lower_precision_safe_modules",
        None,
    ),
    "use_data_before_expert_parallel_": ("use_data_before_expert_parallelism", False),
    "use_node_local_storage": ("checkpoint.use_node_local_storage", False),
    "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
    "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
}
"""Keys, and DeepSpeed's defaults, of attributes whose value is the one in the file."""

_OWN_OPTIMIZERS = {"adagrad", "adam", "adamw", "lamb", "lion", "muadam", "muadamw", "musgd", "muon"}

_CHECKPOINTING = {
    "partition_activations": False,
    "contiguous_memory_optimization": False,
    "cpu_checkpointing": False,
    "number_checkpoints": None,
    "synchronize_checkpoint_boundary": False,
    "profile": False,
}
_AIO = {
    "block_size": 1 << 20,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}


@dataclass(frozen=True)
class CommsConfig:
    """``comms_config``: the block ``comms_logger``."""

    comms_logger_enabled: bool
    comms_logger: CommsLoggerSettings


_BLOCKS: Mapping[str, Callable[[Settings], Any]] = {
    "activation_checkpointing_config": lambda s: SimpleNamespace(
        **_over(_CHECKPOINTING, s, "activation_checkpointing")
    ),
    "aio_config": lambda s: _over(_AIO, s, "aio"),
    "checkpoint_tag_validation_enabled": lambda s: s.tag_validation != "IGNORE",
    "checkpoint_tag_validation_fail": lambda s: s.tag_validation == "FAIL",
    "comms_config": lambda s: CommsConfig(s.comms_logger.enabled, s.comms_logger),
    "flops_profiler_config": lambda s: s.flops_profiler,
    "monitor_config": lambda s: s.monitors,
    "timers_config": lambda s: s.throughput,
}

NAMES = frozenset(_KEYS) | frozenset(_BLOCKS)
"""The attributes that `attribute` knows."""


def optimizer_name(given: str | None) -> str | None:
    """Return ``optimizer.type`` in DeepSpeed's spelling, which is lower case for its own ones."""
    lowered = None if given is None else given.lower()
    return lowered if lowered in _OWN_OPTIMIZERS else given


def attribute(settings: Settings, name: str) -> Any:
    """Return the value of ``name``, one of `NAMES`."""
    if name in _BLOCKS:
        return _BLOCKS[name](settings)
    path, default = _KEYS[name]
    found: Any = settings.raw
    for key in path.split("."):
        if not isinstance(found, Mapping) or key not in found:
            return default
        found = found[key]
    return default if found in (None, "auto") else found


def _over(defaults: Mapping[str, Any], settings: Settings, block: str) -> dict[str, Any]:
    return {**defaults, **(settings.raw.get(block) or {})}
