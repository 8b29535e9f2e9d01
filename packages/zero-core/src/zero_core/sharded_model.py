"""A model whose parameters may be in shards: call it, read its values, export them.

``zero_core.build(..., is_training=False)`` makes one, without gradients, master weights and
optimizer state. `zero_core.Engine` adds the verbs of a training. At stage 3 the model's values are
in the engine's shards: `ShardedModel.unwrap` leaves them in the model, for another engine.
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
from zero_core.extensions.generation import keep_while_generating
from zero_core.lifecycle import LeftShard, ModelCopies, Ownership, Removable, owner_of
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
    """Calls that set when units are gathered and released (stage 3)."""

    config: Config
    module: nn.Module
    _device_states: DeviceStates
    _passes: Passes
    _parts: EngineParts

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, modules: Iterable[nn.Module] | None = None
    ) -> None:
        """Set whether a forward releases the parameters that it has gathered (stage 3).

        False keeps them, with gradients until their backward, without until values change or
        True, the default, is set: several forwards then gather once, for the memory of what is
        kept. ``modules``: whose units are meant; None: all. As FSDP2's method of the name. Every
        rank must call it, between two steps.

        Raises:
            ValueError: one of ``modules`` is not this engine's.
        """
        self._device_states.check("set_reshard_after_forward()", NO_PARTS)
        meant = [self.module] if modules is None else modules
        units = self._passes.units
        indices = {unit.index for module in meant for unit in self._passes.units_of(module)}
        stay = units.stay_gathered
        units.set_stay_gathered(stay - indices if reshard_after_forward else stay | indices)

    @contextmanager
    def generating(self) -> Iterator[nn.Module]:
        """Keep parameters gathered between forwards without gradients, within (stage 3).

        For text generation; the model's own ``generate`` enters it by itself. Units stay up to
        ``stage3_max_live_parameters`` elements; where there are more, the others are gathered in
        each forward, and all ranks must run equally many of them (``synced_gpus`` of transformers).
        Every rank must enter it, between two steps.
        """
        self._device_states.check("generating()", NO_PARTS)
        limit = self.config.zero_optimization.stage3_max_live_parameters
        units, memory = self._passes.units, self._parts.memory
        before, kept, numel = units.stay_gathered, set[int](), 0
        # The root and the tail come first, which others may wait for, then blocks in their order.
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
            memory.pools.free(keeps_expected=True)
            memory.forget_views()

    def set_modules_to_forward_prefetch(
        self, module: nn.Module, modules: Iterable[nn.Module]
    ) -> None:
        """Gather the units of ``modules`` while that of ``module`` is computed in forward.

        They must be those that follow ``module`` in the order of all ranks. Without any it is one,
        the default. As FSDP2's method of the name. Every rank must call it, between two steps.

        Raises:
            ValueError: ``modules`` are others, or not this engine's.
        """
        self._set_prefetched(module, modules, "forward", 1)

    def set_modules_to_backward_prefetch(
        self, module: nn.Module, modules: Iterable[nn.Module]
    ) -> None:
        """Gather the units of ``modules`` while that of ``module`` is computed in backward.

        As `set_modules_to_forward_prefetch`; backward's order is the reverse.
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
        passes.units.prefetch.set_depth(unit.index, len(found) or 1, backward=step < 0)


class _Progress:
    """Counts and settings of the training."""

    config: Config
    _train: TrainState

    @property
    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and micro-step."""
        return self.config.train_micro_batch_size_per_gpu

    @property
    def lr_scheduler(self) -> Schedule | None:
        """Schedule that is stepped at each optimizer step that is taken. It may be set."""
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
        """Calls of ``step`` so far. After a load, as many as the steps so far would have."""
        return self._train.accumulation.micro_steps

    @property
    def loss_scale(self) -> float:
        """Factor on the loss, 1 without fp16."""
        return self._train.scaler.scale

    @property
    def loss_scaler(self) -> LossScaler:
        """Loss scale and what changes it."""
        return self._train.scaler

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-steps per step. The number may be set between two steps, on every rank."""
        return self._train.accumulation.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._train.accumulation.set_steps(steps)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-step is the last one of its step."""
        return self._train.accumulation.is_boundary()

    def get_global_grad_norm(self) -> float | None:
        """2-norm of the last step's gradient, unscaled, before clipping, or None before a step."""
        return self._train.grad_norm


class Attach(Protocol):
    """Adapter's part of a build: see `zero_core.build`."""

    def __call__(self, engine: ShardedModel, /) -> None:
        """Add to ``engine`` and its model."""


class ShardedModel(ModelCheckpoints, _UnitCalls, _Progress):
    """The reading half of an engine.

    Attributes:
        module: the model itself.
        layout: the place of every element.
        device: computes the model.
        rank: this rank within the data-parallel group.
        world_size: number of data-parallel ranks.
        config: the resolved configuration.
        sharded_state: the model, its layout, and the shards and states of this rank.
        states: master weights, gradients and moments by name, to read and to set.
        place: where this rank is, as other ranks see it.
    """

    def __init__(self, parts: EngineParts) -> None:
        """Called by `zero_core.build`."""
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
        if parts.config.broadcast_buffers:
            buffers.attach(state.control, passes.backward)
        ownership.begin(self)
        watch = parts.device_states.watch_model()
        self.remove_at_end([buffers, watch, fix_memory(state.module), self._gathering])
        self._gathering.begin()
        if parts.config.zero_optimization.stage == 3:
            kept = keep_while_generating(state.module, WeakMethod(self.generating))
            self.remove_at_end([kept])
        self._copies = ModelCopies(state, buffers.handles, ownership.hooks)
        self._saver = Saver(state, parts.train, parts.beside)
        self.remove_at_end([self._copies, self._saver])

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Say how to make an engine that trains, where one is needed."""
            trained = ShardedModel.__subclasses__() if type(self) is ShardedModel else ()
            is_named = any(name == "optimizer" or name in dir(each) for each in trained)
            if is_named and not name.startswith("_"):
                raise EvaluationOnlyError(
                    f"{name}: this engine was built for evaluation: build(is_training=True) makes "
                    "one that trains"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __del__(self) -> None:
        """Take the hooks off the model, which nobody can end any more."""
        if (parts := vars(self).get("_parts")) is not None:
            parts.ownership.dropped()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module without gradients. Floating inputs are cast to the compute dtype."""
        self._device_states.check("a forward", FORWARD_PARTS)
        args, kwargs = cast_floats((args, kwargs), self._parts.compute_dtype)
        with torch.no_grad(), self._parts.autocast():
            return self.module(*args, **kwargs)

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of `torch.autocast` that ``torch_autocast`` asks for.

        A call of the engine runs in it; a program that calls ``module`` may enter it.
        """
        return self._parts.autocast()

    def idle_forward(self) -> None:
        """Take part in one forward without gradients of the other ranks, without data.

        At stage 3 the others wait for this rank's shards. Nothing is computed. It follows the order
        of blocks of this rank's last forward, or the module tree's before the first one.
        """
        with torch.no_grad():
            self._idle_forward()

    def _idle_forward(self) -> None:
        self._device_states.check("a forward", FORWARD_PARTS)
        self.sharded_state.common_buffers.idle_forward(self._passes.backward)
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
        """Return the first name of ``param`` if it is one of this engine's, or None."""
        return self._parts.ownership.name_of(param)

    def holds_value(self, param: nn.Parameter) -> bool:
        """Whether ``param``, one of this engine's, holds its current value on this rank now."""
        self._device_states.check("holds_value()", NO_PARTS)
        return self.sharded_state.holds_value(param)

    def own_part(self, param: nn.Parameter) -> Tensor:
        """Return this rank's elements of ``param``, 1-D, in its dtype: a view, not to be changed.

        A slice at stage 0, too, maybe empty, in the order of the parameter's strides.
        """
        self._device_states.check("own_part()", frozenset({StatePart.PARAMETERS}))
        return self.sharded_state.own_part(param)

    def allow_empty_entries(self, advice: str) -> None:
        """Have ``module.state_dict()`` on this rank give empty tensors for values not held here.

        By default it raises. For callers that need only the names, or discard the result. Rank 0
        logs a warning, once, which ends with ``advice``: how a caller gets the values.
        """
        self._device_states.check("allow_empty_entries()", NO_PARTS)
        self._parts.ownership.allow_empty_entries(advice)

    def name_cures(self, cures: access.Cures) -> None:
        """Have errors about uses of sharded parameters name the calls of another interface."""
        for flat in self.sharded_state.params:
            flat.shown.cures = cures

    def offload_states(
        self,
        parts: Iterable[str] | None = None,
        *,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Copy states to host memory and free the device's, until `reload_states`.

        Meanwhile what needs a part that is away raises RuntimeError: a forward needs "parameters"
        and "buffers", a backward "gradients" too, all else every part. A forward whose backward is
        to come must run after `reload_states`. Every rank must call it, between two steps or
        micro-steps. Parts that are away already stay so. On a CPU, memory that ranks share is not
        freed. The model's buffers stay.

        Args:
            parts: which of `zero_core.StatePart`; None: all. In fp32, "parameters" are the master
                weights too.
            pin_memory: copy to page-locked memory: faster.
            non_blocking: return before the copies are done; memory is free in the order of the
                current stream then, and stays reserved by torch's allocator.

        Raises:
            ValueError: there is no such part.
            RuntimeError: a forward, a backward or ``gathered`` is under way; or the host lacks the
                memory, and nothing is offloaded.
        """
        self._device_states.check("offload_states()", NO_PARTS)
        wanted = list(StatePart if parts is None else parts)
        if unknown := set(wanted) - set(StatePart):
            raise ValueError(
                f"offload_states: no part {', '.join(sorted(map(repr, unknown)))}; there are "
                f"{', '.join(StatePart)}"
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
        """Bring back to the device what `offload_states` has taken away, with the same bits.

        Every rank must call it. Addresses change: a captured CUDA graph must be captured again.
        ``non_blocking``: the host does not wait for the copies, the current stream does.

        Raises:
            torch.OutOfMemoryError: the device lacks the memory. All parts stay offloaded: free some
                and call it again.
        """
        self._device_states.check("reload_states()", NO_PARTS)
        self._device_states.reload(non_blocking=non_blocking)

    @property
    def offloaded_states(self) -> frozenset[str]:
        """Parts that `offload_states` has taken away."""
        return self._device_states.offloaded

    def close(self) -> None:
        """Remove the engine's hooks, on this rank alone: it waits for no other.

        Parameters of whose current values other ranks have a part hold none then: at stage 3 and,
        after a step, at 1 and 2. `unwrap` ends an engine with all of them whole.
        """
        try:
            self._parts.ownership.close()
        finally:
            self._end("close()")

    def unwrap(self, *, dtype: torch.dtype | None = None, drops_partial: bool = False) -> nn.Module:
        """End the engine and return its model with every value whole, for another engine perhaps.

        Parameters stay the same objects; each rank then holds all of them, and the buffers, in its
        CPU memory. An optimizer that was given to ``build`` may be stepped again, with the states
        that it came with, or, where it updates whole parameters, those of this rank's. Every rank
        must call it, between two steps.

        Args:
            dtype: of floating values, as in `full_state_dict`.
            drops_partial: whether gradients that a step has accumulated so far are dropped.

        Raises:
            RuntimeError: within ``gathered``, or gradients wait for a step and are not to be
                dropped; or the engine has ended before.
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
        """End the engine and return this rank's part of each parameter that is not whole.

        At stages 0 to 2 parameters keep their values where every rank has them all, as after
        `publish`, and nothing is returned. As `close`, it waits for no other rank.
        """
        ownership = self._parts.ownership
        if ownership.is_ended:
            return iter(())
        self._device_states.check_states("leave_shards()")
        shards = ownership.leave_shards()
        self._end("leave_shards()")
        return shards

    def _end(self, call: str) -> None:
        """Note that ``call`` has ended the engine, and end its collectives, on this rank alone."""
        self._device_states.ended_by = self._device_states.ended_by or call
        try:
            self._communicator.close()
        finally:
            self._parts.transport.close()

    def remove_at_end(self, hooks: Iterable[Removable]) -> None:
        """Remove ``hooks`` that others put on the model when the engine ends."""
        self._parts.ownership.hooks += hooks

    def stay_with_model(self) -> None:
        """Live as long as the model or until the end: sharded values go with a dropped engine."""
        self._copies.engine = self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse `copy.deepcopy`, `copy.copy` and pickle."""
        raise TypeError(
            "an engine cannot be copied or pickled: its state is sharded over ranks. Copy the "
            "model by copy.deepcopy(engine.module) within engine.gathered(); keep a training by "
            "engine.save_checkpoint(), and weights by engine.full_state_dict()"
        )

    def memory_report(self) -> dict[str, int]:
        """Return bytes on this rank by kind, without activations and the state tier's memory."""
        report = self._parts.memory.report()
        report["exchange buffers"] = self._parts.transport.exchange_nbytes
        if own := self.sharded_state.extension_states().values():
            report["extensions"] = sum(t.nbytes for t in own)
        return {**report, **self._communicator.private_nbytes}

    def comm_report(self) -> tuple[Traffic, ...]:
        """Return what this rank sent in the last step, by collective and link.

        Rows, none before a step, are those of ``plan().traffic``, without the host link, and Muon's
        gather, which a plan lacks. What is sent between two steps counts for the second. Only what
        goes through the engine's own collectives is seen.
        """
        return self._parts.meter.report()


def engine_of(param: nn.Parameter) -> ShardedModel | None:
    """Return the engine that owns ``param``, the newest if there are several, or None."""
    found = owner_of(param)
    assert found is None or isinstance(found, ShardedModel)
    return found


def for_evaluation(
    config: Config,
    optimizer: torch.optim.Optimizer | None,
    lr_scheduler: Schedule | ScheduleFactory | None,
    extensions: Sequence[Extension],
) -> Config:
    """Return ``config`` without what only a training uses, and log which keys these are."""
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
