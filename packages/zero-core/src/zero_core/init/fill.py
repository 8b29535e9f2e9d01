"""Initial values on their way from the model to the engine's memory, and back if the build fails.

[Note: a build is a transaction]
All that may fail through a user's fault precedes the first value that moves: configuration,
optimizer, schedule, tiers, the engine and its hooks, and what an adapter attaches. Up to there
references alone are kept, and the model gets its own memory back. Values that move to memory which
each rank has whole are kept until the build has ended. Those that move to shards are given up unit
by unit, as a rank may have no room for them beside the engine. Where a later failure meets all
ranks alike they are gathered again: trained ones from the master weights, frozen ones as the
compute dtype has them; with ``pretrained`` they are the files', and the error says so. Else (a lost
peer, Ctrl-C with several ranks) the error says that they are gone, and their parameters refuse to
be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from zero_core._torch import DisableTorchFunction, get_grad, set_grad, swap_tensor
from zero_core.comm.control import ControlGroup
from zero_core.core import access
from zero_core.core.params import FlatParams
from zero_core.core.pool import BufferPool, allocator
from zero_core.errors import CollectiveError, RankMismatchError
from zero_core.init.values import InitialValues, slice_range, slices
from zero_core.layout.discovery import Discovered, compute_dtype, is_partitioned
from zero_core.lifecycle import Ownership
from zero_core.sharded.sharded_state import ShardedState

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Torch's attributes of a tensor with its hooks."""


class _FormerParam:
    """A parameter or component as it was."""

    def __init__(self, param: Tensor, initial: InitialValues, *, is_taken: bool) -> None:
        """Remember ``param``, and its memory if the engine replaces that (``is_taken``)."""
        self.param = param
        self._initial = initial
        self.is_lost = False  # whether the engine alone has the values
        self._class = type(param)
        self._attributes = dict(vars(param))
        self._requires_grad = param.requires_grad
        self._grad = get_grad(param)
        found = {name: getattr(param, name) for name in _HOOKS}
        self._hooks = {name: None if h is None else dict(h) for name, h in found.items()}
        self._slice = slices.get(param)
        self._data: Tensor | None = None
        if is_taken:
            with DisableTorchFunction():
                self._data = param.data

    @property
    def _stand_in(self) -> Tensor | None:
        """Holds the value now, if `InitialValues.take` has made the parameter ordinary."""
        return self._initial.former.get(id(self.param))

    def give_up(self) -> None:
        """Free the memory of the value, unless it is recorded."""
        assert self._data is not None, "the engine takes it"
        former = self._stand_in
        if self.is_lost:
            return
        if former is None and self._slice is not None:
            self._slice.own.data = torch.empty(0, dtype=torch.uint8)  # in place: it may be shared
        elif former is None:
            self._device = self._data.device
            self._data = torch.empty_like(self._data, device="meta")
        elif is_partitioned(former) and not former.is_deferred:
            former.free_value()
        else:
            return
        self.is_lost = True

    def take(self, value: Tensor) -> None:
        """Have memory of the former kind again, with ``value``."""
        assert self._data is not None, "the engine takes it"
        former = self._stand_in
        self.is_lost = False
        if former is None and self._slice is not None:
            first, last = slice_range(value, self._slice.control)
            own = value.to(self._data.dtype).contiguous().view(-1)[first:last]
            self._slice.keep(self._data, own)
        elif former is None:
            self._data = torch.empty_like(self._data, device=self._device).copy_(value)
        elif is_partitioned(former):
            former.set_value(value)

    def restore(self) -> None:
        """Make the parameter what it was. One whose value is lost stays refused."""
        param, former = self.param, self._stand_in
        if not self.is_lost:
            access.set_class(param, self._class)
        with DisableTorchFunction():
            set_grad(param, None)
            if former is not None and former.is_meta:
                swap_tensor(param, former)
            elif self._data is not None and not self.is_lost:
                param.data = self._data
            if param.requires_grad != self._requires_grad:
                param.requires_grad_(self._requires_grad)
            if not self.is_lost:
                set_grad(param, self._grad)
            for name, before in self._hooks.items():
                now = getattr(param, name)
                if now is not None:
                    _put_back(now, before or {})
                if before is None:
                    setattr(param, name, None)
        if self.is_lost:
            return
        _put_back(vars(param), self._attributes)
        if self._slice is not None:
            slices[param] = self._slice


class FormerModel:
    """A model and its optimizer before a build: see [Note: a build is a transaction]."""

    ownership: Ownership | None = None  # of the engine's hooks and shards, once there are any
    has_pretrained = False  # whether the engine's values are those of files

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Tensor],
        optimizer: torch.optim.Optimizer,
        initial: InitialValues,
    ) -> None:
        """Remember ``model``, of which the engine takes ``params``, and ``optimizer``."""
        owners: list[object] = [*model.modules(), optimizer]
        tables = [vars(owner) for owner in owners]
        tables += [table for own in tables for table in own.values() if isinstance(table, dict)]
        tables += optimizer.param_groups
        self._tables = [(table, dict(table)) for table in tables]
        held = [b for b in model.buffers() if not b.is_meta and b.is_contiguous()]
        held += [v for g in optimizer.param_groups for v in g.values() if isinstance(v, Tensor)]
        self._written = [(tensor, tensor.detach().clone()) for tensor in held]
        taken = {id(param): param for param in params}
        others = {id(param): param for param in model.parameters()}
        self._params = {
            key: _FormerParam(param, initial, is_taken=key in taken)
            for key, param in (others | taken).items()
        }

    def give_up(self, flat: FlatParams) -> None:
        for key in map(id, flat.params):
            self._params[key].give_up()

    @torch.no_grad()
    def restore_after(self, error: BaseException) -> None:
        """Make everything what it was, after ``error``."""
        lost = {key for key, param in self._params.items() if param.is_lost}
        try:
            if self.ownership is not None:
                self.ownership.undo()
                if lost:
                    self._take_back(lost, self.ownership.state, error)
        finally:
            for param in self._params.values():
                param.restore()
            for tensor, before in self._written:
                tensor.data.copy_(before)
            for table, items in self._tables:
                _put_back(table, items)

    def _take_back(self, lost: set[int], state: ShardedState, error: BaseException) -> None:
        """Gather the values of ``lost`` parameters, if all ranks do."""
        key_of = {state.param_names[key]: key for key in lost}
        is_alike = isinstance(error, Exception) and not isinstance(error, CollectiveError)
        if is_alike or state.control.world_size == 1:
            for spec, value in state.full_params(dtype=torch.float64):  # of the master weights
                if spec.name in key_of:
                    self._params[key_of[spec.name]].take(value)
            if self.has_pretrained:
                error.add_note(
                    f"{len(lost)} parameters, {min(key_of)} among them, have the values of the "
                    "pretrained files already"
                )
        else:
            for flat in state.params:
                flat.abandon()
            error.add_note(
                f"{len(lost)} parameters, {min(key_of)} among them, were in shards already, and "
                "their values are gone: load them anew before the next build()"
            )


def _put_back(table: dict[Any, Any], items: dict[Any, Any]) -> None:
    """Make ``table``, the same object, what it was."""
    table.clear()
    table.update(items)


@torch.no_grad()
def fill(
    found: Discovered,
    state: ShardedState,
    initial: InitialValues,
    former: FormerModel,
    *,
    rounds_masters: bool,
) -> None:
    """Write rank 0's values to the engine's memory, unrounded ones to the master weights.

    With ``rounds_masters`` these are rounded to the compute dtype, too. ``former`` gives up what is
    in shards. What fails on one rank alone fails on all of them.
    """
    layout, all_params, control = state.layout, state.params, state.control
    # In these dtypes a segment's original values lose nothing.
    dtypes = [
        s.dtype
        if s.is_opaque
        else reduce(torch.promote_types, (found.params[x.param].dtype for x in s.slots), s.dtype)
        for s in layout.segments
    ]
    sizes = [s.padded_numel * d.itemsize for s, d in zip(layout.segments, dtypes, strict=True)]
    # One buffer for all: the heap stays whole.
    pool = BufferPool(allocator(all_params[0].device), max(sizes))
    num_recorded = sum(initial.is_recorded(p) for p in found.params)
    num_in_parts = sum(initial.is_in_parts(p) for p in found.params)
    rows = control.gather(torch.tensor([num_recorded, num_in_parts])).view(-1, 2)
    if bool((rows[:, 1] != rows[0, 1]).any()):
        raise RankMismatchError(
            f"ranks have {rows[:, 1].tolist()} parameters that were sharded before build(): make "
            "and load the model in the same way on every rank"
        )
    # Where a value has to be computed first on some rank, rank 0 alone does so.
    is_deferred = bool((rows[:, 0] > 0).any())
    num_differing = torch.zeros(
        len(layout.segments), dtype=torch.int64, device=all_params[0].device
    )
    for segment, of_segment, dtype in zip(layout.segments, all_params, dtypes, strict=True):
        params = [found.params[slot.param] for slot in segment.slots]
        in_parts = [initial.is_in_parts(param) for param in params]
        flat = pool.acquire(segment.padded_numel, dtype, segment.index)
        with on_all_ranks(control, RuntimeError):
            try:
                for low, high in segment.gaps():
                    flat[low:high].zero_()
                for slot, param, is_shared in zip(segment.slots, params, in_parts, strict=True):
                    if is_shared or control.rank == 0 or not is_deferred:
                        spec = layout.params[slot.param]
                        flat[slot.start : slot.stop].copy_(spec.to_elements(initial.of(param)))
            finally:  # the other ranks wait
                if not all(in_parts):
                    (control.broadcast if is_deferred else control.equalize)(flat)
            of_segment.write(0, flat)
            if of_segment.source.span is not None:
                start, stop = of_segment.source.span
                is_sharded = stop - start == segment.shard_numel
                low, high = layout.state_range(segment, control.rank, is_sharded=is_sharded)
                masters = flat[low:high]
                if rounds_masters:
                    masters = masters.to(segment.dtype)
                state.tier.write_state("master_weight", start, masters)
                if is_sharded and control.world_size > 1 and of_segment.full is not None:
                    rounded = of_segment.full[low:high]
                    num_differing[segment.index] = rounded.ne(masters.to(rounded.dtype)).sum()
        adopt(of_segment, former)
        pool.release(flat)
    # A tier may round its own part otherwise, as ties of a master weight that is kept split.
    for of_segment, number in zip(all_params, control.sum(num_differing).tolist(), strict=True):
        if number:
            of_segment.invalidate()  # the other ranks gather it


def adopt(flat: FlatParams, former: FormerModel) -> None:
    """Give a segment's parameters the engine's memory. ``former`` drops what is in shards."""
    flat.adopt()
    if not flat.is_kept:
        former.give_up(flat)
    for param in flat.params:
        slices.pop(param, None)


def adopt_buffers(
    model: nn.Module,
    dtype: torch.dtype | None,
    device: torch.device,
    control: ControlGroup,
    initial: InitialValues,
) -> None:
    """Move buffers to ``device`` and rank 0's values to them. Cast floating ones to ``dtype``."""
    adopted: dict[int, Tensor] = {}  # modules may share one
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            moved = adopted.get(id(buffer))
            if moved is None:
                moved = initial.of(buffer).to(device, compute_dtype(buffer, dtype)).contiguous()
                control.broadcast(moved)
                adopted[id(buffer)] = adopted[id(moved)] = moved
            module._buffers[name] = moved


@contextmanager
def on_all_ranks(control: ControlGroup, kind: type[Exception]) -> Iterator[None]:
    """Have an error of one rank in this context raise a ``kind`` on the others, at its end."""
    failure: Exception | None = None
    try:
        yield
    except CollectiveError:
        raise  # the others get one of their own
    except Exception as error:
        failure = error
    said = "" if failure is None else str(failure) or type(failure).__name__
    rows = control.gather_bytes(said.encode())
    if failure is not None:
        raise failure
    for rank, row in enumerate(rows):
        if row:
            raise kind(f"rank {rank}: {row.decode()}")
