"""Stepper for any elementwise torch optimizer, on the host or on a device.

[Note: pieces as parameters]
Each piece is an ``nn.Parameter`` that views the master weights. Torch's optimizer updates it and
creates its states. The elementwise ones are then moved to one flat buffer per name, so that any
range of elements can be read and written. ``optimizer.state`` has views of the buffers.

On a CPU torch's for-loop and foreach implementations compute the same bits for an element at any
offset of its tensor. The kernel of ``fused=True`` may round the last ``numel % 16`` elements of a
tensor differently, so a piece is split between host and device at multiples of `FUSED_ALIGNMENT`.

[Note: state entries]
To find the states of any optimizer class, the optimizer takes one step on a parameter of two
elements. Its state entry before and after shows the names and forms of states and scalars.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_offload.flat.geometry import Geometry, Run, plan_runs
from zero_offload.flat.grads import GradLedger
from zero_offload.protocols import Groups, OptimizerClass
from zero_offload.rules.resolve import check_elementwise
from zero_offload.rules.rule import MASTER
from zero_offload.steppers.stepper import (
    Chunk,
    ShardMasters,
    SpanMemory,
    StateBytes,
    Stepper,
    check_num_steps,
)

_PROBE_NUMEL = 2


def make_optimizer(
    optimizer_class: OptimizerClass, param_groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Create an optimizer. Some settings take effect only as arguments of the constructor."""
    names = list(inspect.signature(optimizer_class).parameters)[1:]
    settings = {name: param_groups[0][name] for name in names if name in param_groups[0]}
    return optimizer_class(param_groups, **settings)


@dataclass(frozen=True, slots=True)
class EntryTemplate:
    """A parameter's entry in ``optimizer.state`` at construction and after its first update."""

    initial: Mapping[str, Any]
    stepped: Mapping[str, Any]

    def elementwise(self) -> dict[str, torch.dtype]:
        """Return names and dtypes of the states with one number per element."""
        return {k: v.dtype for k, v in self.stepped.items() if is_elementwise(v, _PROBE_NUMEL)}

    def fresh(self, numel: int) -> dict[str, Any]:
        """Return an entry as at construction for a piece of ``numel`` elements."""
        return {
            k: v.new_full((numel,), v[0].item()) if is_elementwise(v, _PROBE_NUMEL) else deepcopy(v)
            for k, v in self.initial.items()
        }

    def scalars(self) -> set[str]:
        """Return the names of the states that are not elementwise."""
        return {k for k, v in self.stepped.items() if not is_elementwise(v, _PROBE_NUMEL)}

    def check(self, scalars: Mapping[str, float]) -> None:
        """Raise ValueError unless ``scalars`` fit an entry after an update."""
        own = self.scalars()
        unknown = sorted(scalars.keys() - own - {"num_steps", "step"})
        needed = {k for k in own if self.stepped[k] is not None}
        missing = sorted(needed - scalars.keys() - {"step"})
        if unknown or missing:
            raise ValueError(
                f"the state is another optimizer's: scalars {unknown} are unknown to this one, "
                f"{missing} are missing"
            )

    def restored(
        self, scalars: Mapping[str, float], elements: Callable[[str, torch.dtype], Tensor]
    ) -> dict[str, Any]:
        """Return an entry of ``scalars`` and of elementwise states ``elements(name, dtype)``."""
        values, own = {"step": int(scalars["num_steps"]), **scalars}, self.scalars()
        return {
            k: elements(k, v.dtype) if k not in own else _with_value(v, values.get(k))
            for k, v in self.stepped.items()
        }


def is_elementwise(value: Any, numel: int) -> bool:
    """Return whether a state has shape ``(numel,)``. If not, it must have one element at most."""
    if not isinstance(value, Tensor):
        return False
    if value.shape == (numel,):
        return True
    if value.numel() != 1:
        raise ValueError(
            f"the optimizer keeps a state of shape {tuple(value.shape)} for {numel} elements: "
            f"its update is not elementwise and cannot be offloaded"
        )
    return False


def _with_value(template: Any, value: float | None) -> Any:
    if value is None or template is None:
        return template
    if isinstance(template, Tensor):
        return torch.full_like(template, value)
    return type(template)(value)


def probe_entry(
    optimizer_class: OptimizerClass,
    group: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> EntryTemplate:
    """Return the state entry of an optimizer before and after a step. See [Note: state entries]."""
    ones = torch.ones(_PROBE_NUMEL, dtype=dtype, device=device)
    param = nn.Parameter(ones.clone())
    optimizer = make_optimizer(optimizer_class, [{**group, "params": [param]}])
    initial = deepcopy(optimizer.state.get(param, {}))
    param.grad = ones
    optimizer.step()
    template = EntryTemplate(initial, dict(optimizer.state.get(param, {})))
    template.elementwise()
    return template


FUSED_ALIGNMENT = 16
"""Elements of a vector in torch's fused CPU kernels, or a multiple of that."""

_HOST_CHUNK_NUMEL = 1 << 20
"""A chunk on the host ends with the run that reaches this number of elements."""
_DEVICE_CHUNK_NUMEL = 1 << 26
"""The same on a device, where larger chunks mean fewer kernel launches."""


class TorchStepper(Stepper):
    """Stepper that updates the pieces of a flat space by ``optimizer_class``."""

    has_kernel = False
    states: dict[str, torch.dtype]  # includes states without a buffer yet

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        optimizer_class: OptimizerClass,
        groups: Groups,
        *,
        is_in_place: bool,
    ) -> None:
        check_elementwise(optimizer_class)
        groups = served_groups(groups, device)
        super().__init__(geometry, device)
        self._dtype = geometry.master_dtype
        self._masters = ShardMasters(geometry, device, is_in_place=is_in_place)
        self.is_in_place = self._masters.is_in_place
        self._chunk_numel = _HOST_CHUNK_NUMEL if device.type == "cpu" else _DEVICE_CHUNK_NUMEL
        self._templates: list[EntryTemplate] = [
            probe_entry(optimizer_class, group, device, self._dtype) for group in groups
        ]
        self.states = {k: v for t in self._templates for k, v in t.elementwise().items()}
        self._buffers: dict[str, Tensor] = {}
        self._params = [nn.Parameter(self._masters.view(p.start, p.stop)) for p in geometry.pieces]
        members = self._members(range(len(self._params)), groups)
        self._optimizer = make_optimizer(optimizer_class, members) if members else None
        for i in range(len(self._params)):
            self._start(i)

    @property
    def _entries(self) -> dict[Tensor, dict[str, Any]]:
        # An optimizer may rebind its state attribute, as torch's load_state_dict does.
        return {} if self._optimizer is None else self._optimizer.state

    def num_bytes(self) -> StateBytes:
        states = sum(buffer.nbytes for buffer in self._buffers.values())
        return StateBytes(self._masters.num_bytes, self._masters.num_copy_bytes, states)

    def _members(self, pieces: Sequence[int], groups: Groups) -> list[dict[str, Any]]:
        """Return ``param_groups`` with only the given pieces, without empty groups."""
        params: dict[int, list[nn.Parameter]] = {}
        for i in pieces:
            params.setdefault(self.geometry.pieces[i].group, []).append(self._params[i])
        return [{**groups[g], "params": members} for g, members in sorted(params.items())]

    def plan(self, active: Sequence[int], groups: Groups, grads: GradLedger) -> list[Chunk]:
        groups = served_groups(groups, self.device)
        chunks: list[Chunk] = []
        pending: list[Run] = []
        numel = 0
        for run in plan_runs(self.geometry, active):
            grads.segments(run.start, run.stop)  # raises for a missing gradient
            pending.append(run)
            numel += run.stop - run.start
            if numel >= self._chunk_numel:
                chunks.append(Chunk(tuple(pending), groups))
                pending, numel = [], 0
        return [*chunks, Chunk(tuple(pending), groups)] if pending else chunks

    def update(self, chunk: Chunk, grads: GradLedger, grad_scale: float, out: SpanMemory) -> None:
        assert self._optimizer is not None, "a chunk without pieces"
        pieces = [i for run in chunk.runs for i in run.pieces]
        for run in chunk.runs:
            grad = grads.gather(run.start, run.stop, self._dtype, grad_scale)
            for i in run.pieces:
                piece = self.geometry.pieces[i]
                self._params[i].grad = grad[piece.start - run.start : piece.stop - run.start]
        self._optimizer.param_groups = self._members(pieces, chunk.settings)
        self._optimizer.step()
        for i in pieces:
            self._params[i].grad = None
            self._home(i)
        for run in chunk.runs:
            if not self.is_in_place:
                out(run.start, run.stop).copy_(self._masters.view(run.start, run.stop))

    def _start(self, piece: int) -> None:
        """Create the state that a piece has before its first update, if any."""
        param = self._params[piece]
        template = self._templates[self.geometry.pieces[piece].group]
        if template.initial:
            self._entries[param] = template.fresh(param.numel())
            self._home(piece)

    def _home(self, piece: int) -> None:
        """Move elementwise states that torch allocated into the flat buffers."""
        param = self._params[piece]
        entry = self._entries.get(param, {})
        for name, value in entry.items():
            if is_elementwise(value, param.numel()):
                home = self._elements(piece, name, value.dtype)
                if home.data_ptr() != value.data_ptr():
                    entry[name] = home.copy_(value)

    def _elements(self, piece: int, name: str, dtype: torch.dtype) -> Tensor:
        self.states.setdefault(name, dtype)
        span = self.geometry.pieces[piece]
        return self._buffer(name)[span.start : span.stop]

    def _buffer(self, name: str) -> Tensor:
        """Return the flat buffer of a state. It is created, with zeros, at its first use."""
        if name not in self._buffers:
            self._buffers[name] = torch.zeros(
                self.geometry.numel, dtype=self.states[name], device=self.device
            )
        return self._buffers[name]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        if name == MASTER:
            return self._masters.read(start, stop)
        if name not in self._buffers:
            return torch.zeros(stop - start, dtype=self.states[name], device="cpu")
        return self._buffers[name][start:stop].to("cpu", copy=True)

    def write(self, name: str, start: int, values: Tensor) -> None:
        if name == MASTER:
            self._masters.write(start, values)
            return
        self._buffer(name)[start : start + values.numel()].copy_(values)

    def read_scalars(self, piece: int) -> dict[str, float]:
        scalars: dict[str, float] = {"num_steps": self.num_steps[piece]}
        if self.num_steps[piece]:
            param = self._params[piece]
            for name, value in self._entries.get(param, {}).items():
                if value is not None and not is_elementwise(value, param.numel()):
                    scalars[name] = float(value)
        return scalars

    def check_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        if check_num_steps(scalars):
            self._templates[self.geometry.pieces[piece].group].check(scalars)

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        count = int(scalars["num_steps"])
        param, span = self._params[piece], self.geometry.pieces[piece]
        self._entries.pop(param, None)
        if count == 0:
            for buffer in self._buffers.values():
                buffer[span.start : span.stop].zero_()
            self._start(piece)
        else:
            self._entries[param] = self._templates[span.group].restored(
                scalars, lambda name, dtype: self._elements(piece, name, dtype)
            )
        self.num_steps[piece] = count


def served_groups(groups: Groups, device: torch.device) -> Groups:
    """Return the groups, with ``capturable`` False on a CPU, which has no device graphs."""
    if device.type != "cpu":
        return groups
    return [{**g, "capturable": False} if g.get("capturable") else g for g in groups]
