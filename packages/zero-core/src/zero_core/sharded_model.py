"""A model whose parameters may be in shards: call it, read its values, export them.

``zero_core.build(..., is_training=False)`` makes one, for a model too large for one rank, without
gradients, master weights and optimizer state. `zero_core.Engine` adds the verbs of a training. At
stage 3 the model's values are in the engine's shards: end it with `ShardedModel.unwrap`, which
leaves them in the model, before another engine trains it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from zero_core._torch import cast_floats
from zero_core.checkpoint import whole_models
from zero_core.checkpoint.load import load_checkpoint
from zero_core.checkpoint.save import Saver, SaveRequest
from zero_core.checkpoint.storage import Location, local_path, location_of
from zero_core.comm.communicator import Communicator
from zero_core.comm.control import Exchange
from zero_core.comm.device import DeviceCollectives
from zero_core.comm.host import HostCollectives
from zero_core.comm.meter import Meter, Traffic
from zero_core.config import Config, OffloadOptimizerConfig
from zero_core.core import access
from zero_core.core.extension import Extension
from zero_core.core.hooks import ModuleUnits
from zero_core.core.passes import Passes
from zero_core.core.saved import Holding
from zero_core.errors import ConfigError, EvaluationOnlyError
from zero_core.extensions.generation import keep_while_generating
from zero_core.lifecycle import LeftShard, Ownership, Removable, owner_of
from zero_core.optim.train_state import LossScaler, TrainState
from zero_core.runtime.copies import ModelCopies
from zero_core.runtime.device_states import FORWARD_PARTS, NO_PARTS, DeviceStates, StatePart
from zero_core.runtime.gathered import GatheredParams
from zero_core.runtime.param_guard import FixedMemory, ParamGuard
from zero_core.runtime.small_params import SmallParams
from zero_core.schedules import Schedule, ScheduleFactory
from zero_core.sharded.memory import Memory
from zero_core.sharded.sharded_state import ShardedState
from zero_core.step.states import StateAccess

_log = logging.getLogger(__name__)

_TRAINING_VERBS = frozenset(
    {
        "patch_version",
        "weight_patch",
        *("backward", "clip_grad_norm_", "no_sync", "optimizer", "scale"),
        *("idle_backward", "idle_step", "set_gradient_accumulation_boundary", "step"),
        *("set_is_last_backward", "set_requires_gradient_sync", "async_save", "resume"),
        *("record", "report", "train_batch", "zero_grad"),
    }
)
"""Members of `zero_core.Engine` alone."""
_TRAINING_PARTS = ("optimizer", "lr_scheduler", "progress")
"""Parts of a checkpoint that an evaluation does not load."""


@dataclass(frozen=True)
class EngineParts:
    """Parts of an engine, made by `zero_core.build`."""

    config: Config
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


class Attach(Protocol):
    """Adapter's part of a build: see `zero_core.build`."""

    def __call__(self, engine: ShardedModel, /) -> None:
        """Add to ``engine`` and its model."""


class ShardedModel:
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
        self._ownership = parts.ownership
        state, passes = parts.state, parts.passes
        self.config = parts.config
        self.sharded_state = state
        self.states = parts.states
        self.module = state.module
        self.layout = state.layout
        self.device = state.device
        self.rank = state.control.rank
        self.world_size = state.control.world_size
        self._compute_dtype = parts.config.compute_dtype
        self._autocast_dtype = parts.config.autocast_dtype
        self._train = parts.train
        self._device_states = parts.device_states
        self._passes = passes
        self._memory = parts.memory
        self._communicator = parts.communicator
        self.place = parts.communicator.place
        self._transport = parts.transport
        self._meter = parts.meter
        self._gathering = GatheredParams(passes, state, parts.device_states.edits)
        self._module_units = ModuleUnits(passes)
        buffers = state.common_buffers
        if parts.config.broadcast_buffers:
            buffers.attach(state.control, passes.backward)
        self._guard = ParamGuard(state.module, state.params, state.param_names)
        self._ownership.begin(self)
        self.remove_at_end([buffers, self._guard.watch(), FixedMemory(state.module)])
        self.remove_at_end([Holding(self._gathering)])
        if parts.config.zero_optimization.stage == 3:
            kept = keep_while_generating(state.module, WeakMethod(self.generating))
            self.remove_at_end([kept])
        handles = (buffers.handles, self._ownership.hooks)
        self._copies = ModelCopies(state, handles)
        self._small_params: SmallParams | None = None
        self._saver = Saver(state, parts.train, parts.beside)
        self.remove_at_end([self._copies, self._saver])

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Say how to make an engine that trains, where one is needed."""
            if name in _TRAINING_VERBS and type(self) is ShardedModel:
                raise EvaluationOnlyError(
                    f"{name}: this engine was built for evaluation: build(is_training=True) makes "
                    "one that trains"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __del__(self) -> None:
        """Take the hooks off the model, which nobody can end any more."""
        ownership = vars(self).get("_ownership")
        if ownership is not None:
            ownership.dropped()

    # ------------------------------------------------------------------ using

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module without gradients. Floating inputs are cast to the compute dtype."""
        self._device_states.check("a forward", FORWARD_PARTS)
        args, kwargs = cast_floats((args, kwargs), self._compute_dtype)
        with torch.no_grad(), self.autocast():
            return self.module(*args, **kwargs)

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of `torch.autocast` that ``torch_autocast`` asks for.

        A call of the engine runs in it; a program that calls ``module`` may enter it.
        """
        if self._autocast_dtype is None:
            return nullcontext()
        # torch's cache would keep all weights in 16 bits up to the end of the forward.
        is_cached = None if self.config.zero_optimization.stage < 3 else False  # None: as set
        return torch.autocast(self.device.type, self._autocast_dtype, cache_enabled=is_cached)

    @torch.no_grad()
    def idle_forward(self) -> None:
        """Take part in one forward without gradients of the other ranks, without data.

        For ranks that evaluate or generate less than others: at stage 3 the others wait for this
        rank's shards. Nothing is computed. It follows the order of blocks of this rank's last
        forward, or the module tree's before the first one.
        """
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

    def gathered(
        self, *, modifier_rank: int | None = None, params: Iterable[nn.Parameter] | None = None
    ) -> AbstractContextManager[nn.Module]:
        """Gather the exact values of all parameters, or of ``params`` alone, within a context.

        By default values are only read: at stage 3 a change is an error at the end. Changes that
        rank ``modifier_rank`` makes in place reach all shards and master weights at the end. Every
        rank must enter it with the same parameters. For read-only use this is not checked: a
        mismatch hangs. It takes the memory of what is gathered (of ``params``, and one unit at a
        time), on the modifier twice. It nests. Within its own forward or backward a unit has that
        one's values: with qwZ, quantized.

        Raises:
            ValueError: there is no such rank, or one of ``params`` is not this engine's.
            RankMismatchError: a change was announced with different parameters or ranks.
            RuntimeError: parameters are to be changed within a forward or backward, or were changed
                at stage 3 without ``modifier_rank``.
        """
        self._device_states.check("gathered()")
        self._device_states.before_write()
        if params is None:
            return self._gathering.all_params(modifier_rank)
        return self._gathering.some_params(params, modifier_rank)

    @property
    def is_gathered(self) -> bool:
        """Whether a context of `gathered` is open."""
        return self._gathering.is_open

    def publish(self) -> None:
        """Wait for the values of the last step, where each rank has room for them all.

        A step launches their exchange; the next forward, or whoever reads a parameter first, waits
        for it too. At stage 3 values rest as shards: see `gathered`; copies by `keep_small_params`
        are filled. Every rank must call it.
        """
        self._device_states.check("publish()", FORWARD_PARTS)
        with self.place.during("publish()"):
            self._gathering.publish()
            if self._small_params is not None:
                self._small_params.refresh()

    def keep_small_params(self) -> None:
        """Keep small parameters whole at stage 3, as DeepSpeed does: copies that `publish` fills.

        Small is what ``stage3_param_persistence_threshold`` and
        ``stage3_model_persistence_threshold`` say. The next `publish` makes the copies. Every rank
        must call it, once.
        """
        self._device_states.check("keep_small_params()")
        zero = self.config.zero_optimization
        limits = zero.stage3_param_persistence_threshold, zero.stage3_model_persistence_threshold
        self._small_params = SmallParams(self.sharded_state, *limits)
        self.remove_at_end([self._small_params])

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, modules: Iterable[nn.Module] | None = None
    ) -> None:
        """Set whether a forward releases the parameters that it has gathered (stage 3).

        False keeps them, with gradients until their backward, without until values change or
        True is set: several forwards then gather once, for the memory of what is kept. As FSDP2's
        method of the name. Every rank must call it, between two steps.

        Args:
            reshard_after_forward: True is the default of an engine.
            modules: whose units are meant; None: all.

        Raises:
            ValueError: one of ``modules`` is not this engine's.
        """
        self._device_states.check("set_reshard_after_forward()", NO_PARTS)
        meant = [self.module] if modules is None else modules
        self._module_units.set_resharded(meant, is_resharded=reshard_after_forward)

    @contextmanager
    def generating(self) -> Iterator[nn.Module]:
        """Keep parameters gathered between forwards without gradients, within (stage 3).

        For text generation; the model's own ``generate``, if it has one, enters it by itself. The
        first forward gathers. Units stay up to ``stage3_max_live_parameters`` elements; where there
        are more, the others are gathered in each forward, and all ranks must run equally many of
        them (``synced_gpus`` of transformers). Every rank must enter it, between two steps.
        """
        self._device_states.check("generating()", NO_PARTS)
        limit = self.config.zero_optimization.stage3_max_live_parameters
        try:
            with self._module_units.keeping(limit):
                yield self.module
        finally:
            self._memory.pools.free(keeps_expected=True)
            self._memory.forget_views()

    def set_modules_to_forward_prefetch(
        self, module: nn.Module, modules: Iterable[nn.Module]
    ) -> None:
        """Gather the units of ``modules`` while that of ``module`` is computed in forward.

        Units are gathered in one order on all ranks, so ``modules`` must be those that follow
        ``module`` in it. Without any it is one, the default. Each takes the memory of a unit. As
        FSDP2's method of the name. Every rank must call it, between two steps.

        Raises:
            ValueError: ``modules`` are others, or not this engine's.
        """
        self._device_states.check("set_modules_to_forward_prefetch()", NO_PARTS)
        self._module_units.set_prefetched(module, modules, backward=False)

    def set_modules_to_backward_prefetch(
        self, module: nn.Module, modules: Iterable[nn.Module]
    ) -> None:
        """Gather the units of ``modules`` while that of ``module`` is computed in backward.

        As `set_modules_to_forward_prefetch`; backward's order is the reverse.
        """
        self._device_states.check("set_modules_to_backward_prefetch()", NO_PARTS)
        self._module_units.set_prefetched(module, modules, backward=True)

    def owns(self, param: nn.Parameter) -> str | None:
        """Return the first name of ``param`` if it is one of this engine's, or None."""
        return self._ownership.name_of(param)

    def holds_value(self, param: nn.Parameter) -> bool:
        """Whether ``param``, one of this engine's, holds its current value on this rank now."""
        self._device_states.check("holds_value()", NO_PARTS)
        return self.sharded_state.holds_value(param)

    def own_part(self, param: nn.Parameter) -> Tensor:
        """Return this rank's elements of ``param``, 1-D, in its dtype: a view, not to be changed.

        At stage 0 each rank's part is a slice, too. It may be empty. Elements are in the order of
        the parameter's strides.
        """
        self._device_states.check("own_part()", frozenset({StatePart.PARAMETERS}))
        return self.sharded_state.own_part(param)

    # ---------------------------------------------------------------- keeping

    def allow_empty_entries(self, advice: str) -> None:
        """Have ``module.state_dict()`` on this rank give empty tensors for values not held here.

        By default it raises. It is meant for callers that read the names alone, or throw the dict
        away, as ranks do that write nothing. Rank 0 logs a warning, once, which ends with
        ``advice``: how a caller gets the values.
        """
        self._device_states.check("allow_empty_entries()", NO_PARTS)
        self._ownership.allow_empty_entries(advice)

    def name_cures(self, cures: access.Cures) -> None:
        """Have errors about uses of sharded parameters name the calls of another interface."""
        for flat in self.sharded_state.params:
            flat.shown.cures = cures

    def full_state_dict(
        self, *, dtype: torch.dtype | None = None, rank: int | None = None
    ) -> dict[str, Tensor]:
        """Return the whole model's state dict, on the CPU, on every rank or on ``rank`` alone.

        Values are those of the working shards. With a ``dtype`` other than a parameter's own they
        are its master weights, cast to it. Tied names share a tensor. Every rank must call it.
        """
        self._device_states.check_states("full_state_dict()")
        with self.place.during("full_state_dict()"):
            return whole_models.full_state_dict(self.sharded_state, dtype=dtype, rank=rank)

    def export_safetensors(
        self, directory: str | Path, *, dtype: torch.dtype | None = None
    ) -> Path:
        """Write ``model.safetensors`` (several and an index, if large) as Hugging Face reads it.

        Every rank must call it; rank 0 writes. Returns the folder.
        """
        self._device_states.check_states("export_safetensors()")
        with self.place.during("export_safetensors()"):
            place = local_path(directory, "an export")
            return whole_models.export_safetensors(self.sharded_state, place, dtype=dtype)

    def save_checkpoint(
        self,
        directory: str | Location,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        has_frozen: bool = True,
        is_latest: bool = True,
        drops_partial: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> Location:
        """Write the training's state, for any stage, world size, ratio and tier.

        Every rank must call it between two steps. The previous checkpoint stays whole until the
        new one is. An engine that only evaluates writes its values and buffers: load them
        ``without=("optimizer", "lr_scheduler", "progress")``.

        Args:
            directory: the folder of all checkpoints: a path, or a URL for fsspec such as
                ``s3://bucket/run``.
            tag: name of this one; None is ``step-N``.
            client_state: JSON and small tensors.
            has_frozen: whether the values of frozen parameters are written.
            is_latest: whether a load without a tag takes this one.
            drops_partial: allow the middle of a step, and leave out its gradients.
            keep_last: remove all but the last so many checkpoints. None keeps all. Only those
                whose tags end with their step are removed.
            keep_every: beside these keep the ones of steps that are multiples of it.

        Raises:
            CheckpointError: something cannot be stored, or a rank failed.
        """
        with self._saving("save_checkpoint()", drops_partial=drops_partial):
            place, tag = location_of(directory), self._tag(tag)
            kept = has_frozen, is_latest, keep_last, keep_every
            return self._saver.save(SaveRequest(place, tag, client_state or {}, *kept))

    @contextmanager
    def _saving(self, call: str, *, drops_partial: bool) -> Iterator[None]:
        self._device_states.check_states(call)
        self._communicator.forget_values()
        with self.place.during(call):
            yield

    def _tag(self, tag: str | None) -> str:
        return f"step-{self.global_steps}" if tag is None else tag

    def load_checkpoint(
        self, directory: str | Location, tag: str | None = None, *, without: Collection[str] = ()
    ) -> tuple[Location, dict[str, Any]]:
        """Restore the values and buffers of a checkpoint, trained ones rounded.

        See `zero_core.Engine.load_checkpoint`.
        """
        return self._load_checkpoint(directory, tag, {*without, *_TRAINING_PARTS})

    def _load_checkpoint(
        self, directory: str | Location, tag: str | None, without: Collection[str]
    ) -> tuple[Location, dict[str, Any]]:
        self._device_states.check_here("load_checkpoint()")
        with self.place.during("load_checkpoint()"), self.rewriting():
            found = load_checkpoint(
                self.sharded_state, location_of(directory), tag, self._train, without=without
            )
        self.place.num_steps = self.global_steps
        return found

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """Allow shards and states to be written in this context, on all ranks.

        Gradients so far are dropped.
        """
        self._device_states.check_here("writing shards and states")
        self._device_states.before_write()
        self._passes.units.release_all()
        yield
        self._passes.backward.discard()
        self._train.accumulation.forget()
        self._passes.units.values_replaced()
        self._device_states.edits.forget()
        self.place.unfinished = ""

    # -------------------------------------------------------- offload of states

    def offload_states(
        self,
        parts: Iterable[str] | None = None,
        *,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Copy states to host memory and free the device's, until `reload_states`.

        For programs that need the device for something else meanwhile, such as generation by an
        inference engine. Meanwhile what needs a part that is away raises RuntimeError: a forward
        needs "parameters" and "buffers", a backward "gradients" too, all else every part.
        A forward whose backward is to come must run after `reload_states`. Every rank must call
        it, between two steps or micro-steps. Parts that are away already stay so. On a CPU, memory
        that ranks share is not freed. Buffers of the model stay.

        Args:
            parts: which of `zero_core.StatePart`; None: all. In fp32, "parameters" are the master
                weights too.
            pin_memory: copy to page-locked memory: faster, and not for other use meanwhile.
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
        if self._gathering.is_open:
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
        ``non_blocking`` returns before the copies are done, which later work on the current stream
        waits for.

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

    # ----------------------------------------------------------------- ending

    def close(self) -> None:
        """Remove the engine's hooks, on this rank alone: it waits for no other.

        Parameters of whose current values other ranks have a part hold none then: at stage 3 and,
        after a step, at 1 and 2. `unwrap` ends an engine with all of them whole.
        """
        try:
            self._ownership.close()
        finally:
            self._device_states.end("close()")
            self._end_collectives()

    def unwrap(self, *, dtype: torch.dtype | None = None, drops_partial: bool = False) -> nn.Module:
        """End the engine and return its model with every value whole.

        Another engine may follow; `close` alone leaves a model without the values that this rank
        does not have. Parameters stay the same objects; each rank then holds all of them in its CPU
        memory, and the buffers too. An optimizer that was given to ``build`` may be stepped again;
        its states are those that it came with, or, where it updates whole parameters, those of this
        rank's. Every rank must call it, between two steps.

        Args:
            dtype: of floating values, as in `full_state_dict`.
            drops_partial: whether gradients that a step has accumulated so far are dropped.

        Raises:
            RuntimeError: within ``gathered``, or gradients wait for a step and are not to be
                dropped; or the engine has ended before.
        """
        self._device_states.check_states("unwrap()")
        if self._gathering.is_open:
            raise RuntimeError("unwrap() within gathered(): call it after that has ended")
        if not drops_partial and self.states.has_any_gradient():
            raise RuntimeError(
                "unwrap() between a backward and its step(), whose gradient would be lost: step "
                "first, or drop it by drops_partial=True"
            )
        with self.place.during("unwrap()"):
            self._ownership.leave_values(whole_models.full_values(self.sharded_state, dtype=dtype))
        self._device_states.end("unwrap()")
        self._end_collectives()
        return self.module

    def leave_shards(self) -> Iterator[LeftShard]:
        """End the engine and return this rank's part of each parameter that is not whole.

        At stages 0 to 2 parameters keep their values where every rank has them all, as after
        `publish`, and nothing is returned. As `close`, it waits for no other rank.
        """
        if self._ownership.is_ended:
            return iter(())
        self._device_states.check_states("leave_shards()")
        shards = self._ownership.leave_shards()
        self._device_states.end("leave_shards()")
        self._end_collectives()
        return shards

    def _end_collectives(self) -> None:
        """End what collectives hold, on this rank alone."""
        try:
            self._communicator.close()
        finally:
            self._transport.close()

    def remove_at_end(self, hooks: Iterable[Removable]) -> None:
        """Remove ``hooks`` that others put on the model when the engine ends."""
        self._ownership.hooks += hooks

    def stay_with_model(self) -> None:
        """Live as long as the model or until the end, also where nobody else keeps the engine.

        Otherwise values that are sharded go with an engine that is dropped.
        """
        self._copies.engine = self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse `copy.deepcopy`, `copy.copy` and pickle."""
        raise TypeError(
            "an engine cannot be copied or pickled: its state is sharded over ranks. Copy the "
            "model by copy.deepcopy(engine.module) within engine.gathered(); keep a training by "
            "engine.save_checkpoint(), and weights by engine.full_state_dict()"
        )

    # ------------------------------------------------------------------ facts

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

    def memory_report(self) -> dict[str, int]:
        """Return bytes on this rank by kind, without activations and the state tier's memory."""
        exchanged = {"exchange buffers": self._transport.exchange_nbytes}
        own = self.sharded_state.extension_states().values()
        kept = {"extensions": sum(t.nbytes for t in own)} if own else {}
        return {**self._memory.report(), **exchanged, **kept, **self._communicator.private_nbytes}

    def comm_report(self) -> tuple[Traffic, ...]:
        """Return what this rank sent in the last step, by collective and link.

        There are no rows before a step. Rows are those of ``plan().traffic``, without the host
        link, and Muon's gather, which a plan lacks. What is sent between two steps counts for the
        second. Only what goes through the engine's own collectives is seen.
        """
        return self._meter.report()


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
    offload = config.zero_optimization.offload_optimizer
    given = {
        "optimizer": config.optimizer is not None,
        "scheduler": config.scheduler is not None,
        "zero_optimization.offload_optimizer": offload.device != "none",
        "activation_checkpointing": config.activation_checkpointing is not None,
        "weight_patches": config.weight_patches is not None,
    }
    if any(given.values()):
        unused = ", ".join(key for key, is_given in given.items() if is_given)
        _log.info("evaluation alone: %s not used", unused)
    zero = config.zero_optimization.model_copy(
        update={"offload_optimizer": OffloadOptimizerConfig()}
    )
    return config.model_copy(
        update={
            "optimizer": None,
            "scheduler": None,
            "activation_checkpointing": None,
            "weight_patches": None,
            "zero_optimization": zero,
        }
    )
