"""``deepspeed.DeepSpeedConfig``: a configuration's values under DeepSpeed's attribute names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from zero_core.adapters import find_ranks
from zero_core.config import Config, load_config
from zero_engine.deepspeed.config.reader import Settings, Source, read
from zero_engine.deepspeed.errors import NotServedError

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
"""Path in the file, and DeepSpeed's default, of attributes that are read from the file."""

_OWN_OPTIMIZERS = {"adagrad", "adam", "adamw", "lamb", "lion", "muadam", "muadamw", "musgd", "muon"}
# DeepSpeed has a constant for each of its own optimizers: ADAM_OPTIMIZER = "adam".
globals().update({f"{name.upper()}_OPTIMIZER": name for name in _OWN_OPTIMIZERS})

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


_BLOCKS: Mapping[str, Callable[[Settings], Any]] = {
    "activation_checkpointing_config": lambda s: SimpleNamespace(
        **{**_CHECKPOINTING, **(s.raw.get("activation_checkpointing") or {})}
    ),
    "aio_config": lambda s: {**_AIO, **(s.raw.get("aio") or {})},
    "checkpoint_tag_validation_enabled": lambda s: s.tag_validation != "IGNORE",
    "checkpoint_tag_validation_fail": lambda s: s.tag_validation == "FAIL",
    "comms_config": lambda s: SimpleNamespace(
        comms_logger_enabled=s.comms_logger.enabled, comms_logger=s.comms_logger
    ),
    "flops_profiler_config": lambda s: s.flops_profiler,
    "monitor_config": lambda s: s.monitors,
    "timers_config": lambda s: s.throughput,
}

NAMES = frozenset(_KEYS) | frozenset(_BLOCKS)
"""Attributes of DeepSpeed's configuration that are fields of neither `Config` nor `Settings`."""


class DeepSpeedConfig:
    """Configuration resolved for the current number of ranks, such as ``engine._config``.

    Its attributes include the fields of `Config` and `Settings`, and `NAMES`.
    """

    def __init__(self, config: Source, mpu: Any = None, mesh_device: Any = None) -> None:
        """Read ``config``: a dict, a file's path, a JSON text, or its base64.

        ``mpu`` is Megatron's parallel state. Raises ConfigError if a value is not served, and
        NotServedError for ``mesh_device``.
        """
        if mesh_device is not None:
            raise NotServedError("DeepSpeedConfig(mesh_device=...), sequence parallelism,")
        settings = read(config)
        ranks = find_ranks(None if mpu is None else mpu.get_data_parallel_group(), None)
        resolved = load_config(settings.core, world_size=ranks.size)
        self._fill(settings, resolved, ranks.rank, ranks.size)

    @classmethod
    def of(
        cls, settings: Settings, resolved: Config, rank: int, world_size: int
    ) -> DeepSpeedConfig:
        made = cls.__new__(cls)
        made._fill(settings, resolved, rank, world_size)
        return made

    def _fill(self, settings: Settings, resolved: Config, rank: int, world_size: int) -> None:
        self._param_dict = settings.raw
        self._resolved = resolved
        self._settings = settings
        self.global_rank, self.world_size = rank, world_size
        zero, autocast = resolved.zero_optimization, resolved.torch_autocast
        self.zero_config = zero
        self.zero_optimization_stage, self.zero_enabled = zero.stage, zero.stage > 0
        self.float16_config, self.bfloat16_config = resolved.fp16, resolved.bf16
        self.torch_autocast_enabled = autocast.enabled
        self.torch_autocast_dtype: torch.dtype | None = resolved.autocast_dtype
        name, self.optimizer_params = self._named("optimizer")
        lowered = None if name is None else name.lower()
        self.optimizer_name = lowered if lowered in _OWN_OPTIMIZERS else name
        self.scheduler_name, self.scheduler_params = self._named("scheduler")

    def _named(self, block: str) -> tuple[str | None, dict[str, Any] | None]:
        given = self._param_dict.get(block)
        if not isinstance(given, Mapping):  # absent, or "auto"
            return None, None
        return given.get("type"), given.get("params")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in Config.model_fields:
            return getattr(self._resolved, name)
        if name in Settings.__slots__:
            return getattr(self._settings, name)
        if name in _BLOCKS:
            return _BLOCKS[name](self._settings)
        if name not in _KEYS:
            raise NotServedError(
                f"DeepSpeedConfig.{name}", "read the JSON file, or ask the engine's methods"
            )
        path, default = _KEYS[name]
        found: Any = self._param_dict
        for key in path.split("."):
            if not isinstance(found, Mapping) or key not in found:
                return default
            found = found[key]
        return default if found in (None, "auto") else found
