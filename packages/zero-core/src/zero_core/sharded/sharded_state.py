"""Sharded state of an engine, for checkpoints, exports and access by name, and model buffers.

[Note: when buffers are broadcast]
Rank 0's buffers are broadcast before a forward of the model, as in torch's DistributedDataParallel,
unless the previous forward ran without gradients or within ``no_sync``. So evaluation after a
training forward uses rank 0's running statistics on every rank. Every rank must run a forward that
broadcasts. A buffer updated by a direct call of a submodule is broadcast with the model's next such
forward. A buffer registered after the build is broadcast after the next step, which compares the
ranks' buffers.

[Note: buffers that ranks agree on]
A broadcast must have the same number of bytes on all ranks, or gloo aborts the process. So a rank
that registers, drops or reshapes a buffer uses the previous list until the next step has compared
the buffers of all ranks. For a buffer that no longer has its listed form, the rank sends zeros and
ignores the received values. (torch's DistributedDataParallel looks up the buffers before each
broadcast.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_core._torch import outside_graphs
from zero_core.comm.control import ControlGroup
from zero_core.core import access
from zero_core.core.extension import PREFIX, Extension
from zero_core.core.params import FlatParams
from zero_core.core.passes import BackwardPass
from zero_core.core.saved import is_in_backward
from zero_core.layout.arithmetic import Layout, ParamSpec, Piece
from zero_core.layout.discovery import Quantized, plain_name
from zero_core.protocols import StateTier
from zero_core.sharded import MASTER
from zero_core.sharded.changes import ChangeLog


class _Buffer(NamedTuple):
    module: nn.Module
    key: str
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device


class CommonBuffers:
    """The model's buffers on which all ranks agree, and their broadcast."""

    def __init__(self, model: nn.Module) -> None:
        self.described: Mapping[str, str] = {}  # result of the last `describe`
        self.is_changed = False  # whether `describe` was called after the last `confirm`
        self.handles: list[Any] = []  # handles of the model's forward hooks
        self._model = model
        self._seen: list[_Buffer] = []
        self._agreed: list[_Buffer] = []  # empty until `confirm`
        self._control: ControlGroup | None = None  # None if detached, or on a single rank
        self._is_due = True

    def describe(self) -> Mapping[str, str]:
        """Return dtype and shape of this rank's buffers, by name."""
        self._seen, said = [], dict[str, str]()
        for name, module in self._model.named_modules():
            for key, b in module._buffers.items():
                if b is not None:
                    self._seen.append(_Buffer(module, key, b.dtype, b.shape, b.device))
                    said[f"buffer {name}{'.' if name else ''}{key}"] = f"{b.dtype} {tuple(b.shape)}"
        self.described, self.is_changed = said, True
        return said

    def confirm(self) -> None:
        """Broadcast the buffers of the last `describe`, whose dtypes and shapes all ranks share."""
        self._agreed, self.is_changed = self._seen, False
        self._add_hooks()

    def by_dtype(self) -> Mapping[torch.dtype, list[tuple[Tensor, bool]]]:
        """Return pairs, by dtype: an agreed buffer and True, or zeros and False if it changed."""
        found: dict[torch.dtype, list[tuple[Tensor, bool]]] = {}
        for b in self._agreed:
            value = b.module._buffers.get(b.key)
            is_own = value is not None and (value.dtype, value.shape) == (b.dtype, b.shape)
            if value is None or not is_own:  # the buffer was dropped or changed its form
                value = torch.zeros(b.shape, dtype=b.dtype, device=b.device)
            found.setdefault(b.dtype, []).append((value, is_own))
        return found

    def attach(self, control: ControlGroup, backward: BackwardPass) -> None:
        """Broadcast the buffers from now on, if there are several ranks."""
        if control.world_size > 1:
            self._control = control
            self._backward = weakref.ref(backward)  # weak: it references this object
            self._add_hooks()

    def _add_hooks(self) -> None:
        if self._agreed and self._control is not None and not self.handles:
            before, after = outside_graphs(self._pre_forward), outside_graphs(self._post_forward)
            self.handles.append(self._model.register_forward_pre_hook(before, prepend=True))
            self.handles.append(self._model.register_forward_hook(after))

    def remove(self) -> None:
        self._control = None
        while self.handles:
            self.handles.pop().remove()

    def idle_forward(self) -> None:
        """Take part in the broadcast before the other ranks' next forward, without running one."""
        if self.handles:
            self._pre_forward()
            self._post_forward()

    def _pre_forward(self, *hook_args: Any) -> None:
        if is_in_backward() or not self._is_due:  # skip recomputed forwards
            return
        assert self._control is not None, "the hooks are removed with it"
        for same in self.by_dtype().values():  # look up each time: a module may replace its buffers
            flat = torch.cat([buffer.detach().reshape(-1) for buffer, _ in same])
            self._control.broadcast(flat)
            parts = torch.split(flat, [buffer.numel() for buffer, _ in same])
            for (buffer, is_here), part in zip(same, parts, strict=True):
                # Write through .data, so that versions do not change: a backward of an earlier
                # forward that saved the buffer stays valid.
                if is_here and self._control.rank != 0:
                    buffer.data.copy_(part.view_as(buffer))

    def _post_forward(self, *hook_args: Any) -> None:
        backward = self._backward()
        if backward is not None and not is_in_backward():
            self._is_due = torch.is_grad_enabled() and backward.should_sync


@dataclass(frozen=True)
class ShardedState:
    """Shards, master weights and optimizer state of a model on one rank."""

    module: nn.Module
    layout: Layout
    params: tuple[FlatParams, ...]  # by segment index
    tier: StateTier
    control: ControlGroup  # for small exchanges
    common_buffers: CommonBuffers
    pieces: tuple[Piece, ...]  # this rank's parts of the trainable parameters
    optimizer: str  # description: class and number of groups
    quantized: tuple[Quantized, ...] = ()
    changes: ChangeLog | None = None  # for weight patches
    readers: list[Future[Any]] = field(default_factory=list)  # reads of shards in other threads
    extensions: list[Extension] = field(default_factory=list)  # extensions that have states

    @property
    def local_numel(self) -> int:
        spans = (flat.source.span for flat in self.params)
        return max((span[1] for span in spans if span is not None), default=0)

    @cached_property
    def starts(self) -> dict[int, int]:
        return {f.segment.index: f.source.span[0] for f in self.params if f.source.span}

    @cached_property
    def trained_params(self) -> list[Tensor]:
        return [p for f in self.params if f.segment.is_trainable for p in f.params]

    def state_names(self) -> list[str]:
        return [*self.tier.state_names(), *self.extension_states()]

    def every_tiers_state_names(self) -> list[str]:
        """Return the names of states that any rank's tier has. Every rank must call it.

        The tier of a rank without updates may have fewer states.
        """
        rows = self.control.gather_json(list(self.tier.state_names()))
        return list(dict.fromkeys(chain.from_iterable(rows)))

    def extension_states(self) -> dict[str, Tensor]:
        every = (extension.states().items() for extension in self.extensions)
        return {f"{PREFIX}{name}": values for states in every for name, values in states}

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        """Return a CPU copy of elements ``[start, stop)`` of a state in the local flat space."""
        if name.startswith(PREFIX):
            return self.extension_states()[name][start:stop].clone()
        return self.tier.read_state(name, start, stop)

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        if name.startswith(PREFIX):
            self.extension_states()[name][start : start + values.numel()].copy_(values)
        else:
            self.tier.write_state(name, start, values)

    def own_state(self, segment: int, name: str = MASTER) -> Tensor:
        """Return this rank's slice, [shard_numel], of a state or of frozen values, on the CPU.

        At any stage, each rank returns a different slice, even if every rank holds the whole
        segment. Returns zeros if this rank's tier does not know the state.
        """
        source, dtype = self.params[segment].source, self.layout.segments[segment].dtype
        if source.span is None:
            return source.read().detach().cpu()
        start, stop = self.own_span(segment)
        if name not in self.state_names():
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            return torch.zeros(stop - start, dtype=wide)
        return self.read_state(name, start, stop)

    def own_span(self, segment: int) -> tuple[int, int]:
        """Return the range of this rank's slice of a segment in the local flat space."""
        low, high = self.layout.segments[segment].shard_range(self.control.rank)
        shift = self.starts[segment] - self.covered(segment)[0]
        return low + shift, high + shift

    def covered(self, segment: int) -> tuple[int, int]:
        """Return the range of a trainable segment that this rank's optimizer state covers."""
        span, layout = self.params[segment].source.span, self.layout.segments[segment]
        assert span is not None
        is_sharded = span[1] - span[0] == layout.shard_numel
        return layout.shard_range(self.control.rank) if is_sharded else (0, layout.padded_numel)

    @cached_property
    def places(self) -> dict[int, tuple[FlatParams, int]]:
        """Flat parameters and position of each parameter or component, by its ``id``."""
        return {id(p): (flat, i) for flat in self.params for i, p in enumerate(flat.params)}

    @cached_property
    def places_of(self) -> dict[int, tuple[tuple[FlatParams, int], ...]]:
        """`places` of each model parameter, one per component, by the parameter's ``id``."""
        whole = {
            id(q.param): tuple(self.places[id(c)] for c in q.components) for q in self.quantized
        }
        return {key: (place,) for key, place in self.places.items()} | whole

    @cached_property
    def param_names(self) -> dict[int, str]:
        """First name of each parameter and component, by its ``id``."""
        found = {key: flat.segment.slots[i].param for key, (flat, i) in self.places.items()}
        names = {key: self.layout.params[param].name for key, param in found.items()}
        return names | {id(q.param): q.name for q in self.quantized}

    @cached_property
    def piece_numbers(self) -> dict[int, int]:
        """Index in ``pieces`` of this rank's piece of each parameter, by parameter number."""
        return {piece.param: index for index, piece in enumerate(self.pieces)}

    @cached_property
    def pieces_of(self) -> dict[int, list[int]]:
        """Indices in ``pieces`` of this rank's pieces of each segment, by segment index."""
        found: dict[int, list[int]] = {}
        for index, piece in enumerate(self.pieces):
            found.setdefault(piece.segment, []).append(index)
        return found

    def piece_of(self, param: int) -> Piece | None:
        index = self.piece_numbers.get(param)
        return None if index is None else self.pieces[index]

    @property
    def cures(self) -> access.Cures:
        return self.params[0].shown.cures

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    def refresh(self) -> None:
        for flat in self.params:
            flat.refresh()

    def holds_value(self, param: nn.Parameter) -> bool:
        """Return whether the model's parameter ``param`` holds its current value on this rank."""
        places = self.places_of[id(param)]
        for flat, _ in places:
            flat.refresh()
        return all(
            flat.is_current or (flat.shown.copy_of(i) is not None and not flat.shown.is_shown)
            for flat, i in places
        )

    def own_part(self, param: nn.Parameter) -> Tensor:
        """Return this rank's elements of ``param``, 1-D, for reading only.

        They are a view of the shard, unless it is in a file or there are several components.
        """
        parts = [f.part_of(position, f.source.read()) for f, position in self.places_of[id(param)]]
        return parts[0].view(param.dtype) if len(parts) == 1 else torch.cat(parts)

    def quiesce(self) -> None:
        """Wait until no rank reads any shard, before a write outside of a step.

        Every rank must call it.
        """
        wait(self.readers)
        for flat in self.params:
            flat.synchronize()
        self.control.barrier()

    def value_parts(self) -> Iterator[tuple[Callable[[Tensor], None], ParamSpec, int, int]]:
        """Yield a writer, spec, start and stop (elements) of each parameter's part on this rank.

        The writer sets master weights, or the values themselves for a frozen parameter.
        """
        for piece in self.pieces:
            write = partial(self.tier.write_state, MASTER, piece.start)
            stop = piece.offset + piece.stop - piece.start
            yield write, self.layout.params[piece.param], piece.offset, stop
        for segment in self.layout.segments:
            if segment.is_trainable:
                continue
            values = self.params[segment.index]
            here = segment.shard_range(values.rank)
            if values.is_kept:
                here = 0, segment.padded_numel
            for slot in segment.slots:
                low, high = slot.common(*here)
                if low < high:
                    write = partial(values.edit, slot.start + low)
                    yield write, self.layout.params[slot.param], low, high

    def full_params(
        self, rank: int | None = None, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[ParamSpec, Tensor]]:
        """Yield every parameter whole on the CPU. Every rank must iterate to the end.

        Yields the shards' values if a parameter is frozen, or ``dtype`` is None or its dtype, else
        master weights. (A tier may round these differently than a cast.) For quantized parameters,
        yields their components. If ``rank`` is given, other ranks yield nothing.
        """
        for segment in self.layout.segments:
            if dtype in (None, segment.dtype):
                source = self.params[segment.index].source
                source.wait_update()
                own = source.read().detach().cpu()
            else:
                own = self.own_state(segment.index)
            if rank not in (None, self.control.rank):
                for _ in self.control.gather_in_pieces(own):
                    pass
                continue
            full = self.control.gather(own)
            for slot in segment.slots:
                spec = self.layout.params[slot.param]
                yield spec, spec.to_values(full[slot.start : slot.stop].clone())

    def names(self) -> list[str]:
        found = []
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            path = f"{prefix}." if prefix else ""
            kept = [n for n in module._buffers if n not in module._non_persistent_buffers_set]
            own = [n for n in (*module._parameters, *kept) if getattr(module, n) is not None]
            found += [plain_name(path + name) for name in own]
        return found

    def buffers(self) -> dict[str, Tensor]:
        kept = set(self.names())
        buffers = named_buffers(self.module).items()
        return {name: b.detach().cpu().clone() for name, b in buffers if name in kept}


def named_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return every buffer of ``module`` by all of its names in the unwrapped model."""
    found = module.named_buffers(remove_duplicate=False)
    return {plain_name(name): buffer for name, buffer in found}


def load_buffers(module: nn.Module, saved: dict[str, Tensor]) -> None:
    own = named_buffers(module)
    with torch.no_grad():
        for name, value in saved.items():
            own[plain_name(name)].copy_(value)
