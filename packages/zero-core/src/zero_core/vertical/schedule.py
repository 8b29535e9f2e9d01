"""The vertical schedule of a step's micro-batches.

[Note: the vertical schedule]
The horizontal schedule runs forward and backward of one micro-batch after another, and may gather
each block of a stage-3 model twice per micro-batch. The vertical schedule runs all micro-batches
through one block before the next block, and so gathers a block at most twice per step:

1. Forward: each micro-batch's forward runs up to the first block, in the order of micro-batches.
   Then all micro-batches run the first block, then the second, and so on. Each forward is a
   greenlet, a stack of Python frames that can pause at a block. All run on one thread.
2. Loss: after the last block, each micro-batch in turn computes its loss, and runs backward to the
   last block's output. So only one micro-batch's logits are in memory at a time.
3. Backward: all micro-batches run backward through the last block, then through the block before,
   and finally through the code before the blocks. `zero_core.vertical.segments` cuts the graph at
   the inputs and outputs of blocks.

A unit's gradients are added separately for each micro-batch, in the order of micro-batches, so sums
are bit-identical to those of the horizontal schedule. For a tied weight of the root, the gradient
from the head is kept until that from the embedding is added: one per micro-batch, in host memory if
inputs of blocks are kept there.

The passes treat the micro-batches of a step as one forward and one backward. Hooks in each
micro-batch call `ForwardPass.go_into` and `go_out_of` instead of ``enter`` and ``leave``. A block
stays gathered until the first micro-batch enters the next block. In backward a block is gathered
once for all micro-batches.

Each forward must call each block exactly once, in the order of the module tree. Otherwise an
`AccumulationScheduleError` is raised. The same error is raised if a forward stores new tensors in
attributes of modules, because micro-batches would read each other's tensors. This is checked until
the first step has ended.

[Note: contexts of a paused forward]
A forward may pause within contexts: autocast, ``no_grad``, a device, a choice of attention kernels,
checkpointing around a block. torch keeps their state per thread or process, and micro-batches share
a thread. So a pause exchanges the forward's state for the state before the step, and the end of
the pause exchanges it back. Contexts around the step apply to each micro-batch, and contexts in a
forward only to that forward. Dispatch keys reveal contexts that cannot be exchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zero_core._torch import context_settings, dispatch_keys, outside_graphs, seed_generators
from zero_core.comm.place import OUTSIDE
from zero_core.config import Config
from zero_core.core.grads import FlatGrads
from zero_core.core.passes import Driver, Passes
from zero_core.core.saved import is_in_backward
from zero_core.core.unit import Unit
from zero_core.errors import AccumulationScheduleError, MissingPartError
from zero_core.optim.train_state import TrainState
from zero_core.runtime.host_inputs import HostInputs
from zero_core.sharded.sharded_state import ShardedState
from zero_core.step.micro_batches import MicroBatches, ScaledLoss
from zero_core.vertical.segments import PartialGrads, SegmentCrossing, Segments

try:
    from greenlet import getcurrent, greenlet
except ImportError:  # `make_micro_batches` raises, or chooses the horizontal schedule
    greenlet = None

_log = logging.getLogger(__name__)
_OWN = frozenset(vars(nn.Module()))  # names of attributes that every module has


def random_states(device: torch.device) -> tuple[Tensor, ...]:
    own = torch.get_rng_state()
    if device.type == "cpu":
        return (own,)
    return own, torch.get_device_module(device).get_rng_state(device)


def _tensors_in_attributes(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return tensors in modules' own attributes, also in lists, tuples and dicts, by attribute."""
    found = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _OWN:
                held = value.values() if isinstance(value, dict) else value
                held = held if isinstance(value, list | tuple | dict) else [value]
                if tensors := [item for item in held if isinstance(item, Tensor)]:
                    found[f"{path}.{key}".removeprefix(".")] = tensors
    return found


class TorchState:
    """State of torch's contexts at this object's creation: [Note: contexts of a paused forward]."""

    def __init__(self, device: torch.device) -> None:
        self._settings = context_settings(device)
        self._outside = [get() for get, _ in self._settings]
        self._keys = dispatch_keys()

    def exchange(self, new: list[Any] | None = None) -> list[Any]:
        """Set ``new``, by default the state at this object's creation. Return the previous one."""
        # Otherwise autocast in another micro-batch would reuse a cached cast and its autograd node.
        torch.clear_autocast_cache()
        old = [get() for get, _ in self._settings]
        for (_, put), value, now in zip(self._settings, new or self._outside, old, strict=True):
            if value is not now:
                put(value)
        return old

    def is_as_before(self) -> bool:
        """Return False if contexts are active that `exchange` cannot leave. Call it after that."""
        return bool(dispatch_keys() == self._keys)


class MicroBatch:
    """One micro-batch, whose forward is a greenlet that pauses before each block."""

    loss: Tensor  # detached, set when the forward has ended
    scaled_loss: Tensor | None = None  # set from the end of the forward to the start of backward
    hooks: AbstractContextManager[Any]  # saved-tensor hooks, if parameters are sharded

    def __init__(
        self, number: int, batch: Any, loss_of: ScaledLoss, partial: PartialGrads, state: TorchState
    ) -> None:
        self.number = number  # number in the step, from 0 on
        self.partial = partial  # shared by the step's micro-batches
        self.segments = Segments(partial, number)
        self.states: tuple[Tensor, ...] | None = None  # `random_states` at the last pause
        self._state = state
        self.greenlet = greenlet(lambda: self._compute(batch, loss_of))
        self.greenlet.gr_context = copy_context()

    def _compute(self, batch: Any, loss_of: ScaledLoss) -> None:
        try:
            loss, self.scaled_loss = loss_of(batch)
            self.segments.close([self.scaled_loss])
            self.loss = loss.detach()
        finally:
            self._state.exchange()

    def pause(self) -> bool:
        """Pause until the next `greenlet.switch`. Return False if a pause is not possible here."""
        inside = self._state.exchange()
        try:
            is_possible = getcurrent() is self.greenlet and self._state.is_as_before()
            if is_possible:
                self.greenlet.parent.switch()
            return is_possible
        finally:
            self._state.exchange(inside)


class VerticalSchedule(MicroBatches):
    """Driver that runs all micro-batches unit by unit. See [Note: the vertical schedule]."""

    why_joint = (
        "with accumulation_schedule = 'vertical' the micro-batches of a step are computed "
        "together: call engine.train_batch(batches), or set it to 'horizontal'"
    )

    def __init__(
        self,
        modules: Sequence[nn.Module],
        passes: Passes,
        train: TrainState,
        state: ShardedState,
        host_inputs: HostInputs | None,
    ) -> None:
        """Hook ``modules``, the blocks. Raise AccumulationScheduleError if there are none."""
        if not passes.units.blocks:
            raise AccumulationScheduleError(
                "accumulation_schedule = 'vertical' needs a sequence of blocks (an nn.ModuleList "
                f"or nn.Sequential), and {type(state.module).__name__} has none: use 'horizontal'"
            )
        super().__init__(train, state)
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
        self._host_inputs = host_inputs
        # Tensors in modules' attributes when a forward last paused. None after the first step.
        self._in_attributes: dict[str, list[Tensor]] | None = {}
        self._running: MicroBatch | None = None  # the micro-batch whose forward is running
        # In backward: the running micro-batch, and the unit whose gradients it computes. That is
        # the root for the code before the blocks, and the tail or None for the code behind them.
        self._turn: tuple[MicroBatch, Unit | None] | None = None
        # Whether forwards of the model may broadcast rank 0's buffers (``broadcast_buffers``).
        self._has_common_buffers = state.control.world_size > 1 and bool(
            state.common_buffers.by_dtype()
        )
        self.handles: list[Any] = []
        for number, module in enumerate(modules):
            self._hook(number, module)

    def _hook(self, number: int, module: nn.Module) -> None:
        versions: list[int] = []  # versions of the module's buffers before its forward

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            one = self._running
            if one is None or is_in_backward():
                return None
            expected = max(0, one.segments.number - 1)  # number 0 is the prologue
            if number != expected:
                before = f"called before {self._blocks[expected]!r}" if number > expected else ""
                why = before or f"called again after {self._blocks[expected - 1]!r}"
                raise self._refuse(
                    one,
                    f"{self._blocks[number]!r} is {why}, and each block must be called once, in "
                    "their order",
                )
            if not one.pause():
                raise self._refuse(
                    one,
                    f"{self._blocks[number]!r} is called on another thread, or within "
                    "torch.inference_mode, torch.func or a context whose state is not accessible",
                )
            if self._has_common_buffers:
                versions[:] = [b._version for b in module.buffers()]
            return one.segments.enter((args, kwargs))

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            one = self._running
            if one is None or is_in_backward():
                return None
            if self._has_common_buffers:
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

        hooks = outside_graphs(enter), outside_graphs(leave)
        self.handles.append(
            module.register_forward_pre_hook(hooks[0], prepend=True, with_kwargs=True)
        )
        self.handles.append(module.register_forward_hook(hooks[1]))

    def run(self, batches: Sequence[Any], loss_of: ScaledLoss, *, seed: int) -> list[Tensor]:
        if len(batches) == 1:
            return super().run(batches, loss_of, seed=seed)
        with self._place.during("train_batch()"):
            return self._run_together(batches, loss_of, seed)

    def _run_together(self, batches: Sequence[Any], loss_of: ScaledLoss, seed: int) -> list[Tensor]:
        host_inputs = self._host_inputs
        partial = PartialGrads(len(batches), host_inputs)
        self._forward.enter(self._root, self._state.module)
        self._units.saved.leave_thread()  # each micro-batch registers its own hooks
        torch_state = TorchState(self._state.device)
        micro_batches = [
            MicroBatch(number, batch, loss_of, partial, torch_state)
            for number, batch in enumerate(batches)
        ]
        self._passes.driver = Driver(self._enter, self._leave, self._take)
        if host_inputs is not None:
            host_inputs.expect(len(batches))
        try:
            if self._in_attributes is not None:
                self._in_attributes = _tensors_in_attributes(self._state.module)
            for number in range(len(self._blocks)):
                for one in micro_batches:
                    self._advance(one, seed)
                    if one.greenlet.dead:
                        block = self._blocks[number]
                        raise self._refuse(one, f"its forward ended without a call of {block!r}")
            # Compute each loss, and run backward from the loss to the last block's output.
            for one in micro_batches:
                self._advance(one, seed)
                self._check_graph(one)  # raise before this micro-batch's backward
                if not self._backward.is_open:
                    self._backward.open({unit.index: 0 for unit in self._units.units}, is_new=True)
                self._go_backward(one, len(self._blocks) + 1, self._units.tail)
            self._forward.leave(self._root, needs_grad=True, error=None)
            self._run_backward(micro_batches)
            self._in_attributes = None
        except BaseException as error:
            interruptions: list[BaseException] = []
            try:
                for one in micro_batches:
                    # Frames may catch GreenletExit and enter the next block, or be interrupted.
                    while not one.greenlet.dead:
                        try:
                            one.greenlet.throw()
                        except BaseException as other:
                            if not isinstance(other, Exception):
                                interruptions.append(other)
            finally:
                self._running = self._turn = None
                torch_state.exchange()
                self._train.enter_micro_step(0)
                self._passes.drive_by_hooks()
                self._forward.abandon()  # the next forward drops this step's gradients
                self._units.release_all()
            if interruptions and isinstance(error, Exception):
                raise interruptions[0] from error
            raise
        finally:
            if host_inputs is not None:
                host_inputs.expect(1)
            partial.settle()
        return [one.loss for one in micro_batches]

    def _enter(self, unit: Unit, module: nn.Module) -> None:
        if unit.is_root and self._units.has_sharded_params and self._running is not None:
            self._running.hooks = self._units.saved.hooks()
            self._running.hooks.__enter__()
        self._forward.go_into(unit, module)

    def _leave(self, unit: Unit, *, needs_grad: bool, error: BaseException | None) -> None:
        if error is not None:
            self._forward.note_failure(unit, error)
        was_entered = self._forward.go_out_of(unit, needs_grad=needs_grad) and unit.is_root
        if was_entered and self._units.has_sharded_params and self._running is not None:
            self._running.hooks.__exit__(None, None, None)

    def _advance(self, one: MicroBatch, seed: int) -> None:
        """Run a micro-batch's forward up to its next block, or to the end."""
        self._train.enter_micro_step(one.number)
        if one.states is None:
            seed_generators(self._device, seed, self._train.micro_steps)
        else:
            torch.set_rng_state(one.states[0])
            if self._device.type != "cpu":
                torch.get_device_module(self._device).set_rng_state(one.states[1], self._device)
        self._running = one
        try:
            one.greenlet.switch()
        except SegmentCrossing as error:
            other = error.segment
            maker = "another micro-batch" if other is None else self._name(other)
            raise self._refuse(
                one,
                f"{self._name(one.segments.number)} uses a tensor that needs a gradient and that "
                f"{maker} computed, but was not given it as an argument",
            ) from None
        except RuntimeError as error:
            if "not have been used in the graph" not in str(error):
                raise
            why = "torch.autograd.grad needs the graph of the whole forward, which is cut at blocks"
            raise self._refuse(one, why) from error
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
        self._running = None  # stays set after an error, until the frames are unwound
        one.states = random_states(self._device)

    def _run_backward(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run backward through the blocks, and then through the code before them."""
        last = len(self._blocks) - 1
        turns = [(number + 1, one) for number in range(last, -2, -1) for one in micro_batches]
        for (segment, one), (following, other) in pairwise([*turns, turns[-1]]):
            unit = self._blocks[segment - 1] if segment else self._root
            if segment and one is micro_batches[0]:
                self._place.enter(self._backward.names[unit.index])
                is_used = any(each.segments.needs_backward(segment) for each in micro_batches)
                # Gather for all micro-batches, unless no rank needs the block.
                if is_used or unit.index not in self._backward.order.left_out:
                    self._units.saved.entered = unit
                    if self._units.has_sharded_params:
                        self._units.go_to(unit, backward=True)
            other.segments.prefetch(following)
            self._go_backward(one, segment, unit)
        self._backward.finish_reductions()
        self._passes.drive_by_hooks()
        self._backward.order.end_backward()
        self._place.enter("backward")
        self._units.release_all()
        self._place.enter(OUTSIDE)
        self._backward.is_open = False

    def _go_backward(self, one: MicroBatch, segment: int, unit: Unit | None) -> None:
        """Run backward through one segment. Start to reduce the gradient of ``unit`` if due."""
        self._train.enter_micro_step(one.number)
        self._turn = one, unit
        for grads in () if unit is None else unit.grads:
            grads.begin_backward()
        loss, one.scaled_loss = one.scaled_loss, None
        one.segments.backward(segment, loss)
        if unit is self._root:
            for param, grad in one.partial.take_all(one.number):
                self._add(*self._owners[param], grad)
        one.partial.end_turn(one.number)
        self._turn = None
        if unit is not None and unit.grads and self._backward.will_reduce():
            self._backward.reduce(unit)
        for grads in () if unit is None else unit.grads:
            grads.full.flush()  # no effect after a reduction

    def _add(self, unit: Unit, grads: FlatGrads, position: int, grad: Tensor) -> None:
        in_flight = self._backward.in_flight
        if any(reduced.segment.unit == unit.index for reduced, _ in in_flight):
            self._backward.finish_reductions()  # wait before adding to the same unit's gradient
        grads.add(position, grad)
        self._backward.params_with_grad.add(grads.param_numbers[position])

    def _take(self, unit: Unit, grads: FlatGrads, position: int, grad: Tensor) -> None:
        assert self._turn is not None, "a gradient comes within a backward"
        one, own = self._turn
        param = id(grads.params[position])
        if unit is own:
            one.partial.discard(one.number, param)
            self._add(unit, grads, position, grad)
        else:  # `_check_params` allows only parameters of the root here
            one.partial.put(one.number, param, grad)

    def _name(self, segment: int) -> str:
        if segment == 0:
            return "the code before the blocks"
        if segment > len(self._blocks):
            return "the code behind the blocks"
        return repr(self._blocks[segment - 1])

    def _check_params(self, one: MicroBatch, segment: int) -> None:
        """Raise if a segment uses parameters of a unit that is neither its own nor the root."""
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
    """Vertical schedule until its first AccumulationScheduleError, then the horizontal one."""

    why_joint = ""  # the horizontal schedule gives the same bits
    _is_vertical = True

    def run(self, batches: Sequence[Any], loss_of: ScaledLoss, *, seed: int) -> list[Tensor]:
        if self._is_vertical:
            try:
                return super().run(batches, loss_of, seed=seed)
            except AccumulationScheduleError as error:
                _log.warning("accumulation_schedule: auto chose horizontal: %s", error)
                self._is_vertical = False
        return MicroBatches.run(self, batches, loss_of, seed=seed)


def make_micro_batches(
    config: Config,
    passes: Passes,
    modules: Sequence[nn.Module],
    train: TrainState,
    state: ShardedState,
    host_inputs: HostInputs | None,
) -> MicroBatches:
    """Return the driver of a step's micro-batches for the configured schedule."""
    wanted, needs = config.accumulation_schedule, "pip install greenlet"
    if greenlet is None and wanted == "vertical":
        raise MissingPartError(
            f"accumulation_schedule = {wanted!r} needs the package greenlet, which is not "
            f"installed: {needs}, or set 'horizontal'"
        )
    if wanted == "auto" and state.control.rank == 0:
        why = "no gathers are saved" if greenlet else f"greenlet is not installed: {needs}"
        chosen = "vertical: gathers are saved" if config.is_vertical else f"horizontal: {why}"
        _log.info("accumulation_schedule: auto chose %s", chosen)
    if wanted != "vertical" and not config.is_vertical:
        return MicroBatches(train, state)
    blocks = [modules[unit.index] for unit in passes.units.blocks]
    kind = AutoSchedule if wanted == "auto" else VerticalSchedule
    return kind(blocks, passes, train, state, host_inputs)
