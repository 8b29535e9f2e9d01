"""What scripts ask a DeepSpeed engine: of its configuration by methods, as they are there."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from zero_core import Config, Engine
from zero_engine.deepspeed.block_facts import BlockFacts
from zero_engine.deepspeed.config import Settings
from zero_engine.deepspeed.utils.groups import get_data_parallel_group

__all__ = ["Facts"]

_OWN_OPTIMIZERS = {"adagrad", "adam", "adamw", "lamb", "lion", "muadam", "muadamw", "musgd", "muon"}


class Facts(BlockFacts):
    """Answers from the resolved configuration and the engine's counters; a base of the engine.

    Attributes:
        core: the engine that trains.
        settings: what was asked for beside it.
        client_optimizer: what was given as the optimizer, or None.
    """

    core: Engine
    settings: Settings
    client_optimizer: Any

    @property
    def _resolved(self) -> Config:
        return self.core.config

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples per step, samples per rank and micro-step, micro-steps per step."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def train_batch_size(self) -> int:
        """Samples per step, of all ranks."""
        micro = self.train_micro_batch_size_per_gpu()
        return micro * self.gradient_accumulation_steps() * self.core.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and micro-step."""
        return self.core.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps per step."""
        return self.core.gradient_accumulation_steps

    def steps_per_print(self) -> int | None:
        """Steps between two log lines; None is never."""
        return self.settings.steps_per_print

    def gradient_clipping(self) -> float:
        """Largest norm of the gradient; 0 is off."""
        return self._resolved.gradient_clipping

    # ------------------------------------------------------------------- ZeRO

    def zero_optimization_stage(self) -> int:
        """The stage."""
        return self._resolved.zero_optimization.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.zero_optimization_stage() == 3

    def zero_offload_optimizer(self) -> Any:
        """The block ``offload_optimizer``; None where the state is on the device."""
        block = self._resolved.zero_optimization.offload_optimizer
        return None if block.device == "none" else block

    def zero_offload_param(self) -> Any:
        """The block ``offload_param``; None where parameters are on the device."""
        block = self._resolved.zero_optimization.offload_param
        return None if block.device == "none" else block

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the host updates."""
        return self.zero_offload_optimizer() is not None

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer state is in host memory."""
        return self._resolved.zero_optimization.offload_optimizer.device == "cpu"

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether stage 3 may gather the model to save it."""
        return self.settings.gather_16bit_weights_on_model_save

    def zero_allow_untested_optimizer(self) -> bool:
        """True: any elementwise optimizer is served."""
        return True

    def zero_force_ds_cpu_optimizer(self) -> bool:
        """Whether ``zero_force_ds_cpu_optimizer`` is left on."""
        return bool(self._given("zero_force_ds_cpu_optimizer", True))

    # -------------------------------------------------------------- precision

    def fp16_enabled(self) -> bool:
        """Whether fp16 is on."""
        return self._resolved.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether bf16 is on."""
        return self._resolved.bf16.enabled

    def loss_scale(self) -> float:
        """The configured loss scale; 0 is dynamic."""
        return self._resolved.fp16.loss_scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts itself."""
        return self.loss_scale() == 0.0

    def initial_dynamic_scale(self) -> float:
        """The dynamic loss scale's first value."""
        return float(2.0**self._resolved.fp16.initial_scale_power)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Dtype of the parameters and of gradients as they are accumulated."""
        names = {"fp16": torch.float16, "bf16": torch.bfloat16}
        grads = names.get(self._resolved.data_types.grad_accum_dtype or "", torch.float32)
        return self._resolved.compute_dtype or torch.float32, grads

    # --------------------------------------------------------------- the rest

    def optimizer_name(self) -> str | None:
        """``optimizer.type``, in lower case if DeepSpeed has its own; the class of one given."""
        if self.client_optimizer is not None:
            return type(self.client_optimizer).__name__
        name: str | None = self._block("optimizer").get("type")
        is_own = name is not None and name.lower() in _OWN_OPTIMIZERS
        return name.lower() if name is not None and is_own else name

    def optimizer_params(self) -> dict[str, Any] | None:
        """``optimizer.params`` of the configuration."""
        return self._block("optimizer").get("params")

    def scheduler_name(self) -> str | None:
        """``scheduler.type`` of the configuration."""
        return self._block("scheduler").get("type")

    def scheduler_params(self) -> dict[str, Any] | None:
        """``scheduler.params`` of the configuration."""
        return self._block("scheduler").get("params")

    def fp16_auto_cast(self) -> bool:
        """Whether floating inputs are cast to the compute dtype."""
        return self.settings.fp16_auto_cast

    def wall_clock_breakdown(self) -> bool:
        """Whether step times are logged."""
        return self.settings.wall_clock_breakdown

    def dump_state(self) -> bool:
        """Whether the engine is printed at the start."""
        return self.settings.dump_state

    def dataloader_drop_last(self) -> bool:
        """Whether the loader of ``training_data`` leaves a last short batch out."""
        return self.settings.dataloader_drop_last

    # ---------------------------------------------------------- where it stands

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self.core.global_steps

    @property
    def micro_steps(self) -> int:
        """Calls of ``step`` so far."""
        return self.core.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because a gradient was not finite."""
        return self.core.skipped_steps

    @property
    def device(self) -> torch.device:
        """Where the model is computed."""
        return self.core.device

    @property
    def global_rank(self) -> int:
        """This rank."""
        return self.core.rank

    @property
    def local_rank(self) -> int:
        """This rank's number on its node."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """All ranks."""
        return get_data_parallel_group()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.core.world_size

    @property
    def dp_world_size(self) -> int:
        """Number of data-parallel ranks: all."""
        return self.core.world_size

    @property
    def mp_world_size(self) -> int:
        """Number of model-parallel ranks: one."""
        return 1

    def get_data_parallel_rank(self) -> int:
        """This rank within the data-parallel group."""
        return self.core.rank

    def _given(self, key: str, default: Any) -> Any:
        value = self.settings.raw.get(key, default)
        return default if value in (None, "auto") else value

    def _block(self, key: str) -> dict[str, Any]:
        block: dict[str, Any] = self._given(key, {})
        return block
