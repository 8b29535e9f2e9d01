"""A model whose parameters may be sharded. It can be called, read and exported.

``zero_core.build(..., is_training=False)`` makes a `ShardedModel`, which has no gradients, master
weights or optimizer state. `zero_core.Engine` adds the methods of training. At stage 3 the engine's
shards hold the model's values. `ShardedModel.unwrap` restores them in the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from zero_core._torch import cast_floats
from zero_core.checkpoint import whole_models
from zero_core.checkpoint.save import Saver
from zero_core.checkpointing import ModelCheckpoints
from zero_core.comm.communicator import Communicator
from zero_core.comm.control import Exchange
from zero_core.comm.device import DeviceCollectives
from zero_core.comm.host import HostCollectives
from zero_core.comm.meter import Meter, Traffic
from zero_core.config import Config, OffloadOptimizerConfig
from zero_core.core import access
from zero_core.core.extension import Extension
from zero_core.core.passes import Passes
from zero_core.errors import ConfigError, EvaluationOnlyError
from zero_core.lifecycle import LeftShard, ModelCopies, Ownership, Removable, owner_of
from zero_core.object_methods import keep_while_generating
from zero_core.optim.train_state import LossScaler, TrainState
from zero_core.runtime.device_states import (
    FORWARD_PARTS,
    NO_PARTS,
    DeviceStates,
    StatePart,
    fix_memory,
)
from zero_core.runtime.gathered import GatheredParams
from zero_core.schedules import Schedule, ScheduleFactory
from zero_core.sharded.memory import Memory
from zero_core.sharded.sharded_state import ShardedState
from zero_core.step.states import StateAccess

_log = logging.getLogger(__name__)
_WAYS = {
    "state_dict": "use engine.full_state_dict(), or engine.save_checkpoint(folder)",
    "load_state_dict": "use engine.load_checkpoint(folder), or zero_core.load_pretrained",
    "to": "build() has moved the model to engine.device; engine.unwrap() ends the engine",
}
"""Advice for methods of torch modules that engines do not have."""


@dataclass(frozen=True)
class EngineParts:
    """Parts of an engine, made by `zero_core.build`."""

    config: Config
    compute_dtype: torch.dtype | None
    autocast: Callable[[], AbstractContextManager[None]]
    ownership: Ownership
    state: ShardedState
    passes: Passes
    states: StateAccess
    device_states: DeviceStates
    train: TrainState
    memory: Memory
    communicator: Communicator
    transport: HostCollectives | DeviceCollectives
    meter: Meter
    beside: Exchange


class _UnitCalls:
    """Methods that set when units are gathered and released (stage 3)."""

    config: Config
    module: nn.Module
    _device_states: DeviceStates
    _passes: Passes
    _parts: EngineParts

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, modules: Iterable[nn.Module] | None = None
    ) -> None:
        """Set whether a forward releases the parameters that it has gathered (stage 3).

        True is the default. False keeps the parameters of a forward with gradients until their
        backward, and of a forward without gradients until the next backward or step, or until True
        is set. ``modules`` selects units. None selects all. Like FSDP2's method of this name. Every
        rank must call it, between two steps.

        Raises:
            ValueError: a module in ``modules`` does not belong to this engine.
        """
        self._device_states.check("set_reshard_after_forward()", NO_PARTS)
        meant = [self.module] if modules is None else modules
        units = self._passes.units
        indices = {unit.index for module in meant for unit in self._passes.units_of(module)}
        stay = units.stay_gathered
        units.set_stay_gathered(stay - indices if reshard_after_forward else stay | indices)

    @contextmanager
    def generating(self) -> Iterator[nn.Module]:
        """Keep parameters gathered between forwards without gradients, in this context (stage 3).

        For text generation. The model's own ``generate`` enters this context. Units of up to
        ``stage3_max_live_parameters`` elements in all stay gathered. If there are more, each
        forward gathers the others, and all ranks must run equally many forwards (``synced_gpus`` of
        transformers). Every rank must enter the context, between two steps.
        """
        self._device_states.check("generating()", NO_PARTS)
        limit = self.config.zero_optimization.stage3_max_live_parameters
        units, memory = self._passes.units, self._parts.memory
        before, kept, numel = units.stay_gathered, set[int](), 0
        # Prefer the root and the tail to blocks, and earlier blocks to later ones.
        for unit in sorted(units.units, key=lambda unit: unit.is_block):
            numel += sum(flat.segment.padded_numel for flat in unit.params)
            if numel > limit:
                break
            kept.add(unit.index)
        units.set_stay_gathered(before | kept)
        try:
            yield self.module
        finally:
            units.set_stay_gathered(before)
            memory.free_buffers(keeps_expected=True)
            memory.forget_views()

    def set_modules_to_forward_prefetch(
        self, module: nn.Module, modules: Iterable[nn.Module]
    ) -> None:
        """Gather the units of ``modules`` while the unit of ``module`` is computed in forward.

        These units must directly follow the unit of ``module`` in forward. An empty list restores
        the default, one unit. As in FSDP2. Every rank must call it, between two steps.

        Raises:
            ValueError: ``module`` is not in one unit, or ``modules`` are not in the units after it.
        """
        self._set_prefetched(module, modules, "forward", 1)

    def set_modules_to_backward_prefetch(
        self, module: nn.Module, modules: Iterable[nn.Module]
    ) -> None:
        """Gather the units of ``modules`` while the unit of ``module`` is computed in backward.

        As `set_modules_to_forward_prefetch`, in the reverse order.
        """
        self._set_prefetched(module, modules, "backward", -1)

    def _set_prefetched(
        self, module: nn.Module, modules: Iterable[nn.Module], order: str, step: int
    ) -> None:
        self._device_states.check(f"set_modules_to_{order}_prefetch()", NO_PARTS)
        passes, units = self._passes, self._passes.units_of(module)
        if len(units) != 1:
            raise ValueError(
                f"{type(module).__name__} is in units {units}: name a module of a single one"
            )
        (unit,) = units
        found = [index for m in modules for index in sorted(u.index for u in passes.units_of(m))]
        found = list(dict.fromkeys(found))
        if found != [unit.index + step * (n + 1) for n in range(len(found))]:
            raise ValueError(
                f"units {found} cannot be gathered ahead of {unit!r}: units are gathered in one "
                f"order on all ranks, so name those that follow it in {order}, which begin with "
                f"unit {unit.index + step}"
            )
        passes.units.set_depth(unit.index, len(found) or 1, backward=step < 0)


class _Progress:
    """Counters and settings of the training."""

    config: Config
    _train: TrainState

    @property
    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and micro-step."""
        return self.config.train_micro_batch_size_per_gpu

    @property
    def lr_scheduler(self) -> Schedule | None:
        """Schedule that is stepped after each optimizer step that was taken. May be set."""
        return self._train.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Schedule | None) -> None:
        self._train.lr_scheduler = scheduler

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self._train.global_steps

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because a gradient was not finite."""
        return self._train.skipped_steps

    @property
    def micro_steps(self) -> int:
        """Number of micro-steps so far. A load sets it to steps times micro-steps per step."""
        return self._train.micro_steps

    @property
    def loss_scale(self) -> float:
        """Factor on the loss, 1 without fp16."""
        return self._train.scaler.scale

    @property
    def loss_scaler(self) -> LossScaler:
        """Loss scale and the rule that changes it."""
        return self._train.scaler

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-steps per step. May be set between two steps, on every rank."""
        return self._train.accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._train.set_accumulation_steps(steps)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-step is the last one of its step."""
        return self._train.is_boundary

    def get_global_grad_norm(self) -> float | None:
        """Return the last step's unscaled gradient 2-norm before clipping. None before a step."""
        return self._train.grad_norm


class Attach(Protocol):
    """Callback that an adapter passes to `zero_core.build`."""

    def __call__(self, engine: ShardedModel, /) -> None:
        """Add methods or hooks to ``engine`` and its model."""


class ShardedModel(ModelCheckpoints, _UnitCalls, _Progress):
    """An engine that computes, reads and exports a model, without training.

    Attributes:
        module: the model itself.
        layout: the position of every parameter element in units and shards.
        device: the device that computes the model.
        rank: this rank within the data-parallel group.
        world_size: number of data-parallel ranks.
        config: the resolved configuration.
        sharded_state: the model, its layout, and the shards and optimizer states of this rank.
        states: master weights, gradients and moments by name, to read and to set.
        place: the call that this rank is in, as other ranks see it.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        state, passes, ownership = parts.state, parts.passes, parts.ownership
        self.config = parts.config
        self.sharded_state = state
        self.states = parts.states
        self.module = state.module
        self.layout = state.layout
        self.device = state.device
        self.rank = state.control.rank
        self.world_size = state.control.world_size
        self.place = parts.communicator.place
        self._communicator = parts.communicator
        self._device_states = parts.device_states
        self._passes = passes
        self._train = parts.train
        self._gathering = GatheredParams(passes, state, parts.device_states.edits)
        buffers = state.common_buffers
        buffers.attach(state.control, passes.backward)
        ownership.begin(self)
        self.remove_at_end([buffers, fix_memory(state.module), self._gathering])
        if parts.config.zero_optimization.stage == 3:
            kept = keep_while_generating(state.module, WeakMethod(self.generating))
            self.remove_at_end([kept])
        self._copies = ModelCopies(state, buffers.handles, ownership.hooks)
        self._saver = Saver(state, parts.train, parts.beside)
        self.remove_at_end([self._copies, self._saver])

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raise EvaluationOnlyError for a member of training engines, else AttributeError."""
            trained = ShardedModel.__subclasses__() if type(self) is ShardedModel else ()
            is_named = any(name == "optimizer" or name in dir(each) for each in trained)
            if is_named and not name.startswith("_"):
                raise EvaluationOnlyError(
                    f"{name}: this engine was built for evaluation: build(is_training=True) makes "
                    "one that trains"
                )
            way = _WAYS.get(name, f"use engine.module.{name}")
            hint = f": {way}" if name in dir(vars(self).get("module")) else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def __repr__(self) -> str:
        ended, zero = self._device_states.ended_by, self.config.zero_optimization
        offload = zero.offload_optimizer
        dtypes = dict.fromkeys(segment.dtype for segment in self.layout.segments)
        numel = sum(p.numel for p in self.layout.params)
        facts = [
            *([f"ended by {ended}"] if ended else []),
            f"stage {zero.stage}",
            f"{self.world_size} rank{'s' * (self.world_size > 1)} on {self.device.type}",
            " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
            *([f"offload {offload.device} {offload.ratio}"] if offload.device != "none" else []),
            f"{numel:,} parameters",
            f"step {self.global_steps}",
        ]
        return f"{type(self).__name__}({', '.join(facts)})"

    def __del__(self) -> None:
        """Release the model's parameters, if this thread built the engine."""
        if (parts := vars(self).get("_parts")) is not None:
            parts.ownership.dropped()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module without gradients. Floating inputs are cast to the compute dtype."""
        self._device_states.check("a forward", FORWARD_PARTS)
        if (dtype := self._parts.compute_dtype) is not None:
            args, kwargs = cast_floats((args, kwargs), dtype)
        with torch.no_grad(), self._parts.autocast():
            return self.module(*args, **kwargs)

    def autocast(self) -> AbstractContextManager[None]:
        """Return the `torch.autocast` context that the key ``torch_autocast`` asks for.

        Calls of the engine run in it. A program that calls ``module`` directly may enter it, too.
        """
        return self._parts.autocast()

    def idle_forward(self) -> None:
        """Take part, without data, in a forward that the other ranks run without gradients.

        At stage 3 the other ranks wait for this rank's shards. Nothing is computed. Blocks follow
        the order of this rank's last forward, or of the module tree before the first forward.
        """
        with torch.no_grad():
            self._idle_forward()

    def _idle_forward(self) -> None:
        self._device_states.check("a forward", FORWARD_PARTS)
        self.sharded_state.common_buffers.idle_forward()
        self._passes.forward.idle(self.module)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode, as `torch.nn.Module.train`."""
        self._device_states.check("train()", NO_PARTS)
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the evaluation mode, as `torch.nn.Module.eval`."""
        return self.train(False)

    def owns(self, param: nn.Parameter) -> str | None:
        """Return the first name of ``param`` if this engine owns it, else None."""
        return self._parts.ownership.name_of(param)

    def holds_value(self, param: nn.Parameter) -> bool:
        """Return whether ``param``, owned by this engine, holds its current value on this rank."""
        self._device_states.check("holds_value()", NO_PARTS)
        return self.sharded_state.holds_value(param)

    def own_part(self, param: nn.Parameter) -> Tensor:
        """Return this rank's elements of ``param``, 1-D, in its dtype, for reading only.

        Even at stage 0 it is a slice, maybe empty, in the order of ``param``'s strides: a view, or
        a copy if a file holds the shard. For a quantized parameter with several components it is a
        copy of their bytes.
        """
        self._device_states.check("own_part()", frozenset({StatePart.PARAMETERS}))
        return self.sharded_state.own_part(param)

    def allow_empty_entries(self, advice: str) -> None:
        """Make ``module.state_dict()`` return empty tensors for values that this rank lacks.

        By default ``state_dict`` raises for them. Rank 0 logs one warning, at the first of them. It
        ends with ``advice``, which explains how to get the values.
        """
        self._device_states.check("allow_empty_entries()", NO_PARTS)
        self._parts.ownership.allow_empty_entries(advice)

    def name_cures(self, cures: access.Cures) -> None:
        """Make errors about sharded parameters suggest the calls in ``cures``."""
        for flat in self.sharded_state.params:
            flat.shown.cures = cures

    def offload_states(
        self,
        parts: Iterable[str] | None = None,
        *,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Copy states to host memory and free their device memory, until `reload_states`.

        Until then, calls that need an offloaded part raise RuntimeError. A forward needs
        "parameters" and "buffers", a backward "gradients" too, and a step, save or load every part.
        A forward whose backward follows must run after `reload_states`. Every rank must call it,
        between two steps or micro-steps. Parts that are already offloaded stay offloaded. On a CPU,
        memory that ranks share is not freed. The model's buffers stay on the device.

        Args:
            parts: members of `zero_core.StatePart`. None: all. In fp32, "parameters" include the
                master weights.
            pin_memory: copy to page-locked memory, which is faster.
            non_blocking: return before the copies are done. Memory is then freed in the order of
                the current stream, and stays reserved by torch's allocator.

        Raises:
            ValueError: there is no such part.
            RuntimeError: a forward, a backward or ``gathered`` is in progress; or the host lacks
                memory, and nothing is offloaded.
        """
        self._device_states.check("offload_states()", NO_PARTS)
        wanted = list(StatePart if parts is None else parts)
        if set(wanted) - set(StatePart):
            raise ValueError(
                f"offload_states: {parts!r:.300} must list some of: {', '.join(StatePart)}"
            )
        if self.is_gathered:
            raise RuntimeError("offload_states() within gathered(): call it after that has ended")
        self._device_states.offload(
            wanted,
            keeps_gradients=self.states.has_any_gradient(),
            pin_memory=pin_memory,
            non_blocking=non_blocking,
        )

    def reload_states(self, *, non_blocking: bool = False) -> None:
        """Copy the states that `offload_states` has moved back to the device, with the same bits.

        Every rank must call it. Addresses change: a captured CUDA graph must be captured again.
        With ``non_blocking``, the current stream waits for the copies instead of the host.

        Raises:
            torch.OutOfMemoryError: the device lacks memory. All parts still count as offloaded.
        """
        self._device_states.check("reload_states()", NO_PARTS)
        self._device_states.reload(non_blocking=non_blocking)

    @property
    def offloaded_states(self) -> frozenset[str]:
        """Parts that `offload_states` has moved to host memory."""
        return self._device_states.offloaded

    def close(self) -> None:
        """Remove the engine's hooks, on this rank alone, without a collective.

        Parameters then hold no value if this rank lacks a part of it, as at stage 3 with several
        ranks. `unwrap` ends an engine with all values. A rank with an accelerator waits up to 10
        seconds for pending collectives and, unless it has failed, up to 10 for the other ranks.
        """
        try:
            self._parts.ownership.close()
        finally:
            self._end("close()")

    def unwrap(self, *, dtype: torch.dtype | None = None, drops_partial: bool = False) -> nn.Module:
        """End the engine and return its model with all values, for example for another engine.

        Parameters stay the same objects. Each rank then holds all parameters and buffers in its CPU
        memory. An optimizer that was given to ``build`` may be stepped again. It has the states
        from before ``build``, or this rank's states if it updates whole parameters. Every rank must
        call it, between two steps.

        Args:
            dtype: dtype of floating-point values, as in `full_state_dict`.
            drops_partial: whether gradients that a step has accumulated are dropped.

        Raises:
            RuntimeError: within ``gathered``, with accumulated gradients that are not to be
                dropped, while states are offloaded, or after the engine has ended.
        """
        self._device_states.check_states("unwrap()")
        if self.is_gathered:
            raise RuntimeError("unwrap() within gathered(): call it after that has ended")
        if not drops_partial and self.states.has_any_gradient():
            raise RuntimeError(
                "unwrap() between a backward and its step(), whose gradient would be lost: step "
                "first, or drop it by drops_partial=True"
            )
        with self.place.during("unwrap()"):
            values = whole_models.full_values(self.sharded_state, dtype=dtype)
            self._parts.ownership.leave_values(values)
        self._end("unwrap()")
        return self.module

    def leave_shards(self) -> Iterator[LeftShard]:
        """End the engine and return this rank's part of each parameter, without a collective.

        If this rank keeps all values, as at stages 0 to 2, parameters keep them and nothing is
        returned, unless an exchange of values has failed. Waits as `close` does.
        """
        ownership = self._parts.ownership
        if ownership.is_ended:
            return iter(())
        self._device_states.check_states("leave_shards()")
        shards = ownership.leave_shards()
        self._end("leave_shards()")
        return shards

    def _end(self, call: str) -> None:
        """Record that ``call`` has ended the engine, and close this rank's collectives."""
        self._device_states.end(call)
        try:
            self._communicator.close()
        finally:
            self._parts.transport.close()

    def remove_at_end(self, hooks: Iterable[Removable]) -> None:
        """Call ``remove`` of each of ``hooks`` when the engine ends."""
        self._parts.ownership.hooks += hooks

    def stay_with_model(self) -> None:
        """Keep the engine alive as long as its model: sharded values are lost with the engine."""
        self._copies.engine = self

    __reduce_ex__ = ModelCopies.refuse_pickle

    def memory_report(self) -> dict[str, int]:
        """Return bytes on this rank by kind, without activations and the state tier's memory."""
        report = self._parts.memory.report()
        report["exchange buffers"] = self._parts.transport.exchange_nbytes
        if own := self.sharded_state.extension_states().values():
            report["extensions"] = sum(t.nbytes for t in own)
        return {**report, **self._communicator.private_nbytes}

    def comm_report(self) -> tuple[Traffic, ...]:
        """Return what this rank sent in the last step, by collective and link.

        Rows equal those of ``plan().traffic``, without the host link. Optimizers that need whole
        parameters add a row. There are no rows before a step. Traffic between two steps counts for
        the second step. Only the engine's own collectives are counted.
        """
        return self._parts.meter.report()


def engine_of(param: nn.Parameter) -> ShardedModel | None:
    """Return the engine that owns ``param``, the newest of several, or None."""
    found = owner_of(param)
    assert found is None or isinstance(found, ShardedModel)
    return found


def for_evaluation(
    config: Config,
    optimizer: torch.optim.Optimizer | None,
    lr_scheduler: Schedule | ScheduleFactory | None,
    extensions: Sequence[Extension],
) -> Config:
    """Return ``config`` without some keys that only training uses, and log those that were set."""
    if optimizer is not None or lr_scheduler is not None or extensions:
        raise ConfigError(
            "build(is_training=False) uses no optimizer, no lr_scheduler and no extensions: leave "
            "them out, or build for training"
        )
    zero = config.zero_optimization
    offload = zero.offload_optimizer
    given = {
        "optimizer": config.optimizer,
        "scheduler": config.scheduler,
        "zero_optimization.offload_optimizer": offload if offload.device != "none" else None,
        "activation_checkpointing": config.activation_checkpointing,
        "weight_patches": config.weight_patches,
    }
    if unused := ", ".join(key for key, value in given.items() if value is not None):
        _log.info("evaluation alone: %s not used", unused)
    changed = dict.fromkeys(key for key in given if "." not in key)
    zero = zero.model_copy(update={"offload_optimizer": OffloadOptimizerConfig()})
    return config.model_copy(update={**changed, "zero_optimization": zero})
