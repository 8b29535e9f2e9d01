"""Engines of verl (0.9): the strategy ``zero`` trains actors, and evaluates references.

    actor_rollout_ref.actor.strategy=zero
    actor_rollout_ref.actor.fsdp_config._target_=zero_engine.verl.ZeroEngineConfig
    +actor_rollout_ref.actor.fsdp_config.zero=stage3-offload

``actor_rollout_ref.ref.fsdp_config`` has the same two keys. ``critic.fsdp`` takes them, untried.
verl loads the model, makes micro-batches, losses and schedule, and sends weights to the rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft.utils.save_and_load import get_peft_model_state_dict
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu
from verl.utils.fsdp_utils import normalize_peft_param_name, replace_lora_wrapper
from verl.utils.model import convert_weight_keys
from verl.utils.py_functional import convert_to_regular_types
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import FSDPEngineConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl as fsdp
from verl.workers.engine.fsdp.utils import unfuse_moe_params
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

import zero_core
from zero_core import ConfigError
from zero_engine.hf.trainer import read_zero

_OF_VERL = (
    *("optimizer", "scheduler", "gradient_clipping", "train_batch_size"),
    *("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
)
"""Keys of the engine's configuration that verl's ``optim`` and batch sizes decide."""


@dataclass
class ZeroEngineConfig(FSDPEngineConfig):  # type: ignore[misc]
    """verl's `FSDPEngineConfig` with ``zero``, as `zero_engine.hf.ZeroTrainer` takes it.

    Without ``bf16``, ``fp16`` or ``torch_autocast`` in ``zero``, ``mixed_precision`` decides, by
    default bf16. ``param_offload`` and ``optimizer_offload`` free the device between two phases.
    """

    strategy: str = "zero"
    zero: Any = "stage3"

    def __post_init__(self) -> None:
        """Accept every ``strategy``: verl sets the actor's or critic's afterwards."""


class ZeroEngine(fsdp.FSDPEngine):  # type: ignore[misc]
    """Mixin for verl's FSDP engines, whose model this package's engine trains or evaluates."""

    engine: Any  # a `zero_core.Engine`, or with ``forward_only`` a `zero_core.ShardedModel`

    def _build_model_optimizer(self) -> None:
        config = self._read_config()
        module = self._build_module()
        self.pass_packed_cu_seqlens = "cu_seqlens" in signature(module.forward).parameters
        if any(param.is_meta for param in module.parameters()):  # rank 0 has the values
            module.to_empty(device="cpu")
        if self._is_lora:
            module = self._build_lora_module(module)
        self.optimizer = self.lr_scheduler = None
        if self.engine_config.forward_only:
            module.requires_grad_(False)
            self.engine = zero_core.build(module, config, is_training=False)
        else:
            trained = [param for param in module.parameters() if param.requires_grad]
            given = build_optimizer(trained, self.optimizer_config)
            self.engine = zero_core.build(module, config, optimizer=given)
            self.optimizer = self.engine.optimizer
            self.lr_scheduler = self._build_lr_scheduler(self.optimizer)
        self.module = self.engine.module
        self._autocast_dtype = torch.float32  # disables FSDPEngine's own autocast

    def _read_config(self) -> dict[str, Any]:
        """Return the engine's configuration. Raises ConfigError for keys that are not served."""
        given, optim, model = self.engine_config, self.optimizer_config, self.model_config
        refused = {
            "fsdp_size": 0 < given.fsdp_size < dist.get_world_size(),
            "lora.merge": self._is_lora and model.lora.get("merge", False),
            "enable_activation_offload": model.enable_activation_offload,
            "offload_policy": given.offload_policy,
            "qat": given.qat.enable,
        }
        if found := [key for key, is_set in refused.items() if is_set]:
            raise ConfigError(f"strategy=zero does not serve {', '.join(found)}: use the default")
        config = read_zero(convert_to_regular_types(given.zero))
        for key in _OF_VERL:
            if config.pop(key, "auto") != "auto":
                raise ConfigError(f"zero has the key {key}, which verl decides: leave it out")
        # More than 1, so that a tier adds up gradients: `forward_backward_batch` sets boundaries.
        config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
        if optim is not None:
            config["gradient_clipping"] = float(optim.clip_grad)
        given = {"param_dtype": "bf16", "reduce_dtype": "fp32", **(given.mixed_precision or {})}
        dtype, reduced = (
            PrecisionType.to_dtype(given[f"{of}_dtype"]) for of in ("param", "reduce")
        )
        config.setdefault("communication_data_type", PrecisionType.to_str(reduced))
        if dtype != torch.float32 and not config.keys() & {"bf16", "fp16", "torch_autocast"}:
            config["fp16" if dtype == torch.float16 else "bf16"] = {"enabled": True}
        return config

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Run forward and backward of a step's micro-batches. Every rank must call it.

        verl's losses are divided by the tokens or samples of the whole batch and multiplied by the
        number of ranks, so gradients of micro-batches are summed and those of ranks averaged.
        """
        engine, group = self.engine, self.get_data_parallel_group()
        num_tokens = data["loss_mask"].sum().to(engine.device)
        dist.all_reduce(num_tokens, group=group)
        sizes = {"sp_size": self.ulysses_sequence_parallel_size}
        sizes |= {"dp_size": self.get_data_parallel_size(), "batch_num_tokens": num_tokens.item()}
        tu.assign_non_tensor(data, **sizes)
        is_local = engine.config.zero_optimization.stage < 2  # at others no_sync takes memory
        is_local = is_local and self.engine_config.use_no_sync_for_gradient_accumulation
        keeps_output = forward_only or tu.get_non_tensor_data(data, "return_model_output", False)
        batches, indices = prepare_micro_batches(data=data, dp_group=group)
        outputs = []
        for number, batch in enumerate(batches, 1):
            with torch.set_grad_enabled(not forward_only), engine.autocast():
                loss, output = self.forward_step(batch, loss_function, forward_only)
            if not forward_only:
                is_last = number == len(batches)
                engine.set_gradient_accumulation_boundary(is_last)
                with engine.no_sync() if is_local and not is_last else nullcontext():
                    engine.backward(loss, over=1)
                if not is_last:
                    engine.step()  # ends the micro-step
            if not keeps_output:
                del output["model_output"]
            outputs.append(output)
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def optimizer_zero_grad(self) -> None:
        self.engine.zero_grad()

    def optimizer_step(self) -> float:
        """Clip and update. Return the gradient's norm before clipping. Every rank must call it."""
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Offload the chosen states to host memory, or reload every state that is there."""
        if device == self.engine.device.type:
            self.engine.reload_states()
            return
        parts = ["parameters", "buffers"] * model + ["gradients"] * grad
        if optimizer or self._is_offload_optimizer:  # `reload_states` reloads all before evaluation
            parts += ["master_weights", "optimizer_states"]
        self.engine.offload_states(parts)

    @contextmanager
    def _reloaded(self) -> Iterator[None]:
        """Bring offloaded states to the device for this context."""
        away = self.engine.offloaded_states
        self.engine.reload_states()
        try:
            yield
        finally:
            self.engine.offload_states(away)

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint that loads at any stage and number of ranks. Every rank must call it.

        With "hf_model" in ``save_contents`` the folder ``huggingface`` has the whole weights, too.
        """
        manager = self.checkpoint_manager
        schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        has_frozen = not (self._is_lora and manager.should_save_lora_only)
        with self._reloaded():
            state = {"lr_scheduler": schedule}
            self.engine.save_checkpoint(local_path, "zero", state, has_frozen=has_frozen)
            if "hf_model" in self.checkpoint_config.save_contents:
                self.engine.export_safetensors(Path(local_path, "huggingface"))
        manager.checkpoint_save_contents = []  # Hugging Face's config and tokenizer remain
        manager.save_checkpoint(local_path, *args, **kwargs)

    def load_checkpoint(self, local_path: str | None, *args: Any, **kwargs: Any) -> None:
        """Load what `save_checkpoint` wrote, or nothing without a path. Every rank must call it."""
        if local_path is None:
            return
        manager = self.checkpoint_manager
        without = () if manager.should_load_optimizer else ("optimizer", "lr_scheduler", "progress")
        with self._reloaded():
            _, state = self.engine.load_checkpoint(local_path, "zero", without=without)
        if self.lr_scheduler is not None and manager.should_load_extra:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Return whole tensors by name, one at a time, and peft's configuration or None.

        Every rank must iterate to the end, between two steps. Beside the tensor, a rank holds one
        gathered unit. With LoRA the tensors are the adapters, or before ``base_sync_done`` the
        base model's.
        """
        every = dict(self.module.named_parameters(remove_duplicate=False))
        every |= self.module.named_buffers(remove_duplicate=False)
        named = {name: every[name] for name in self.engine.sharded_state.names()}
        peft = self.module.peft_config["default"] if self._is_lora else None
        if peft is not None and base_sync_done:
            named = get_peft_model_state_dict(self.module, named, save_embedding_layers=False)
        elif peft is not None:
            base = normalize_peft_param_name(named)
            named = {replace_lora_wrapper(name, peft): value for name, value in base.items()}
        values = self._gathered(convert_weight_keys(named, self.module))
        values = unfuse_moe_params(values, self.model_config.hf_config.model_type)
        return values, None if peft is None else peft.to_dict()

    def _gathered(self, named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        places, other = self.engine.sharded_state.places_of, ((None, 0),)  # ``other``: a buffer
        with self._reloaded():
            for _, group in groupby(
                named.items(), lambda item: places.get(id(item[1]), other)[0][0]
            ):
                members = list(group)
                params = [value for _, value in members if isinstance(value, nn.Parameter)]
                with self.engine.gathered(params=params):
                    for name, value in members:
                        yield name, value.detach().clone()


@EngineRegistry.register("language_model", backend="zero", device=["cuda", "cpu"])
class ZeroEngineWithLMHead(ZeroEngine, fsdp.FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's engine of actors and references."""


@EngineRegistry.register("value_model", backend="zero", device=["cuda", "cpu"])
class ZeroEngineWithValueHead(ZeroEngine, fsdp.FSDPEngineWithValueHead):  # type: ignore[misc]
    """verl's engine of critics."""
