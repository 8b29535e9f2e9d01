"""The model's buffers: taken from rank 0 when the engine is built, and again before forwards.

[Note: when buffers are broadcast]
As in torch's DistributedDataParallel: before each forward of the model, unless the forward before
it ran without gradients or within ``no_sync``, for then no rank has changed them in a step that the
others share. So evaluation after a training forward sees rank 0's running statistics on every rank.
Every rank must run such a forward. A buffer that only a submodule called by itself updates waits
for the model's next forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zero_core.collectives import ControlGroup
from zero_core.compiling import outside_graphs
from zero_core.discovery import compute_dtype

__all__ = ["BufferSync", "adopt_buffers"]


def adopt_buffers(
    model: nn.Module,
    dtype: torch.dtype | None,
    device: torch.device,
    control: ControlGroup,
    value_of: Callable[[Tensor], Tensor],
) -> None:
    """Move buffers to ``device``, cast floating ones to ``dtype``, and take over rank 0's.

    ``value_of`` gives the initial values of a buffer.
    """
    adopted: dict[int, Tensor] = {}  # modules may share one
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            moved = adopted.get(id(buffer))
            if moved is None:
                moved = value_of(buffer).to(device, compute_dtype(buffer, dtype)).contiguous()
                control.broadcast(moved)
                adopted[id(buffer)] = adopted[id(moved)] = moved
            module._buffers[name] = moved


class BufferSync:
    """Brings rank 0's buffers to every rank; see [Note: when buffers are broadcast]."""

    def __init__(
        self, model: nn.Module, control: ControlGroup, *, should_sync: Callable[[], bool]
    ) -> None:
        """Prepare; ``should_sync`` is false within ``no_sync``."""
        self._model = model
        self._control = control
        self._should_sync = should_sync
        self._is_due = True
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Hook the model, if there is more than one rank."""
        if self._control.world_size > 1:
            before, after = outside_graphs(self._pre_forward), outside_graphs(self._post_forward)
            self._handles.append(self._model.register_forward_pre_hook(before))
            self._handles.append(self._model.register_forward_hook(after))

    def detach(self) -> None:
        """Take the hooks off again."""
        while self._handles:
            self._handles.pop().remove()

    def _pre_forward(self, module: nn.Module, args: Any) -> None:
        if self._is_due and torch._C._current_graph_task_id() == -1:  # no recomputation
            self._broadcast()

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._is_due = torch.is_grad_enabled() and self._should_sync()

    def _broadcast(self) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._model.buffers():  # looked up each time: a module may replace its own
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for same in by_dtype.values():
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in same])
            self._control.broadcast(flat)
            if self._control.rank != 0:
                _copy_back(flat, same)


def _copy_back(flat: Tensor, buffers: list[Tensor]) -> None:
    parts = torch.split(flat, [buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        # Through .data: what an earlier forward saved of a buffer counts as unchanged, as it does
        # where batch normalisation updates its statistics; two forwards may precede a backward.
        buffer.data.copy_(part.view_as(buffer))
