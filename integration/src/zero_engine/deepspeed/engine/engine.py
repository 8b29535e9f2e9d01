"""`DeepSpeedEngine`: a `zero_core.Engine` with DeepSpeed's methods around it.

It trains nothing by itself: forward, backward and step are the engine's. What it adds is the
order in which DeepSpeed counts and boundaries are set from outside.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zero_core import Engine, ShardedModel, StatePart
from zero_core.adapters import ObjectMethods
from zero_engine.deepspeed.config.deepspeed_config import DeepSpeedConfig
from zero_engine.deepspeed.config.reader import Settings
from zero_engine.deepspeed.dataloader import DeepSpeedDataLoader
from zero_engine.deepspeed.engine.checkpoints import Checkpoints
from zero_engine.deepspeed.engine.facts import value_of
from zero_engine.deepspeed.engine.optimizer import DeepSpeedOptimizer
from zero_engine.deepspeed.errors import NoSyncError, NotScalarError, NotServedError
from zero_engine.deepspeed.zero.partitioned import leave_partitioned
from zero_engine.monitoring import (
    CommunicationLog,
    FlopsProfiler,
    MemoryBreakdown,
    Monitor,
    Scalars,
    StepFacts,
    StepObserver,
    Throughput,
    ThroughputTimer,
    WallClock,
)

_log = logging.getLogger(__name__)


class OffloadDeviceEnum(StrEnum):
    """Places of offloaded states."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """States of an engine, by DeepSpeed's names."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


PARTS: Mapping[OffloadStateTypeEnum, StatePart] = {
    OffloadStateTypeEnum.optim_states: StatePart.OPTIMIZER_STATES,
    OffloadStateTypeEnum.hp_params: StatePart.MASTER_WEIGHTS,
    OffloadStateTypeEnum.lp_params: StatePart.PARAMETERS,
    OffloadStateTypeEnum.lp_grads: StatePart.GRADIENTS,
    OffloadStateTypeEnum.contiguous_grad_buffer: StatePart.BUFFERS,
}
"""The engine's own names."""

_Outputs = TypeVar("_Outputs")


class Watch:
    """Everything that watches an engine's steps.

    Attributes:
        monitor: where scalars go; ``engine.monitor``.
        observers: called in this order, that of DeepSpeed's output.
        tput_timer: counts steps and epochs; ``engine.tput_timer``.
    """

    def __init__(self, settings: Settings, engine: ShardedModel, batch_size: int) -> None:
        """Watch ``engine``, whose steps have ``batch_size`` samples.

        Raises:
            ConfigError: a monitor needs a library that is not installed.
        """
        self.monitor = Monitor(settings.monitors, rank=engine.rank)
        # Rank 0 prints. Times and bytes are taken on every rank, so that ranks stay alike.
        say: Callable[[str], None] = print if engine.rank == 0 else lambda text: None
        self.observers: list[StepObserver] = []
        if self.monitor.enabled:
            self.observers.append(Scalars(self.monitor))
        if settings.flops_profiler.enabled and engine.rank == 0:
            self.observers.append(FlopsProfiler(settings.flops_profiler, say=say))
        if settings.wall_clock_breakdown:
            self.observers.append(WallClock(engine.device, self.monitor, say=say))
        if settings.memory_breakdown:
            self.observers.append(MemoryBreakdown(engine.device, say=say))
        if settings.comms_logger.enabled:
            self.observers.append(CommunicationLog(engine, settings.comms_logger, say=say))
        if settings.throughput.enabled and settings.steps_per_print is not None:
            self.observers.append(Throughput(engine.device, settings.steps_per_print, say=say))
        self.tput_timer = ThroughputTimer(batch_size)
        self._is_in_backward = False

    @contextmanager
    def part(self, name: Literal["forward", "backward", "step"]) -> Iterator[None]:
        self._is_in_backward = name == "backward"
        for observer in self.observers:
            getattr(observer, f"begin_{name}")()
        try:
            yield
        finally:
            self._is_in_backward = False
            for observer in self.observers:
                getattr(observer, f"end_{name}")()

    def followed(self, outputs: _Outputs) -> _Outputs:
        """Return ``outputs`` of a forward, from which a plain ``backward()`` is observed, too."""
        self._is_in_backward = False  # one that failed has not told its end
        for leaf in pytree.tree_leaves(outputs) if self.observers else ():
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._enter_backward)  # type: ignore[no-untyped-call]
        return outputs

    def _enter_backward(self, _grad: Tensor) -> None:
        if self._is_in_backward:
            return
        self._is_in_backward = True
        for observer in self.observers:
            observer.begin_plain_backward()
        # Called back after all that was queued meanwhile: the engine waits for reductions there.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self._leave_backward))

    def _leave_backward(self) -> None:
        self._is_in_backward = False
        for observer in self.observers:
            observer.end_plain_backward()

    def step_done(self, facts: StepFacts) -> None:
        self.tput_timer.step_done(facts)
        for observer in self.observers:
            observer.step_done(facts)


class DeepSpeedEngine(Checkpoints, nn.Module):
    """A model under training, with DeepSpeed's interface. Made by `initialize`.

    What it doesn't have itself is looked up in the model.

    Attributes:
        core: the engine that trains.
        settings: what was asked for beside its configuration.
        module: the model itself.
        config: the configuration as it was given.
        optimizer: real ``param_groups``; None, if the engine only evaluates.
        client_optimizer: what `initialize` was given as one, or None.
        client_lr_scheduler: what it was given as the scheduler, or None.
        lr_scheduler: stepped at each optimizer step that is taken, or None.
        training_dataloader: of ``training_data``, or None.
        global_samples: samples of all steps so far.
        watch: the observers of its steps.
    """

    module: nn.Module
    optimizer: DeepSpeedOptimizer | None
    is_compiled = False

    def __init__(
        self,
        core: ShardedModel,
        settings: Settings,
        *,
        client_optimizer: Any = None,
        client_lr_scheduler: Any = None,
        training_data: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self.core = core
        self.settings = settings
        self.config = settings.raw
        self.module = core.module
        self.client_optimizer = client_optimizer
        self.client_lr_scheduler = client_lr_scheduler
        self.collate_fn = collate_fn
        self.optimizer = DeepSpeedOptimizer(core, self) if isinstance(core, Engine) else None
        if isinstance(core, Engine) and core.config.fp16.enabled:
            core.loss_scaler.growth_delay = 1  # by autocast DeepSpeed uses torch's GradScaler
        self.global_samples = 0
        self._was_step_applied = False
        self.watch = Watch(settings, core, self.train_batch_size())
        self._config = DeepSpeedConfig.of(settings, core.config, core.rank, core.world_size)
        self._num_backwards = 0  # since the last step, where step() alone is the boundary
        self._is_quiet = self._is_coalescing = self._is_stepping = False  # within these contexts
        self._was_quiet = False  # since the last step
        self._has_told_of_drop = False
        if not settings.managed_gradient_accumulation and isinstance(core, Engine):
            core.set_gradient_accumulation_boundary(True)
        trained = (core.module.get_parameter(p.name) for p in core.layout.params if p.is_trainable)
        core.remove_at_end(average_plain_backwards(trained, self.gradient_accumulation_steps))
        if self.zero_optimization_stage():  # at stage 0 torch's own drops what is on parameters
            zero_grad = partial(_zero_grad, weakref.ref(self))
            core.remove_at_end([ObjectMethods("zero_grad", [(core.module, zero_grad)])])
        self.training_dataloader = (
            None if training_data is None else self.deepspeed_io(training_data)
        )

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute where the engine has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        try:
            return getattr(self.module, name)
        except AttributeError:
            if name.startswith("_"):
                text = f"{type(self).__name__!r} object has no attribute {name!r}"
                raise AttributeError(text) from None
            hint = "the model has no such attribute either: remove it, or use DeepSpeed itself"
            raise NotServedError(f"DeepSpeedEngine.{name}", hint) from None

    # ---------------------------------------------------------------- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. Inputs are cast only under ``fp16.auto_cast``, as in DeepSpeed."""
        call = self.core if self.fp16_auto_cast() else self.module
        if self.optimizer is None:
            with torch.no_grad(), self.core.autocast():
                return call(*args, **kwargs)
        with self.watch.part("forward") if self.training else nullcontext(), self.core.autocast():
            outputs = call(*args, **kwargs)
        return self.watch.followed(outputs)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Run backward of ``loss``, a scalar. Every rank must call it.

        A plain ``loss.backward()`` does the same, but for the loss scale of fp16: see `scale`.

        Args:
            loss: the mean over this rank's micro-batch.
            retain_graph: as in `torch.Tensor.backward`.
            scale_wrt_gas: divide by the micro-steps of a step.

        Returns:
            ``loss``, divided, without the loss scale.
        """
        core = self._live_core("backward")
        if loss.numel() != 1:
            raise ValueError(f"backward() takes a scalar, found a loss of shape {loss.shape}")
        steps = self.gradient_accumulation_steps() if scale_wrt_gas else 1
        self._num_backwards += 1
        with self.watch.part("backward"), _divided():
            core.backward(loss, over=steps, retain_graph=retain_graph)
        return loss / steps if steps > 1 else loss

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the loss scale, for a plain ``backward()``, which averages.

        Raises:
            NotScalarError: ``loss`` has several values.
        """
        if loss.numel() != 1:
            raise NotScalarError(
                f"scale() takes a scalar tensor, found a loss of shape {tuple(loss.shape)}: run "
                "backward of several values by tensor.backward(gradient)"
            )
        return self._live_core("scale").scale(loss, over=1)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-step and, at an accumulation boundary, update the parameters.

        Every rank must call it. ``lr_kwargs`` go to the scheduler's ``step``.

        Raises:
            NoSyncError: it is called within `no_sync`.
        """
        core = self._live_core("step")
        if self._is_quiet:  # in DeepSpeed's words, which scripts may look for
            raise NoSyncError(
                "It is illegal to call Engine.step() inside no_sync context manager: leave it first"
            )
        if self._is_coalescing:
            raise RuntimeError("step() within coalesce_grad_reduction(): step after it")
        is_boundary = core.is_gradient_accumulation_boundary()
        skipped = self.core.skipped_steps
        scheduler: Any = core.lr_scheduler
        self._is_stepping = True
        try:
            with self.watch.part("step"):
                if lr_kwargs and scheduler is not None:
                    core.lr_scheduler = SimpleNamespace(step=partial(scheduler.step, **lr_kwargs))
                core.step()
                if is_boundary:
                    self.fill_small_params()
        finally:
            if lr_kwargs:
                core.lr_scheduler = scheduler
            self._is_stepping = False
        self._was_step_applied = is_boundary and self.core.skipped_steps == skipped
        if is_boundary:
            assert self.optimizer is not None
            self._was_quiet = False
            self.optimizer.stepped()
            num_backwards, self._num_backwards = self._num_backwards, 0
            if self.settings.managed_gradient_accumulation:
                self.global_samples += self.train_batch_size()
            else:
                micro_batch = self.core.train_micro_batch_size_per_gpu
                self.global_samples += micro_batch * self.core.world_size * num_backwards
            facts = StepFacts(
                global_steps=self.global_steps,
                global_samples=self.global_samples,
                lr=[float(lr) for lr in self.get_lr()],
                loss_scale=self.core.loss_scale if self.fp16_enabled() else None,
            )
            self.watch.step_done(facts)

    def optimizer_step(self) -> None:
        """End the step, for `DeepSpeedOptimizer.step`. Every rank must call it.

        Raises:
            RuntimeError: further micro-steps are to come before the step, or no rank has a
                gradient: ``step`` was called already.
        """
        core = self._live_core("optimizer.step")
        if not core.is_gradient_accumulation_boundary():
            raise RuntimeError(
                "optimizer.step() between two steps, by gradient_accumulation_steps: call "
                "engine.step() after each micro-step instead"
            )
        if not core.states.has_any_gradient():
            raise RuntimeError(
                "optimizer.step() without a backward since the last step: engine.step() has "
                "stepped the optimizer, so leave optimizer.step() out"
            )
        self.step()

    def idle_step(self) -> None:
        """Take part in one micro-step of the other ranks, without data.

        DeepSpeed has no such call: its scripts run a batch whose loss is multiplied by zero, which
        works too, but computes. The average is that of `zero_core.Engine.idle_step`.
        """
        core = self._live_core("idle_step")
        self._num_backwards += 1
        with self.watch.part("backward"), _divided():
            core.idle_backward(over=self.gradient_accumulation_steps())
        self.step()

    def was_step_applied(self) -> bool:
        return self._was_step_applied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next backward is the last one of its step.

        Without ``managed_gradient_accumulation`` that is not known before ``step``: it is True only
        while ``step`` runs.
        """
        is_known = self.settings.managed_gradient_accumulation or self._is_stepping
        return is_known and self.core.is_gradient_accumulation_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next backward is the last one of its step, until said otherwise.

        Raises:
            RuntimeError: ``managed_gradient_accumulation`` is false, or the engine only evaluates.
        """
        core = self._training_core("set_gradient_accumulation_boundary")
        if not self.settings.managed_gradient_accumulation:
            raise RuntimeError(
                "set_gradient_accumulation_boundary() with managed_gradient_accumulation = false, "
                "where each step() is the boundary: leave the call out"
            )
        core.set_gradient_accumulation_boundary(is_boundary)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step, at every stage as plain torch does.

        DeepSpeed does so at stages 0 and 1, and after `no_sync`. At stages 2 and 3 it may keep
        what a backward has reduced: that difference is logged once, on rank 0.
        """
        if not isinstance(self.core, Engine):
            return
        stage, is_told = self.zero_optimization_stage(), self._has_told_of_drop or self.global_rank
        if stage >= 2 and self.core.states.holds_gradient and not (self._was_quiet or is_told):
            self._has_told_of_drop = True
            _log.warning(
                "zero_grad() drops the gradient since step %d, as plain torch does; DeepSpeed may "
                "train on it at stage %d: to keep it, call zero_grad() after step() only",
                self.global_steps,
                stage,
            )
        self.core.optimizer.zero_grad()
        self._was_quiet = self._is_quiet

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on the rank in this context. ``step`` must be called outside.

        Raises:
            RuntimeError: the engine only evaluates.
        """
        core = self._training_core("no_sync")
        before, self._is_quiet = self._is_quiet, True
        self._was_quiet = True
        try:
            with core.no_sync():
                yield
        finally:
            self._is_quiet = before

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Reduce the gradients of all backwards in this context once, for the ``step`` after it.

        It spans a whole step's backwards, however many these are.

        Raises:
            RuntimeError: within another such context or ``no_sync``, or
                ``managed_gradient_accumulation`` is false, or ``gradient_accumulation_steps`` is
                more than 1.
        """
        core = self._training_core("coalesce_grad_reduction")
        if not self.settings.managed_gradient_accumulation:
            raise RuntimeError(
                "coalesce_grad_reduction() with managed_gradient_accumulation = false: use "
                "no_sync()"
            )
        if self.gradient_accumulation_steps() > 1:
            raise RuntimeError(
                "coalesce_grad_reduction() with gradient_accumulation_steps = "
                f"{self.gradient_accumulation_steps()}: set it to 1, as a block is a whole step"
            )
        if self._is_coalescing or self._is_quiet:
            raise RuntimeError(
                "coalesce_grad_reduction() within itself or no_sync(): leave one out"
            )
        self._is_coalescing = True
        try:
            with core.no_sync():
                yield
        finally:
            self._is_coalescing = False

    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Copy states to host memory and free the device's. See `zero_core.Engine.offload_states`.

        Args:
            include: which states; None: all.
            device: "cpu" alone; "none" does nothing.
            pin_memory, non_blocking: as there.

        Raises:
            ValueError: ``device`` is "nvme".
        """
        if device == OffloadDeviceEnum.none:
            return
        if device != OffloadDeviceEnum.cpu:
            raise ValueError(f"offload_states(device={str(device)!r}): states go to the cpu alone")
        parts = None if include is None else [PARTS[OffloadStateTypeEnum(x)] for x in include]
        self.core.offload_states(parts, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring states back that `offload_states` took away. Every rank must call it."""
        self.core.reload_states(non_blocking=non_blocking)

    def get_global_grad_norm(self) -> float | None:
        """Return the 2-norm of the last step's gradient, unscaled, before clipping."""
        return self.core.get_global_grad_norm()

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: gradients are reduced as they become complete."""

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per step, by the number of micro-steps, at a step boundary.

        Raises:
            ValueError: it is no multiple of the samples per micro-step of all ranks.
        """
        per_micro_step = self.train_micro_batch_size_per_gpu() * self.core.world_size
        if train_batch_size < 1 or train_batch_size % per_micro_step:
            raise ValueError(
                f"train_batch_size = {train_batch_size} must be a multiple of {per_micro_step}, "
                "the samples of all ranks per micro-step"
            )
        self.core.gradient_accumulation_steps = train_batch_size // per_micro_step

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the model in place with torch.compile.

        Raises:
            NotServedError: for a ``schedule`` of DeepCompile's passes, or compiled autograd.
        """
        if schedule is not None:
            raise NotServedError("compile(schedule=...), DeepCompile's,", "leave it out")
        if compiled_autograd_enabled:
            what = "compile(compiled_autograd_enabled=True), under which hooks see no gradients,"
            raise NotServedError(what, "leave it out")
        self.module.compile(backend=backend, **(compile_kwargs or {}))
        self.is_compiled = True

    def destroy(self) -> None:
        """Remove the engine's hooks from the model, on this rank alone. The model keeps its values.

        What lies in shards stays so, as within `zero.Init`, for `GatheredParameters` and the next
        `initialize`; but integers and classes of their own are gathered: every rank must call it.
        """
        if self.core.offloaded_states:
            self.core.reload_states()
        leave_partitioned(self.core)

    def empty_partition_cache(self) -> None:
        """Do nothing: gathered parameters are released as soon as their unit is computed."""

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Return a loader of this rank's part of ``dataset``, in micro-batches."""
        if route not in ("train", "eval", "predict"):
            raise ValueError(f"route: expected 'train', 'eval' or 'predict', found {route!r}")
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            rank=self.core.rank,
            world_size=self.core.world_size,
            is_shuffled=route == "train",
            pin_memory=pin_memory and self.device.type != "cpu",
            data_sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            num_workers=num_local_io_workers,
            drop_last=self.dataloader_drop_last(),
        )

    # ------------------------------------------------------------------- facts

    # ``monitor.write_events([(name, value, samples)])``, ``tput_timer.update_epoch_count()``
    monitor = property(value_of("watch.monitor"))
    tput_timer = property(value_of("watch.tput_timer"))

    @property
    def lr_scheduler(self) -> Any:
        """Scheduler that is stepped at each optimizer step that is taken, or None."""
        return self.core.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        """Step another one, or none, as Lightning does, which steps its schedulers itself."""
        self.core.lr_scheduler = scheduler

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        return None if self.optimizer is None else self.optimizer.optimizer

    def get_lr(self) -> list[Any]:
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        return self._of_groups("momentum", "betas")

    def get_type(self) -> list[Any]:
        return self._of_groups("type")

    def _of_groups(self, *keys: str) -> list[Any]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [next((g[k] for k in keys if k in g), 0.0) for g in groups]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DeepSpeedEngine:
        """Serve ``to``, ``half``, ``cuda`` and the like where they change nothing."""
        for param in self.parameters():
            probe = torch.empty(0, dtype=param.dtype, device=param.device)
            if (fn(probe).dtype, fn(probe).device) != (probe.dtype, probe.device):
                raise RuntimeError(
                    f"the engine owns the parameters' memory ({probe.dtype} on {probe.device}): "
                    "set the precision in the configuration, and leave the device to it"
                )
        return self


_num_divided = 0
"""Running backwards whose loss is divided already. Autograd calls hooks from threads of its own."""


def average_plain_backwards(
    params: Iterable[nn.Parameter], num_micro_steps: Callable[[], int]
) -> list[Any]:
    """Divide gradients of a plain ``loss.backward()`` by a step's micro-steps, by hooks.

    [Note: divided once]
    `DeepSpeedEngine.backward` divides the loss. Any other backward that reaches a parameter has its
    gradient divided there, by a hook on the parameter, before it is accumulated: however many
    losses and outputs there are, and wherever a block is computed again, each gradient passes there
    once. DeepSpeed divides at the outputs of forward. A loss that goes through several engines is
    divided by the one whose ``backward`` is called, and by no other.
    """

    def divide(grad: Tensor) -> Tensor | None:
        steps = num_micro_steps()
        return None if _num_divided or steps == 1 else grad / steps

    handles: list[Any] = []
    for param in params:
        is_required = param.requires_grad
        param.requires_grad_(True)  # torch hooks no other; the hook stays when it is off again
        handles.append(param.register_hook(divide))  # type: ignore[no-untyped-call]
        param.requires_grad_(is_required)
    return handles


@contextmanager
def _divided() -> Iterator[None]:
    """Mark a backward whose loss has been divided, or is not to be."""
    global _num_divided
    _num_divided += 1
    try:
        yield
    finally:
        _num_divided -= 1


def _zero_grad(engine: weakref.ref[DeepSpeedEngine], set_to_none: bool = True) -> None:
    """Drop the gradients of ``engine``, as the ``zero_grad`` of its model."""
    found = engine()
    if found is not None:
        found.zero_grad(set_to_none)
