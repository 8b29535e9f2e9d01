"""Sharded state of an engine, as checkpoints, exports and access by name see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_core.comm.control import ControlGroup
from zero_core.core import access
from zero_core.core.extension import PREFIX, Extension
from zero_core.core.params import FlatParams
from zero_core.layout.arithmetic import Layout, ParamSpec, Piece
from zero_core.layout.discovery import Quantized, plain_name
from zero_core.protocols import StateTier
from zero_core.sharded.buffers import CommonBuffers
from zero_core.sharded.changes.log import ChangeLog

MASTER = "master_weight"


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
    optimizer: str  # its kind and number of groups, in words
    quantized: tuple[Quantized, ...] = ()
    changes: ChangeLog | None = None  # for patches
    readers: list[Future[Any]] = field(default_factory=list)  # of shards, in other threads
    extensions: list[Extension] = field(default_factory=list)  # with states of their own

    @property
    def local_numel(self) -> int:
        """Elements of the local flat space, gaps included."""
        spans = (flat.source.span for flat in self.params)
        return max((span[1] for span in spans if span is not None), default=0)

    def state_names(self) -> list[str]:
        return [*self.tier.state_names(), *self.extension_states()]

    def extension_states(self) -> dict[str, Tensor]:
        every = (extension.states().items() for extension in self.extensions)
        return {f"{PREFIX}{name}": values for states in every for name, values in states}

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        """Return ``[start, stop)`` of a state in the local flat space: a copy, on the CPU."""
        if name.startswith(PREFIX):
            return self.extension_states()[name][start:stop].clone()
        return self.tier.read_state(name, start, stop)

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        if name.startswith(PREFIX):
            self.extension_states()[name][start : start + values.numel()].copy_(values)
        else:
            self.tier.write_state(name, start, values)

    def extension_slices(self, name: str) -> dict[str, Tensor]:
        """Return copies of this rank's slices of an extension's state, by segment."""
        trained = [s.index for s in self.layout.segments if s.is_trainable]
        return {str(index): self.own_state(index, name) for index in trained}

    def own_state(self, segment: int, name: str = MASTER) -> Tensor:
        """Return this rank's [shard_numel] of a state, or of frozen values, on the CPU.

        One slice per rank, whatever the stage: where every rank holds the whole segment, it is
        that rank's part of it. Zeros if the tier of this rank does not know the state.
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
        """Return the span of this rank's slice of a segment in the local flat space."""
        span = self.params[segment].source.span
        assert span is not None
        layout = self.layout.segments[segment]
        if span[1] - span[0] == layout.shard_numel:
            return span
        low, high = layout.shard_range(self.control.rank)
        return span[0] + low, span[0] + high

    def covered(self, segment: int) -> tuple[int, int]:
        """Return the part of a trainable segment that this rank's optimizer state covers."""
        span = self.params[segment].source.span
        assert span is not None
        layout = self.layout.segments[segment]
        is_sharded = span[1] - span[0] == layout.shard_numel
        return self.layout.state_range(layout, self.control.rank, is_sharded=is_sharded)

    @cached_property
    def places(self) -> dict[int, tuple[FlatParams, int]]:
        """Flat parameters that hold a parameter or component, and its position, by its ``id``."""
        return {id(p): (flat, i) for flat in self.params for i, p in enumerate(flat.params)}

    @cached_property
    def places_of(self) -> dict[int, tuple[tuple[FlatParams, int], ...]]:
        """Places of a parameter of the model, or of its components, by the parameter's ``id``."""
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
        """Index of this rank's piece of a parameter, by its number in the layout."""
        return {piece.param: index for index, piece in enumerate(self.pieces)}

    @cached_property
    def pieces_of(self) -> dict[int, list[int]]:
        """Indices of this rank's pieces of a segment, by segment."""
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
        """Whether ``param``, one of the model's, holds its current value on this rank."""
        places = self.places_of[id(param)]
        for flat, _ in places:
            flat.refresh()
        return all(flat.has_values_of(position) for flat, position in places)

    def own_part(self, param: nn.Parameter) -> Tensor:
        """Return this rank's elements of ``param``, 1-D: a view of its shard, not to be changed.

        Of a parameter of several components their bytes, a copy.
        """
        parts = [f.part_of(position, f.source.read()) for f, position in self.places_of[id(param)]]
        return parts[0].view(param.dtype) if len(parts) == 1 else torch.cat(parts)

    def quiesce(self) -> None:
        """Wait until no rank reads any shard, before shards are written from outside of a step.

        Every rank must call it.
        """
        wait(self.readers)
        for flat in self.params:
            flat.synchronize()
        self.control.barrier()

    def value_parts(self) -> Iterator[tuple[Callable[[Tensor], None], ParamSpec, int, int]]:
        """Yield a writer of values here, the parameter and ``[low, high)`` of its slot.

        It writes master weights, of a frozen parameter the values themselves.
        """
        for piece in self.pieces:
            write, stop = partial(self.tier.write_state, MASTER, piece.start), piece.stop
            spec = self.layout.params[piece.param]
            yield write, spec, piece.offset, piece.offset + stop - piece.start
        for segment in self.layout.segments:
            values = self.params[segment.index]
            for slot in () if segment.is_trainable else segment.slots:
                low, high = slot.common(*values.stored)
                if low < high:
                    write = partial(values.edit, slot.start + low)
                    yield write, self.layout.params[slot.param], low, high

    def full_params(
        self, rank: int | None = None, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[ParamSpec, Tensor]]:
        """Yield every parameter whole on the CPU. Every rank must iterate to the end.

        For ``dtype`` None, or a parameter's own, these are the working shards, else the master
        weights. A tier need not round master weights as a cast does.

        Of quantized parameters their components.

        With ``rank`` the others get nothing, and download nothing.
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
        """Return the keys of the unwrapped model's state dict, in order, tied names included."""
        found = []
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            path = f"{prefix}." if prefix else ""
            kept = [n for n in module._buffers if n not in module._non_persistent_buffers_set]
            own = [n for n in (*module._parameters, *kept) if getattr(module, n) is not None]
            found += [plain_name(path + name) for name in own]
        return found

    def buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers of the model, on the CPU."""
        kept = set(self.names())
        buffers = named_buffers(self.module).items()
        return {name: b.detach().cpu().clone() for name, b in buffers if name in kept}


def named_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return every buffer of ``module`` by each of its names in the unwrapped model."""
    found = module.named_buffers(remove_duplicate=False)
    return {plain_name(name): buffer for name, buffer in found}


def load_buffers(module: nn.Module, saved: dict[str, Tensor]) -> None:
    own = named_buffers(module)
    with torch.no_grad():
        for name, value in saved.items():
            own[plain_name(name)].copy_(value)
