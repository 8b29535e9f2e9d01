"""Gathers, releases and reductions of all units: which unit, and when.

`zero_core.runtime.hooks` calls in here; nothing in the model changes.

[Note: the path of a gradient]
1. `hooks` takes ``param.grad`` when autograd has it, and calls `Runtime.gradient_ready`.
2. `FlatGrads.add` writes it to the segment's ``full_grad``.
3. When its unit is complete and all units before it are: `FlatGrads.reduce`; one unit later:
   `FlatGrads.finish`.
4. At an accumulation boundary the sink (`StepGradient.add`) offers it to the state tier; in every
   micro-step, if the tier adds them up.
5. ``engine.step()``: `Runtime.complete_gradient`, then `StepGradient.decide` and ``apply``, which
   has the tier update the shards. `Runtime.values_changed` makes gathered values stale. On a device
   the update is enqueued earlier: see [Note: update ahead] in `zero_core.step.gradient`.

[Note: order]
Units are gathered forward in the order of the module tree and backward in reverse; reductions run
in that reverse order, the root last (`zero_core.runtime.order`). So every rank launches the same
collectives in the same order even where ranks take different branches within a block. The first
block's gather is launched before the root's is waited for.

[Note: the tail]
Parameters that the module tree holds behind the blocks are most likely used after them. The tail is
gathered with the last block's forward, waited for at the latest when forward leaves that block, and
stays to the end of backward, as the root does. It may be used at any other time: a module that
holds one of its parameters and is called earlier has a hook, and a read by other code is seen
(`zero_core.runtime.early_reads`): both gather it and wait for it. A forward that went into neither
the last block nor the tail gathers it at its end, as other ranks may have done.

[Note: saved tensors]
Autograd saves the weights that a forward used. At stage 3 their buffer is reused for other units,
so what is saved of a pool buffer is only (segment, offset, shape): `torch.autograd.graph`'s hooks
pack it when it is saved, and gather the unit again when backward unpacks it. The first unpacking,
or the first recomputation by activation checkpointing, marks the beginning of a unit's backward. A
parameter that is in no such buffer when it is saved: see `zero_core.runtime.saved`. A node that
reads quantized weights may save them where no hook sees it. Then the gradient of what its module
returned marks the beginning (`Runtime.watch_outputs`).

[Note: blocks that need no gradient]
Backward does not go into a block whose output needs no gradient, as below the first trainable one.
At stage 3 it is not gathered either, if that was so on all ranks in the step before: they agree on
that with the step's statistics. Until then, and where it is so on some ranks alone, it counts as a
unit that backward skips, and all ranks gather it.

[Note: idle ranks]
A rank that has no data while the others have takes part in their collectives: `idle_forward` uses
the blocks that this rank's last forward used, in its order (before the first one: that of the
module tree), and `idle_backward` opens a backward that skips all of them. Both take the ways of a
forward and a backward with data, so that all launches are in one order. Gradients count as zero,
and averages are divided by all ranks, as `torch.distributed.algorithms.Join` does for DDP with
``divide_by_initial_world_size=True``, its default.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zero_core._torch import call_at_end_of_backward, count_calls, is_in_backward, pytree
from zero_core.comm.communicator import Communicator
from zero_core.layout.discovery import Quantized
from zero_core.runtime.early_reads import EarlyReads
from zero_core.runtime.order import BackwardOrder, Forward
from zero_core.runtime.saved import HeldReferences, Reference, refer
from zero_core.sharded.experts import agree, are_sparse
from zero_core.sharded.grads import FlatGrads
from zero_core.sharded.params import FlatParams
from zero_core.sharded.unit import Unit

_Packed = tuple[Unit, FlatParams, torch.dtype, int, torch.Size, tuple[int, ...], int, Forward]
"""A weight that autograd saved: unit, segment, dtype, offset, shape, strides, version, and the
forward. A plain tuple, as there is one for each use of a weight, and a test for each saved tensor.
"""


class GradientSink(Protocol):
    """Takes reduced gradients and knows where in a step the training is.

    `zero_core.step.gradient.StepGradient` is the one implementation.

    Attributes:
        params_with_grad: parameters that got a gradient on this rank since the last step; the
            runtime adds to it.
    """

    params_with_grad: set[int]

    @property
    def is_boundary(self) -> bool:
        """Whether the current micro-step is the last one of its step."""

    @property
    def is_reduced(self) -> bool:
        """Whether every segment's gradient has been added."""

    def begin_backward(self) -> None:
        """Check, at the first sign of a backward, that it may add to the gradient.

        Raises:
            RuntimeError: units have been updated already, or fp16's loss scale is missing.
        """

    def add(self, grads: FlatGrads) -> bool:
        """Take a segment's reduced gradient and offer it to the state tier.

        Returns:
            Whether the segment's parameters have been updated with it.
        """

    def broken(self) -> None:
        """Restart the step: a forward found that the last backward did not end.

        Raises:
            RuntimeError: units have been updated already.
        """

    def reopen(self) -> None:
        """Note that more is to be added to the gradient. All ranks agree on its statistics anew."""

    def agree(self, *, has_unreduced: bool, is_tail_late: bool, left_out: frozenset[int]) -> None:
        """Start to sum the gradient's statistics over all ranks. Every rank must call it.

        Nothing is done if they are known of the gradient as it is. ``is_tail_late``: see
        `zero_core.runtime.order`. ``left_out`` are the units that needed no gradient here.
        """

    def is_reduction_missing(self) -> bool:
        """Whether, by the statistics, any rank has gradients that no reduction has carried."""

    def is_tail_late(self) -> bool:
        """Whether, by the statistics, any rank had a block's gradients before the tail's."""

    def is_left_out_agreed(self) -> bool:
        """Whether, by the statistics, the same units needed no gradient on all ranks."""

    @property
    def num_ranks_with_grad(self) -> Sequence[float]:
        """Number of ranks with a gradient of each parameter, by the statistics."""

    def clear(self) -> None:
        """Drop the gradient and start a new step."""


class Runtime:
    """Drives all units. See the notes at the top of this file.

    Attributes:
        units: the root first, then blocks in the order of the module tree, then the tail.
        quantized: the model's quantized parameters.
        rank: this rank.
        ready: indices of the units whose parameters hold the current values. The tail is in it only
            once the forward under way has waited for it.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        communicator: Communicator,
        sink: GradientSink,
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
        self._communicator = communicator
        self._sink = sink
        self._params_with_grad = sink.params_with_grad
        self._has_sharded_params = has_sharded_params
        # One rank has nothing to reduce before the boundary, and nothing to wait for.
        self._has_peers = communicator.world_size > 1
        # Unless the tier adds up what each micro-step reduces.
        self._is_reduced_per_backward = self._has_peers or any(
            grads.plan.is_passed_on_each for unit in self.units for grads in unit.grads
        )
        self._should_sync = True
        self._full_params_depth = 0  # within any `full_params`, nothing is released
        self._by_storage: dict[int, tuple[Unit, FlatParams]] = {}
        self._current: Unit | None = None  # the block in use
        self._entered: Unit | None = None  # the block that backward is in
        self._ahead: list[Unit] = []  # gathered before they are needed
        # Units that are gathered ahead of one in use, by its index, forward and backward.
        self._num_ahead: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._unsharded: frozenset[int] = frozenset()  # units that a forward does not release
        # Units recomputed in this backward: gradients to come since the last recomputation.
        self._recomputed: dict[int, int] = {}
        self._ever_recomputed: set[int] = set()
        self._stay_idle: set[int] = set()  # units that the backward of an idle rank gathers once
        self._with_experts = [u for u in self.units if u.experts] if self._has_peers else []
        self._becomes_sparse = [False] * len(self._with_experts)
        self._entered_experts: set[int] = set()  # units of `_with_experts` in this step
        self._last_block = max((u.index for u in self.units if u.is_block), default=0)
        self._tail = self.units[-1] if self.units[-1].is_tail else None
        held = () if self._tail is None else self._tail.params
        awaited = [p for f in held for p in f.params if isinstance(p, nn.Parameter)]
        self._early_reads = EarlyReads(awaited, self)
        trainable = [u.index for u in self.units if u.grads]
        self._order = BackwardOrder(trainable, None if self._tail is None else self._tail.index)
        self._forward: Forward | None = None  # the one that is running with gradients
        # See [Note: blocks that need no gradient].
        self._without_grad: set[int] = set()
        self._with_grad: set[int] = set()
        self._left_out: frozenset[int] = frozenset()
        self._is_failing = False  # between `forward_failed` and `leave_forward`
        self._failure = 0  # id of the error that ended the last forward
        # Blocks that the model's last whole forward used, in order, and the one under way so far.
        self._last_path = [unit for unit in self.units if unit.is_block]
        self._path: list[Unit] = []
        self._in_flight: tuple[FlatGrads, ...] = ()  # under reduction
        self._is_backward_open = False
        self._why_no_backward: str | None = None
        # Whether the open backward reduces (not in no_sync; one rank: at the boundary only).
        self._is_reducing = False
        # The hooked modules whose forward is running, and the saved-tensor hooks that each entered.
        self._running: list[tuple[Unit, nn.Module, AbstractContextManager[Any] | None]] = []
        self._references = HeldReferences()
        # Addresses between which the buffers of gathered units lie, of those seen so far.
        self._low, self._high = sys.maxsize, 0

    # ---------------------------------------------------------------- forward

    def enter_forward(self, unit: Unit, module: nn.Module) -> None:
        """Gather ``unit`` for the forward of its ``module``."""
        context: AbstractContextManager[Any] | None = None
        if unit.is_root:
            self.end_interrupted_forward(entering=module)
        if not self._running:
            if self._is_backward_open:
                self._sink.broken()
                self.discard()
                self.release_all()
            if torch.is_grad_enabled():
                self._forward = self._order.begin_forward()
                if self._has_sharded_params:
                    context = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
                    context.__enter__()
            if self._failure:
                self._failure = 0
                self._communicator.clear_failure()
            for mixture in self._with_experts:
                mixture.is_whole = self._forward is None or self._full_params_depth > 0
            if unit.is_root:
                self._path = []
                if self._tail is not None:
                    self.ready.discard(self._tail.index)
                    self._early_reads.watch()
        self._running.append((unit, module, context))
        self._use(unit, backward=False)
        if unit.experts:
            self._entered_experts.add(unit.index)

    def forward_failed(self, unit: Unit, error: BaseException) -> None:
        """Note that ``error`` left the forward of ``unit``. `leave_forward` follows."""
        self._is_failing = True
        if id(error) != self._failure:  # else it has been noted of a block within
            self._failure = id(error)  # the error itself would keep its frames' tensors
            self._communicator.note_failure(f"the forward of {unit!r}", error)

    def leave_forward(self, unit: Unit, *, needs_grad: bool) -> None:
        """Release ``unit`` after its forward, whose output ``needs_grad`` or not."""
        has_failed, self._is_failing = self._is_failing, False
        if unit.is_sparse and not has_failed:
            self._end_experts(unit)
        is_trained = self._forward is not None  # even where the model switches gradients off
        if is_trained and unit.is_block:
            self._note_need(unit.index, needs_grad)
        running = self._running
        if running and running[-1][0] is unit:  # else its pre-forward raised before it got here
            *_, context = running.pop()
            if not running:
                if unit.is_root:
                    self._end_tail(is_saved=needs_grad and self._forward is not None)
                    self._last_path = self._path
                self._forward = None
            if context is not None:
                context.__exit__(None, None, None)
            if unit.is_root and not running and not torch.is_grad_enabled():
                self._release_but(self._unsharded)
        if unit.index == self._last_block and running:
            self._use_tail()
        # The last block stays gathered: backward begins with it.
        if unit.is_block and not (unit.index == self._last_block and is_trained):
            self._reshard(unit, backward=False)

    def idle_forward(self, model: nn.Module) -> None:
        """Take part in a forward of the other ranks, without data. See [Note: idle ranks].

        ``model`` is the root's module.
        """
        root = self.units[0]
        path = self._last_path
        self.enter_forward(root, model)
        for unit in path:
            self.enter_forward(unit, model)
            self.leave_forward(unit, needs_grad=unit.index not in self._left_out)
        self.leave_forward(root, needs_grad=True)

    def enter_expert(self, unit: Unit, number: int) -> None:
        """Have expert ``number`` of ``unit`` gathered by all ranks, as it is called here.

        Raises:
            RuntimeError: the ranks cannot agree on it, as the block's own forward is not running,
                or computes it again with other experts.
        """
        own = unit.experts[number]
        if not unit.is_sparse:
            return
        if not all(flat.is_gathered for flat in own):
            if is_in_backward() or not any(running is unit for running, *_ in self._running):
                raise RuntimeError(
                    f"rank {self.rank}: an expert of {unit!r} was called in another way than in "
                    "the last step: outside of the forward of its block, or by a recomputation "
                    "that no forward had called. Name the block in zero_optimization.leaf_module, "
                    "then all of its experts are gathered together"
                )
            self._gather_experts(unit, number)
        for flat in own:
            self._wait_flat(unit, flat)

    def _gather_experts(self, unit: Unit, called: int | None) -> bool:
        """Take part in one round. Returns whether a rank called any expert."""
        control, num = self._communicator.control, len(unit.experts)
        found = agree(control, called, num, unit.params[0].device)
        for number in found:
            for flat in unit.experts[number]:
                flat.gather()
        if self._forward is not None:
            unit.needed.update(found)
        return bool(found)

    def _end_experts(self, unit: Unit) -> None:
        """Take part in the rounds of the ranks whose forward of ``unit`` has not ended."""
        if unit.is_whole:
            if self._forward is not None:
                unit.needed.update(range(len(unit.experts)))
            return
        while self._gather_experts(unit, None):
            pass

    def _note_need(self, index: int, needs_grad: bool) -> None:
        """Note whether the output of a block needs a gradient; if not, backward may leave it out.

        See [Note: blocks that need no gradient].
        """
        if needs_grad:
            self._with_grad.add(index)
            return
        self._without_grad.add(index)
        if index in self._left_out or not (self._has_peers and self._has_sharded_params):
            self._order.drop(index)

    def end_interrupted_forward(self, *, entering: nn.Module | None = None) -> None:
        """End a forward that was left without its hooks: torch runs none after Ctrl-C.

        ``entering`` is the module whose call has begun and has not been noted yet.
        """
        if self._running:
            _, outermost, _ = self._running[0]
            num_known = int(outermost is entering)
            if count_calls(outermost) <= num_known:
                self.abandon_forward()

    def abandon_forward(self) -> None:
        """End the forward that is under way, if one is, without its hooks."""
        if not self._running:
            return
        self._early_reads.end()
        while self._running:
            *_, context = self._running.pop()
            if context is not None:
                context.__exit__(None, None, None)
        self._forward = None
        self.release_all()

    def enter_part(self, unit: Unit) -> None:
        """Gather ``unit``, of which a part is called by itself.

        Raises:
            RuntimeError: with gradients, outside of a forward of the model.
        """
        if not self._running:
            unit.is_whole = not is_in_backward()
        if is_in_backward():
            self.enter_recompute(unit)
        elif self._has_sharded_params and not self._running and torch.is_grad_enabled():
            raise RuntimeError(
                f"rank {self.rank}: a part of {unit!r} was called by itself, with gradients: "
                "call the engine (or its module), or use engine.gathered() without gradients"
            )
        elif unit.is_tail:
            self._use_tail()
        else:
            self._use(unit, backward=False)

    def _pack(self, tensor: Tensor) -> object:
        found = None
        if self._low <= tensor.data_ptr() < self._high:
            found = self._by_storage.get(tensor.untyped_storage().data_ptr())
        if found is None:  # most by far: activations
            if not tensor.is_leaf:
                # A node that saves its own output would otherwise keep itself alive if no backward
                # comes.
                return tensor.detach()
            reference = refer(tensor) if isinstance(tensor, nn.Parameter) else None
            return tensor if reference is None else reference
        unit, flat = found
        layout = (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        assert self._forward is not None
        return (unit, flat, *layout, flat.version, self._forward)

    def _unpack(self, packed: Tensor | Reference | _Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, Reference):
            return self._unpack_reference(packed)
        unit, flat, dtype, offset, shape, stride, version, forward = packed
        _check_version(unit, flat, version)
        if unit is not self._entered:
            self.enter_backward(unit, forward)
        assert flat.full is not None
        full = flat.full if dtype is flat.full.dtype else flat.full.view(dtype)
        saved = full.as_strided(shape, stride, offset)
        # create_graph: nodes of this backward save the tensor without our hooks and outlive the
        # buffer: copy.
        return saved.clone() if torch.is_grad_enabled() else saved

    def _unpack_reference(self, reference: Reference) -> Tensor:
        if not self._is_backward_open:
            self._open_backward()
        saved = self._references.read(reference)
        return saved.clone() if torch.is_grad_enabled() else saved

    def watch_outputs(self, unit: Unit, output: object) -> None:
        """Have ``unit`` gathered before the backward of what made ``output`` from its components.

        See [Note: saved tensors], and [Note: quantized parameters] in `zero_core.layout.stored`.
        """
        forward = self._forward
        if forward is None:
            return  # nothing is saved; or activation checkpointing, which has entered the unit
        opaque = [(flat, flat.version) for flat in unit.params if flat.segment.is_opaque]

        def enter(grad: Tensor) -> None:
            for flat, version in opaque:
                _check_version(unit, flat, version)
            self.enter_backward(unit, forward)

        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(enter)  # type: ignore[no-untyped-call]

    def _use(self, unit: Unit, *, backward: bool) -> None:
        """Gather ``unit`` and its successor. Release its predecessor."""
        index = unit.index
        if unit.is_block:
            previous, self._current = self._current, unit
            if previous is not unit:
                if previous is not None:
                    self._reshard(previous, backward=backward)
                if self._running and not backward:
                    self._path.append(unit)
                    if self._forward is not None:
                        self._order.use(index)
        if self._ahead:
            self._drop_ahead(unit, backward=backward)
        if unit.is_sparse and (backward or unit.is_whole):
            self.ready.discard(index)  # another forward may have left other experts there
        if index not in self.ready:
            unit.gather(backward=backward)
        if unit.hints is not None:
            unit.hints.announce(index, backward=backward)
        if unit.is_block:
            self._wait(unit)
        for ahead in self._window(index, backward=backward):
            if ahead not in self.ready:
                self._gather_ahead(self.units[ahead], backward=backward)
        self._wait(unit)  # the root, after the launch of the first block's gather

    def _gather_ahead(self, unit: Unit, *, backward: bool) -> None:
        if not unit.is_exchanged and not unit.is_updated():
            return  # it would block here until the tier has updated the unit
        if unit.is_block:  # else it stays
            self._ahead.append(unit)
        unit.gather(backward=backward)

    def _window(self, index: int, *, backward: bool) -> range:
        """Return the units to gather ahead of the one at ``index``, in order."""
        num = self._num_ahead[backward].get(index, 1)
        if backward:
            return range(index - 1, max(0, index - 1 - num), -1)
        return range(index + 1, min(len(self.units), index + 1 + num))

    def _drop_ahead(self, entered: Unit, *, backward: bool) -> None:
        """Release what was gathered ahead and is not next: the order is not the module tree's."""
        window = self._window(entered.index, backward=backward)
        for unit in self._ahead:
            if unit is not entered and unit.index not in window:
                self._reshard(unit, backward=backward)
        self._ahead.clear()

    def _reshard(self, unit: Unit, *, backward: bool) -> None:
        """Release ``unit`` after its use, unless it stays until its backward."""
        if backward or unit.index not in self._unsharded:
            self.release(unit)

    def _use_tail(self) -> None:
        """Gather the tail and wait for it, once in a forward."""
        tail = self._tail
        if tail is not None and tail.index not in self.ready:
            tail.gather()
            self._wait(tail)

    def read_early(self) -> None:
        """Make the tail readable for code that no hook announced."""
        self._early_reads.end()
        if self._running:  # else its forward was interrupted: the values are whatever they are
            self._use_tail()

    def _end_tail(self, *, is_saved: bool) -> None:
        """End the outermost forward. A backward follows if it ``is_saved``.

        Other ranks may have gone into the tail.
        """
        if self._tail is None:
            return
        if is_saved:
            self._use_tail()
            self._order.use(self._tail.index)
        self._early_reads.end()

    def _wait(self, unit: Unit) -> None:
        index = unit.index
        if index in self.ready:
            return
        if unit.is_tail:
            self._early_reads.end()
        for flat in unit.params:
            if flat.full is not None:  # else an expert that no rank has called
                self._wait_flat(unit, flat)
        self.ready.add(index)

    def _wait_flat(self, unit: Unit, flat: FlatParams) -> None:
        flat.wait()
        if self._has_sharded_params and not flat.is_kept:
            assert flat.full is not None
            address = flat.address
            self._by_storage[address] = (unit, flat)
            if not self._low <= address < self._high:
                self._low = min(self._low, address)
                self._high = max(self._high, address + flat.full.untyped_storage().nbytes())

    def release(self, unit: Unit) -> None:
        """Release the gathered values of ``unit``, outside of `full_params`."""
        if not self._has_sharded_params or self._full_params_depth:
            return
        if unit is self._current:
            self._current = None
        self.ready.discard(unit.index)
        for flat in unit.params:
            if flat.full is not None and not flat.is_kept:
                self._by_storage.pop(flat.address, None)
                flat.release()

    def release_all(self) -> None:
        """Release every unit, the root and the tail included."""
        self._release_but(frozenset())

    def _release_but(self, unsharded: frozenset[int]) -> None:
        self._references.release()
        self._current = self._entered = None
        self._ahead.clear()
        for unit in self.units:
            if unit.index not in unsharded:
                self.release(unit)

    # --------------------------------------------------------------- backward

    def enter_backward(self, unit: Unit, forward: Forward | None) -> None:
        """Gather ``unit`` for the backward of ``forward``. None: the unit is computed again."""
        if unit is self._entered:
            return
        if not self._is_backward_open:
            self._open_backward()
        if not unit.is_block:
            unit.gather(backward=True)
            self._wait(unit)
            return
        previous = self._current
        if previous is not None and previous is not unit and self._must_stay(previous):
            self._current = None  # it is released at the end of backward
        self._entered = unit
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
        if not self._is_backward_open:
            self._open_backward()
        index = unit.index
        if index in self._recomputed:
            self._recomputed[index] -= 1
        num_missing = self._order.gradient_ready(index)
        # late: this unit's reduction has started. Finish it; the gradient opens a second one.
        if num_missing < 0:
            self._finish_reductions()
        grads.add(position, grad)
        self._params_with_grad.add(grads.param_numbers[position])
        if num_missing == 0 and self._is_reducing:
            self._reduce_ready_units()

    def idle_backward(self, grad: Tensor) -> None:
        """Begin a backward that brings no gradient. Its end follows the last forward's trail.

        A hook on the tensor that it begins with, whose ``grad`` is not looked at.
        """
        if not self._is_backward_open:
            self._open_backward()
        # With data, a block that is used twice and recomputed stays until its gradients are there.
        uses = Counter(unit.index for unit in self._last_path)
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

    def _open_backward(self) -> None:
        """Begin a backward at its first sign, and be called at its end."""
        if self._why_no_backward is not None:
            raise RuntimeError(self._why_no_backward)
        for mixture in self._with_experts:
            mixture.is_whole = False
        self._sink.begin_backward()
        self._is_backward_open = True
        self._is_reducing = self._will_reduce()
        if not self._is_reducing:
            self._accumulate_locally()  # more is to come before anything is reduced
        self._entered = None
        self._recomputed.clear()
        self._order.begin_backward({u.index: u.count_trainable() for u in self.units})
        call_at_end_of_backward(self.end_backward)

    def _will_reduce(self) -> bool:
        return self._should_sync and (self._is_reduced_per_backward or self._sink.is_boundary)

    def _reduce_ready_units(self) -> None:
        for index in self._order.ready_units():
            self._reduce(self.units[index])

    def _reduce(self, unit: Unit) -> None:
        # One unit's reduction is under way while the next unit is computed.
        self._finish_reductions()
        for grads in unit.grads:
            grads.reduce()
            self._in_flight += (grads,)
        if not self._has_peers:
            self._finish_reductions()

    def _finish_reductions(self) -> None:
        in_flight = self._in_flight
        if in_flight:
            for grads in in_flight:
                grads.finish()
                if self._sink.is_boundary or grads.plan.is_passed_on_each:
                    self._offer(grads)
            self._in_flight = ()

    def _offer(self, grads: FlatGrads) -> None:
        """Offer a reduced gradient to the sink. If it updates the segment, its values are stale."""
        if self._sink.add(grads):
            unit = grads.segment.unit
            for flat in self.units[unit].params:
                if flat.segment is grads.segment:
                    flat.invalidate()
            self.ready.discard(unit)

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
                self._reduce(self.units[index])
            self._finish_reductions()
        self.release_all()
        self._is_backward_open = False
        self._stay_idle = set()

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
            self._accumulate_locally()

    def _accumulate_locally(self) -> None:
        for unit in self.units:
            for grads in unit.grads:
                grads.accumulate_locally()

    @property
    def is_last_backward(self) -> bool:
        """Whether no backward of a later micro-step will add to the step's gradient."""
        return self._sink.is_boundary and self._should_sync

    # ------------------------------------------------------------------- step

    def start_agreement(self) -> None:
        """Have all of the step's gradient reduced, and start to agree on it.

        Every rank must call it. The host does not wait for the device.

        Raises:
            RuntimeError: not at an accumulation boundary, or within ``no_sync``, or after a
                backward that did not end.
        """
        if self._is_backward_open:
            raise RuntimeError(
                "the last backward did not end: run the forward and backward of this step again"
            )
        if not self.is_last_backward:
            raise RuntimeError(
                "the gradient is not whole yet: call this outside no_sync(), between the last "
                "backward of a step and step()"
            )
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
        if self._sink.is_reduction_missing():
            # On some rank, gradients came after their unit's reduction.
            self.end_backward()
            self._sink.reopen()
            self._agree()
        self._order.place_tail(is_first=not self._sink.is_tail_late())
        wanted = self._wanted_left_out()
        is_agreed = self._sink.is_left_out_agreed()
        self._left_out = frozenset(i for i in wanted if i >= 0) if is_agreed else frozenset()
        if self._with_experts:
            num_ranks = self._sink.num_ranks_with_grad
            self._becomes_sparse = [
                is_agreed and unit.index in self._entered_experts and is_sparse
                for unit, is_sparse in zip(
                    self._with_experts, are_sparse(self._with_experts, num_ranks), strict=True
                )
            ]

    def _agree(self) -> None:
        self._sink.agree(
            has_unreduced=self._has_unreduced(),
            is_tail_late=self._order.is_tail_late,
            left_out=self._wanted_left_out(),
        )

    def _wanted_left_out(self) -> frozenset[int]:
        # A unit is sparse only if all ranks have entered its block: below 0, for the same checksum.
        return frozenset(self._without_grad - self._with_grad) | {~i for i in self._entered_experts}

    def _has_unreduced(self) -> bool:
        """Whether gradients were added that no reduction has carried yet.

        They came within ``no_sync``, or after their unit had been reduced (reentrant activation
        checkpointing of a block that is used twice).
        """
        return any(grads.has_unreduced for unit in self.units for grads in unit.grads)

    def gradient_replaced(self, grads: FlatGrads, param: int) -> None:
        """Pass on the gradient of a segment again: that of parameter number ``param`` was set."""
        self._params_with_grad.add(param)
        self._offer(grads)

    def discard(self) -> None:
        """Drop all gradients and start a new step.

        Wait for reductions under way. Gathered units stay.
        """
        for grads in self._in_flight:
            grads.finish()
        self._in_flight = ()
        self._is_backward_open = False
        self._order.forget()
        self._without_grad.clear()
        self._with_grad.clear()
        self._entered_experts.clear()
        for unit in self.units:
            for grads in unit.grads:
                grads.clear()
        self._sink.clear()

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
        for unit in self.units:
            for grads in unit.grads:
                grads.synchronize()

    def vacate(self) -> None:
        """Make all parameters placeholders until they are gathered again. See `settle`."""
        for unit in self.units:
            for flat in unit.params:
                flat.vacate()
        self._low, self._high = sys.maxsize, 0
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

    def set_num_ahead(self, unit: Unit, number: int, *, backward: bool) -> None:
        """Gather ``number`` units ahead while ``unit`` is in use. Every rank must set the same."""
        self._num_ahead[backward][unit.index] = number

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
            u is unit or (u.is_root and unit.is_tail) for u, *_ in self._running
        )
        return self._full_params_depth > 0 or (is_used and unit.is_current)

    def values_changed(self) -> None:
        """Note that the shards hold new values: what is gathered of them is stale from now on."""
        self.ready.clear()
        for unit in self.units:
            for flat in unit.params:
                flat.invalidate()
        for unit, is_sparse in zip(self._with_experts, self._becomes_sparse, strict=True):
            unit.is_sparse = is_sparse
            unit.needed.clear()

    def values_replaced(self) -> None:
        """Note that values were written from outside of a step, on all ranks."""
        self.values_changed()
        self._communicator.forget_values()


def _check_version(unit: Unit, flat: FlatParams, version: int) -> None:
    """Refuse a backward whose forward had other values."""
    if version != flat.version:
        raise RuntimeError(
            f"backward of a forward that ran before the last step or load: the weights of "
            f"{unit!r} have changed since; run the forward again"
        )
