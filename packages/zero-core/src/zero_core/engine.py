"""The training engine: a callable model with the methods of a training step.

    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()

`zero_core.core.passes` gathers parameters and reduces gradients during forward and backward. At an
accumulation boundary, ``step`` makes the state tier update the parameters.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zero_core._torch import cast_floats, has_step_pre_hooks, mark_stepped, share_step_hooks
from zero_core.checkpoint.patches import PatchWriter
from zero_core.checkpointing import TrainingCheckpoints
from zero_core.comm.meter import Meter
from zero_core.core.extension import EndedStep, Extensions
from zero_core.core.passes import Passes
from zero_core.errors import AccumulationScheduleError, RankMismatchError, UnusedParameterError
from zero_core.object_methods import ObjectMethods
from zero_core.optim.train_state import TrainState
from zero_core.protocols import MicroBatchLoss
from zero_core.record.recorder import StepRecords, Subject
from zero_core.runtime.device_states import BACKWARD_PARTS, FORWARD_PARTS, NO_PARTS
from zero_core.sharded_model import EngineParts, ShardedModel
from zero_core.step.micro_batches import MicroBatches
from zero_core.step.update import StepGradient


class EngineOptimizer(torch.optim.Optimizer):
    """Optimizer that shares the param groups of ``given``. Only the engine may step it."""

    _has_all_groups = False  # False while torch's constructor adds the groups

    def __init__(
        self,
        given: torch.optim.Optimizer,
        gradient: StepGradient,
        passes: Passes,
        meter: Meter,
        train: TrainState,
        names: Mapping[int, str],
        *,
        is_given_stepped: bool,
    ) -> None:
        """Share the groups of ``given``. ``names``: the model's parameter names by ``id``.

        ``is_given_stepped``: whether the state tier calls ``given.step()``, which runs its hooks.
        """
        super().__init__(given.param_groups, given.defaults)
        self._has_all_groups = True
        self._names = names
        self.param_groups = given.param_groups
        self._grouped = self._ids()
        self.given = given
        self.overflow = False  # whether the last step was skipped
        self._gradient = gradient
        self._passes = passes
        self._meter = meter
        self._train = train
        self._may_step = False
        self.state = given.state
        if not is_given_stepped:
            share_step_hooks(given, self)
        self.guard = given.register_step_pre_hook(self._refuse_step)  # refuses given.step()

    def engine_step(self) -> None:
        """Run ``step`` with all its hooks, for `Engine.step`."""
        self._may_step = True
        try:
            self.step()
        finally:
            self._may_step = False
        # Schedulers of the given optimizer check whether it has been stepped.
        mark_stepped(self.given)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError after build: further parameters would have no master weights."""
        if self._has_all_groups:
            params = param_group["params"]
            self._refuse_param(params if isinstance(params, Tensor) else next(iter(params), None))
        super().add_param_group(param_group)

    def check_groups(self) -> None:
        """Raise RuntimeError if a group's parameters differ from those at build()."""
        if self._ids() != self._grouped:
            groups = zip(self.param_groups, chain(self._grouped, repeat([])), strict=False)
            moved = (p for group, was in groups for p in group["params"] if id(p) not in was)
            self._refuse_param(next(moved, None))

    def _ids(self) -> list[list[int]]:
        return [sorted(map(id, group["params"])) for group in self.param_groups]

    def _refuse_param(self, param: Any) -> NoReturn:
        if isinstance(param, tuple):  # torch also accepts (name, parameter)
            param = param[1]
        what = "parameters removed"
        if isinstance(param, Tensor):
            shape = f"of shape {tuple(param.shape)}, which the model did not have at build()"
            what = f"parameter {self._names.get(id(param), shape)}"
        raise RuntimeError(
            f"the optimizer's groups were changed after build() ({what}): the engine keeps each "
            "parameter in the group that it had at build(), and has no gradient, master weight or "
            "state for others. Put every parameter that is ever to be trained into a group before "
            "build(), and freeze it by requires_grad_(False) until then"
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters, within `engine_step`. Raises RuntimeError for other callers."""
        if not self._may_step or closure is not None:
            raise RuntimeError("call engine.step(): the engine drives its optimizer")
        self._gradient.apply()
        self._meter.end_step()  # bytes that publish the new values count for the next step
        self._passes.units.values_changed()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients accumulated since the last step. Keeps the count of micro-steps."""
        self._gradient.policy.check_unused("dropping gradients")
        self._train.warn_of_drop(restarts=False)
        self._passes.backward.discard()

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError(
            "the optimizer state is sharded over ranks: use engine.save_checkpoint(), which "
            "stores it for any stage and world size"
        )

    def load_state_dict(self, state_dict: Any) -> None:
        raise RuntimeError("the optimizer state is sharded: use engine.load_checkpoint()")

    def _refuse_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Both optimizers have this hook. Within `engine_step` a `WholeTier` steps the given one.
        if optimizer is not self and not self._may_step:
            raise RuntimeError(
                "this optimizer was given to zero_core.build(): call engine.step() instead of "
                f"{type(optimizer).__name__}.step()"
            )


class Engine(TrainingCheckpoints, ShardedModel):
    """A model under training. Made by `zero_core.build`.

    Attributes:
        optimizer: has the ``param_groups`` that updates use. Schedulers may be attached to it.
        should_defer_sigint: whether SIGINT (Ctrl-C) waits until a `step` in the main thread has
            ended. A second SIGINT is handled at once. May be False if the handler never raises.
    """

    def __init__(
        self,
        parts: EngineParts,
        optimizer: EngineOptimizer,
        gradient: StepGradient,
        micro_batches: MicroBatches,
        patches: PatchWriter,
        extensions: Extensions,
    ) -> None:
        super().__init__(parts)
        self.optimizer = optimizer
        self.should_defer_sigint = True
        self._gradient = gradient
        self._micro_batches = micro_batches
        self._patches = patches
        self._extensions = extensions
        subject = parts.config, parts.state, parts.train, parts.meter, parts.memory
        self._records = StepRecords(Subject(*subject, parts.communicator), extensions)
        self.remove_at_end([optimizer.guard])
        # At stage 0 the module's own zero_grad reaches the gradient by ``param.grad``.
        if parts.config.zero_optimization.stage:
            drop = partial(_drop_gradient, optimizer, self.module)
            self.remove_at_end([ObjectMethods("zero_grad", [(self.module, drop)])])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Floating inputs are cast to the compute dtype, if one is set."""
        if self._device_states.refuses or self.place.unfinished:
            self._device_states.check("a forward", FORWARD_PARTS)
        for follow in self._extensions.called:
            follow(args, kwargs)
        if (dtype := self._parts.compute_dtype) is not None:
            args, kwargs = cast_floats((args, kwargs), dtype)
        with self._parts.autocast():
            return self.module(*args, **kwargs)

    def scale(self, loss: Tensor, *, over: int | None = None) -> Tensor:
        """Return ``loss`` times the loss scale and divided by ``over``, for a plain backward.

        ``over``: number of micro-steps in this step, by default `gradient_accumulation_steps`. With
        ``world_size_invariant`` the result is also divided by the number of ranks.
        """
        if self._device_states.refuses or self.place.unfinished:
            self._device_states.check("backward()", BACKWARD_PARTS)
        for follow in self._extensions.scaled:
            follow(loss)
        return self._gradient.scale(loss, over)

    def backward(self, loss: Tensor, *, over: int | None = None, **kwargs: Any) -> None:
        """Run backward of ``loss``, scaled and averaged over the micro-steps as by `scale`.

        A plain ``loss.backward()`` works too, except with fp16 or ``world_size_invariant``, but
        does not divide by the accumulation steps. Every rank must run backward. ``kwargs`` are
        passed to `torch.Tensor.backward`.

        Raises:
            RuntimeError: states are offloaded, or a change of values was interrupted.
            AccumulationScheduleError: the vertical schedule needs `train_batch`, because a step has
                several micro-batches.
        """
        _check_apart(self._micro_batches, self._train, "backward()")
        with self.place.during("backward"):
            self.scale(loss, over=over).backward(**kwargs)  # type: ignore[no-untyped-call]

    def step(self, *, client_state: Mapping[str, Any] | None = None) -> None:
        """End a micro-step. At an accumulation boundary, update the parameters.

        Every rank must call it. With ``check_grad_overflow`` (the default) or fp16, all ranks skip
        the step if some rank's gradient is not finite. ``client_state`` has JSON values and small
        tensors. `resume` returns it with the in-memory copy of this step (``memory_checkpoint``).

        Raises:
            RuntimeError: the model or the optimizer's groups were changed, a boundary is within
                ``no_sync``, the schedule needs a measured value, the last backward did not end,
                states are offloaded, `resume` was not called (with ``memory_checkpoint``), or an
                earlier call raised in the middle. In the last case, load a checkpoint.
            CheckpointError: the last copy in memory failed.
            UnusedParameterError: at stages 1 and 2 with ``ignore_unused_parameters`` false, a
                trainable parameter got no gradient on a rank. All ranks raise it.
            AccumulationScheduleError: the vertical schedule joins micro-steps: use `train_batch`.
            RankMismatchError: settings or written values differ between ranks. All ranks raise it.
        """
        _check_apart(self._micro_batches, self._train, "step()")
        self._end_micro_step(client_state)

    def zero_grad(self) -> None:
        """Drop the step's gradient and start the step again from its first micro-step.

        Needed only after a loop was left between backward and `step`. Every rank must call it.
        Raises RuntimeError if units have been updated in backward.
        """
        self._device_states.check_here("zero_grad()")
        self._gradient.policy.check_unused("dropping gradients")
        self._train.warn_of_drop(restarts=True)
        self._passes.backward.discard()
        self._train.enter_micro_step(0)

    def _end_micro_step(self, client_state: Mapping[str, Any] | None) -> None:
        train, backward, place = self._train, self._passes.backward, self.place
        if self._device_states.refuses or place.unfinished:
            self._device_states.check("step()")
        if not train.is_boundary:
            train.end_micro_step()
            return
        if not backward.should_sync:
            raise RuntimeError(
                "step() while gradients are not reduced: leave no_sync(), or "
                "set_requires_gradient_sync(True)"
            )
        train.check_schedule()
        rates = [group["lr"] for group in self.optimizer.param_groups]
        micro_steps = train.num_accumulated + 1
        with _deferred_interrupt(is_on=self.should_defer_sigint):
            with place.during("step()"):
                self.optimizer.check_groups()
                self._passes.units.drain()  # all ranks do so before extensions exchange data
                for begin in self._extensions.before_update:
                    begin(train.global_steps + 1)
                backward.check_last()
                # if this rank fails after it sends its statistics, other ranks may still update
                place.unfinished = "step()"
                try:
                    backward.start_agreement()
                    # Checks may raise, so no update may be enqueued before them. The second call of
                    # `complete_gradient` exchanges facts only if more gradients were reduced.
                    if self._extensions.agreed:
                        backward.complete_gradient()
                    for check in self._extensions.agreed:
                        check()
                    # Pre-hooks may change the groups, so with hooks no update starts before them.
                    if not has_step_pre_hooks(self.optimizer, self.optimizer.guard.id):
                        self._gradient.update_ahead()
                    backward.complete_gradient()
                    why_skipped = self._gradient.decide()
                except (RankMismatchError, UnusedParameterError):  # on all ranks
                    place.unfinished = ""
                    raise
                self.optimizer.overflow = bool(why_skipped)
                if why_skipped:
                    self._parts.meter.end_step()
                    train.step_skipped(why_skipped)
                else:
                    self.optimizer.engine_step()
                    train.step_taken()
                backward.discard()
                train.end_step()
                place.unfinished = ""
            place.num_steps = number = train.global_steps
            self._communicator.begin_step(number)
            ended = EndedStep(number, why_skipped, rates, micro_steps, client_state or {})
            for follow in self._extensions.stepped:
                follow(ended)

    def train_batch(
        self,
        batches: Iterable[Any],
        compute_loss: MicroBatchLoss | None = None,
        *,
        over: int | None = None,
        client_state: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Run one step: forward and backward of all its micro-batches, and the update.

        The key ``accumulation_schedule`` sets the order of the work, but not results: see
        `zero_core.vertical.schedule`. Every rank must call it. Torch's generators are seeded for
        each micro-batch from torch's seed and the number of the micro-step, and restored at the
        end. ``over`` is as in `scale`, ``client_state`` as in `step`.

        Args:
            batches: an iterator, or a collection of exactly ``gradient_accumulation_steps``.
            compute_loss: computes the loss of one micro-batch by one call of the engine. None: a
                micro-batch is the model's keyword arguments (mapping) or positional ones (tuple,
                list or one tensor), and the loss is the model's output or its entry "loss".

        Returns:
            The mean of this rank's losses, 0-dim, fp32 or wider, without gradient.

        Raises:
            ValueError: too few micro-batches, more in a sequence or DataLoader, or one tensor or
                mapping in place of a list.
            TypeError: without ``compute_loss``, the model returned no loss.
            RuntimeError: as for `step` and `backward`; or within a step or ``no_sync``, or after
                `set_gradient_accumulation_boundary`. After an exception in a forward or backward,
                the next call starts the step again.
            AccumulationScheduleError: the model cannot be computed with the vertical schedule.
        """
        self._device_states.check("train_batch()", NO_PARTS)
        train, steps = self._train, self.gradient_accumulation_steps
        is_whole = self._passes.backward.should_sync and train.declared_boundary is None
        if train.num_accumulated or not is_whole:
            raise RuntimeError(
                "train_batch() runs a whole step: call it after step(), outside of no_sync(), and "
                "without set_gradient_accumulation_boundary()"
            )
        found = _micro_batches(batches, steps)
        compute = compute_loss or partial(_loss_of, self)
        seed = torch.initial_seed()  # read before micro-batches change the seed
        num_steps = self.global_steps

        def scaled(batch: Any) -> tuple[Tensor, Tensor]:
            loss = compute(batch)
            return loss, self.scale(loss, over=over)

        devices = [] if self.device.type == "cpu" else [self.device]
        try:
            with torch.random.fork_rng(devices, device_type=self.device.type):
                losses = self._micro_batches.run(found, scaled, seed=seed)
                self._end_micro_step(client_state)
        except BaseException:
            if self.global_steps == num_steps:
                train.enter_micro_step(0)
                self._passes.backward.is_open = True  # makes the next forward drop the gradient
            raise
        wide = torch.promote_types(losses[0].dtype, torch.float32)
        return torch.stack(losses).to(wide).mean()

    def memory_report(self) -> dict[str, int]:
        """Return bytes as `ShardedModel.memory_report`, and those of an undo log on the host."""
        undo = self._gradient.policy.undo_bytes
        return super().memory_report() | ({"undo log": undo} if undo else {})

    def record(
        self, folder: str | Path, *, max_bytes: int = 32 * 2**20, detail_every: int = 50
    ) -> AbstractContextManager[object]:
        """Write a line of JSON per step to a file of this rank in ``folder``, from now on.

        The configuration key ``step_records`` does the same. Each rank that a report should show
        must call it. `zero_core.records` describes the fields. Returns a context that need not be
        entered. The record ends with that context, the engine or the program, whichever ends first.

        Args:
            folder: readable by all ranks, created if missing. Earlier records stay in the file.
            max_bytes: file size above which records are dropped: every 2nd, 4th, ... step stays.
            detail_every: the spans of one in ``detail_every`` steps are recorded.

        Raises:
            ConfigError: the folder cannot be written to, or is a URL.
        """
        self._device_states.check("record()", NO_PARTS)
        recorder = self._records.start(folder, max_bytes=max_bytes, detail_every=detail_every)
        self._parts.ownership.hooks.append(recorder)
        return recorder

    def report(self, path: str | Path) -> Path:
        """Write an HTML page about the steps recorded in the folder of `record`. Returns ``path``.

        A single rank calls it, without waiting for other ranks.

        Raises:
            ConfigError: nothing is recorded: call `record` first.
            MissingPartError: the package zero-parts, which draws the page, is not installed.
        """
        return self._records.report(Path(path))

    def idle_backward(self, *, over: int | None = None) -> None:
        """Take part in one forward and backward of the other ranks, without data.

        For a rank whose data has ended. The rank gathers and reduces each unit with the other ranks
        and adds zero to each gradient, in the order of this rank's last forward, or of the module
        tree before its first one. Averages still count all ranks, as with
        `torch.distributed.algorithms.Join` by default. For a mean over existing samples, scale the
        loss of the other ranks by world size / ranks with data. ``over`` is as in `scale`. Call
        ``step`` afterwards, or use `idle_step`.
        """
        for follow in self._extensions.idled:
            follow()
        self._idle_forward()
        nothing = torch.zeros((), device=self.device, requires_grad=True)
        nothing.register_hook(self._passes.idle_backward)  # type: ignore[no-untyped-call]
        self._device_states.check("idle_backward()", BACKWARD_PARTS)
        self._gradient.scale(nothing, over).backward()  # type: ignore[no-untyped-call]

    def idle_step(self, *, over: int | None = None) -> None:
        """Take part in the other ranks' micro-step without data: `idle_backward` and `step`."""
        _check_apart(self._micro_batches, self._train, "idle_step()")
        self.idle_backward(over=over)
        self.step()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether this micro-step and each later one is the last of its step.

        None restores the default: the count decides. Every rank must call it, before the backward.
        With ``gradient_accumulation_steps`` 1, offloaded 16-bit sums are rounded each time.
        """
        self._device_states.check("set_gradient_accumulation_boundary()", NO_PARTS)
        self._train.declared_boundary = is_boundary
        self._train.find_boundary()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Call `set_gradient_accumulation_boundary`. This is FSDP2's name for that method."""
        self.set_gradient_accumulation_boundary(is_last_backward)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Set whether later backwards reduce gradients, or keep them local as in `no_sync`.

        Like FSDP2's method of this name. Every rank must call it. Raises RuntimeError with
        ``world_size_invariant``, where every backward must reduce.
        """
        self._device_states.check("set_requires_gradient_sync()", NO_PARTS)
        if not requires_gradient_sync:
            for follow in self._extensions.before_local_sums:
                follow()
        self._passes.backward.set_should_sync(requires_gradient_sync)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clip the gradient of the step by its p-norm and return the unscaled norm before clipping.

        Equals `torch.nn.utils.clip_grad_norm_` over the whole model. Call it between the last
        backward of a step and ``step``, which applies the factor. ``gradient_clipping`` clips
        afterwards. Every rank must call it. Torch's own function clips nothing at stages 1 to 3.

        Raises:
            RuntimeError: not the last micro-step, within ``no_sync``, or after updates in backward.
            ValueError: ``max_norm`` or ``norm_type`` is not positive.
        """
        if not (max_norm > 0.0 and norm_type > 0.0):
            raise ValueError(f"max_norm and norm_type must be > 0: {max_norm}, {norm_type}")
        self._device_states.check("clip_grad_norm_()")
        self._gradient.policy.check_unused("reading, setting or clipping gradients")
        self._device_states.before_write()
        with self.place.during("clip_grad_norm_()"):
            self._passes.backward.complete_gradient()
            return self._gradient.clip(max_norm, norm_type)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context whose backwards keep gradients on the rank, unreduced, as in DDP.

        This saves reductions and takes memory for the whole gradient. Every rank must enter it.
        Raises RuntimeError with ``world_size_invariant``, where every backward must reduce.
        """
        self._device_states.check("no_sync()", NO_PARTS)
        for follow in self._extensions.before_local_sums:
            follow()
        return self._passes.backward.no_sync()

    def close(self) -> None:
        """End the engine as `ShardedModel.close` does, then wait for a pending save on this rank.

        Raises:
            CheckpointError: the save failed, and no earlier call has raised its error.
        """
        super().close()
        self._saver.finish()


def _check_apart(driver: MicroBatches, train: TrainState, call: str) -> None:
    """Raise for ``call`` if the schedule computes a step's micro-batches together."""
    if driver.why_joint and train.accumulation_steps > 1:
        raise AccumulationScheduleError(f"{call}: {driver.why_joint}")


def _loss_of(engine: Engine, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        output = engine(**batch)
    else:
        output = engine(*(batch if isinstance(batch, tuple | list) else (batch,)))
    loss = output["loss"] if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"train_batch: the model returned {type(output).__name__}, expected a loss, or a "
            'mapping with "loss": give compute_loss'
        )
    return loss


def _drop_gradient(optimizer: EngineOptimizer, module: nn.Module, set_to_none: bool = True) -> None:
    optimizer.zero_grad()
    type(module).zero_grad(module, set_to_none)


def _micro_batches(batches: Iterable[Any], steps: int) -> list[Any]:
    """Return the micro-batches of one step. Raise ValueError if there are not so many."""
    if isinstance(batches, Tensor | Mapping):  # its rows or keys are no micro-batches
        raise ValueError(
            f"train_batch: expected an iterator or a list of the step's {steps} micro-batches, "
            f"found one {type(batches).__name__}: give a list, such as tensor.chunk({steps}), or "
            "list(tensor) if they are stacked"
        )
    remaining = iter(batches)
    found = list(islice(remaining, steps))
    if len(found) < steps:
        raise ValueError(f"train_batch: a step has {steps} micro-batches, found {len(found)}")
    if isinstance(batches, Sequence | DataLoader) and next(remaining, None) is not None:
        raise ValueError(
            f"train_batch: a step has {steps} micro-batches, and {type(batches).__name__} has "
            "more, of which each call would take the first ones: call iter() on it once, and give "
            "that iterator to each call"
        )
    return found


@contextmanager
def _deferred_interrupt(*, is_on: bool) -> Iterator[None]:
    """Defer SIGINT (Ctrl-C) until the end of the context, then call its handler.

    A second SIGINT immediately calls the handler twice, once per signal. Nothing is deferred if not
    ``is_on``, outside of the main thread, or if no Python function handles SIGINT.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_on and is_main and callable(handler)):
        yield
        return
    num_waiting = 0

    def defer(signum: int, frame: FrameType | None) -> None:
        nonlocal num_waiting
        num_waiting += 1
        if num_waiting == 2:
            signal.signal(signal.SIGINT, handler)
            handler(signum, frame)
            handler(signum, frame)

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        if num_waiting < 2:  # otherwise ``defer`` has restored the handler
            found = signal.signal(signal.SIGINT, handler)
            if found != defer:  # code in the step has set another handler
                signal.signal(signal.SIGINT, found)
            if num_waiting:
                # The handler gets the frame of the caller, above contextlib's frames.
                handler(signal.SIGINT, sys._getframe(2))
