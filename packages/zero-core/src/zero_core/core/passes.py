"""Forward and backward over all units: when units are gathered, released and reduced.

Hooks on the model call this module: `zero_core.core.hooks`.

[Note: the path of a gradient]
1. A hook takes ``param.grad`` when autograd has computed it, and calls
   `BackwardPass.gradient_ready`.
2. `FlatGrads.add` writes the gradient to the segment's ``full_grad``.
3. When the unit and all units before it in the order of reductions are complete,
   `BackwardPass.reduce` calls `FlatGrads.reduce`, and `FlatGrads.finish` one unit later.
4. At an accumulation boundary (in every micro-step if the tier accumulates), `BackwardPass.offer`
   passes the reduced gradient to the sink, `StepGradient.add`, which offers it to the state tier,
   to one that reads it in place only when the step's gradient is complete. At stage 0
   ``param.grad`` shows it from then on: `zero_core.step.param_grads`.
5. ``engine.step()`` calls `BackwardPass.complete_gradient`, then `StepGradient.decide` and
   ``apply``. The tier updates the shards. `UnitSet.values_changed` marks gathered values as stale.
   On a device the update is enqueued before the host reads the facts: see [Note: update ahead] in
   `zero_core.step.update`.

[Note: order]
Forward gathers each unit that it uses, and the next ones of the module tree ahead of use. Backward
gathers and reduces units in the reverse order (`zero_core.core.order`). So every rank launches the
same collectives in the same order, even if ranks take different branches within a block. The first
block's gather is launched before waiting for the root's gather.

[Note: idle ranks]
A rank without data takes part in the other ranks' collectives. An idle forward uses the blocks and
the tail in the order of this rank's last forward of the same kind, with or without gradients. If
there was none, it uses all blocks of the module tree. An idle backward skips every unit of that
forward. Both run the same code as passes with data, so the order of launches is the same. Gradients
count as zero, and averages are divided by the number of all ranks, like
`torch.distributed.algorithms.Join` for DDP with ``divide_by_initial_world_size=True``, its default.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from zero_core._torch import call_at_end_of_backward, count_calls
from zero_core.comm.communicator import Communicator
from zero_core.comm.place import OUTSIDE
from zero_core.core.access import find_trainable
from zero_core.core.facts import Facts
from zero_core.core.grads import FlatGrads
from zero_core.core.order import BackwardOrder, Forward
from zero_core.core.saved import is_in_backward
from zero_core.core.unit import Unit
from zero_core.core.units import UnitSet


class GradientSink(Protocol):
    """Interface of `zero_core.step.update.StepGradient`, which collects reduced gradients."""

    params_with_grad: set[int]  # parameter numbers, added by `BackwardPass`

    @property
    def is_boundary(self) -> bool:
        """Whether the current micro-step is the last one of its step."""

    @property
    def is_reduced(self) -> bool:
        """Whether the reduced gradient of every segment was added."""

    def begin_backward(self, *, is_new_round: bool) -> None:
        """Begin a backward, or raise if it may not add to the step's gradient.

        Hides the gradient from ``param.grad`` until it is complete again. ``is_new_round``: a
        forward has begun since the last backward, and this backward is outside of ``no_sync``.
        """

    def add(self, grads: FlatGrads, *, is_last: bool) -> bool:
        """Take a segment's reduced gradient. See [Note: the path of a gradient], 4.

        ``is_last``: whether it belongs to the step's last micro-step. Returns whether the tier has
        already updated the parameters.
        """

    def broken(self) -> None:
        """Restart the step, because a forward found that the last backward did not end."""

    def drop_untaken(self) -> bool:
        """Drop gradients left by an interrupted backward. Return whether there were any."""

    def reopen(self) -> None:
        """Note that more gradients will be added. All ranks then agree on the facts again."""

    def agree(self, backward: BackwardPass) -> None:
        """Start the all-reduce of the step's facts, if outdated. Every rank must call it."""

    def void_update(self) -> None:
        """Drop an update enqueued ahead of the decision, because more gradients will be reduced."""

    def clear(self) -> None:
        """Drop the gradient and start a new step."""


class _Running(NamedTuple):
    """A module whose forward is running, and the exception being handled when the forward began."""

    unit: Unit
    module: nn.Module
    handled: BaseException | None


class BackwardPass:
    """All backwards of a step, until its gradient is complete.

    With several ranks, a unit's reduction overlaps with the backward of the next unit.

    Attributes:
        names: names of the units' backwards, as reported by `Communicator.place`.
        grads: the gradients of all units.
        in_flight: gradients being reduced, and whether each is of the step's last micro-step.
        is_due_per_backward: whether every backward reduces: with several ranks, or if the tier
            accumulates micro-steps. Otherwise only the last backward of a step reduces.
        is_open: whether a backward is running, or was aborted by an exception. After an abort, the
            next forward drops the step's gradient.
        should_sync: whether backwards reduce gradients. False within `no_sync`.
        why_refused: error message if no backward may begin, or None.
    """

    def __init__(
        self, units: UnitSet, communicator: Communicator, sink: GradientSink, facts: Facts
    ) -> None:
        self._units = units
        self._place = communicator.place
        self.names = [f"backward of {unit!r}" for unit in units.units]
        self._sink = sink
        self._facts = facts
        self.params_with_grad = sink.params_with_grad
        has_peers = communicator.world_size > 1
        self.grads = [grads for unit in units.units for grads in unit.grads]
        self.in_flight: tuple[tuple[FlatGrads, bool], ...] = ()
        self.is_due_per_backward = has_peers or any(g.plan.is_passed_on_each for g in self.grads)
        self._trained_params = [param for unit in units.units for param in unit.trained_params]
        self.order = BackwardOrder(
            [u.index for u in units.units if u.grads],
            None if units.tail is None else units.tail.index,
            is_alone=not (has_peers and units.has_sharded_params),
        )
        self.is_open = False
        self.should_sync = True
        self.why_refused: str | None = None
        self._is_reducing = False  # whether the open backward reduces gradients
        # By unit recomputed in this backward: number of gradients that it still expects.
        self._recomputed: dict[int, int] = {}
        self._ever_recomputed: set[int] = set()
        self._stay_idle: set[int] = set()  # units that an idle backward gathers only once

    def begin(self) -> None:
        """Begin a backward when its first hook runs, unless one is open."""
        if self.is_open:
            return
        are_trained = iter(find_trainable(self._trained_params))
        num_missing = {
            unit.index: sum(islice(are_trained, len(unit.trained_params)))
            for unit in self._units.units
        }
        self.open(num_missing, is_new=self.order.is_awaited)
        for grads in self.grads:
            grads.begin_backward()
        self._place.enter("backward")
        self._is_reducing = self.will_reduce()
        if not self._is_reducing:
            self._accumulate_locally()  # later backwards add to these gradients
        call_at_end_of_backward(self.end)

    def open(self, num_missing: dict[int, int], *, is_new: bool) -> None:
        """Open a backward. ``num_missing``: number of gradients expected for each unit.

        ``is_new``: whether a forward has begun since the last backward.
        """
        if self.why_refused is not None:
            raise RuntimeError(self.why_refused)
        self._place.check_finished("a backward")
        if not self._units.part_hooks.handles:
            self._units.part_hooks.resume()
        self._units.drain()
        self._sink.begin_backward(is_new_round=self.should_sync and is_new)
        self.is_open = True
        self._is_reducing = False  # `begin` sets it, the vertical schedule does not
        self._units.saved.entered = None
        self._recomputed.clear()
        self.order.begin_backward(num_missing)

    def begin_idle(self, path: Sequence[Unit]) -> None:
        """Begin a backward without gradients. ``path``: the blocks that its forward used."""
        self.begin()
        # With data, a block that is used twice and recomputed stays gathered until its gradients
        # are ready. So the idle rank must gather it only once.
        uses = Counter(unit.index for unit in path)
        self._stay_idle = {i for i, num in uses.items() if num > 1} & self._ever_recomputed

    def enter(self, unit: Unit, forward: Forward | None) -> None:
        """Gather ``unit`` for the backward of ``forward``, or, if None, for a recomputation."""
        units = self._units
        if unit is units.saved.entered:
            return
        if not self.is_open:
            self.begin()
        if not unit.is_block:
            units.gather(unit, backward=True)
            units.wait(unit)
            return
        previous = units.current
        if previous is not None and previous is not unit:
            # A recomputed forward saved raw views of the gathered buffer. The buffer is needed
            # until the unit's gradients are ready, or to the end of backward if it has no trainable
            # parameter.
            num_missing = self._recomputed.get(previous.index)
            params = previous.trained_params
            if num_missing is not None and (num_missing > 0 or not any(find_trainable(params))):
                units.current = None  # `end` releases the unit instead of `go_to`
        self._place.enter(self.names[unit.index])
        units.saved.entered = unit
        for skipped in self.order.enter(unit.index, forward):
            self._gather_skipped(skipped)
        if self._is_reducing:
            # Reduce before gathering: [Note: one order for gathers and reductions] in `order`.
            self._reduce_ready()
        units.go_to(unit, backward=True)

    def enter_recompute(self, unit: Unit) -> None:
        """Gather ``unit``, whose forward activation checkpointing recomputes in backward."""
        self.enter(unit, None)
        self._recomputed[unit.index] = sum(find_trainable(unit.trained_params))
        self._ever_recomputed.add(unit.index)

    def gradient_ready(self, unit: Unit, grads: FlatGrads, position: int, grad: Tensor) -> None:
        """Add the gradient of parameter ``position`` of a segment of ``unit``."""
        if not self.is_open:
            self.begin()
        index = unit.index
        if self._place.doing is self.names[index]:
            self._place.num_changes += 1
        else:  # without sharded parameters, `enter` is not called
            self._place.enter(self.names[index])
        if index in self._recomputed:
            self._recomputed[index] -= 1
        num_missing = self.order.gradient_ready(index)
        # A late gradient: the unit's reduction has started. Finish it before adding to the buffer.
        # The late gradient is reduced in a second round.
        if num_missing < 0:
            self.finish_reductions()
        grads.add(position, grad)
        self.params_with_grad.add(grads.param_numbers[position])
        if num_missing <= 0:
            if num_missing == 0 and self._is_reducing:
                self._reduce_ready()
            for segment in unit.grads:  # free the held gradients: the unit may be reduced later
                if segment.full.held:
                    segment.full.flush()

    def _gather_skipped(self, skipped: int) -> None:
        """Gather a unit that this backward skips, because other ranks may enter it."""
        units = self._units
        if not units.has_sharded_params:
            return
        if self._is_reducing:
            self._reduce_ready()
        unit = units.units[skipped]
        if unit.is_tail:
            self.enter(unit, None)
        else:
            units.go_to(unit, backward=True)
            if skipped in self._stay_idle:
                units.current = None  # `end` releases the unit instead of `go_to`

    def will_reduce(self) -> bool:
        """Return whether a backward that ends now reduces gradients."""
        return self.should_sync and (self.is_due_per_backward or self._sink.is_boundary)

    def _reduce_ready(self) -> None:
        for index in self.order.ready_units():
            self.reduce(self._units.units[index])

    def reduce(self, unit: Unit) -> None:
        """Finish the previous unit's reduction, and start that of ``unit``."""
        self.finish_reductions()
        for grads in unit.grads:
            grads.reduce()
            self.in_flight += ((grads, self._sink.is_boundary),)
            if grads.segment.world_size == 1:
                self.finish_reductions()

    def finish_reductions(self) -> None:
        """Finish the pending reductions, and offer the gradients that are due to the sink."""
        for grads, is_last in self.in_flight:
            grads.finish()
            if is_last or grads.plan.is_passed_on_each:
                self.offer(grads, is_last=is_last)
        self.in_flight = ()

    def offer(self, grads: FlatGrads, *, is_last: bool) -> None:
        """Offer a reduced (possibly replaced) gradient to the sink, which may update the unit."""
        if self._sink.add(grads, is_last=is_last):
            self._units.updated_early(grads.segment)

    def _accumulate_locally(self) -> None:
        """Make gradients of several backwards accumulate before they are reduced."""
        for grads in self.grads:
            grads.full.is_wide = True

    def end(self) -> None:
        """Reduce the remaining units if `will_reduce`, and release every unit.

        Called by autograd at the end of a backward, and by a step if gradients remain unreduced.
        """
        if self.is_open:
            for skipped in self.order.skipped_last():
                self._gather_skipped(skipped)
        if self.will_reduce():
            for index in self.order.end_backward():
                self.reduce(self._units.units[index])
            self.finish_reductions()
        else:
            for grads in self.grads:  # incomplete units may hold gradients
                grads.full.flush()
        self._units.release_all()
        if self.is_open:
            self._place.enter(OUTSIDE)
        self.is_open = False
        self._stay_idle = set()

    def drop_unended(self) -> None:
        # Ctrl-C may also interrupt the first hook of a backward, before `is_open` is set.
        if self.is_open or (self.order.is_awaited and self._sink.drop_untaken()):
            self._sink.broken()
            self.discard()
            self._units.release_all()

    def discard(self) -> None:
        """Drop all gradients and start a new step. Gathered units stay gathered."""
        if self.is_open:
            self._sink.drop_untaken()
        self.is_open = True  # after Ctrl-C in this method, the next forward drops the rest
        for grads, _ in self.in_flight:
            grads.finish()
        self.in_flight = ()
        for grads in self.grads:
            grads.clear()
        self.order.forget()
        self._sink.clear()
        self.is_open = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of backwards within the context unreduced. Every rank must enter it."""
        before = self.should_sync
        self.set_should_sync(False)
        try:
            yield
        finally:
            self.should_sync = before

    def set_should_sync(self, should_sync: bool) -> None:
        """Set whether backwards reduce gradients. Every rank must set the same value."""
        self.should_sync = should_sync
        if not should_sync:
            self._sink.reopen()
            self._accumulate_locally()

    @property
    def is_last(self) -> bool:
        """Whether this micro-step's backward completes the step's gradient."""
        return self._sink.is_boundary and self.should_sync

    def check_last(self) -> None:
        """Raise unless the step's last backward has ended."""
        if self.is_open:
            raise RuntimeError(
                "the last backward did not end: run the forward and backward of this step again"
            )
        if not self.is_last:
            raise RuntimeError(
                "the gradient is not whole yet: call this outside no_sync(), between the last "
                "backward of a step and step()"
            )

    def start_agreement(self) -> None:
        """Reduce remaining gradients, and start the all-reduce of the step's facts.

        Every rank must call it. Raises RuntimeError if `check_last` does.
        """
        self.check_last()
        if not self._sink.is_reduced:
            # this rank used no parameter, or the last backward ran within no_sync
            self.end()
        self._units.drain()
        self._sink.agree(self)

    def complete_gradient(self) -> None:
        """Reduce all of the step's gradient and agree on its facts. Every rank must call it."""
        self.start_agreement()
        if self._facts.is_any("unreduced"):
            self._sink.void_update()
            self.end()  # reduce gradients that some rank has left unreduced
            self._sink.reopen()
            self.start_agreement()
        is_agreed = self._facts.is_unanimous("left out")
        self.order.left_out = self.order.unneeded if is_agreed else frozenset()

    def fill(self, facts: Facts) -> None:
        # gradients computed within no_sync, or late
        unreduced = [grads for grads in self.grads if grads.full.memory is not None]
        facts.put("unreduced", bool(unreduced))
        facts.mark("left out", self.order.unneeded)


class ForwardPass:
    """The running forward, and the paths of previous forwards."""

    def __init__(self, units: UnitSet, communicator: Communicator, backward: BackwardPass) -> None:
        self._units = units
        self._communicator = communicator
        self._place = communicator.place
        self._backward = backward
        self._order = backward.order
        self._names = [f"forward of {unit!r}" for unit in units.units]
        self._last_block = units.blocks[-1] if units.blocks else None
        self.running: list[_Running] = []  # outermost first
        self._forward: Forward | None = None  # the running forward with gradients
        self._failure = 0  # id of the exception that ended the last forward
        # Blocks used by the model's last complete forward with gradients (key True) and without
        # (False), in order of use. ``_path``: blocks used by the running forward so far.
        self._last_paths: dict[bool, list[Unit]] = {}
        self._path: list[Unit] = []

    def enter(self, unit: Unit, module: nn.Module) -> None:
        """Gather ``unit`` for the forward of its ``module``, which may begin a forward pass."""
        if unit.is_root:
            self.end_interrupted(entering=module)
        if not self.running:
            self._place.check_finished("a forward")
            self._backward.drop_unended()
            if torch.is_grad_enabled():
                self._forward = self._order.begin_forward()
                if self._units.has_sharded_params:
                    self._units.saved.begin_forward(self._forward, self._backward)
            if self._failure:
                self._failure = 0
                self._communicator.clear_failure()
            if unit.is_root:
                self._path = []
        self.go_into(unit, module)

    def go_into(self, unit: Unit, module: nn.Module) -> None:
        """Gather ``unit`` for the forward of its ``module``, and record that forward as running."""
        self.running.append(_Running(unit, module, sys.exception()))
        self._place.enter(self._names[unit.index])
        self._use(unit)

    def enter_part(self, unit: Unit) -> None:
        """Gather ``unit``, one of whose submodules is called directly."""
        units = self._units
        if is_in_backward():
            self._backward.enter_recompute(unit)
        elif units.has_sharded_params and not self.running and torch.is_grad_enabled():
            raise RuntimeError(
                f"rank {self._communicator.rank}: a part of {unit!r} was called by itself, with "
                "gradients: call the engine (or its module), or use "
                f"{unit.params[0].shown.cures.read} without gradients"
            )
        if unit.is_tail:
            units.open_tail()
        else:
            self._use(unit)

    def _use(self, unit: Unit) -> None:
        units = self._units
        if self.running and unit.is_block and unit is not units.current:
            if self._forward is not None:
                last = self._path[-1].index if self._path else 0
                if unit.index > last + 1:
                    self._note_passed(unit.index)
                self._order.use(unit.index)
            self._path.append(unit)
        units.go_to(unit, backward=False)
        if self.running and unit.is_root:
            units.launch_tail()
        if not unit.is_block:  # for the root, only after launching the first block's gather
            units.wait(unit)

    def _note_passed(self, before: int) -> None:
        """Note blocks before unit ``before`` that were prefetched but not used."""
        last = self._path[-1].index if self._path else 0
        for index in self._units.windows[False][last]:
            if index < before and self._units.units[index].is_block:
                self._order.pass_by(index)

    def leave(self, unit: Unit, *, needs_grad: bool, error: BaseException | None) -> None:
        """Release ``unit`` after its forward.

        ``needs_grad``: whether the output needs a gradient. ``error``: the exception that ended the
        forward, or None. An exception that was already being handled when the forward began is
        ignored: the forward may be a retry in an ``except`` block.
        """
        units = self._units
        is_trained = self._forward is not None  # even if the model disables gradients
        has_failed = error is not None and self.note_failure(unit, error)
        if self.go_out_of(unit, needs_grad=needs_grad) and not self.running:  # outermost forward
            if unit.is_root:
                if needs_grad and is_trained:  # a backward will follow
                    self._note_passed(len(units.units))
                    if units.tail is not None:
                        units.open_tail()
                        self._order.use(units.tail.index)
                if not has_failed:
                    self._last_paths[is_trained] = self._path
            self._forward = None
            units.saved.end_forward()
            if unit.is_root and not torch.is_grad_enabled():
                units.release_resharded()
        # The last block stays gathered, because backward begins with it.
        stays = unit.index in units.stay_gathered or (is_trained and unit is self._last_block)
        if unit.is_block and not stays:
            units.release(unit)

    def note_failure(self, unit: Unit, error: BaseException) -> bool:
        """Report ``error`` to other ranks. Return False if it precedes the forward of ``unit``."""
        running = self.running
        if running and running[-1].unit is unit and running[-1].handled is error:
            return False
        if id(error) != self._failure:  # no inner block has reported it
            self._failure = id(error)  # keeping the error would keep its frames' tensors
            if "saved tensor hooks" in str(error):  # torch.func's message
                error.add_note(
                    "The engine's forward has such hooks at stage 3: use torch.autograd.grad with "
                    "create_graph=True in place of torch.func, or stage 2"
                )
            self._communicator.note_failure(f"the forward of {unit!r}", error)
        return True

    def go_out_of(self, unit: Unit, *, needs_grad: bool) -> bool:
        """Leave the forward of ``unit``. Return False if a hook raised before `go_into` ran."""
        if unit.is_block and self._forward is not None:
            self._order.leave(unit.index, needs_grad=needs_grad)
        running = self.running
        was_entered = bool(running) and running[-1].unit is unit
        if was_entered:
            running.pop()
            self._place.enter(self._names[running[-1].unit.index] if running else OUTSIDE)
        if running and unit is self._last_block:
            self._units.open_tail()
        return was_entered

    def end_interrupted(self, *, entering: nn.Module | None = None) -> None:
        """End a forward whose hooks did not run: torch runs none after Ctrl-C.

        ``entering``: the module whose call has begun but is not recorded yet.
        """
        if self.running:
            outermost = self.running[0].module
            if count_calls(outermost) <= int(outermost is entering):
                self.abandon()

    def abandon(self) -> None:
        """End the running forward, if any, without its hooks."""
        if self.running:
            self.running.clear()
            self._place.enter(OUTSIDE)
            self._forward = None
            self._units.saved.end_forward()
            self._units.release_all()

    def idle(self, model: nn.Module) -> None:
        """Take part in the other ranks' forward of ``model``: see [Note: idle ranks]."""
        root = self._units.units[0]
        path = self.last_path(is_trained=torch.is_grad_enabled())
        self.enter(root, model)
        for unit in path:
            self.enter(unit, model)
            needs_grad = unit.index not in self._order.left_out
            self.leave(unit, needs_grad=needs_grad, error=None)
        self.leave(root, needs_grad=True, error=None)

    def last_path(self, *, is_trained: bool) -> Sequence[Unit]:
        """Return the last path, preferably of a forward with this ``is_trained``, or all blocks."""
        known = [self._last_paths[k] for k in (is_trained, not is_trained) if k in self._last_paths]
        return known[0] if known else self._units.blocks


class Driver(NamedTuple):
    """The functions of the passes that hooks on the model call."""

    enter: Callable[[Unit, nn.Module], None]
    leave: Callable[..., None]  # as `ForwardPass.leave`
    gradient_ready: Callable[[Unit, FlatGrads, int, Tensor], None]


class Passes:
    """Forward and backward over one model, driven by hooks or by `zero_core.vertical`."""

    def __init__(
        self, units: UnitSet, communicator: Communicator, sink: GradientSink, facts: Facts
    ) -> None:
        """Create without hooks. `zero_core.core.hooks.install` registers them."""
        self.units = units
        self.backward = BackwardPass(units, communicator, sink, facts)
        self.forward = ForwardPass(units, communicator, self.backward)
        self._units_of: dict[int, set[int]] = {}  # unit indices by id of parameter
        for unit in units.units:
            for flat in unit.params:
                for param in (*flat.params, *flat.shown.read_params):
                    self._units_of.setdefault(id(param), set()).add(unit.index)
        self.drive_by_hooks()

    def drive_by_hooks(self) -> None:
        self.driver = Driver(self.forward.enter, self.forward.leave, self.backward.gradient_ready)

    def remove(self) -> None:
        """End a forward that is still running. Called when the hooks are removed."""
        self.forward.abandon()

    def idle_backward(self, grad: Tensor) -> None:
        """Begin the backward of a rank without data. Called as a hook on the rank's loss."""
        self.backward.begin_idle(self.forward.last_path(is_trained=True))

    @property
    def is_running(self) -> bool:
        return bool(self.forward.running) or is_in_backward()

    def units_of(self, module: nn.Module, *, recurse: bool = True) -> list[Unit]:
        """Return the units that hold parameters of ``module`` (and submodules if ``recurse``)."""
        try:
            indices = set().union(*(self._units_of[id(p)] for p in module.parameters(recurse)))
        except KeyError:
            raise ValueError(f"{type(module).__name__} is not a module of this engine") from None
        return [self.units.units[index] for index in sorted(indices)]
