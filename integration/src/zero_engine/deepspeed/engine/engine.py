"""`DeepSpeedEngine`: a wrapper of `zero_core.Engine` with DeepSpeed's methods.

The core engine computes forward, backward and step. This class adds DeepSpeed's counters,
observers of steps, and accumulation boundaries that the script sets.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zero_core import Engine, ShardedModel, StatePart
from zero_core.adapters import ObjectMethods
from zero_engine import monitoring
from zero_engine.deepspeed.config.deepspeed_config import DeepSpeedConfig
from zero_engine.deepspeed.config.reader import Settings
from zero_engine.deepspeed.dataloader import DeepSpeedDataLoader
from zero_engine.deepspeed.engine.checkpoints import Checkpoints
from zero_engine.deepspeed.engine.facts import value_of
from zero_engine.deepspeed.engine.optimizer import DeepSpeedOptimizer
from zero_engine.deepspeed.errors import NoSyncError, NotScalarError, NotServedError
from zero_engine.deepspeed.zero.partitioned import leave_partitioned

_log = logging.getLogger(__name__)


class OffloadDeviceEnum(StrEnum):
    """Targets of offloaded states, by DeepSpeed's names."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """States that `DeepSpeedEngine.offload_states` offloads, by DeepSpeed's names."""

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
"""zero-core's name of each state."""

_Outputs = TypeVar("_Outputs")


class Watch:
    """Observers of an engine's steps that the configuration requests.

    ``monitor`` writes scalars, and ``tput_timer`` counts steps and epochs. Scripts read both as
    attributes of the engine.
    """

    def __init__(self, settings: Settings, engine: ShardedModel, batch_size: int) -> None:
        self.monitor = monitoring.Monitor(settings.monitors, rank=engine.rank)
        # Only rank 0 prints, writes scalars and counts operations. Every rank measures times,
        # memory and traffic.
        say: Callable[[str], None] = print if engine.rank == 0 else lambda text: None
        self.observers: list[monitoring.StepObserver] = []
        if self.monitor.enabled:
            self.observers.append(monitoring.Scalars(self.monitor))
        if settings.flops_profiler.enabled and engine.rank == 0:
            self.observers.append(monitoring.FlopsProfiler(settings.flops_profiler, say=say))
        if settings.wall_clock_breakdown:
            self.observers.append(monitoring.WallClock(engine.device, self.monitor, say=say))
        if settings.memory_breakdown:
            self.observers.append(monitoring.MemoryBreakdown(engine.device, say=say))
        if settings.comms_logger.enabled:
            self.observers.append(
                monitoring.CommunicationLog(engine, settings.comms_logger, say=say)
            )
        if settings.throughput.enabled and settings.steps_per_print is not None:
            self.observers.append(
                monitoring.Throughput(engine.device, settings.steps_per_print, say=say)
            )
        self.tput_timer = monitoring.ThroughputTimer(batch_size)
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
        self._is_in_backward = False  # a failed backward may have left it True
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
        # Queued in a callback, to run after the callback in which the engine waits for reductions.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self._leave_backward))

    def _leave_backward(self) -> None:
        self._is_in_backward = False
        for observer in self.observers:
            observer.end_plain_backward()

    def step_done(self, facts: monitoring.StepFacts) -> None:
        self.tput_timer.step_done(facts)
        for observer in self.observers:
            observer.step_done(facts)


class DeepSpeedEngine(Checkpoints, nn.Module):
    """A model with the interface of DeepSpeed's engine. Made by `initialize`.

    Attributes that it lacks are looked up in the model.

    Attributes:
        core: zero-core's engine or, without an optimizer, its model for evaluation.
        config: the configuration as it was given.
        optimizer: None if the engine only evaluates.
        client_optimizer, client_lr_scheduler: objects that `initialize` was given, or None.
        global_samples: samples of all steps so far.
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
            core.loss_scaler.growth_delay = 1  # DeepSpeed's first growth window is one step longer
        self.global_samples = 0
        self._was_step_applied = False
        self.watch = Watch(settings, core, self.train_batch_size())
        self._config = DeepSpeedConfig.of(settings, core.config, core.rank, core.world_size)
        self._num_backwards = 0  # number of backwards since the last step
        self._is_quiet = self._is_coalescing = self._is_stepping = False
        self._was_quiet = False  # whether no_sync was entered since the last step
        self._has_told_of_drop = False
        if not settings.managed_gradient_accumulation and isinstance(core, Engine):
            core.set_gradient_accumulation_boundary(True)
        trained = (core.module.get_parameter(p.name) for p in core.layout.params if p.is_trainable)
        core.remove_at_end(average_plain_backwards(trained, self.gradient_accumulation_steps))
        if self.zero_optimization_stage():  # at stage 0 the model keeps torch's zero_grad
            zero_grad = partial(_zero_grad, weakref.ref(self))
            core.remove_at_end([ObjectMethods("zero_grad", [(core.module, zero_grad)])])
        self.training_dataloader = (
            None if training_data is None else self.deepspeed_io(training_data)
        )

    def __getattr__(self, name: str) -> Any:
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
        """Run backward of ``loss``, the mean over this rank's micro-batch. Every rank must call it.

        A plain ``loss.backward()`` does the same, except for fp16's loss scale: see `scale`. With
        ``scale_wrt_gas`` the loss is divided by the number of micro-steps per step. Returns the
        divided ``loss``, without the loss scale.
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
        """Return a scalar ``loss`` times the loss scale, for a plain backward."""
        if loss.numel() != 1:
            raise NotScalarError(
                f"scale() takes a scalar tensor, found a loss of shape {tuple(loss.shape)}: run "
                "backward of several values by tensor.backward(gradient)"
            )
        return self._live_core("scale").scale(loss, over=1)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-step and, at a boundary, update the parameters. Every rank must call it.

        Raises RuntimeError in `no_sync` and `coalesce_grad_reduction`, and without an optimizer.
        """
        core = self._live_core("step")
        if self._is_quiet:  # scripts may match DeepSpeed's message
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
            facts = monitoring.StepFacts(
                global_steps=self.global_steps,
                global_samples=self.global_samples,
                lr=[float(lr) for lr in self.get_lr()],
                loss_scale=self.core.loss_scale if self.fp16_enabled() else None,
            )
            self.watch.step_done(facts)

    def optimizer_step(self) -> None:
        """Call `step`. Raises RuntimeError between boundaries and if there was no backward."""
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

        DeepSpeed has no such call. Its scripts compute a batch whose loss is multiplied by zero,
        which works here too. See `zero_core.Engine.idle_backward` for the average of gradients.
        """
        core = self._live_core("idle_step")
        self._num_backwards += 1
        with self.watch.part("backward"), _divided():
            core.idle_backward(over=self.gradient_accumulation_steps())
        self.step()

    def was_step_applied(self) -> bool:
        return self._was_step_applied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-step is the last one of its step.

        Without ``managed_gradient_accumulation`` it is True only while ``step`` runs.
        """
        is_known = self.settings.managed_gradient_accumulation or self._is_stepping
        return is_known and self.core.is_gradient_accumulation_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the following backwards are the last of their step, until the next call.

        Raises RuntimeError without ``managed_gradient_accumulation`` or without an optimizer.
        """
        core = self._training_core("set_gradient_accumulation_boundary")
        if not self.settings.managed_gradient_accumulation:
            raise RuntimeError(
                "set_gradient_accumulation_boundary() with managed_gradient_accumulation = false, "
                "where each step() is the boundary: leave the call out"
            )
        core.set_gradient_accumulation_boundary(is_boundary)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients accumulated since the last step, at every stage, as torch does.

        At stages 2 and 3, where DeepSpeed may keep gradients that are reduced already, rank 0 logs
        a warning once.
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
        """Accumulate gradients on this rank without reduction, in this context.

        Within it, ``step`` raises NoSyncError. Raises RuntimeError without an optimizer.
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
        """Sum the gradients of all backwards in this context, and reduce the sum in ``step``.

        The context must span all backwards of a step. Raises RuntimeError within itself or
        `no_sync`, without ``managed_gradient_accumulation``, and with several micro-steps per step.
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
        """Copy states to host memory and free the device memory. Every rank must call it.

        ``include`` names the states; None means all. The ``device`` "none" does nothing, and "nvme"
        raises ValueError.
        """
        if device == OffloadDeviceEnum.none:
            return
        if device != OffloadDeviceEnum.cpu:
            raise ValueError(f"offload_states(device={str(device)!r}): states go to the cpu alone")
        parts = None if include is None else [PARTS[OffloadStateTypeEnum(x)] for x in include]
        self.core.offload_states(parts, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Copy offloaded states back to the device. Every rank must call it."""
        self.core.reload_states(non_blocking=non_blocking)

    def get_global_grad_norm(self) -> float | None:
        return self.core.get_global_grad_norm()

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: backward or, after `coalesce_grad_reduction`, `step` reduces gradients."""

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the samples per step by changing the number of micro-steps, between two steps.

        Raises ValueError unless it is a positive multiple of all ranks' samples per micro-step.
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
        """Compile the model in place. DeepCompile and compiled autograd raise NotServedError."""
        if schedule is not None:
            raise NotServedError("compile(schedule=...), DeepCompile's,", "leave it out")
        if compiled_autograd_enabled:
            what = "compile(compiled_autograd_enabled=True), under which hooks see no gradients,"
            raise NotServedError(what, "leave it out")
        self.module.compile(backend=backend, **(compile_kwargs or {}))
        self.is_compiled = True

    def destroy(self) -> None:
        """Remove the engine from the model, which keeps its values.

        Sharded parameters become partitioned, as within `zero.Init`. Integer parameters and
        subclasses of ``nn.Parameter`` are gathered, so every rank must call it.
        """
        if self.core.offloaded_states:
            self.core.reload_states()
        leave_partitioned(self.core)

    def empty_partition_cache(self) -> None:
        """Do nothing: the engine releases gathered parameters itself."""

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
        """Return a loader of ``dataset``, by default of this rank's samples in micro-batches."""
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

    monitor = property(value_of("watch.monitor"))
    tput_timer = property(value_of("watch.tput_timer"))

    @property
    def lr_scheduler(self) -> Any:
        return self.core.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        self.core.lr_scheduler = scheduler

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        return None if self.optimizer is None else self.optimizer.optimizer

    def _of_groups(self, *keys: str) -> list[Any]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [next((g[k] for k in keys if k in g), 0.0) for g in groups]

    get_lr = partialmethod(_of_groups, "lr")
    get_mom = partialmethod(_of_groups, "momentum", "betas")
    get_type = partialmethod(_of_groups, "type")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DeepSpeedEngine:
        """Raise RuntimeError if ``to``, ``half`` or the like would change a dtype or a device."""
        for param in self.parameters():
            probe = torch.empty(0, dtype=param.dtype, device=param.device)
            if (fn(probe).dtype, fn(probe).device) != (probe.dtype, probe.device):
                raise RuntimeError(
                    f"the engine owns the parameters' memory ({probe.dtype} on {probe.device}): "
                    "set the precision in the configuration, and leave the device to it"
                )
        return self


_num_divided = 0
"""Number of running backwards in `_divided`. Global, as autograd runs hooks in other threads."""


def average_plain_backwards(
    params: Iterable[nn.Parameter], num_micro_steps: Callable[[], int]
) -> list[Any]:
    """Divide gradients of a plain ``loss.backward()`` by the micro-steps. Returns the hooks.

    [Note: divided once]
    `DeepSpeedEngine.backward` divides the loss. In any other backward, a hook on each parameter
    divides its gradient before accumulation. A gradient passes that hook once, whatever the number
    of losses, outputs and recomputed blocks. If a loss depends on several engines, only the engine
    whose ``backward`` is called divides it.
    """

    def divide(grad: Tensor) -> Tensor | None:
        steps = num_micro_steps()
        return None if _num_divided or steps == 1 else grad / steps

    handles: list[Any] = []
    for param in params:
        is_required = param.requires_grad
        param.requires_grad_(True)  # register_hook refuses frozen parameters
        handles.append(param.register_hook(divide))  # type: ignore[no-untyped-call]
        param.requires_grad_(is_required)
    return handles


@contextmanager
def _divided() -> Iterator[None]:
    global _num_divided
    _num_divided += 1
    try:
        yield
    finally:
        _num_divided -= 1


def _zero_grad(engine: weakref.ref[DeepSpeedEngine], set_to_none: bool = True) -> None:
    found = engine()
    if found is not None:
        found.zero_grad(set_to_none)
