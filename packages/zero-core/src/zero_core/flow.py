"""The flow of a step: when each unit is gathered, released and reduced.

Hooks on the unit modules and on the parameters call in here; nothing in the model changes.

[Note: order]
Units are gathered forward in the order of the module tree and backward in reverse; reductions run
in that reverse order, the root last (`zero_core.arrivals`). So every rank launches the same
collectives in the same order even where ranks take different branches within a block.

[Note: saved tensors]
Autograd saves the weights that a forward used. At stage 3 their buffer is reused for other units,
so what is saved of a pool buffer is only (segment, offset, shape): `torch.autograd.graph`'s hooks
pack it when it is saved, and re-gather the unit when backward unpacks it. The first unpacking, or
the first recomputation by activation checkpointing, also tells that a unit's backward has begun.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from zero_core.arrivals import Arrivals, Forward
from zero_core.autograd import is_in_backward, requires_grad
from zero_core.compiling import outside_graphs, unless_compiling
from zero_core.config import ActivationCheckpointingConfig
from zero_core.freezing import hook_gradient
from zero_core.layout import Segment
from zero_core.protocols import Collectives, StateTier
from zero_core.recompute import Recompute
from zero_core.segment_grads import SegmentGrads
from zero_core.segment_values import SegmentValues
from zero_core.unit import Unit

__all__ = ["Flow"]


_Packed = tuple[Unit, SegmentValues, int, torch.Size, tuple[int, ...], int, Forward]
"""A weight that autograd saved: unit, segment, offset, shape, strides, version, and the forward. A
plain tuple, as there is one for each use of a weight, and a test for each saved tensor."""


class Flow:
    """Drives gathers and reductions of all units; see the notes at the top of this file."""

    def __init__(
        self,
        units: Sequence[Unit],
        collectives: Collectives,
        *,
        rank: int,
        has_sharded_params: bool,
        is_reduced_per_backward: bool,
        on_reduced: Callable[[SegmentGrads], None],
        on_backward: Callable[[], None],
        on_broken_backward: Callable[[], None],
        is_boundary: Callable[[], bool],
    ) -> None:
        """Prepare; `attach` installs the hooks.

        Args:
            units: the root first, then blocks in the order of the module tree.
            collectives: how shards become units and gradients become shards.
            rank: for messages.
            has_sharded_params: whether gathered values are released after use (stage 3).
            is_reduced_per_backward: whether each backward is reduced (False for one rank, which
                has nothing to reduce before the boundary).
            on_reduced: called for each segment whose gradient of the step is complete.
            on_backward: called at the first sign of each backward; may raise.
            on_broken_backward: called when a forward finds that the last backward never ended.
            is_boundary: whether the current micro-step is the last one of its step.
        """
        self.tier: StateTier | None = None
        self.should_sync = True
        """False within ``no_sync``: gradients stay unreduced."""
        self.num_wholes = 0
        """How many ``gathered`` of the whole model are open: within any, nothing is released."""
        self.fired: set[int] = set()
        """Parameters that got a gradient on this rank since the last step."""
        self.units = list(units)
        """The root first, then blocks in the order of the module tree."""
        self._blocks = self.units[1:]
        self._collectives = collectives
        self._rank = rank
        self._has_sharded_params = has_sharded_params
        self._is_reduced_per_backward = is_reduced_per_backward
        self._on_reduced = on_reduced
        self._on_backward = on_backward
        self._on_broken_backward = on_broken_backward
        self.is_boundary = is_boundary
        self._by_storage: dict[int, tuple[Unit, SegmentValues]] = {}
        self._ready: set[int] = set()  # units whose parameters hold the current values
        self._current: Unit | None = None  # the block in use
        self._entered: Unit | None = None  # the block that backward is in
        self._ahead: Unit | None = None  # gathered before it is needed
        # Units recomputed in this backward: gradients to come since the last recomputation.
        self._recomputed: dict[int, int] = {}
        self._arrivals = Arrivals(units)
        self._forward: Forward | None = None  # the one that is running with gradients
        self._in_flight: list[tuple[Unit, SegmentGrads]] = []
        self._is_backward_open = False
        self._is_reducing = False  # in the backward that is open
        # The hooked modules whose forward is running, and the saved-tensor hooks that each entered.
        self._running: list[tuple[Unit, AbstractContextManager[Any] | None]] = []
        self._handles: list[Any] = []
        # Addresses between which the buffers of gathered units lie, of those seen so far.
        self._low, self._high = sys.maxsize, 0

    # ------------------------------------------------------------------ hooks

    def attach(
        self,
        modules: Sequence[nn.Module],
        checkpointing: ActivationCheckpointingConfig | None = None,
    ) -> None:
        """Hook the units' ``modules`` (same order) and their trainable parameters."""
        if checkpointing is not None and checkpointing.enabled:
            recompute = Recompute(
                modules[1:],
                is_on_cpu=checkpointing.cpu_checkpointing,
                begin=lambda index: self._begin_recompute(self._blocks[index]),
            )
            self._handles.append(recompute)
        self._modules = list(modules)
        self._model = modules[0]
        for unit, module in zip(self.units, modules, strict=True):
            before = outside_graphs(self._pre_forward(unit))
            after = outside_graphs(self._post_forward(unit))
            self._handles.append(module.register_forward_pre_hook(before))
            self._handles.append(module.register_forward_hook(after, always_call=True))
            for grads in unit.grads:
                for position, param in enumerate(grads.params):
                    hook = self._on_grad(unit, grads, position)
                    self._handles.append(hook_gradient(param, hook))
        self._guard_inside()

    def _guard_inside(self) -> None:
        """Hook the modules that hold a unit's parameters, for when they are called by themselves.

        Activation checkpointing of a part of a block does that in backward, a model that calls
        ``block.attention`` in its own forward.
        """
        unit_of = {id(p): u.index for u in self.units for v in u.values for p in v.params}
        for module in self._model.modules():
            own = {unit_of[id(p)] for p in module.parameters(recurse=False)}
            if module._compiled_call_impl is not None:  # one graph with all its parts
                within = {unit_of[id(p)] for p in module.parameters()}
                if len(within) == 1:
                    self._guard(module, within.pop(), outside_graphs)
                    continue
            for index in own:
                self._guard(module, index, unless_compiling)

    def _guard(self, module: nn.Module, index: int, around: Callable[..., Any]) -> None:
        if module is not self._modules[index]:
            hook = around(self._pre_inside(self.units[index]))
            self._handles.append(module.register_forward_pre_hook(hook))

    def _pre_inside(self, unit: Unit) -> Callable[[nn.Module, Any], None]:
        index, ready = unit.index, self._ready

        def hook(module: nn.Module, args: Any) -> None:
            if index in ready:
                return
            if is_in_backward():
                self._begin_recompute(unit)
            elif self._has_sharded_params and not self._running and torch.is_grad_enabled():
                raise RuntimeError(
                    f"rank {self._rank}: a part of {unit!r} was called by itself, with gradients: "
                    "call the engine (or its module), or use engine.gathered() without gradients"
                )
            else:
                self._use(unit, backward=False)

        return hook

    def detach(self) -> None:
        """Take every hook off again."""
        while self._handles:
            self._handles.pop().remove()

    def _pre_forward(self, unit: Unit) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            if is_in_backward():  # activation checkpointing computes the block again
                self._begin_recompute(unit)
                return
            self._enter_forward(unit)
            self._use(unit, backward=False)

        return hook

    def _post_forward(self, unit: Unit) -> Callable[[nn.Module, Any, Any], None]:
        is_last = unit is self.units[-1]

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if is_in_backward():
                return
            if self._forward is not None and not requires_grad(output):
                self._arrivals.unused(unit)
            self._leave_forward(unit)
            if not unit.is_root and not (is_last and torch.is_grad_enabled()):
                self.release(unit)  # but the last one: backward starts with it

        return hook

    def _on_grad(
        self, unit: Unit, grads: SegmentGrads, position: int
    ) -> Callable[[nn.Parameter], None]:
        number = grads.segment.slots[position].param
        index, arrivals, fired = unit.index, self._arrivals, self.fired

        def hook(param: nn.Parameter) -> None:
            if not self._is_backward_open:
                self._open_backward()
            if index in self._recomputed:
                self._recomputed[index] -= 1
            missing = arrivals.came(index)
            if missing < 0:  # late: its unit is being reduced
                self._finish_reduces()
            grads.take(position)
            fired.add(number)
            if missing == 0:
                self._reduce_what_is_due()

        return hook

    # ---------------------------------------------------------------- forward

    def _enter_forward(self, unit: Unit) -> None:
        if not self._running and self._is_backward_open:
            self._on_broken_backward()
            self.discard()
            self.release_all()
        context: AbstractContextManager[Any] | None = None
        if not self._running and torch.is_grad_enabled():
            self._forward = self._arrivals.forward_begins()
        if not self._running and self._has_sharded_params and torch.is_grad_enabled():
            context = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            context.__enter__()
        self._running.append((unit, context))

    def _leave_forward(self, unit: Unit) -> None:
        if not self._running or self._running[-1][0] is not unit:
            return  # its pre-forward raised before it got here
        _, context = self._running.pop()
        if not self._running:
            self._forward = None
        if context is not None:
            context.__exit__(None, None, None)
        if unit.is_root and not self._running and not torch.is_grad_enabled():
            self.release_all()

    def _pack(self, tensor: Tensor) -> object:
        found = None
        if self._low <= tensor.data_ptr() < self._high:
            found = self._by_storage.get(tensor.untyped_storage().data_ptr())
        if found is None:  # most by far: activations
            # Detached: a node that saved its own output would hold itself, for ever if no backward
            # comes (torch drops the graph of an output by itself only where there are no hooks).
            return tensor if tensor.grad_fn is None else tensor.detach()
        unit, values = found
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride())
        assert self._forward is not None
        return (unit, values, *layout, values.version, self._forward)

    def _unpack(self, packed: Tensor | _Packed) -> Tensor:
        if type(packed) is not tuple:
            return packed  # type: ignore[return-value]
        unit, values, offset, shape, stride, version, forward = packed
        if version != values.version:
            raise RuntimeError(
                f"backward of a forward that ran before the last step or load: the weights of "
                f"{unit!r} have changed since; run the forward again"
            )
        if unit is not self._entered:
            self.begin_backward_of(unit, forward)
        assert values.full is not None
        return values.full.as_strided(shape, stride, offset)

    def _use(self, unit: Unit, *, backward: bool) -> None:
        """Gather ``unit`` and the one that comes after it; release the one before."""
        if not unit.is_root:
            previous, self._current = self._current, unit
            if previous is not unit:
                if previous is not None:
                    self.release(previous)
                if not backward and self._forward is not None:
                    self._arrivals.used(unit)
        if self._ahead is not None and self._ahead is not unit:
            self.release(self._ahead)  # the order is not that of the module tree
        self._ahead = None
        self._start_unshard(unit, backward=backward)
        unit.announce_next(backward=backward)
        self._finish_unshard(unit)
        ahead = unit.index - 1 if backward else unit.index + 1
        if 0 < ahead < len(self.units) and not (backward and unit.is_root):
            following = self.units[ahead]
            if ahead not in self._ready:
                if not following.is_exchanged and not following.is_updated(self.tier):
                    return  # this unit would wait for the update of the next one
                self._ahead = following
            self._start_unshard(following, backward=backward)

    def _start_unshard(self, unit: Unit, *, backward: bool, is_exact: bool = False) -> None:
        for v in unit.values:
            v.start_unshard(self._collectives, self.tier, backward=backward, is_exact=is_exact)

    def _finish_unshard(self, unit: Unit) -> None:
        if unit.index in self._ready:
            return
        for values in unit.values:
            values.finish_unshard(lambda: self._what("all_gather", unit))
            if self._has_sharded_params and values.full is not None and not values.is_kept:
                pointer = values.full.data_ptr()
                self._by_storage[pointer] = (unit, values)
                if not self._low <= pointer < self._high:
                    self._low = min(self._low, pointer)
                    self._high = max(self._high, pointer + values.full.untyped_storage().nbytes())
        self._ready.add(unit.index)

    def release(self, unit: Unit) -> None:
        """Give the gathered values of ``unit`` back, unless they are kept or held."""
        if not self._has_sharded_params or self.num_wholes:
            return
        if unit is self._current:
            self._current = None
        self._ready.discard(unit.index)
        for values in unit.values:
            if values.full is not None:
                self._by_storage.pop(values.full.data_ptr(), None)
            values.reshard(lambda: self._what("all_gather", unit))

    def release_all(self) -> None:
        """Release every unit, the root included."""
        self._current = self._ahead = self._entered = None
        for unit in self.units:
            self.release(unit)

    def gather(self, unit: Unit) -> None:
        """Gather ``unit`` now, for `Engine.gathered`: exactly, whatever quantizes."""
        self._start_unshard(unit, backward=False, is_exact=True)
        self._finish_unshard(unit)

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward is under way."""
        return bool(self._running) or is_in_backward()

    def is_needed(self, unit: Unit) -> bool:
        """Whether ``unit`` is gathered for somebody who is not done with it."""
        is_used = is_in_backward() or any(u is unit for u, _ in self._running)
        return self.num_wholes > 0 or (is_used and unit.is_in_use)

    # --------------------------------------------------------------- backward

    def begin_backward_of(self, unit: Unit, forward: Forward | None) -> None:
        """Called whenever backward needs the values of ``unit``.

        ``forward`` used them and saved them, or is None if the unit is computed again.
        """
        if unit is self._entered:
            return
        self._open_backward()
        if unit.is_root:
            self._start_unshard(unit, backward=True)
            self._finish_unshard(unit)
            return
        previous = self._current
        if previous is not None and previous is not unit and self._must_stay(previous):
            self._current = None  # it is released at the end of backward
        self._entered = unit
        for skipped in self._arrivals.enter(unit, forward):
            self._pass(skipped)
        self._use(unit, backward=True)
        self._reduce_what_is_due()

    def _pass(self, skipped: int) -> None:
        """Other ranks may go into a unit that backward skips here: gather it with them."""
        if self._has_sharded_params:
            self._use(self.units[skipped], backward=True)
            self._reduce_what_is_due()

    def _begin_recompute(self, unit: Unit) -> None:
        self.begin_backward_of(unit, None)
        self._recomputed[unit.index] = unit.num_trainable

    def _must_stay(self, unit: Unit) -> bool:
        # A recomputed forward saved raw views; they are used until the unit's gradients are there.
        # A unit without trainable parameters never tells: it stays until backward ends.
        missing = self._recomputed.get(unit.index)
        return missing is not None and (missing > 0 or unit.num_trainable == 0)

    def _open_backward(self) -> None:
        """At the first sign of a backward, make sure to hear of its end."""
        if self._is_backward_open:
            return
        self._on_backward()
        self._is_backward_open = True
        self._is_reducing = self._will_reduce()
        if not self._is_reducing:
            self.hold_gradients()  # more is to come before anything is reduced: add up unrounded
        self._entered = None
        self._recomputed.clear()
        self._arrivals.begin()
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def _will_reduce(self) -> bool:
        return self.should_sync and (self._is_reduced_per_backward or self.is_boundary())

    def _reduce_what_is_due(self) -> None:
        if self._is_reducing:
            for unit in self._arrivals.due():
                self._start_reduce(unit)

    def _start_reduce(self, unit: Unit) -> None:
        # One unit's reduction is under way while the next unit is computed.
        self._finish_reduces()
        for grads in unit.grads:
            grads.start_reduce(self._collectives)
            self._in_flight.append((unit, grads))

    def _finish_reduces(self) -> None:
        for unit, grads in self._in_flight:
            grads.finish_reduce(lambda unit=unit: self._what("reduce_scatter", unit))  # type: ignore[misc]
            if self.is_boundary():
                self._on_reduced(grads)
        self._in_flight.clear()

    def end_backward(self) -> None:
        """Reduce what is left, wait for everything, release every unit.

        Autograd calls it when a backward ends; the engine when a backward touched no parameter.
        """
        if self._is_backward_open:
            for skipped in self._arrivals.skipped_last():
                self._pass(skipped)
        if self._will_reduce():
            for unit in self._arrivals.rest():
                self._start_reduce(unit)
            self._finish_reduces()
        self.release_all()
        self._is_backward_open = False

    def hold_gradients(self) -> None:
        """The next backwards reduce nothing (``no_sync``); every rank must call it."""
        for unit in self.units:
            for grads in unit.grads:
                grads.hold()

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients were taken that no reduction has carried yet.

        They came within ``no_sync``, or after their unit had been reduced (reentrant activation
        checkpointing of a block that is used twice). `Engine.step` has them reduced, on all ranks.
        """
        return any(g.has_unreduced for u in self.units for g in u.grads)

    # ------------------------------------------------------------------- step

    def discard(self) -> None:
        """Forget all gradients and whatever a failed forward or backward left behind."""
        for _, grads in self._in_flight:
            grads.finish_reduce(lambda: "reduce_scatter")
        self._in_flight.clear()
        self._is_backward_open = False
        self._arrivals.forget()
        self.fired.clear()
        for unit in self.units:
            for grads in unit.grads:
                grads.reset()

    @property
    def has_stale_values(self) -> bool:
        """Whether parameters of the module do not hold the current values on this rank."""
        for unit in self.units:
            for values in unit.values:
                values.settle(self.tier)
        return not all(unit.is_in_use for unit in self.units)

    def segment_changed(self, segment: Segment) -> None:
        """The shards of one segment get new values, in a backward that needs the old no more."""
        for values in self.units[segment.unit].values:
            if values.segment is segment:
                values.version += 1
        self._ready.discard(segment.unit)

    def values_changed(self) -> None:
        """The shards hold new values: what is gathered of them is stale from now on."""
        self._ready.clear()
        for unit in self.units:
            for values in unit.values:
                values.version += 1

    def _what(self, collective: str, unit: Unit) -> str:
        return f"rank {self._rank}: {collective} of {unit!r}"
