"""The model's buffers: taken from rank 0 when the engine is built, and again before forwards.

[Note: when buffers are broadcast]
As in torch's DistributedDataParallel: before each forward of the model, unless the forward before
it ran without gradients or within ``no_sync``, for then no rank has changed them in a step that the
others share. So evaluation after a training forward sees rank 0's running statistics on every rank.
Every rank must run such a forward. A buffer that only a submodule called by itself updates waits
for the model's next forward. One that is registered after the build is broadcast after the next
step, which compares the ranks.

[Note: buffers that ranks agree on]
A broadcast must have the same bytes on all ranks, or gloo ends the process. So a rank that
registers, drops or reshapes a buffer goes on with the list of before until the next step has
compared the buffers of all ranks. For one that it no longer has in that form it sends zeros, and
ignores what it receives. torch's DistributedDataParallel looks them up before each broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_core._torch import is_in_backward, outside_graphs
from zero_core.comm.control import ControlGroup
from zero_core.core.passes import BackwardPass


class _Buffer(NamedTuple):
    module: nn.Module
    key: str
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device


class CommonBuffers:
    """The model's buffers, as all ranks have them, and their broadcast. See the notes above."""

    def __init__(self, model: nn.Module) -> None:
        """Prepare. There are none before `confirm`."""
        self._model = model
        self._seen: list[_Buffer] = []
        self._agreed: list[_Buffer] = []
        self.handles: list[Any] = []  # of the hooks that `attach` puts on the model

    def describe(self) -> Mapping[str, str]:
        """Return shape and dtype of this rank's buffers, by their names."""
        self._seen, said = [], {}
        for name, module in self._model.named_modules():
            for key, b in module._buffers.items():
                if b is not None:
                    self._seen.append(_Buffer(module, key, b.dtype, b.shape, b.device))
                    said[f"buffer {name}{'.' if name else ''}{key}"] = f"{b.dtype} {tuple(b.shape)}"
        return said

    def confirm(self) -> None:
        """Take what `describe` has seen last: all ranks have the same."""
        self._agreed = self._seen

    def by_dtype(self) -> Mapping[torch.dtype, list[tuple[Tensor, bool]]]:
        """Return tensors of the agreed buffers' forms, and whether each is the module's."""
        found: dict[torch.dtype, list[tuple[Tensor, bool]]] = {}
        for b in self._agreed:
            value = b.module._buffers.get(b.key)
            is_own = value is not None and (value.dtype, value.shape) == (b.dtype, b.shape)
            if value is None or not is_own:  # it has another form by now
                value = torch.zeros(b.shape, dtype=b.dtype, device=b.device)
            found.setdefault(b.dtype, []).append((value, is_own))
        return found

    def attach(self, control: ControlGroup, backward: BackwardPass) -> None:
        """Hook the model, if there is more than one rank."""
        if control.world_size == 1:
            return
        self._control = control
        self._is_due = True

        def after(*hook_args: Any) -> None:
            # The pass, which knows of ``no_sync``, leads back here: the hook alone holds it.
            self._post_forward(backward)

        before = outside_graphs(self._pre_forward)
        self.handles.append(self._model.register_forward_pre_hook(before, prepend=True))
        self.handles.append(self._model.register_forward_hook(outside_graphs(after)))

    def remove(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    def idle_forward(self, backward: BackwardPass) -> None:
        """Take part in what the other ranks' next forward broadcasts, without a forward here."""
        if self.handles:
            self._pre_forward()
            self._post_forward(backward)

    def _pre_forward(self, *hook_args: Any) -> None:
        if is_in_backward() or not self._is_due:  # a recomputation is no forward
            return
        for same in self.by_dtype().values():  # each time: a module may replace its own
            flat = torch.cat([buffer.detach().reshape(-1) for buffer, _ in same])
            self._control.broadcast(flat)
            parts = torch.split(flat, [buffer.numel() for buffer, _ in same])
            for (buffer, is_here), part in zip(same, parts, strict=True):
                # Through .data: what an earlier forward saved of a buffer counts as unchanged, as
                # where batch normalisation updates it; two forwards may precede a backward.
                if is_here and self._control.rank != 0:
                    buffer.data.copy_(part.view_as(buffer))

    def _post_forward(self, backward: BackwardPass) -> None:
        if not is_in_backward():
            self._is_due = torch.is_grad_enabled() and backward.should_sync
