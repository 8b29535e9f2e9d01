"""Initial values: moved from the model to the engine's memory, and back if the build fails.

A value is in the model's own memory, recorded by `deferred_init`, in a `PartitionedParam`, or in
slices: see [Note: values in slices] in `zero_core.quantization`.

[Note: a build is a transaction]
Most user errors are found before the first value moves: in the configuration, optimizer, schedule,
tiers, hooks and an adapter's code. Until then a failure restores the model's own memory. That
memory is kept until the build has ended, unless values move to shards: then it is freed segment by
segment, because a rank may lack memory for both. If a later failure occurs on all ranks alike,
sharded values are gathered again: trained ones from the master weights, frozen ones in the compute
dtype. With ``pretrained`` the model then has the files' values, and the error says so. After other
failures (a lost peer, Ctrl-C with several ranks) the error says that values are lost: reads raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zero_core._torch import DisableTorchFunction, get_grad, pytree, set_grad, swap_tensor
from zero_core.comm.control import ControlGroup
from zero_core.core import access
from zero_core.core.params import FlatParams
from zero_core.core.pool import BufferPool, allocator
from zero_core.errors import CollectiveError, ConfigError, RankMismatchError
from zero_core.init.deferred import recordings, zeroed
from zero_core.layout.discovery import Discovered, compute_dtype, is_partitioned, is_same_memory
from zero_core.lifecycle import Ownership
from zero_core.sharded import MASTER
from zero_core.sharded.sharded_state import ShardedState

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes in which torch keeps a tensor's hooks."""


class Slice(NamedTuple):
    """This rank's elements of a tensor, as bytes, padded to the same size on all ranks."""

    control: ControlGroup
    own: Tensor

    def keep(self, tensor: Tensor, values: Tensor) -> None:
        """Copy ``values``, this rank's `slice_range` of ``tensor``, to new memory."""
        numel = -(-tensor.numel() // self.control.world_size)
        self.own.set_(zeroed(numel * tensor.dtype.itemsize))
        self.own[: values.nbytes].copy_(values.view(torch.uint8))


slices: MutableMapping[Tensor, Slice] = WeakIdKeyDictionary()
"""This rank's `Slice` of each tensor whose value is in slices."""


def put_in_slices(tensors: Sequence[Tensor], control: ControlGroup) -> None:
    """Keep this rank's slices of ``tensors`` (equal on all ranks) and free their memory.

    Tensors that are the same view of one memory share a slice. Non-contiguous ones stay whole.
    """
    whole = [tensor.detach() for tensor in tensors]
    for place, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            continue
        twin = next(n for n in range(place + 1) if is_same_memory(whole[n], whole[place]))
        if twin < place:
            tensor.data = tensors[twin].data
            slices[tensor] = slices[tensors[twin]]
            continue
        first, last = slice_range(tensor, control)
        keep_slice(tensor, whole[place].view(-1)[first:last], control)


def slice_range(tensor: Tensor, control: ControlGroup) -> tuple[int, int]:
    """Return this rank's range ``[first, last)`` of the elements of ``tensor``."""
    numel = -(-tensor.numel() // control.world_size)
    first = min(control.rank * numel, tensor.numel())
    return first, min(first + numel, tensor.numel())


def keep_slice(tensor: Tensor, values: Tensor, control: ControlGroup) -> None:
    """Convert ``tensor`` to slices. ``values`` are its elements in this rank's `slice_range`."""
    found = Slice(control, torch.empty(0, dtype=torch.uint8))
    found.keep(tensor, values)
    hole = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        hole.fill_(float("nan"))  # makes accidental reads visible
    tensor.data = hole.expand(tensor.shape)
    slices[tensor] = found


def whole_value(tensor: Tensor) -> Tensor:
    """Return the value of a tensor in slices, on the CPU. Every rank must call it."""
    found = slices[tensor]
    flat = found.control.gather(found.own)[: tensor.numel() * tensor.dtype.itemsize]
    return flat.view(tensor.dtype).view(tensor.shape)


@contextmanager
def gathered_slices(
    tensors: Sequence[Tensor], *, modifier_rank: int | None = None
) -> Iterator[None]:
    """Give ``tensors`` that are in slices their values in this context.

    At the end they are in slices again, with the values of rank ``modifier_rank``. By default, and
    after an exception, changes are lost. A tensor that gets other memory in the context keeps that
    memory. Every rank must enter the context with the same tensors.
    """
    found = [(tensor, slices[tensor], tensor.data) for tensor in tensors if tensor in slices]
    shared = {id(own): (own, tensor) for tensor, own, _ in found}  # tensors may share a slice
    values = {key: whole_value(t).to(t.device, copy=True) for key, (_, t) in shared.items()}
    for tensor, own, _ in found:
        tensor.data = values[id(own)]
        del slices[tensor]
    try:
        yield
        if modifier_rank is not None:
            for key, ((control, held), _) in shared.items():
                is_source = control.rank == modifier_rank
                numel = held.numel()
                parts = torch.zeros(numel * control.world_size * is_source, dtype=torch.uint8)
                if is_source:
                    parts[: values[key].nbytes] = values[key].view(-1).view(torch.uint8)
                sent = [numel * is_source] * control.world_size
                received = [numel * (rank == modifier_rank) for rank in range(control.world_size)]
                held.copy_(control.exchange(parts, sent, received))
    finally:
        for tensor, own, hole in found:
            if is_same_memory(tensor, values[id(own)]):
                tensor.data = hole
                slices[tensor] = own


class InitialValues:
    """Values of a model's tensors before the build, computed on request."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._recordings = {r for m in model.modules() if (r := recordings.get(m)) is not None}
        self.former: dict[int, Tensor] = {}
        """Tensors with the former content of parameters that `take` made ordinary, by ``id``."""

    def take(self, params: Iterable[Tensor]) -> None:
        """Make partitioned and meta ``params`` ordinary. `of` still returns their values."""
        for param in params:
            if is_partitioned(param) or param.is_meta:
                make_ordinary(param, self.former)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the value of ``tensor``: itself detached, gathered, or computed on the CPU.

        For a meta tensor that was not recorded, return zeros. Every rank must call it for a tensor
        whose `source_of` is "parts".
        """
        tensor = self.former.get(id(tensor), tensor)
        if is_partitioned(tensor):
            return tensor.full_value()
        if tensor in slices:
            return whole_value(tensor)
        if not tensor.is_meta:
            return tensor.detach()
        for recording in self._recordings:
            if recording.knows(tensor):
                return recording.value(tensor)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def source_of(self, tensor: Tensor) -> Literal["own", "recorded", "parts"]:
        """Return whether the value is in memory, to be computed, or in parts on several ranks."""
        tensor = self.former.get(id(tensor), tensor)
        if is_partitioned(tensor):
            return "recorded" if tensor.is_deferred else "parts"
        if tensor in slices:
            return "parts"
        return "recorded" if tensor.is_meta else "own"

    def check(self, *, has_pretrained: bool, within: tuple[str, ...] = ("",)) -> None:
        """Raise ConfigError for a value that is unknown, lost or changed, unless a file has it.

        Checks the modules whose paths start with a text of ``within``.
        """
        for path, module in self._model.named_modules():
            if not path.startswith(within):
                continue
            kept = set(module._buffers) - module._non_persistent_buffers_set
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                is_in_file = has_pretrained and (name in module._parameters or name in kept)
                if tensor is None or is_in_file or tensor in slices:
                    continue
                whole_name = f"{path}.{name}" if path else name
                known = [r for r in self._recordings if r.knows(tensor)]
                if tensor.is_meta and not known:
                    raise ConfigError(
                        f"{whole_name} is on the meta device and its values are not known: make "
                        "the model under zero_core.deferred_init() instead of "
                        "torch.device('meta'), or, for parameters and persistent buffers, give "
                        "their file: build(..., pretrained=path)"
                    )
                if known and known[0].is_changed(tensor):
                    raise ConfigError(
                        f"{whole_name} was changed after deferred_init(), where nothing is "
                        "recorded: initialise and change the model within it, or use "
                        "zero_core.load_pretrained() after build()"
                    )
                if not is_partitioned(tensor) and access.is_refused(tensor):
                    raise ConfigError(
                        f"{whole_name} holds no value: it went with an engine that had it in "
                        "shards and was closed or dropped. Have the values read from a file "
                        "(build(..., pretrained=path), or load_state_dict() before build()); next "
                        "time end the engine with engine.unwrap(), which leaves them in the model"
                    )

    def give_attributes(self) -> None:
        """Replace deferred tensors in modules' plain attributes by their values, on the CPU."""
        if not self._recordings:
            return

        def give(value: Any) -> Any:
            is_plain = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            is_deferred = is_plain and any(r.knows(value) for r in self._recordings)
            return self.of(value) if is_deferred else value

        for module in self._model.modules():
            for name, value in vars(module).items():
                if name in ("_parameters", "_buffers", "_modules"):
                    continue
                leaves, spec = pytree.tree_flatten(value)
                given = [give(leaf) for leaf in leaves]
                if any(new is not old for new, old in zip(given, leaves, strict=True)):
                    vars(module)[name] = pytree.tree_unflatten(given, spec)


def make_ordinary(param: Tensor, former: dict[int, Tensor] | None = None) -> None:
    """Convert ``param`` in place to an ordinary CPU tensor of its shape without memory.

    If ``param`` is neither partitioned nor on the meta device, only drop its `Slice`. Otherwise
    ``former`` gets, by ``id``, a tensor with the former content of ``param``.
    """
    slices.pop(param, None)
    if is_partitioned(param):
        with DisableTorchFunction():
            twin = nn.Parameter(param.data, param.requires_grad)
        twin.__class__ = type(param)  # type: ignore[assignment]
        vars(twin).update(vars(param))
        if former is not None:
            former[id(param)] = twin
        param.make_ordinary()
    if param.is_meta:
        stand_in = torch.empty((), dtype=param.dtype).expand(param.shape)
        if isinstance(param, nn.Parameter):
            stand_in = nn.Parameter(stand_in, param.requires_grad)
        if former is not None:
            former[id(param)] = stand_in
        swap_tensor(param, stand_in)


class _FormerParam:
    """State of a parameter (or of a quantized one's component) from before the build."""

    def __init__(self, param: Tensor, initial: InitialValues, *, is_taken: bool) -> None:
        """Store the state of ``param``, and its memory if the engine replaces it (``is_taken``)."""
        self.param = param
        self._initial = initial
        self.is_lost = False  # whether only the engine has the values
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
        """Tensor with the former content, if `InitialValues.take` made the parameter ordinary."""
        return self._initial.former.get(id(self.param))

    def give_up(self) -> None:
        """Free the memory of the value, unless `deferred_init` has recorded how to compute it."""
        assert self._data is not None, "the engine takes it"
        former = self._stand_in
        if self.is_lost:
            return
        if former is None and self._slice is not None:
            self._slice.own.data = torch.empty(0, dtype=torch.uint8)  # tensors may share a slice
        elif former is None:
            self._device = self._data.device
            self._data = torch.empty_like(self._data, device="meta")
        elif is_partitioned(former) and not former.is_deferred:
            former.free_value()
        else:
            return
        self.is_lost = True

    def take(self, value: Tensor) -> None:
        """Store ``value`` in new memory, as a slice or whole, as before `give_up`."""
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
        """Restore the parameter. If its value is lost, reads of it still raise."""
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
    """Model and optimizer before a build: see [Note: a build is a transaction]."""

    ownership: Ownership | None = None  # None until the engine has hooks and shards
    has_pretrained = False  # whether the engine's values were read from files

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Tensor],
        optimizer: torch.optim.Optimizer,
        initial: InitialValues,
    ) -> None:
        """Store the state of ``model`` and ``optimizer``. The engine will own ``params``."""
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
        """Restore model and optimizer after ``error``."""
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
        key_of = {state.param_names[key]: key for key in lost}
        is_alike = isinstance(error, Exception) and not isinstance(error, CollectiveError)
        if is_alike or state.control.world_size == 1:
            for spec, value in state.full_params(dtype=torch.float64):  # reads master weights
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
    """Write rank 0's values to the engine's parameters, and unrounded to its master weights.

    Values in parts are gathered instead. With ``rounds_masters``, master weights are rounded to the
    compute dtype, too. ``former`` frees values that are now in shards. Every rank must call it.
    """
    layout, all_params, control = state.layout, state.params, state.control
    # Dtypes that represent a segment's original values exactly.
    dtypes = [
        s.dtype
        if s.is_opaque
        else reduce(torch.promote_types, (found.params[x.param].dtype for x in s.slots), s.dtype)
        for s in layout.segments
    ]
    sizes = [s.padded_numel * d.itemsize for s, d in zip(layout.segments, dtypes, strict=True)]
    # One buffer for all segments avoids heap fragmentation.
    pool = BufferPool(allocator(all_params[0].device), max(sizes))
    sources = [initial.source_of(param) for param in found.params]
    counts = torch.tensor([sources.count("recorded"), sources.count("parts")])
    rows = control.gather(counts).view(-1, 2)
    if bool((rows[:, 1] != rows[0, 1]).any()):
        raise RankMismatchError(
            f"ranks have {rows[:, 1].tolist()} parameters that were sharded before build(): make "
            "and load the model in the same way on every rank"
        )
    # If any rank has a recorded value, only rank 0 computes values that are not in parts.
    is_deferred = bool((rows[:, 0] > 0).any())
    num_differing = torch.zeros(
        len(layout.segments), dtype=torch.int64, device=all_params[0].device
    )
    for segment, of_segment, dtype in zip(layout.segments, all_params, dtypes, strict=True):
        params = [found.params[slot.param] for slot in segment.slots]
        in_parts = [sources[slot.param] == "parts" for slot in segment.slots]
        flat = pool.acquire(segment.padded_numel, dtype, segment.index)
        with on_all_ranks(control, RuntimeError):
            try:
                for low, high in segment.gaps():
                    flat[low:high].zero_()
                for slot, param, is_shared in zip(segment.slots, params, in_parts, strict=True):
                    if is_shared or control.rank == 0 or not is_deferred:
                        spec = layout.params[slot.param]
                        flat[slot.start : slot.stop].copy_(spec.to_elements(initial.of(param)))
            finally:  # after an error, too, because the other ranks wait in this collective
                if not all(in_parts):
                    (control.broadcast if is_deferred else control.equalize)(flat)
            of_segment.write(0, flat)
            if of_segment.source.span is not None:
                start, stop = of_segment.source.span
                is_sharded = stop - start == segment.shard_numel
                own = segment.shard_range(control.rank)
                low, high = own if is_sharded else (0, segment.padded_numel)
                masters = flat[low:high]
                if rounds_masters:
                    masters = masters.to(segment.dtype)
                state.tier.write_state(MASTER, start, masters)
                if is_sharded and control.world_size > 1 and of_segment.full is not None:
                    rounded = of_segment.full[low:high]
                    num_differing[segment.index] = rounded.ne(masters.to(rounded.dtype)).sum()
        adopt(of_segment, former)
        pool.release(flat)
    # A tier may round differently from `fill`, for example halfway cases of split master weights.
    for of_segment, number in zip(all_params, control.sum(num_differing).tolist(), strict=True):
        if number:
            of_segment.invalidate()  # makes other ranks gather the tier's values


def adopt(flat: FlatParams, former: FormerModel) -> None:
    """Move a segment's parameters to the engine's memory. ``former`` frees values now in shards."""
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
    """Move buffers to ``device``, with rank 0's values, in their `compute_dtype`."""
    adopted: dict[int, Tensor] = {}  # modules may share a buffer
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
    """Make an error of one rank raise ``kind`` on the others. Every rank must enter it."""
    failure: Exception | None = None
    try:
        yield
    except CollectiveError:
        raise  # the other ranks get a CollectiveError, too
    except Exception as error:
        failure = error
    said = "" if failure is None else str(failure) or type(failure).__name__
    rows = control.gather_bytes(said.encode())
    if failure is not None:
        raise failure
    for rank, row in enumerate(rows):
        if row:
            raise kind(f"rank {rank}: {row.decode()}")
