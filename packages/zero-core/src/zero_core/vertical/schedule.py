"""Schedules of a step's micro-batches.

[Note: the vertical schedule]
The horizontal schedule runs forward and backward of one micro-batch after the other, and gathers
each unit of a stage-3 model twice per micro-batch. Here all micro-batches go through a unit before
the next one, so that each unit is gathered twice per step:

1. Forward. Each micro-batch's forward runs on a thread of its own up to the first block, in the
   order of micro-batches. Then all run the first block, then all the second one.
2. Behind the last block, one micro-batch after the other computes its loss and goes backward to the
   last block's output, so that the logits of one are in memory at a time.
3. Backward goes through the last block for all micro-batches, then through the one before. What
   blocks are given and return are the borders of `zero_core.vertical.segments`. At last it goes
   through what precedes the blocks.

Every micro-batch's gradient of a unit is reduced by itself, in the order of micro-batches, so sums
have the bits of the horizontal schedule. A tied weight of the root gets a part of its gradient from
the head, which waits for the embedding's part: one such gradient per micro-batch is kept, in host
memory if blocks' inputs wait there, too.

The micro-batches of a step are one forward and one backward of the passes. The root is entered
once. Each micro-batch's forward enters and leaves the root and the blocks by its hooks: a block
stays gathered until the first of them enters the next block. In backward a unit is gathered for all
of them.

Blocks must be called in the order of the module tree, each once. Anything else is refused with an
`AccumulationScheduleError`. So are tensors that a forward leaves in attributes of modules, which
the first step looks for: micro-batches would find each other's.

[Note: random numbers by micro-batch]
Dropout draws from torch's generators. With the vertical schedule the micro-batches of a step draw
in turns, so each has states of its own: it begins with a seed that follows from torch's seed and
the number of the micro-step since the training's start. So it draws the same numbers whatever the
schedule. Activation checkpointing keeps the state that a block began with, and repeats it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextvars import copy_context
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero_core._libc import share_arenas
from zero_core._torch import is_in_backward, outside_graphs, seed_generators
from zero_core.config import Config
from zero_core.core.grads import FlatGrads
from zero_core.core.passes import Driver, Passes
from zero_core.core.unit import Unit
from zero_core.errors import AccumulationScheduleError
from zero_core.optim.train_state import TrainState
from zero_core.runtime.host_inputs import HostInputs
from zero_core.sharded.sharded_state import ShardedState
from zero_core.vertical.segments import PartialGrads, SegmentCrossing, Segments
from zero_core.watch.place import OUTSIDE

_log = logging.getLogger(__name__)
_OWN = frozenset(vars(nn.Module()))  # parameters, buffers, hooks


def random_states(device: torch.device) -> tuple[Tensor, ...]:
    """Return the states of torch's generators, on the CPU and on ``device``: uint8, on the CPU."""
    own = torch.get_rng_state()
    if device.type == "cpu":
        return (own,)
    return own, torch.get_device_module(device).get_rng_state(device)


def set_random_states(device: torch.device, states: tuple[Tensor, ...]) -> None:
    """Restore what `random_states` returned."""
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)


class ScaledLoss(Protocol):
    """Computes the loss of one micro-batch."""

    def __call__(self, batch: Any, /) -> tuple[Tensor, Tensor]:
        """Return the loss, and the loss times the loss scale over the number of micro-batches."""


def run_in_turn(
    train: TrainState,
    state: ShardedState,
    batches: Sequence[Any],
    loss_of: ScaledLoss,
    *,
    seed: int,
) -> list[Tensor]:
    """Run forward and backward of each micro-batch of a step before the next one begins.

    Returns their losses, without gradient. The step's last micro-step is under way then. ``seed``:
    torch's, from which those of the micro-batches follow.
    """
    losses = []
    for number, batch in enumerate(batches):
        if number:
            train.end_micro_step()
        seed_generators(state.device, seed, train.accumulation.micro_steps)
        loss, scaled = loss_of(batch)
        with state.control.place.during("backward"):
            scaled.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    return losses


def _tensors_in_attributes(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return tensors in modules' attributes and containers, parameters and buffers left out."""
    found = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _OWN:
                held = value.values() if isinstance(value, dict) else value
                held = held if isinstance(value, list | tuple | dict) else [value]
                if tensors := [item for item in held if isinstance(item, Tensor)]:
                    found[f"{path}.{key}".removeprefix(".")] = tensors
    return found


class ForwardAbandoned(BaseException):
    """Stops a micro-batch's forward, in its thread, after another micro-batch failed."""


class MicroBatch:
    """One micro-batch, whose forward runs on a thread of its own and pauses at blocks.

    The forward of a model is a stack of Python frames that only the model's own code can build, so
    it can stop at the border of a block and go on later only on a thread. At any time at most one
    of these threads runs, while its starter waits: nothing runs in parallel.
    """

    loss: Tensor  # without gradient, when the forward has ended

    def __init__(
        self,
        number: int,
        batch: Any,
        loss_of: ScaledLoss,
        device: torch.device,
        partial: PartialGrads,
    ) -> None:
        """Prepare. The thread enqueues as the caller does on ``device``."""
        self.number = number  # in the step, from 0 on
        self.partial = partial  # gradients that are not complete, of all micro-batches
        self.segments = Segments(partial, number)  # its graph
        self.states: tuple[Tensor, ...] | None = None  # of random generators, between turns
        self.is_done = False  # whether its forward has ended
        self._batch = batch
        self._loss_of = loss_of
        self._scaled_loss: Tensor | None = None
        self._device = device
        self._thread: threading.Thread | None = None
        self._go = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._is_abandoned = False
        self._error: BaseException | None = None

    def _compute(self, stream: torch.Stream | None) -> None:
        """Run the forward on its thread."""
        try:
            if stream is not None:
                torch.accelerator.set_stream(stream)  # and its device
            loss, scaled = self._loss_of(self._batch)
            self.segments.close([scaled])
            self.loss, self._scaled_loss = loss.detach(), scaled
            self._batch = None
        except BaseException as error:  # `advance` raises it
            self._error = error
        self.is_done = True
        self._paused.release()

    def take_scaled_loss(self) -> Tensor | None:
        scaled, self._scaled_loss = self._scaled_loss, None
        return scaled

    def advance(self) -> None:
        """Run until the next `pause` or the end. What the forward raises is raised here."""
        if self._thread is not None:
            self._go.release()
        else:
            is_accelerated = self._device.type != "cpu"
            stream = torch.accelerator.current_stream(self._device) if is_accelerated else None
            name = f"zero_core micro-batch {self.number}"
            self._thread = threading.Thread(
                target=copy_context().run, args=(self._compute, stream), name=name, daemon=True
            )
            self._thread.start()
        self._paused.acquire()
        if self.is_done:
            self._thread.join()
            error, self._error = self._error, None
            if error is not None:
                raise error

    def pause(self) -> None:
        """End the turn, on the thread. Returns when the next one begins."""
        self._paused.release()
        self._go.acquire()
        if self._is_abandoned:
            raise ForwardAbandoned

    def abandon(self) -> None:
        """End the forward where it pauses, and wait for that."""
        if self._thread is not None and self._thread.ident is not None and not self.is_done:
            self._is_abandoned = True
            self._go.release()
            self._thread.join()
        self._error = None


class VerticalSchedule:
    """Runs all micro-batches of a step. See the note at the top of this file."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        passes: Passes,
        train: TrainState,
        state: ShardedState,
        host_inputs: HostInputs | None,
    ) -> None:
        """Hook ``modules``, those of the passes' blocks, whose inputs ``host_inputs`` may move."""
        if not passes.units.blocks:
            raise AccumulationScheduleError(
                "accumulation_schedule = 'vertical' needs a sequence of blocks (an nn.ModuleList "
                f"or nn.Sequential), and {type(state.module).__name__} has none: use 'horizontal'"
            )
        self._train = train
        self._place = state.control.place
        self._device = state.device
        self._state = state
        self._passes = passes
        self._units = passes.units
        self._forward = passes.forward
        self._backward = passes.backward
        self._blocks = passes.units.blocks
        self._root = passes.units.units[0]
        self._owners = {
            id(param): (unit, grads, position)
            for unit in passes.units.units
            for grads in unit.grads
            for position, param in enumerate(grads.params)
        }
        if state.device.type == "cpu":
            share_arenas()  # micro-batches take turns on threads of their own
        self._host_inputs = host_inputs
        # Tensors in modules before a turn; None once the model's code has been seen.
        self._in_attributes: dict[str, list[Tensor]] | None = {}
        self._running: MicroBatch | None = None  # the forward that has its turn
        # Backward: the micro-batch, and the unit that its gradients are of; the prologue's is the
        # root.
        self._turn: tuple[MicroBatch, Unit | None] | None = None
        # Ranks exchange them between two micro-batches.
        has_common_buffers = state.control.world_size > 1 and bool(state.common_buffers.by_dtype())
        self.handles = [
            handle
            for number, module in enumerate(modules)
            for handle in self._hook(number, module, has_common_buffers)
        ]

    def _hook(
        self, number: int, module: nn.Module, has_common_buffers: bool
    ) -> list[RemovableHandle]:
        versions: list[int] = []  # of its buffers, as its forward begins

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            one = self._running
            if one is None or is_in_backward():
                return None
            expected = one.segments.next_block
            if number != expected:
                before = f"called before {self._blocks[expected]!r}" if number > expected else ""
                why = before or f"called again after {self._blocks[expected - 1]!r}"
                raise self._refuse(
                    one,
                    f"{self._blocks[number]!r} is {why}, and each block must be called once, in "
                    "their order",
                )
            one.pause()
            if has_common_buffers:
                versions[:] = [b._version for b in module.buffers()]
            return one.segments.enter((args, kwargs))

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            one = self._running
            if one is None or is_in_backward():
                return None
            if has_common_buffers:
                buffers = zip(module.named_buffers(), versions, strict=True)
                changed = [name for (name, b), version in buffers if b._version != version]
                if changed:
                    raise self._refuse(
                        one,
                        f"{self._blocks[number]!r} changes its buffer {changed[0]}, which is rank "
                        "0's in the next micro-batch with broadcast_buffers",
                    )
            found = one.segments.leave(output)
            self._check_params(one, number + 1)
            return found

        return [
            module.register_forward_pre_hook(outside_graphs(enter), prepend=True, with_kwargs=True),
            module.register_forward_hook(outside_graphs(leave)),
        ]

    def check_apart(self, call: str) -> None:
        """Refuse ``call``, which serves one micro-batch alone, if a step needs all of them."""
        if self._train.accumulation.steps > 1:
            raise AccumulationScheduleError(
                f"{call}: with accumulation_schedule = 'vertical' the micro-batches of a step are "
                "computed together: call engine.train_batch(batches), or set it to 'horizontal'"
            )

    # ---------------------------------------------------------------- forward

    def run(self, batches: Sequence[Any], loss_of: ScaledLoss, *, seed: int) -> list[Tensor]:
        """Do as `run_in_turn`. ``loss_of`` is called on other threads."""
        if len(batches) == 1:
            return run_in_turn(self._train, self._state, batches, loss_of, seed=seed)
        with self._place.during("train_batch()"):
            return self._run_together(batches, loss_of, seed)

    def _run_together(self, batches: Sequence[Any], loss_of: ScaledLoss, seed: int) -> list[Tensor]:
        host_inputs = self._host_inputs
        copies = None if host_inputs is None else host_inputs.copies
        partial = PartialGrads(len(batches), copies)
        micro_batches = [
            MicroBatch(number, batch, loss_of, self._state.device, partial)
            for number, batch in enumerate(batches)
        ]
        self._forward.enter(self._root, self._state.module)
        self._units.saved.leave_thread()  # each micro-batch watches its own
        self._passes.driver = Driver(self._enter, self._leave, self._take)
        if host_inputs is not None:
            host_inputs.expect(len(batches))
        try:
            if self._in_attributes is not None:
                self._in_attributes = _tensors_in_attributes(self._state.module)
            for number in range(len(self._blocks)):
                for one in micro_batches:
                    self._advance(one, seed)
                    if one.is_done:
                        block = self._blocks[number]
                        raise self._refuse(one, f"its forward ended without a call of {block!r}")
            # Compute each loss, and go backward from it to what the last block returned.
            for one in micro_batches:
                self._advance(one, seed)
                self._check_graph(one)  # a refusal comes before backward updates any unit
                if not self._backward.is_open:
                    self._backward.open({unit.index: 0 for unit in self._units.units}, is_new=True)
                self._go_backward(
                    one, len(self._blocks) + 1, self._units.tail, one.take_scaled_loss()
                )
            self._forward.leave(self._root, needs_grad=True, error=None)
            self._run_backward(micro_batches)
            self._in_attributes = None
        except BaseException:
            try:
                for one in micro_batches:
                    one.abandon()
            finally:
                self._running = self._turn = None
                self._train.accumulation.enter_micro_step(0)
                self._passes.drive_by_hooks()
                self._forward.abandon()  # the next forward drops gradients that the passes brought
                self._units.release_all()
            raise
        finally:
            if host_inputs is not None:
                host_inputs.expect(1)
            partial.settle()
        return [one.loss for one in micro_batches]

    def _enter(self, unit: Unit, module: nn.Module) -> None:
        if unit.is_root and self._units.has_sharded_params:
            self._units.saved.watch_thread()
        self._forward.go_into(unit, module)

    def _leave(self, unit: Unit, *, needs_grad: bool, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, ForwardAbandoned):  # else it is noted
            self._forward.note_failure(unit, error)
        if self._forward.go_out_of(unit, needs_grad=needs_grad) and unit.is_root:
            self._units.saved.leave_thread()

    def _advance(self, one: MicroBatch, seed: int) -> None:
        """Run a micro-batch's forward to its next block, or to its end."""
        accumulation = self._train.accumulation
        accumulation.enter_micro_step(one.number)
        if one.states is None:
            seed_generators(self._device, seed, accumulation.micro_steps)
        else:
            set_random_states(self._device, one.states)
        self._running = one
        try:
            one.advance()
        except SegmentCrossing as error:
            other = error.segment
            maker = "another micro-batch" if other is None else self._name(other)
            raise self._refuse(
                one,
                f"{self._name(one.segments.number)} uses a tensor that needs a gradient and that "
                f"{maker} computed, but was not given it as an argument",
            ) from None
        before = self._in_attributes
        if before is not None:
            self._in_attributes = _tensors_in_attributes(self._state.module)
            for name, tensors in self._in_attributes.items():
                known = {id(tensor) for tensor in before.get(name, ())}
                if any(id(tensor) not in known for tensor in tensors):
                    raise self._refuse(
                        one,
                        f"{self._name(one.segments.number)} or code in front of it leaves a tensor "
                        f"in the attribute {name}, where another micro-batch would find it",
                    )
        self._running = None  # after an error it goes on until it is abandoned
        one.states = random_states(self._device)

    # --------------------------------------------------------------- backward

    def _run_backward(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Go backward through the blocks, and then through what precedes them."""
        last = len(self._blocks) - 1
        turns = [(number + 1, one) for number in range(last, -2, -1) for one in micro_batches]
        for (segment, one), (following, other) in pairwise([*turns, turns[-1]]):
            unit = self._blocks[segment - 1] if segment else self._root
            if segment and one is micro_batches[0]:
                self._place.enter(self._backward.names[unit.index])
                is_used = any(each.segments.needs_backward(segment) for each in micro_batches)
                # Gathered for all micro-batches, unless no rank needs it.
                if is_used or unit.index not in self._backward.order.left_out:
                    self._units.saved.entered = unit
                    if self._units.has_sharded_params:
                        self._units.go_to(unit, backward=True)
            other.segments.prefetch(following)
            self._go_backward(one, segment, unit)
        self._backward.reductions.finish()
        self._passes.drive_by_hooks()
        self._backward.order.end_backward()
        self._place.enter("backward")
        self._units.release_all()
        self._place.enter(OUTSIDE)
        self._backward.is_open = False

    def _go_backward(
        self, one: MicroBatch, segment: int, unit: Unit | None, loss: Tensor | None = None
    ) -> None:
        """Go backward through one segment of a micro-batch, and reduce its gradient of ``unit``."""
        self._train.accumulation.enter_micro_step(one.number)
        self._turn = one, unit
        for grads in () if unit is None else unit.grads:
            grads.begin_backward()
        one.segments.backward(segment, loss)
        if unit is self._root:
            for param, grad in one.partial.take_all(one.number):
                self._add(*self._owners[param], grad)
        one.partial.end_turn(one.number)
        self._turn = None
        if unit is not None and unit.grads and self._backward.will_reduce():
            self._backward.reductions.start(unit.index)

    def _add(self, unit: Unit, grads: FlatGrads, position: int, grad: Tensor) -> None:
        reductions = self._backward.reductions
        if any(reduced.segment.unit == unit.index for reduced, _ in reductions.in_flight):
            reductions.finish()  # more is to be added to it
        grads.add(position, grad)
        self._backward.params_with_grad.add(grads.param_numbers[position])

    def _take(self, unit: Unit, grads: FlatGrads, position: int, grad: Tensor) -> None:
        assert self._turn is not None, "a gradient comes within a backward"
        one, own = self._turn
        param = id(grads.params[position])
        if unit is own:
            one.partial.discard(one.number, param)
            self._add(unit, grads, position, grad)
        else:  # of the root: `_check_params`
            one.partial.put(one.number, param, grad)

    # ----------------------------------------------------------------- checks

    def _name(self, segment: int) -> str:
        if segment == 0:
            return "the code before the blocks"
        if segment > len(self._blocks):
            return "the code behind the blocks"
        return repr(self._blocks[segment - 1])

    def _check_params(self, one: MicroBatch, segment: int) -> None:
        """Refuse parameters whose gradient would not be whole when their unit's is reduced."""
        own: Unit | None = self._root
        if segment:
            own = self._units.tail if segment > len(self._blocks) else self._blocks[segment - 1]
        for param in one.segments.params(segment):
            unit = self._owners[param][0] if param in self._owners else None
            if unit is not None and unit is not own and not unit.is_root:
                name = self._state.param_names[param]
                raise self._refuse(one, f"{self._name(segment)} uses {name} of {unit!r}, too")

    def _check_graph(self, one: MicroBatch) -> None:
        later: set[int] = set()
        for segment in range(len(self._blocks) + 1, -1, -1):
            self._check_params(one, segment)
            params = one.segments.params(segment)
            for key in later & params.keys():
                if params[key]._backward_hooks:
                    name = self._state.param_names[key]
                    raise self._refuse(
                        one,
                        f"{self._name(segment)} and code behind it use {name}, on which "
                        "a hook would change each part of its gradient",
                    )
            later |= params.keys()

    def _refuse(self, one: MicroBatch, why: str) -> AccumulationScheduleError:
        return AccumulationScheduleError(
            f"rank {self._state.control.rank}: accumulation_schedule = 'vertical', micro-batch "
            f"{one.number}: {why}; use 'horizontal' for this model"
        )


class AutoSchedule(VerticalSchedule):
    """Vertical schedule that falls back to the horizontal one at the first refusal."""

    _is_vertical = True

    def check_apart(self, call: str) -> None:
        """Permit ``call``: either schedule gives the same bits."""

    def run(self, batches: Sequence[Any], loss_of: ScaledLoss, *, seed: int) -> list[Tensor]:
        if self._is_vertical:
            try:
                return super().run(batches, loss_of, seed=seed)
            except AccumulationScheduleError as error:
                _log.warning("accumulation_schedule: auto chose horizontal: %s", error)
                self._is_vertical = False
        return run_in_turn(self._train, self._state, batches, loss_of, seed=seed)


def make_micro_batches(
    config: Config,
    passes: Passes,
    modules: Sequence[nn.Module],
    train: TrainState,
    state: ShardedState,
    host_inputs: HostInputs | None,
) -> VerticalSchedule | None:
    """Return what runs a step's micro-batches together, where the configuration asks for that."""
    wanted = config.accumulation_schedule
    if wanted == "auto" and state.control.rank == 0:
        chosen = "vertical:" if config.is_vertical else "horizontal: no"
        _log.info("accumulation_schedule: auto chose %s gathers are saved", chosen)
    if wanted != "vertical" and not config.is_vertical:
        return None
    blocks = [modules[unit.index] for unit in passes.units.blocks]
    kind = AutoSchedule if wanted == "auto" else VerticalSchedule
    return kind(blocks, passes, train, state, host_inputs)
