"""The vertical schedule of a step's micro-batches.

[Note: the vertical schedule]
The horizontal schedule runs forward and backward of one micro-batch after the other, and gathers
each unit of a stage-3 model twice per micro-batch. Here all micro-batches go through a unit before
the next one, so that each unit is gathered twice per step:

1. Forward. Each micro-batch's forward runs on a thread of its own (`zero_core.vertical.turns`) up
   to the first block, in the order of micro-batches. Then all run the first block, then all the
   second one.
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
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zero_core._libc import share_arenas
from zero_core._torch import is_in_backward, outside_graphs
from zero_core.config import Config
from zero_core.core.grads import FlatGrads
from zero_core.core.passes import Driver, Passes
from zero_core.core.unit import Unit
from zero_core.errors import AccumulationScheduleError
from zero_core.optim.train_state import TrainState
from zero_core.runtime.host_inputs import HostInputs
from zero_core.sharded.sharded_state import ShardedState
from zero_core.step.micro_batches import MicroBatches, RandomStates, ScaledLoss
from zero_core.vertical.partial_grads import HostGradients, PartialGrads
from zero_core.vertical.segments import SegmentCrossing
from zero_core.vertical.turns import ForwardAbandoned, MicroBatch
from zero_core.watch.place import OUTSIDE, Place

_log = logging.getLogger(__name__)


_OWN = frozenset(vars(nn.Module()))  # parameters, buffers, hooks


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
        self._model = state.module
        self._names = state.param_names
        self._passes = passes
        self._units = passes.units
        self._forward = passes.forward
        self._backward = passes.backward
        self._place = state.control.place
        self._rank = state.control.rank
        self._train = train
        self._has_common_buffers = state.control.world_size > 1 and bool(
            state.common_buffers.by_dtype()
        )
        self._device = state.device
        self._blocks = passes.units.blocks
        self._versions: list[int] = []  # of the buffers of the block under way
        self._root = passes.units.units[0]
        self._tail = passes.units.tail
        self._owners = {
            id(param): (unit, grads, position)
            for unit in passes.units.units
            for grads in unit.grads
            for position, param in enumerate(grads.params)
        }
        if state.device.type == "cpu":
            share_arenas()  # micro-batches take turns on threads of their own
        self._host_inputs = host_inputs
        self._random = RandomStates(state.device)
        # Tensors in modules before a turn; None once the model's code has been seen.
        self._in_attributes: dict[str, list[Tensor]] | None = {}
        self._running: MicroBatch | None = None  # the forward that has its turn
        # Backward: the micro-batch, and the unit that its gradients are of; the prologue's is the
        # root.
        self._turn: tuple[MicroBatch, Unit | None] | None = None
        self.handles: list[Any] = []  # of the hooks on the blocks
        for number, module in enumerate(modules):
            self._hook(number, module)

    def _hook(self, number: int, module: nn.Module) -> None:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            one = self._running
            if one is None or is_in_backward():
                return None
            expected = one.next_block
            if number != expected:
                before = f"called before {self._blocks[expected]!r}" if number > expected else ""
                why = before or f"called again after {self._blocks[expected - 1]!r}"
                raise self._refuse(
                    one,
                    f"{self._blocks[number]!r} is {why}, and each block must be called once, in "
                    "their order",
                )
            one.pause()
            if self._has_common_buffers:
                self._versions = [b._version for b in module.buffers()]
            return one.segments.enter((args, kwargs))

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            one = self._running
            if one is None or is_in_backward():
                return None
            one.next_block = number + 1
            if self._has_common_buffers:  # which ranks exchange between two micro-batches
                buffers = zip(module.named_buffers(), self._versions, strict=True)
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

        self.handles += [
            module.register_forward_pre_hook(outside_graphs(enter), prepend=True, with_kwargs=True),
            module.register_forward_hook(outside_graphs(leave)),
        ]

    # ---------------------------------------------------------------- forward

    def run(self, batches: Sequence[Any], loss_of: ScaledLoss, *, seed: int) -> list[Tensor]:
        """Run forward and backward of one step's micro-batches, and return their losses.

        ``loss_of`` is called once for each, on another thread. The step's last micro-step is under
        way then. ``seed``: torch's, from which those of the micro-batches follow.
        """
        host = None
        if self._host_inputs is not None:
            host = HostGradients(self._host_inputs.copies, len(batches))
        micro_batches = [
            MicroBatch(number, batch, loss_of, self._device, PartialGrads(host))
            for number, batch in enumerate(batches)
        ]
        self._forward.enter(self._root, self._model)
        self._units.saved.leave_thread()  # each micro-batch watches its own
        self._passes.driver = Driver(self._enter, self._leave, self._take)
        if self._host_inputs is not None:
            self._host_inputs.expect(len(batches))
        try:
            if self._in_attributes is not None:
                self._in_attributes = _tensors_in_attributes(self._model)
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
                self._go_backward(one, len(self._blocks) + 1, self._tail, one.take_scaled_loss())
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
            if self._host_inputs is not None:
                self._host_inputs.expect(1)
            if host is not None:
                host.settle()
        return [one.results[0] for one in micro_batches if one.results is not None]

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
            self._random.seed(seed, accumulation.micro_steps)
        else:
            self._random.set(one.states)
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
            self._in_attributes = _tensors_in_attributes(self._model)
            for name, tensors in self._in_attributes.items():
                known = {id(tensor) for tensor in before.get(name, ())}
                if any(id(tensor) not in known for tensor in tensors):
                    raise self._refuse(
                        one,
                        f"{self._name(one.segments.number)} or code in front of it leaves a tensor "
                        f"in the attribute {name}, where another micro-batch would find it",
                    )
        self._running = None  # after an error it goes on until it is abandoned
        one.states = self._random.get()

    # --------------------------------------------------------------- backward

    def _run_backward(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Go backward through the blocks, and then through what precedes them."""
        last = len(self._blocks) - 1
        turns = [(number + 1, one) for number in range(last, -2, -1) for one in micro_batches]
        for (segment, one), (following, other) in pairwise([*turns, turns[-1]]):
            unit = self._blocks[segment - 1] if segment else self._root
            if segment and one is micro_batches[0]:
                self._backward.enter_place(unit)
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
        reductions = self._backward.reductions
        if unit is not None:
            reductions.begin_unit(unit.index)
        with one.segments.partial.turn():
            one.segments.backward(segment, loss)
            if unit is self._root:
                for param, grad in one.segments.partial.take_all():
                    self._add(*self._owners[param], grad)
        self._turn = None
        if unit is not None and unit.grads and self._backward.will_reduce():
            reductions.start(unit.index)

    def _add(self, unit: Unit, grads: FlatGrads, position: int, grad: Tensor) -> None:
        self._backward.reductions.finish_unit(unit.index)
        grads.add(position, grad)
        self._backward.params_with_grad.add(grads.param_numbers[position])

    def _take(self, unit: Unit, grads: FlatGrads, position: int, grad: Tensor) -> None:
        assert self._turn is not None, "a gradient comes within a backward"
        one, own = self._turn
        param = id(grads.params[position])
        if unit is own:
            one.segments.partial.discard(param)
            self._add(unit, grads, position, grad)
        else:  # of the root: `_check_params`
            one.segments.partial.put(param, grad)

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
            own = self._tail if segment > len(self._blocks) else self._blocks[segment - 1]
        for param in one.segments.params(segment):
            unit = self._owners[param][0] if param in self._owners else None
            if unit is not None and unit is not own and not unit.is_root:
                name = self._names[param]
                raise self._refuse(one, f"{self._name(segment)} uses {name} of {unit!r}, too")

    def _check_graph(self, one: MicroBatch) -> None:
        later: set[int] = set()
        for segment in range(len(self._blocks) + 1, -1, -1):
            self._check_params(one, segment)
            params = one.segments.params(segment)
            for key in later & params.keys():
                if params[key]._backward_hooks:
                    raise self._refuse(
                        one,
                        f"{self._name(segment)} and code behind it use {self._names[key]}, on "
                        "which a hook would change each part of its gradient",
                    )
            later |= params.keys()

    def _refuse(self, one: MicroBatch, why: str) -> AccumulationScheduleError:
        return AccumulationScheduleError(
            f"rank {self._rank}: accumulation_schedule = 'vertical', micro-batch "
            f"{one.number}: {why}; use 'horizontal' for this model"
        )


class VerticalMicroBatches(MicroBatches):
    """Runs the micro-batches of a step by the vertical schedule, if the step has several."""

    def __init__(
        self, schedule: VerticalSchedule, train: TrainState, place: Place, device: torch.device
    ) -> None:
        super().__init__(train, place, device)
        self._schedule = schedule
        self.handles = schedule.handles

    def check_apart(self, call: str) -> None:
        if self._train.accumulation.steps > 1:
            raise AccumulationScheduleError(
                f"{call}: with accumulation_schedule = 'vertical' the micro-batches of a step are "
                "computed together: call engine.train_batch(batches), or set it to 'horizontal'"
            )

    def run(self, batches: Sequence[Any], loss_of: ScaledLoss, *, seed: int) -> list[Tensor]:
        if len(batches) == 1:
            return super().run(batches, loss_of, seed=seed)
        with self._place.during("train_batch()"):
            return self._schedule.run(batches, loss_of, seed=seed)


class AutoMicroBatches(VerticalMicroBatches):
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
        return MicroBatches.run(self, batches, loss_of, seed=seed)


def make_micro_batches(
    config: Config,
    passes: Passes,
    modules: Sequence[nn.Module],
    train: TrainState,
    state: ShardedState,
    host_inputs: HostInputs | None,
) -> MicroBatches:
    """Return what runs a step's micro-batches, by the configuration's schedule."""
    place, wanted = state.control.place, config.accumulation_schedule
    if wanted == "auto" and state.control.rank == 0:
        chosen = "vertical: %s" if config.is_vertical else "horizontal: no %s"
        _log.info("accumulation_schedule: auto chose " + chosen, "gathers are saved")
    if wanted != "vertical" and not config.is_vertical:
        return MicroBatches(train, place, state.device)
    blocks = [modules[unit.index] for unit in passes.units.blocks]
    schedule = VerticalSchedule(blocks, passes, train, state, host_inputs)
    kind = AutoMicroBatches if wanted == "auto" else VerticalMicroBatches
    return kind(schedule, train, place, state.device)
