"""transformers' Trainers on the engine.

[Note: the seams]
The engine works by hooks on the unwrapped model, so the Trainer's loop is unchanged. `ZeroTrainer`
overrides the Accelerator (`ZeroAccelerator`), the device placement, the preparation of the model
(`_wrap_model` builds the engine), the saved state dict, and the checkpoints. The Accelerator calls
the engine's backward and clipping, and the optimizer calls the engine's step. A second model, such
as TRL's reference model, gets an engine from `ZeroAccelerator.prepare_model`.
"""

from __future__ import annotations

import copy
import difflib
import functools
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pydantic
import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from accelerate.utils import is_peft_model  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import GenerationMixin, Seq2SeqTrainer, Trainer, TrainingArguments

import zero_core
from zero_core import CheckpointError, ConfigError, Engine, ShardedModel, engine_of
from zero_core.adapters import ObjectMethods
from zero_core.checkpoint import read_client_state
from zero_core.config import SchedulerConfig, explain, shown, without_nulls
from zero_core.schedules import Schedule, check_state, make_scheduler
from zero_engine.deepspeed.config.reader import load
from zero_engine.presets import PRESETS

_log = logging.getLogger(__name__)

_SCHEDULE = "lr_scheduler"
"""Key of the Trainer's schedule in a checkpoint's client state."""


class ZeroOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Wrapper of the engine's optimizer, whose ``step`` is the engine's."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self.engine = engine
        # Accelerate does not wrap an object with this mark.
        self._is_accelerate_prepared = True

    def step(self, closure: Any = None) -> None:
        """End the step, except during gradient accumulation. Raises ValueError for a closure."""
        if closure is not None:
            raise ValueError("ZeroOptimizer.step() takes no closure")
        if self.gradient_state.sync_gradients:
            self.engine.step()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because its gradient was not finite."""
        return self.engine.optimizer.overflow


class ZeroAccelerator(Accelerator):  # type: ignore[misc]
    """Accelerator whose backward and clipping are the engine's. `ZeroTrainer` uses this class."""

    engine: ShardedModel | None = None
    config: Mapping[str, Any]

    def adopt(self, engine: ShardedModel) -> None:
        self.engine = engine
        engine.module._is_accelerate_prepared = True  # type: ignore[assignment]
        self._models.append(engine.module)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Build an engine on a model that only evaluates, such as a reference model of TRL.

        It has the trained model's stage and precision. Returns ``model``, which is frozen.
        """
        param = next(model.parameters(), None)
        if evaluation_mode and param is not None and engine_of(param) is None:
            engine = zero_core.build(model.requires_grad_(False), self.config, is_training=False)
            engine.stay_with_model()
            model._is_accelerate_prepared = True  # type: ignore[assignment]
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward of ``loss``, which the Trainer has divided by the micro-steps."""
        engine = self._engine()
        engine.set_gradient_accumulation_boundary(self.sync_gradients)
        engine.backward(loss, over=1, **kwargs)
        if not self.sync_gradients:
            engine.step()

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2
    ) -> float | None:
        """Clip to ``max_norm``, and return the gradient's norm.

        For the 2-norm, returns None without clipping if ``max_norm`` is infinite, or equals the
        configuration's, to which the engine's ``step`` clips.
        """
        engine = self._engine()
        if norm_type == 2 and max_norm in (math.inf, engine.config.gradient_clipping):
            return None
        return engine.clip_grad_norm_(max_norm, norm_type)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Leave gradients unreduced in this context at stages 0 and 1. No effect at stages 2, 3."""
        engine = self._engine()
        if engine.config.zero_optimization.stage >= 2:
            yield
            return
        with engine.no_sync():
            yield

    def _engine(self) -> Engine:
        if self.engine is None:
            raise RuntimeError("there is no engine yet: call ZeroTrainer.train() or evaluate()")
        if not isinstance(self.engine, Engine):
            raise RuntimeError("the engine only evaluates: call ZeroTrainer.train() to train")
        return self.engine


class ZeroTrainer(Trainer):
    """transformers' Trainer, whose model the engine trains.

    The first ``train``, ``evaluate`` or ``predict`` builds the engine. Until then ``engine`` is
    None. The optimizer is the Trainer's, with its decay groups, unless the configuration names one.
    Every rank runs the same script, under torchrun. The model may be made under
    `zero_core.deferred_init`.

    A key of the configuration that TrainingArguments decide may be missing or "auto", and must
    otherwise agree. The Trainer divides the loss over the micro-steps, and makes and steps
    optimizer and schedule, while the engine scales the loss, clips, and updates the parameters.
    """

    accelerator: ZeroAccelerator

    def __init__(self, *args: Any, zero: str | Path | Mapping[str, Any], **kwargs: Any) -> None:
        """Check ``zero``: a name of `zero_engine.hf.PRESETS`, a configuration or its JSON file.

        Raises ConfigError if ``zero`` is none of these, it differs from TrainingArguments, or
        TrainingArguments select another engine.
        """
        self.engine: ShardedModel | None = None
        self._given = read_zero(zero)
        self._whole: dict[str, Tensor] | None = None  # state dict during `save_model`
        super().__init__(*args, **kwargs)
        if "optimizer" in self._given and self.optimizer is not None:
            raise ConfigError(
                "optimizers=... and the configuration's optimizer: found both, leave out one"
            )

    def create_accelerator_and_postprocess(self) -> None:
        check_arguments(self.args)
        self._config = fill_config(self._given, self.args)
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ConfigError(
                "accelerate's environment asks for DeepSpeed or FSDP, and zero=... for this "
                "engine: start with torchrun, or take Trainer instead of ZeroTrainer"
            )
        self.accelerator.__class__ = ZeroAccelerator  # not a new object: others refer to this one
        self.accelerator.config = self._config
        if self.args.n_gpu > 1:
            _log.warning("one process uses one of %d devices: use torchrun", self.args.n_gpu)
            self.args._n_gpu = 1

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Return the Trainer's arguments without mixed precision, which the engine implements."""
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the engine places the sharded model."""

    def create_optimizer(  # type: ignore[override]
        self, model: nn.Module | None = None
    ) -> torch.optim.Optimizer | None:
        """Make the Trainer's optimizer, unless the configuration names one for the engine."""
        if "optimizer" in self._given:
            return self.optimizer
        return super().create_optimizer(model)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LRScheduler:
        if "scheduler" in self._given and self.lr_scheduler is None:
            block = SchedulerConfig.model_validate(without_nulls(self._given["scheduler"]))
            params = fill_schedule(block.params, self.args, num_training_steps)
            assert self.optimizer is not None
            schedule = make_scheduler(self.optimizer, block.type, params)
            self.lr_scheduler = schedule  # type: ignore[assignment]
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def _get_learning_rate(self) -> float:
        assert self.optimizer is not None
        return float(self.optimizer.param_groups[0]["lr"])

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: DataLoader[Any] | None = None
    ) -> nn.Module:
        """Build the engine on ``model`` if necessary, and return ``model``.

        Without a training set the engine only evaluates, and has no optimizer state.
        """
        engine = self.engine
        if engine is None or engine.module is not self.model:
            self._start_engine(is_training=training or self.train_dataset is not None)
        elif training and not isinstance(engine, Engine):
            raise RuntimeError(
                "train() after evaluate() of a ZeroTrainer without train_dataset: its engine only "
                "evaluates; give it train_dataset when it is made, or free the model by "
                "trainer.engine.unwrap() and make another trainer with it"
            )
        elif training:
            assert isinstance(engine, Engine)
            engine.zero_grad()  # drops gradients of an interrupted training
        return model

    def _start_engine(self, *, is_training: bool) -> None:
        if self.engine is not None:
            self.engine.close()
        assert isinstance(self.model, nn.Module)
        self._config = fill_config(self._given, self.args)  # hyperparameter search changes args
        self.accelerator.config = self._config
        if is_training:
            self.create_optimizer()
            trained = zero_core.build(
                self.model, self._config, optimizer=self.optimizer, attach=self._check_device
            )
            self.optimizer = ZeroOptimizer(trained)
            engine: ShardedModel = trained
        else:
            engine = zero_core.build(
                self.model, self._config, attach=self._check_device, is_training=False
            )
        self.accelerator.adopt(engine)
        self.engine = engine
        if engine.config.zero_optimization.stage == 3 and engine.world_size > 1:
            engine.remove_at_end([_synchronized(engine)])

    def _check_device(self, engine: ShardedModel) -> None:
        if engine.device.type != self.args.device.type:
            raise ConfigError(
                f"TrainingArguments place the data on {self.args.device} and the engine computes "
                f"on {engine.device}: hide the accelerator from this process, or use torchrun"
            )

    def _prepare_input(self, data: Any) -> Any:
        data = super()._prepare_input(data)
        if isinstance(data, Tensor) and data.is_floating_point() and self.engine is not None:
            return data.to(self.engine.config.compute_dtype or data.dtype)
        return data

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as the Trainer does. Every rank must call it, because weights are gathered."""
        if self.engine is not None:
            rank = None if self.args.save_on_each_node else 0
            self._whole = self.engine.full_state_dict(rank=rank)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._whole = None

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Save the whole state dict. Some releases of the Trainer call it on one rank only."""
        super()._save(output_dir, state_dict=self._whole if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert isinstance(self.engine, Engine)
        schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        tag = f"global_step{self.state.global_step}"
        self.engine.save_checkpoint(output_dir, tag, {_SCHEDULE: schedule})

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load weights as the Trainer does, unless the engine's checkpoint holds them."""
        if _has_state(resume_from_checkpoint):
            return
        _log.warning("%s holds weights alone: the optimizer starts anew", resume_from_checkpoint)
        with self._writable():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the engine's checkpoint, which includes the weights, and the schedule."""
        assert isinstance(self.engine, Engine)
        if checkpoint is None or not _has_state(checkpoint):
            return
        saved: Any = read_client_state(Path(checkpoint)).get(_SCHEDULE)
        schedule: Schedule | None = None if saved is None else self.lr_scheduler
        if schedule is not None:
            try:
                check_state(schedule, saved)  # checked before the engine loads anything
            except ValueError as error:
                raise CheckpointError(
                    f"{checkpoint}: the schedule that was saved does not fit: {error}; resume with "
                    "the schedule of the saved training, or load the weights alone into the model"
                ) from error
        self.engine.load_checkpoint(checkpoint, without=("rng",))  # the Trainer restores its own
        if schedule is not None:
            schedule.load_state_dict(saved)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        assert best is not None
        assert isinstance(self.engine, Engine)
        if _has_state(best):
            self.engine.load_checkpoint(best, without=("optimizer", "lr_scheduler", "progress"))
            return
        with self._writable():
            super()._load_best_model()

    def _writable(self) -> AbstractContextManager[object]:
        if self.engine is None or self.engine.module is not self.model:
            return nullcontext()
        return self.engine.gathered(modifier_rank=0)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as the Trainer does, with the gradient's norm and fp16's loss scale."""
        engine = self.engine
        if engine is not None and "loss" in logs:
            norm = engine.get_global_grad_norm()
            if norm is not None:
                logs.setdefault("grad_norm", norm)
            if engine.config.fp16.enabled:
                logs["loss_scale"] = engine.loss_scale
        super().log(logs, start_time)


class ZeroSeq2SeqTrainer(ZeroTrainer, Seq2SeqTrainer):
    """transformers' Seq2SeqTrainer, whose model the engine trains. See `ZeroTrainer`."""


def _synchronized(engine: ShardedModel) -> ObjectMethods:
    """Make the model's ``generate`` run equally many forwards on all ranks, unless all values stay.

    Each forward of a sharded model may wait for all ranks. transformers sets ``synced_gpus`` by
    itself for DeepSpeed and FSDP only, and Seq2SeqTrainer passes False for other engines. Within
    ``engine.gathered()`` one rank may generate alone.
    """

    def synchronized(generate: Any) -> Any:
        @functools.wraps(generate)
        def generate_synchronized(*args: Any, **kwargs: Any) -> Any:
            is_whole = all(map(engine.holds_value, engine.module.parameters()))
            kwargs["synced_gpus"] = kwargs.get("synced_gpus") or not (
                engine.is_gathered and is_whole
            )
            return generate(*args, **kwargs)

        return generate_synchronized

    model: Any = engine.module
    kind = model.get_base_model() if is_peft_model(model) else model
    models = [model] if isinstance(kind, GenerationMixin) else []
    return ObjectMethods("generate", [(m, synchronized(m.generate)) for m in models])


def _has_state(checkpoint: str) -> bool:
    return (Path(checkpoint) / "latest").is_file()


_AUTO = "auto"
_LEFT_TO_ENGINE = (
    *("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
)
"""Keys of ``zero_optimization`` whose "auto" is the engine's default."""


def read_zero(zero: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that ``zero`` is or names. It may still have "auto" values."""
    if isinstance(zero, str) and zero in PRESETS:
        zero = {"zero_optimization": PRESETS[zero]}
    if isinstance(zero, Mapping) or Path(zero).suffix == ".json" or Path(zero).is_file():
        return {k: v for k, v in copy.deepcopy(load(zero)).items() if v is not None}
    near = difflib.get_close_matches(str(zero), PRESETS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"zero = {str(zero)!r} is neither a preset nor a file: {hint}"
        f"Presets: {', '.join(PRESETS)}; or give a configuration, or the path of its JSON file"
    )


def check_arguments(args: TrainingArguments) -> None:
    """Refuse arguments that select another engine or would change the sharded model."""
    refused = {
        "deepspeed": "leave it out: zero=... takes the same configuration",
        "fsdp": "leave it out: the engine shards the model",
        "torch_compile": "compile the model's blocks in place instead: block.compile()",
        "bf16_full_eval": "set bf16=True: the engine trains and evaluates in bf16",
        "fp16_full_eval": "set fp16=True: the engine trains and evaluates in fp16",
        "parallelism_config": "leave it out: the engine is data-parallel alone",
    }
    for name, advice in refused.items():
        if getattr(args, name, None):
            raise ConfigError(
                f"TrainingArguments({name}={getattr(args, name)!r}) does not go with zero=...: "
                f"{advice}"
            )


def fill_config(config: Mapping[str, Any], args: TrainingArguments) -> dict[str, Any]:
    filled = without_nulls(config)
    for path in ("zero_optimization", "bf16", "fp16", "optimizer", "optimizer.params"):
        block: Any = filled
        for key in path.split("."):
            block = block.get(key, {})
        if not isinstance(block, Mapping):
            raise ConfigError(f"{path}: expected a block of keys, found {shown(block)}")
    scheduler = filled.pop("scheduler", None)
    if scheduler is not None:
        try:
            SchedulerConfig.model_validate(scheduler)
        except pydantic.ValidationError as error:
            raise ConfigError(explain(error, SchedulerConfig, scheduler, "scheduler")) from None
    zero = filled.setdefault("zero_optimization", {})
    for key in _LEFT_TO_ENGINE:
        if zero.get(key) == _AUTO:
            del zero[key]
    if zero.get("zero_hpz_partition_size") == _AUTO:
        of_node = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
        zero["zero_hpz_partition_size"] = of_node if of_node < args.world_size else 1
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    decided = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "train_batch_size": micro * steps * args.world_size,
        "gradient_clipping": float(args.max_grad_norm or 0.0),
        "bf16.enabled": bool(args.bf16),
        "fp16.enabled": bool(args.fp16),
    }
    differences: list[str] = []
    for path, value in decided.items():
        _fill(filled, path, value, differences)
    if "optimizer" in filled:
        params = dict(config["optimizer"].get("params") or {})  # its nulls are filled in, too
        filled["optimizer"] = {**filled["optimizer"], "params": params}
        of_trainer = {
            "lr": args.learning_rate,
            "betas": [args.adam_beta1, args.adam_beta2],
            "eps": args.adam_epsilon,
            "weight_decay": args.weight_decay,
        }
        for key, value in of_trainer.items():
            if key in params:
                _fill(params, key, value, differences, prefix="optimizer.params.")
    if differences:
        raise ConfigError(
            "the configuration and TrainingArguments differ; take the value of TrainingArguments, "
            'or "auto", or leave the key out:\n' + "\n".join(differences)
        )
    return filled


def fill_schedule(
    params: Mapping[str, Any], args: TrainingArguments, num_steps: int
) -> dict[str, Any]:
    """Return ``scheduler.params`` with "auto" filled in, for a training of ``num_steps`` steps."""
    known = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": args.learning_rate,
        "warmup_num_steps": args.get_warmup_steps(num_steps),
        "total_num_steps": num_steps,
    }
    return {k: known.get(k, v) if v == _AUTO else v for k, v in params.items()}


def _fill(
    block: dict[str, Any], path: str, value: Any, differences: list[str], prefix: str = ""
) -> None:
    *outer, key = path.split(".")
    for name in outer:
        block = block.setdefault(name, {})
    found = block.get(key)
    if found is None or found == _AUTO:
        block[key] = value
    elif (list(found) if isinstance(found, tuple) else found) != value:
        differences.append(f"- {prefix}{path} = {found!r}, TrainingArguments: {value!r}")
