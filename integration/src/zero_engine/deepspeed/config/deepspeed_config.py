"""``deepspeed.DeepSpeedConfig``: a configuration's values under DeepSpeed's attribute names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zero_core.comm.topology import find_ranks
from zero_core.config import Config, load_config
from zero_engine.deepspeed.config import attributes
from zero_engine.deepspeed.config.reader import read
from zero_engine.deepspeed.config.settings import Settings
from zero_engine.deepspeed.config.source import Source
from zero_engine.deepspeed.errors import NotServedError

ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUADAM_OPTIMIZER = "muadam"
MUADAMW_OPTIMIZER = "muadamw"
MUON_OPTIMIZER = "muon"
MUSGD_OPTIMIZER = "musgd"
"""Values of ``optimizer.type``. Of these LAMB and the mu-parametrised ones are refused."""


class DeepSpeedConfig:
    """A configuration, resolved for the ranks that there are. ``engine._config`` is one.

    Attributes of DeepSpeed's that are keys of the top level have the key's name. ``zero_config``,
    ``float16_config`` and ``bfloat16_config`` are the blocks of `zero_core.Config`. Values are read
    only: change the configuration before `initialize`.
    """

    def __init__(self, config: Source, mpu: Any = None, mesh_device: Any = None) -> None:
        """Read ``config``: a dict, a file's path, or base64 of JSON.

        Args:
            config: the configuration.
            mpu: Megatron's parallel state, which has the data-parallel group; default: all ranks.
            mesh_device: not served.

        Raises:
            ConfigError: a key has a value that is not served, or the batch sizes do not fit.
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
        """Return the configuration that has been read as ``settings`` and ``resolved``."""
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
        self.optimizer_name = attributes.optimizer_name(name)
        is_profiled = settings.flops_profiler.enabled
        self.wall_clock_breakdown = settings.wall_clock_breakdown or is_profiled
        self.scheduler_name, self.scheduler_params = self._named("scheduler")

    def _named(self, block: str) -> tuple[str | None, dict[str, Any] | None]:
        given = self._param_dict.get(block)
        if not isinstance(given, Mapping):  # none, or "auto" that nothing has filled in
            return None, None
        return given.get("type"), given.get("params")

    def __getattr__(self, name: str) -> Any:
        """Return the value of the top-level key ``name``, or of one of `attributes.NAMES`."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in Config.model_fields:
            return getattr(self._resolved, name)
        if name in Settings.__slots__:
            return getattr(self._settings, name)
        if name in attributes.NAMES:
            return attributes.attribute(self._settings, name)
        raise NotServedError(
            f"DeepSpeedConfig.{name}", "read the JSON file, or ask the engine's methods"
        )
