"""A Lightning strategy on `zero_core.build`.

Lightning's DDPStrategy starts and connects the processes, reduces metrics and configures samplers.
This strategy builds the engine on the module, calls the engine's step for each step of the
Trainer (`ZeroPrecision`), and writes a checkpoint as a folder of shards. Lightning counts the
batches to accumulate, divides the loss, and requests a step, also at the end of an epoch.
"""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partialmethod
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_warn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero_core
from zero_core import CheckpointError, ConfigError, Engine, ShardedModel
from zero_core.adapters import plain_name
from zero_core.checkpoint import encode
from zero_core.config import without_nulls
from zero_engine.deepspeed.config.reader import load

_OF_TRAINER = {
    "train_batch_size": "the batch size of the DataLoader",
    "gradient_accumulation_steps": "Trainer(accumulate_grad_batches=...)",
    "gradient_clipping": "Trainer(gradient_clip_val=...)",
    "scheduler": "LightningModule.configure_optimizers()",
    "fp16.enabled": "Trainer(precision='16-mixed')",
    "bf16.enabled": "Trainer(precision='bf16-mixed')",
}
"""Keys that must be missing or "auto", and the setting of Lightning's that decides each."""
_TAG = "checkpoint"
"""The engine's folder within a checkpoint of Lightning's."""
_ADVICE = "leave it out (save_hyperparameters(ignore=[...]) for an argument)"


_BLOCK_OF: Mapping[str, str | None] = {
    "32-true": None,
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "16-mixed": "fp16",
    "16-true": "fp16",
}


class ZeroPrecision(Precision):
    """Precision plugin: a model in 16 bits with fp32 master weights, or entirely in fp32.

    "mixed" and "true" are the same here: parameters, activations and inputs are in the 16-bit
    dtype, without autocast. The engine scales fp16's loss.
    """

    def __init__(self, precision: Any) -> None:
        """Store ``Trainer(precision=...)``'s value. Raises ConfigError if it is not supported."""
        if precision not in _BLOCK_OF:
            raise ConfigError(
                f"Trainer(precision={precision!r}) is not served by the ZeRO strategies; "
                f"choose one of {sorted(_BLOCK_OF)}"
            )
        self.precision = precision
        self.engine: ShardedModel | None = None

    @property
    def _attached(self) -> Engine:
        assert isinstance(self.engine, Engine), "the strategy attaches its engine in setup()"
        return self.engine

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Run backward of ``tensor``, which Lightning has divided by the batches to accumulate."""
        if model.automatic_optimization:
            is_last = not model.trainer.fit_loop._should_accumulate()
            self._attached.set_gradient_accumulation_boundary(is_last)
        model.backward(self._attached.scale(tensor), *args, **kwargs)
        if not self._attached.is_gradient_accumulation_boundary():
            self._attached.step()

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run ``closure`` (forward and backward), Lightning's hooks, and `Engine.step`."""
        if kwargs:
            raise TypeError(f"the engine's step takes no arguments, found {sorted(kwargs)}")
        result = closure()
        if result is None and model.automatic_optimization:
            raise MisconfigurationException(
                "training_step returned None: a step of the ZeRO strategies needs a loss on every "
                "rank; return a loss of zero, (output * 0).sum(), to skip a batch"
            )
        self._after_closure(model, optimizer)
        self._attached.step()
        return result

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        self._attached.clip_grad_norm_(float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: int | float) -> None:
        raise MisconfigurationException("gradient_clip_algorithm 'value' is not served: use 'norm'")


class ZeroStrategy(DDPStrategy):
    """ZeRO stages 0 to 3, offload and quantized communication under `lightning.pytorch.Trainer`."""

    strategy_name = "zero"

    def __init__(self, config: Mapping[str, Any] | str | Path, **process_options: Any) -> None:
        """Store the configuration. The engine is built when the Trainer starts.

        Args:
            config: the engine's configuration, or the path of a JSON file. Keys that the Trainer
                decides must be missing or "auto". Its optimizer is used if ``configure_optimizers``
                returns None.
            process_options: DDPStrategy's ``accelerator``, ``parallel_devices``,
                ``cluster_environment``, ``checkpoint_io``, ``precision_plugin``,
                ``process_group_backend``, ``timeout`` and ``start_method``.

        Raises ConfigError for keys that the Trainer decides or options of DistributedDataParallel.
        """
        super().__init__(**process_options)
        plain = inspect.signature(DistributedDataParallel).parameters  # LightningCLI gives them
        ddp = {k for k, v in self._ddp_kwargs.items() if k not in plain or v != plain[k].default}
        if ddp or self._ddp_comm_hook is not None or self._model_averaging_period:
            raise ConfigError(
                f"ZeroStrategy has no DistributedDataParallel to pass {sorted(process_options)} to"
            )
        self._config = _without_trainers(without_nulls(load(config)))
        self._engine: ShardedModel | None = None

    @property
    def engine(self) -> ShardedModel:
        """The engine, for gathered values, states by name, memory and traffic.

        Raises RuntimeError if the Trainer has not called `setup` yet, or another Trainer has
        trained the module since.
        """
        if self._engine is None:
            raise RuntimeError(
                "there is no engine: it is built by Trainer.fit(), after configure_optimizers(), "
                "and lasts until the next fit() of the module"
            )
        return self._engine

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and type(plugin) in (Precision, MixedPrecision, HalfPrecision):
            plugin = ZeroPrecision(plugin.precision)
        if not isinstance(plugin, ZeroPrecision | None):
            raise ConfigError(
                f"{type(plugin).__name__} does not go with the ZeRO strategies, which have the "
                "model in fp32, bf16 or fp16: choose precision '32-true', 'bf16-mixed' or "
                "'16-mixed'"
            )
        self._precision_plugin = plugin

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Make modules in host memory. The engine copies its shards to the device."""
        if empty_init:
            raise ConfigError("empty_init: the ZeRO strategies need the values of a new module")
        yield

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Make modules of ``configure_model`` without memory. The engine computes its shards."""
        with zero_core.deferred_init():
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        """Build the engine. An evaluation uses the module's earlier engine, if there is one."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        param = next(self.lightning_module.parameters(), None)
        self._engine = None if param is None else zero_core.engine_of(param)
        if trainer.state.fn == TrainerFn.FITTING:
            _check_trainer(trainer)
            self._free_engine()
            if self._layer_sync is not None:
                self.model = self._layer_sync.apply(self.lightning_module)
            self.setup_optimizers(trainer)
        elif self._engine is None:
            self._engine = zero_core.build(
                self.lightning_module, self._resolved(), is_training=False
            )
        self.engine.stay_with_model()  # a later Trainer may use it
        self._precision.engine = self.engine
        _HOLDERS.setdefault(self.engine, WeakSet()).add(self)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        (given,) = self.optimizers  # Lightning allows several only for manual optimization
        is_named = "optimizer" in self._config
        if isinstance(given, _MockOptimizer) != is_named:
            found = "both do" if is_named else "neither does"
            raise ConfigError(
                "either configure_optimizers() returns an optimizer, or the configuration of the "
                f"strategy names one: {found}"
            )
        assert self.lightning_module is not None
        self._engine = zero_core.build(
            self.lightning_module, self._resolved(), optimizer=None if is_named else given
        )
        self.optimizers = [self._engine.optimizer]

    def _free_engine(self) -> None:
        """End the engine of an earlier ``fit``, whose memory the next engine needs."""
        if self._engine is None:
            return
        if any(zero_core.engine_of(p) is self._engine for p in self._engine.module.parameters()):
            self._engine.unwrap(dtype=torch.float32, drops_partial=True)
        for strategy in (*_HOLDERS.pop(self._engine, ()), self):
            strategy._engine = None
            strategy._precision.engine = None
            strategy.optimizers, strategy.lr_scheduler_configs = [], []
        gc.collect()  # the engine has reference cycles

    @property
    def _precision(self) -> ZeroPrecision:
        plugin = self.precision_plugin
        assert isinstance(plugin, ZeroPrecision), "the Trainer sets one"
        return plugin

    def _resolved(self) -> dict[str, Any]:
        config = dict(self._config)
        config.setdefault("train_micro_batch_size_per_gpu", 1)  # for the engine's reports only
        block = _BLOCK_OF[str(self._precision.precision)]
        if block is not None:
            config[block] = {**config.get(block, {}), "enabled": True}
        return config

    def model_to_device(self) -> None:
        """Do nothing: the engine has moved the model."""

    def teardown(self) -> None:
        """Tear down Lightning's parts, but not the engine, which a test after ``fit`` can use."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Leave gradients of accumulated batches unreduced in this context, at stages 0 and 1."""
        if self.engine.config.zero_optimization.stage > 1:
            yield  # no_sync would keep whole gradients instead of shards
            return
        with self.engine.no_sync() if isinstance(self.engine, Engine) else nullcontext():
            yield

    def _forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.lightning_module
        wrapper: Any = self.engine  # Lightning expects a wrapper of the user's module
        return self._forward_redirection(wrapper, module, method, *args, **kwargs)

    training_step = partialmethod(_forward, "training_step")
    validation_step = partialmethod(_forward, "validation_step")
    test_step = partialmethod(_forward, "test_step")
    predict_step = partialmethod(_forward, "predict_step")

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True, because the engine must exist before it loads shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False, because the engine's checkpoint holds the optimizer state."""
        return False

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return {}, because the engine saves the state in shards."""
        return {}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a folder of shards or, for weights only, one file of Lightning's format.

        Every rank must call it. The file (``Trainer.save_checkpoint(path, weights_only=True)``,
        ``ModelCheckpoint(save_weights_only=True)``) can be read by any strategy and by
        ``LightningModule.load_from_checkpoint``. Rank 0 holds the whole model to write it.

        Raises:
            CheckpointError: an object of Lightning's checkpoint is neither JSON nor a small tensor.
            TypeError: there are ``storage_options`` for a folder of shards.
        """
        if "optimizer_states" not in checkpoint:
            values = self.engine.full_state_dict(rank=0)
            checkpoint["state_dict"] = renamed_for(self.engine.module, values)
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        if storage_options is not None:
            raise TypeError("storage_options: a folder of shards is written by the engine, locally")
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.training and trainer.fit_loop._should_accumulate():
            rank_zero_warn(
                "saving in the middle of accumulate_grad_batches: what was accumulated so far is "
                "not kept, as with Lightning's other strategies"
            )
        kept = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}
        assert isinstance(self.engine, Engine), "Lightning saves in fit(), whose engine trains"
        control = self.engine.sharded_state.control  # gather_bytes, because broadcast() pickles
        folder = Path(os.fsdecode(control.gather_bytes(os.fsencode(filepath))[0]))
        encode(kept, "checkpoint", _ADVICE)  # raises an error with advice, unlike the engine
        self.engine.save_checkpoint(folder, _TAG, {"lightning": kept}, drops_partial=True)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a folder that this strategy wrote, at any world size, or a file of weights.

        Raises CheckpointError if the folder is no checkpoint, or if ``fit`` would resume from
        another strategy's file, whose optimizer state is not sharded.
        """
        path = Path(checkpoint_path)
        if path.is_dir():
            _, client_state = self.engine.load_checkpoint(path, _TAG)
            return {**client_state["lightning"], "state_dict": {}}
        loaded = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        assert self.lightning_module is not None
        is_fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if is_fitting and "optimizer_states" in loaded:
            raise CheckpointError(
                f"{path} holds the optimizer state of another strategy, which cannot be resumed "
                "here: start from its weights with LightningModule.load_from_checkpoint()"
            )
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a file. `load_checkpoint` has loaded those of a folder."""
        values = checkpoint["state_dict"]
        if values:
            with self.engine.gathered(modifier_rank=0) as module:
                module.load_state_dict(renamed_for(module, values), strict=strict)

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register ``zero_stage_1``, ``_2``, ``_3``, and each with ``_offload``."""
        for stage in (1, 2, 3):
            for has_offload in (False, True):
                name = f"zero_stage_{stage}" + ("_offload" if has_offload else "")
                text = f"ZeRO stage {stage}" + (" with offload to host memory" * has_offload)
                block: dict[str, Any] = {"stage": stage}
                if has_offload:
                    block["offload_optimizer"] = {"device": "cpu"}
                    if stage == 3:
                        block["offload_param"] = {"device": "cpu"}
                config = {"zero_optimization": block}
                strategy_registry.register(name, cls, description=text, config=config)


_HOLDERS: WeakKeyDictionary[ShardedModel, WeakSet[ZeroStrategy]] = WeakKeyDictionary()
"""Strategies that each engine was set up for. Their Trainers may outlive the engine."""


def renamed_for(module: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` under the names that ``module`` loads. Compiled parts have longer names."""
    params = module.named_parameters(remove_duplicate=False)
    named = chain(params, module.named_buffers(remove_duplicate=False))
    own = {plain_name(n): n.replace("_checkpoint_wrapped_module.", "") for n, _ in named}
    return {own.get(plain_name(name), name): value for name, value in values.items()}


def _without_trainers(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` without keys that the Trainer decides, which must be "auto"."""
    for key, place in _OF_TRAINER.items():
        name, _, inner = key.partition(".")
        block = config.get(name) if inner else config
        if not isinstance(block, dict) or (inner or name) not in block:
            continue
        if block[inner or name] != "auto":
            raise ConfigError(f"{key} = {block[inner or name]!r}: leave it out and use {place}")
        rest = {k: v for k, v in block.items() if k != (inner or name)}
        config = {**config, name: rest} if inner else rest
    if config.get("train_micro_batch_size_per_gpu") == "auto":
        del config["train_micro_batch_size_per_gpu"]
    return config


def _check_trainer(trainer: pl.Trainer) -> None:
    """Refuse a Trainer that the strategy cannot serve, before the engine is built."""
    if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
        raise ConfigError("gradient_clip_algorithm='value' is not served here: use 'norm'")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ConfigError(
                f"{type(callback).__name__} copies the whole module, which is sharded here: "
                "leave it out, or average the weights of checkpoints after training"
            )
    data = getattr(trainer, "datamodule", None)  # foreign: set if there is a datamodule
    for owner in (trainer.lightning_module, data):
        if owner is not None:
            encode(dict(owner.hparams), "hyper_parameters", _ADVICE)
