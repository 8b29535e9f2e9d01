"""Gathers, releases and reductions of all units: which unit, and when.

`zero_core.runtime.hooks` calls in here; nothing in the model changes.

[Note: the path of a gradient]
1. `hooks` takes ``param.grad`` when autograd has it, and calls `Runtime.gradient_ready`.
2. `FlatGrads.add` writes it to the segment's ``full_grad``.
3. When its unit is complete and all units before it are: `FlatGrads.reduce`; one unit later:
   `FlatGrads.finish`.
4. At an accumulation boundary the sink (`StepGradient.add`) offers it to the state tier; in every
   micro-step, if the tier adds them up. Steps 3 and 4 are called by `Reductions`.
5. ``engine.step()``: `Runtime.complete_gradient`, then `StepGradient.decide` and ``apply``, which
   has the tier update the shards. `Runtime.values_changed` makes gathered values stale. On a device
   the update is enqueued earlier: see [Note: update ahead] in `zero_core.step.update`.

[Note: order]
Units are gathered forward in the order of the module tree and backward in reverse; reductions run
in that reverse order, the root last (`zero_core.runtime.order`). So every rank launches the same
collectives in the same order even where ranks take different branches within a block. The first
block's gather is launched before the root's is waited for.

[Note: the tail]
Parameters that the module tree holds behind the blocks are most likely used after them. The gather
of the tail is launched with the root's, behind that of the first block, and waited for when forward
leaves the last block. It stays to the end of backward, as the root does. Whoever uses it earlier
waits earlier: a module that holds one of its parameters by a hook, other code by a read
([Note: access] in `zero_core.core.access`).

[Note: publication]
At stages 1 and 2 every rank keeps all values, and a step leaves new ones in one slice on each. Once
the step is decided, `publish` launches the exchange of all units, in their order, on all ranks
alike, and waits for none: a unit's forward does, or the first read. So ranks may skip different
blocks, and nobody reads a value of before the step. A tier on the host is still updating then: each
launch follows the update of its unit, in a thread of its own (`Launcher`). No reduction, no other
exchange and no later update begins before `drain`: peers may still read the shards.

[Note: idle ranks]
A rank that has no data while the others have takes part in their collectives: `idle_forward` uses
the blocks and the tail as this rank's last forward did, with gradients or without as this one
(before the first one: the blocks of the module tree), and `idle_backward` opens a backward that
skips all of them. Both take the ways of a forward and a backward with data, so that all launches
are in one order. Gradients count as zero, and averages are divided by all ranks, as
`torch.distributed.algorithms.Join` does for DDP with ``divide_by_initial_world_size=True``, its
default.

[Note: micro-batches in turns]
With the vertical schedule (`zero_core.vertical`) the micro-batches of a step are one forward and
one backward here. `begin_turns` enters the root. Each micro-batch's forward runs on a thread of its
own, one of them at a time, and enters and leaves the root and the blocks by its hooks: a block
stays gathered until the first of them enters the next block. In backward `enter_turn` gathers a
unit for all of them, and `reduce_turn` reduces one micro-batch's gradient of it. Who knows which
micro-batch has its turn is the `GradientTaker`.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from zero_core._torch import call_at_end_of_backward, count_calls, is_in_backward
from zero_core.comm.communicator import Communicator
from zero_core.core import access
from zero_core.layout.discovery import Quantized
from zero_core.object_methods import SuspendableHooks
from zero_core.runtime.order import BackwardOrder, Forward, Prefetch
from zero_core.runtime.saved import SavedWeights
from zero_core.sharded.facts import Facts
from zero_core.sharded.grads import FlatGrads
from zero_core.sharded.params import FlatParams, Launcher
from zero_core.sharded.reductions import GradientSink, Reductions
from zero_core.sharded.unit import Unit
from zero_core.watch.place import OUTSIDE


class _Running(NamedTuple):
    """A hooked module whose forward is running, and the exception that its caller handles."""

    unit: Unit
    module: nn.Module
    handled: BaseException | None


class ForwardAbandoned(BaseException):
    """Ends a micro-batch's forward on its thread, as that of another one has failed."""


class GradientTaker(Protocol):
    """Takes gradients while micro-batches have turns.

    `zero_core.vertical.schedule.VerticalSchedule` is the one implementation.
    """

    def take(self, unit: Unit, grads: FlatGrads, position: int, grad: Tensor) -> None:
        """Take the gradient of parameter ``position`` of a segment of ``unit``."""


class _TailReads:
    """Waits for the tail as a forward does, for whoever reads it before."""

    def __init__(self, runtime: Runtime, tail: Unit) -> None:
        self._runtime = weakref.ref(runtime)
        self._params = {id(p): flat for flat in tail.params for p in flat.read_params}
        self._lock = threading.RLock()
        access.register(self, [p for flat in tail.params for p in flat.read_params])

    def await_values(self, param: nn.Parameter) -> None:
        """Wait for the tail: see `zero_core.core.access.ValueHolder`."""
        runtime = self._runtime()
        assert runtime is not None, "it holds this object"
        with self._lock:
            runtime._use_tail()

    @property
    def is_ended(self) -> bool:
        return all(flat.is_ended for flat in self._params.values())

    def refusal(self, param: nn.Parameter, *, is_write: bool) -> str:
        """Return why ``param`` cannot be read: see `zero_core.core.access.ValueHolder`."""
        return self._params[id(param)].refusal(param, is_write=is_write)


class Runtime:
    """Drives all units. See the notes at the top of this file.

    Attributes:
        units: the root first, then blocks in the order of the module tree, then the tail.
        quantized: the model's quantized parameters.
        rank: this rank.
        ready: indices of the units whose parameters hold the current values. The tail is in it only
            once the forward under way has waited for it.
        entered: the block that backward is in.
        saved: what autograd saves of gathered units.
        prefetch: units that are gathered ahead of others.
        part_hooks: gather the block of a part that is called by itself. They are suspended while
            all blocks stay gathered: a forward for one token calls many small modules.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        communicator: Communicator,
        sink: GradientSink,
        facts: Facts,
        *,
        has_sharded_params: bool,
        quantized: Sequence[Quantized] = (),
    ) -> None:
        """Prepare. `zero_core.runtime.hooks.install` makes the model call it.

        ``has_sharded_params``: gathered values are released after use (stage 3).
        """
        self.units = tuple(units)
        self.quantized = tuple(quantized)
        self.rank = communicator.rank
        self.ready: set[int] = set()
        self.entered: Unit | None = None
        self.saved = SavedWeights()
        self.prefetch = Prefetch(len(self.units))
        self.part_hooks = SuspendableHooks()
        self._communicator = communicator
        self._place = communicator.place
        self._forwards = [f"forward of {unit!r}" for unit in self.units]
        self._backwards = [f"backward of {unit!r}" for unit in self.units]
        self._sink = sink
        self._facts = facts
        self._params_with_grad = sink.params_with_grad
        self._has_sharded_params = has_sharded_params
        has_peers = communicator.world_size > 1
        self._reductions = Reductions(self.units, sink, self.ready, has_peers=has_peers)
        self._blocks = {unit.index for unit in self.units if unit.is_block}
        self._last_block = max(self._blocks, default=0)
        self._tail = self.units[-1] if self.units[-1].is_tail else None
        if self._tail is not None and has_sharded_params:
            self._tail_reads = _TailReads(self, self._tail)
        kept = [flat for unit in self.units for flat in unit.params if flat.is_kept]
        self._published = [flat for flat in kept if flat.is_exchanged]
        self._launcher: Launcher | None = None
        self._is_publishing = False  # not all that was launched has been waited for
        self._publishing = threading.RLock()
        for unit in self.units:
            for flat in unit.params:
                flat.publishing = self._publishing
        self._order = BackwardOrder(
            [u.index for u in self.units if u.grads],
            None if self._tail is None else self._tail.index,
            is_alone=not (has_peers and has_sharded_params),
        )
        self._full_params_depth = 0  # within any `full_params`, nothing is released
        self._unsharded: frozenset[int] = frozenset()  # units that a forward does not release
        self._current: Unit | None = None  # the block in use
        self._running: list[_Running] = []
        self._forward: Forward | None = None  # the one that is running with gradients
        self._taker: GradientTaker | None = None  # while micro-batches have turns
        self._is_failing = False  # between `forward_failed` and `leave_forward`
        self._failure = 0  # id of the error that ended the last forward
        # Blocks and tail in the order in which the model's last whole forward used them, by whether
        # it had gradients, and so far in the one under way.
        self._last_paths: dict[bool, list[Unit]] = {}
        self._path: list[Unit] = []
        self._is_backward_open = False
        self._why_no_backward: str | None = None
        self._should_sync = True
        # Whether the open backward reduces (not in no_sync; one rank: at the boundary only).
        self._is_reducing = False
        # Units recomputed in this backward: gradients to come since the last recomputation.
        self._recomputed: dict[int, int] = {}
        self._ever_recomputed: set[int] = set()
        self._stay_idle: set[int] = set()  # units that the backward of an idle rank gathers once

    # ---------------------------------------------------------------- forward

    def enter_forward(self, unit: Unit, module: nn.Module) -> None:
        """Gather ``unit`` for the forward of its ``module``."""
        if unit.is_root and self._taker is None:
            self.end_interrupted_forward(entering=module)
        if unit.is_root and self._taker is not None:
            if self._has_sharded_params:
                self.saved.watch_thread()
        elif not self._running:
            self._place.check_finished("a forward")
            # Or Ctrl-C came in the first hook of a backward, before it was opened.
            if self._is_backward_open or (self._order.is_awaited and self._sink.drop_untaken()):
                self._sink.broken()
                self.discard()
                self.release_all()
            if torch.is_grad_enabled():
                self._forward = self._order.begin_forward()
                if self._has_sharded_params:
                    self.saved.begin_forward(self._forward, self)
            if self._failure:
                self._failure = 0
                self._communicator.clear_failure()
            if unit.is_root:
                self._path = []
        self._running.append(_Running(unit, module, sys.exception()))
        self._place.enter(self._forwards[unit.index])
        self._use(unit, backward=False)

    def forward_failed(self, unit: Unit, error: BaseException) -> None:
        """Note that ``error`` left the forward of ``unit``. `leave_forward` follows.

        It did not if it was being handled when the forward began: a retry with a smaller batch.
        """
        running = self._running
        if running and running[-1].unit is unit and running[-1].handled is error:
            return
        self._is_failing = True
        if isinstance(error, ForwardAbandoned):
            return  # another one was noted
        if id(error) != self._failure:  # else it has been noted of a block within
            self._failure = id(error)  # the error itself would keep its frames' tensors
            self._communicator.note_failure(f"the forward of {unit!r}", error)

    def leave_forward(self, unit: Unit, *, needs_grad: bool) -> None:
        """Release ``unit`` after its forward, whose output ``needs_grad`` or not."""
        has_failed, self._is_failing = self._is_failing, False
        is_trained = self._forward is not None  # even where the model switches gradients off
        if is_trained and unit.is_block:
            self._order.leave(unit.index, needs_grad=needs_grad)
        running = self._running
        if running and running[-1].unit is unit:  # else its pre-forward raised before it got here
            running.pop()
            self._place.enter(self._forwards[running[-1].unit.index] if running else OUTSIDE)
            if not running:
                if unit.is_root:
                    self._end_tail(is_saved=needs_grad and is_trained)
                    if not has_failed:
                        self._last_paths[is_trained] = self._path
                self._forward = None
                self.saved.end_forward()
                if unit.is_root and not torch.is_grad_enabled():
                    self._release_but(self._unsharded)
                    if self._unsharded and self._blocks <= self.ready & self._unsharded:
                        self.part_hooks.suspend()
            elif unit.is_root and self._taker is not None:
                self.saved.leave_thread()
        if unit.index == self._last_block and running:
            self._use_tail()
        # The last block stays gathered: backward begins with it.
        stays = unit.index in self._unsharded or (is_trained and unit.index == self._last_block)
        if unit.is_block and not stays and self._taker is None:
            self.release(unit)

    def idle_forward(self, model: nn.Module) -> None:
        """Take part in a forward of the other ranks, without data. See [Note: idle ranks].

        ``model`` is the root's module.
        """
        root = self.units[0]
        path = self._last_path(is_trained=torch.is_grad_enabled())
        self.enter_forward(root, model)
        for unit in path:
            self.enter_forward(unit, model)
            self.leave_forward(unit, needs_grad=unit.index not in self._order.left_out)
        self.leave_forward(root, needs_grad=True)

    def _last_path(self, *, is_trained: bool) -> list[Unit]:
        """Return the path of the last forward of its kind, or of the other kind, or all blocks."""
        known = [self._last_paths[k] for k in (is_trained, not is_trained) if k in self._last_paths]
        return known[0] if known else list(self.blocks)

    def end_interrupted_forward(self, *, entering: nn.Module | None = None) -> None:
        """End a forward that was left without its hooks: torch runs none after Ctrl-C.

        ``entering`` is the module whose call has begun and has not been noted yet.
        """
        if self._running:
            outermost = self._running[0].module
            num_known = int(outermost is entering)
            if count_calls(outermost) <= num_known:
                self.abandon_forward()

    def abandon_forward(self) -> None:
        """End the forward that is under way, if one is, without its hooks."""
        if not self._running:
            return
        self._running.clear()
        self._place.enter(OUTSIDE)
        self._forward = None
        self.saved.end_forward()
        self.release_all()

    def enter_part(self, unit: Unit) -> None:
        """Gather ``unit``, of which a part is called by itself.

        Raises:
            RuntimeError: with gradients, outside of a forward of the model.
        """
        if is_in_backward():
            self.enter_recompute(unit)
        elif self._has_sharded_params and not self._running and torch.is_grad_enabled():
            raise RuntimeError(
                f"rank {self.rank}: a part of {unit!r} was called by itself, with gradients: "
                f"call the engine (or its module), or use {unit.params[0].cures.read} without "
                "gradients"
            )
        elif unit.is_tail:
            self._use_tail()
        else:
            self._use(unit, backward=False)

    def _use(self, unit: Unit, *, backward: bool) -> None:
        """Gather ``unit`` and its successor. Release its predecessor."""
        index = unit.index
        if unit.is_block:
            previous, self._current = self._current, unit
            if previous is not unit:
                if previous is not None and (backward or previous.index not in self._unsharded):
                    self.release(previous)
                if self._running and not backward:
                    if self._forward is not None:
                        self._note_passed(index)
                        self._order.use(index)
                    self._path.append(unit)
        window, strays = self.prefetch.enter(index, backward=backward)
        for stray in strays:
            if backward or stray not in self._unsharded:
                self.release(self.units[stray])
        if index not in self.ready:
            unit.gather(backward=backward)
        if unit.hints is not None:
            unit.hints.announce(index, backward=backward)
        if unit.is_block:
            self._wait(unit)
        for ahead in window:
            if ahead not in self.ready:
                self._gather_ahead(self.units[ahead], backward=backward)
        if unit.is_root and self._running and not backward:
            self._gather_tail()
        self._wait(unit)  # the root, after the launch of the first block's gather

    def _gather_ahead(self, unit: Unit, *, backward: bool) -> None:
        if not unit.is_exchanged and not unit.is_updated():
            return  # it would block here until the tier has updated the unit
        if unit.is_block:  # else it stays
            self.prefetch.add(unit.index)
        unit.gather(backward=backward)

    def _gather_tail(self) -> None:
        """Launch the gather of the tail. Whoever reads it from now on waits."""
        tail = self._tail
        if tail is None or tail.index in self.ready:
            return
        if tail.is_exchanged or tail.is_updated():  # else whoever is first waits for the update
            tail.gather()
        for flat in tail.params:
            flat.defer()

    def _use_tail(self) -> None:
        """Wait for the tail."""
        if self._tail is not None and self._tail.index not in self.ready:
            self._tail.gather()
            self._wait(self._tail)

    def _end_tail(self, *, is_saved: bool) -> None:
        """End the outermost forward. A backward follows if it ``is_saved``."""
        if not is_saved:
            return
        self._note_passed(len(self.units))
        if self._tail is not None:
            self._use_tail()
            self._order.use(self._tail.index)

    def _note_passed(self, before: int) -> None:
        """Note blocks that this rank gathered ahead and leaves out in the forward that is running.

        ``before``: the unit that the forward goes to.
        """
        last = self._path[-1].index if self._path else 0
        for index in self.prefetch.window(last, backward=False):
            if index < before and index in self._blocks:
                self._order.pass_by(index)

    def _wait(self, unit: Unit) -> None:
        index = unit.index
        if index in self.ready:
            return
        for flat in unit.params:
            flat.wait()
            if self._has_sharded_params and not flat.is_kept:
                self.saved.add(unit, flat)
        self.ready.add(index)

    def release(self, unit: Unit) -> None:
        """Release the gathered values of ``unit``, outside of `full_params`."""
        if not self._has_sharded_params or self._full_params_depth:
            return
        if unit is self._current:
            self._current = None
        self.part_hooks.resume()
        self.ready.discard(unit.index)
        for flat in unit.params:
            if flat.full is not None and not flat.is_kept:
                self.saved.gathered.pop(flat.address, None)
            flat.release()

    def release_all(self) -> None:
        """Release every unit, the root and the tail included."""
        self._release_but(frozenset())

    def _release_but(self, unsharded: frozenset[int]) -> None:
        self.saved.release_references()
        self._current = self.entered = None
        self.prefetch.clear()
        for unit in self.units:
            if unit.index not in unsharded:
                self.release(unit)

    # --------------------------------------------------------------- backward

    def enter_backward(self, unit: Unit, forward: Forward | None) -> None:
        """Gather ``unit`` for the backward of ``forward``. None: the unit is computed again."""
        if unit is self.entered:
            return
        if not self._is_backward_open:
            self.begin_backward()
        if not unit.is_block:
            unit.gather(backward=True)
            self._wait(unit)
            return
        previous = self._current
        if previous is not None and previous is not unit and self._must_stay(previous):
            self._current = None  # it is released at the end of backward
        self.entered = unit
        self._place.enter(self._backwards[unit.index])
        for skipped in self._order.enter(unit.index, forward):
            self._gather_skipped(skipped)
        if self._is_reducing:
            self._reduce_ready_units()  # before the next gather: [Note: one order ...] in `order`
        self._use(unit, backward=True)

    def enter_recompute(self, unit: Unit) -> None:
        """Gather ``unit``, whose forward activation checkpointing computes again in backward."""
        self.enter_backward(unit, None)
        self._recomputed[unit.index] = unit.count_trainable()
        self._ever_recomputed.add(unit.index)

    def gradient_ready(self, unit: Unit, grads: FlatGrads, position: int, grad: Tensor) -> None:
        """Take the gradient of parameter ``position`` of a segment of ``unit``."""
        if self._taker is not None:
            self._taker.take(unit, grads, position, grad)
            return
        if not self._is_backward_open:
            self.begin_backward()
        index = unit.index
        self._place.enter(self._backwards[index])  # without shards nothing enters it before
        if index in self._recomputed:
            self._recomputed[index] -= 1
        num_missing = self._order.gradient_ready(index)
        # late: this unit's reduction has started. Finish it; the gradient opens a second one.
        if num_missing < 0:
            self._reductions.finish()
        grads.add(position, grad)
        self._params_with_grad.add(grads.param_numbers[position])
        if num_missing == 0 and self._is_reducing:
            self._reduce_ready_units()

    def idle_backward(self, grad: Tensor) -> None:
        """Begin a backward that brings no gradient. Its end follows the last forward's trail.

        A hook on the tensor that it begins with, whose ``grad`` is not looked at.
        """
        self.begin_backward()
        # With data, a block that is used twice and recomputed stays until its gradients are there.
        uses = Counter(unit.index for unit in self._last_path(is_trained=True))
        self._stay_idle = {i for i, num in uses.items() if num > 1} & self._ever_recomputed

    def _gather_skipped(self, skipped: int) -> None:
        """Gather a unit that backward skips here, because other ranks may go into it."""
        if not self._has_sharded_params:
            return
        if self._is_reducing:
            self._reduce_ready_units()
        unit = self.units[skipped]
        if unit.is_tail:
            self.enter_backward(unit, None)
        else:
            self._use(unit, backward=True)
            if skipped in self._stay_idle:
                self._current = None  # it is released at the end of backward

    def _must_stay(self, unit: Unit) -> bool:
        # A recomputed forward saved raw views; they are used until the unit's gradients are there.
        # A unit without trainable parameters never has one: it stays until backward ends.
        num_missing = self._recomputed.get(unit.index)
        return num_missing is not None and (num_missing > 0 or unit.count_trainable() == 0)

    def begin_backward(self) -> None:
        """Begin a backward at its first sign, unless one is open, and be called at its end."""
        if self._is_backward_open:
            return
        if self._why_no_backward is not None:
            raise RuntimeError(self._why_no_backward)
        self._place.check_finished("a backward")
        self.part_hooks.resume()
        self.drain()
        self._sink.begin_backward(is_new_round=self._should_sync and self._order.is_awaited)
        self._reductions.begin_backward()
        self._is_backward_open = True
        self._place.enter("backward")
        self._is_reducing = self._will_reduce()
        if not self._is_reducing:
            self._reductions.accumulate_locally()  # more is to come before anything is reduced
        self.entered = None
        self._recomputed.clear()
        self._order.begin_backward({u.index: u.count_trainable() for u in self.units})
        call_at_end_of_backward(self.end_backward)

    def abandon_backward(self) -> None:
        """Have the next forward drop the step's gradient, as after a backward that did not end."""
        self._is_backward_open = True

    def _will_reduce(self) -> bool:
        return self._should_sync and (
            self._reductions.is_due_per_backward or self._sink.is_boundary
        )

    def _reduce_ready_units(self) -> None:
        for index in self._order.ready_units():
            self._reductions.start(index)

    def end_backward(self) -> None:
        """Reduce what is left, wait for everything, release every unit.

        Autograd calls it when a backward ends; `complete_gradient` does when a backward touched no
        parameter.
        """
        if self._is_backward_open:
            for skipped in self._order.skipped_last():
                self._gather_skipped(skipped)
        if self._will_reduce():
            for index in self._order.end_backward():
                self._reductions.start(index)
            self._reductions.finish()
        self.release_all()
        if self._is_backward_open:
            self._place.enter(OUTSIDE)
        self._is_backward_open = False
        self._stay_idle = set()

    # -------------------------------------------------- micro-batches in turns

    def begin_turns(self, model: nn.Module, taker: GradientTaker) -> None:
        """Begin the forward of all micro-batches of a step. See [Note: micro-batches in turns].

        ``model`` is the root's module. Until `end_turns` ``taker`` takes the gradients.
        """
        self.enter_forward(self.units[0], model)
        self.saved.leave_thread()  # each micro-batch watches its own
        self._taker = taker

    def begin_backward_of_turns(self) -> None:
        """Begin the backward of all micro-batches, unless it has begun."""
        if self._is_backward_open:
            return
        if self._why_no_backward is not None:
            raise RuntimeError(self._why_no_backward)
        self.part_hooks.resume()
        self.drain()
        self._sink.begin_backward(is_new_round=True)
        self._is_backward_open = True
        self._is_reducing = False  # `reduce_turn` does
        self.entered = None
        self._recomputed.clear()
        self._order.begin_backward({unit.index: 0 for unit in self.units})

    def end_forward_of_turns(self) -> None:
        """End the forward of all micro-batches."""
        self.leave_forward(self.units[0], needs_grad=True)

    def enter_turn(self, unit: Unit, *, is_used: bool) -> None:
        """Gather a block for the backward of all micro-batches, unless no rank needs it.

        ``is_used``: whether this rank's backward goes into it.
        """
        self._place.enter(self._backwards[unit.index])
        if is_used or unit.index not in self._order.left_out:
            self.entered = unit
            if self._has_sharded_params:
                self._use(unit, backward=True)

    def begin_turn(self, unit: Unit) -> None:
        """Begin the backward of one micro-batch through ``unit``."""
        self._reductions.begin_unit(unit.index)

    def add_in_turn(self, unit: Unit, grads: FlatGrads, position: int, grad: Tensor) -> None:
        """Add the gradient that one micro-batch has of a parameter."""
        self._reductions.finish_unit(unit.index)
        grads.add(position, grad)
        self._params_with_grad.add(grads.param_numbers[position])

    def reduce_turn(self, unit: Unit) -> None:
        """Reduce one micro-batch's gradient of ``unit``, which is complete."""
        if unit.grads and self._will_reduce():
            self._reductions.start(unit.index)

    def end_turns(self) -> None:
        """End the backward of all micro-batches."""
        self._reductions.finish()
        self._taker = None
        self._order.end_backward()
        self._place.enter("backward")
        self.release_all()
        self._place.enter(OUTSIDE)
        self._is_backward_open = False

    def abandon_turns(self) -> None:
        """End turns that failed. The next forward drops gradients that they have brought."""
        self._taker = None
        self.abandon_forward()
        self.release_all()

    # ----------------------------------------------------------- accumulation

    @property
    def should_sync(self) -> bool:
        """Whether backwards reduce gradients: False within `no_sync`."""
        return self._should_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients of backwards unreduced within. Every rank must enter it."""
        before = self._should_sync
        self.set_should_sync(False)
        try:
            yield
        finally:
            self._should_sync = before

    def set_should_sync(self, should_sync: bool) -> None:
        """Set whether backwards reduce gradients. Every rank must set the same."""
        self._should_sync = should_sync
        if not should_sync:
            self._sink.reopen()
            self._reductions.accumulate_locally()

    @property
    def is_last_backward(self) -> bool:
        """Whether no backward of a later micro-step will add to the step's gradient."""
        return self._sink.is_boundary and self._should_sync

    # ------------------------------------------------------------------- step

    def check_last_backward(self) -> None:
        """Raise if a backward that did not end, or a further one, is needed before ``step``."""
        if self._is_backward_open:
            raise RuntimeError(
                "the last backward did not end: run the forward and backward of this step again"
            )
        if not self.is_last_backward:
            raise RuntimeError(
                "the gradient is not whole yet: call this outside no_sync(), between the last "
                "backward of a step and step()"
            )

    def start_agreement(self) -> None:
        """Have all of the step's gradient reduced, and start to agree on it.

        Every rank must call it. The host does not wait for the device.

        Raises:
            RuntimeError: not at an accumulation boundary, or within ``no_sync``, or after a
                backward that did not end.
        """
        self.check_last_backward()
        if not self._sink.is_reduced:
            # No parameter was used on this rank, or the last backward ran within no_sync.
            self.end_backward()
        self._agree()

    def complete_gradient(self) -> None:
        """Have all of the step's gradient reduced and agreed on. Every rank must call it.

        Raises:
            RuntimeError: as of `start_agreement`.
        """
        self.start_agreement()
        if self._facts.is_any("unreduced"):
            self._sink.void_update()
            # On some rank, gradients came after their unit's reduction.
            self.end_backward()
            self._sink.reopen()
            self._agree()
        self._order.place_tail(is_first=not self._facts.is_any("tail late"))
        self._order.leave_out(is_agreed=self._facts.is_unanimous("left out"))

    def _agree(self) -> None:
        self.drain()
        self._sink.agree(self)

    def fill(self, facts: Facts) -> None:
        """Put in what this rank's backwards have shown: see `zero_core.runtime.order`."""
        facts.put("unreduced", self._reductions.has_unreduced)
        facts.put("tail late", self._order.is_tail_late)
        facts.mark("left out", self._order.unneeded)

    def gradient_replaced(self, grads: FlatGrads, param: int) -> None:
        """Pass on the gradient of a segment again: that of parameter number ``param`` was set."""
        self._params_with_grad.add(param)
        self._reductions.offer(grads, is_last=self._sink.is_boundary)

    def discard(self) -> None:
        """Drop all gradients and start a new step.

        Wait for reductions under way. Gathered units stay.
        """
        if self._is_backward_open:
            self._sink.drop_untaken()
        self._is_backward_open = True  # Ctrl-C may come meanwhile: then a forward drops the rest
        self._reductions.discard()
        self._order.forget()
        self._sink.clear()
        self._is_backward_open = False

    # ---------------------------------------------------------------- offload

    def settle(self) -> None:
        """Release everything and wait for all reductions, between two steps or micro-steps.

        Raises:
            RuntimeError: a forward, a backward or a `full_params` is under way.
        """
        self.end_interrupted_forward()
        if self.is_running or self._full_params_depth:
            raise RuntimeError(
                f"rank {self.rank}: offload_states() within a forward, a backward or gathered(): "
                "call it between two steps"
            )
        if self._is_backward_open:
            self._sink.broken()
            self.discard()
        self.release_all()
        self._reductions.synchronize()

    def vacate(self) -> None:
        """Make all parameters placeholders until `FlatParams.reoccupy`. See `settle`."""
        for unit in self.units:
            for flat in unit.params:
                flat.vacate()
        self.saved.forget_range()
        self.ready.clear()

    def refuse_backwards(self, reason: str | None) -> None:
        """Refuse backwards for ``reason`` from now on, or allow them: None."""
        self._why_no_backward = reason

    # ----------------------------------------------------------------- values

    @contextmanager
    def full_params(self) -> Iterator[None]:
        """Release nothing that is gathered within. Contexts may end in any order."""
        self._full_params_depth += 1
        try:
            yield
        finally:
            self._full_params_depth -= 1
            if not self._full_params_depth:
                self.release_all()

    @property
    def has_full_params(self) -> bool:
        """Whether a `full_params` is open."""
        return self._full_params_depth > 0

    def set_unsharded(self, units: frozenset[int]) -> None:
        """Keep ``units``, by index, gathered after a forward, until a backward or `release_all`.

        Every rank must set the same ones, between two forwards. Units that were among them and are
        not any more are released.
        """
        left, self._unsharded = self._unsharded - units, units
        for index in sorted(left):
            self.release(self.units[index])

    @property
    def unsharded(self) -> frozenset[int]:
        """Units that stay gathered after a forward."""
        return self._unsharded

    def gather_exact(self, unit: Unit) -> None:
        """Gather ``unit`` now, unquantized, unless its current values are gathered already.

        Then they may be quantized: release it first.
        """
        if unit.index not in self.ready:
            unit.gather(exact=True)
            self._wait(unit)

    @property
    def blocks(self) -> tuple[Unit, ...]:
        """The units but the root and the tail."""
        return tuple(unit for unit in self.units if unit.is_block)

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward is under way."""
        return bool(self._running) or is_in_backward()

    def is_needed(self, unit: Unit) -> bool:
        """Whether ``unit`` is gathered for a forward, backward or context that has not ended."""
        is_used = is_in_backward() or any(
            r.unit is unit or (r.unit.is_root and unit.is_tail) for r in self._running
        )
        return self._full_params_depth > 0 or (is_used and unit.is_current)

    def values_changed(self, flats: Iterable[FlatParams] | None = None) -> None:
        """Note that shards hold new values, and publish them. Every rank must call it.

        ``flats``: whose values are meant; None: all.
        """
        with self._publishing:
            self._change_values(flats)

    def _change_values(self, flats: Iterable[FlatParams] | None) -> None:
        self.part_hooks.resume()
        if flats is None:
            self.ready.clear()
            flats = (flat for unit in self.units for flat in unit.params)
        for flat in flats:
            self.release(self.units[flat.segment.unit])  # a forward may have left old values in it
            self.ready.discard(flat.segment.unit)
            flat.invalidate()
        self.publish()

    def values_replaced(self, flats: Iterable[FlatParams] | None = None) -> None:
        """Do as `values_changed` for values that were written from outside of a step."""
        self._communicator.forget_values()
        self.values_changed(flats)

    def publish(self) -> None:
        """Launch the exchange of kept values that have changed, and wait for none.

        Every rank must call it. See [Note: publication].
        """
        stale = [flat for flat in self._published if not flat.is_gathered]
        if not stale:
            return
        launcher = None
        if not all(flat.is_updated() for flat in stale):
            if self._launcher is None:
                self._launcher = Launcher(stale[0].device)
            launcher = self._launcher
            launcher.begin()
        for flat in stale:
            flat.publish(launcher)
        self._is_publishing = True

    def drain(self) -> None:
        """Wait for all that was published."""
        if self._is_publishing:
            for flat in self._published:
                flat.finish_gather()
            self._is_publishing = False
