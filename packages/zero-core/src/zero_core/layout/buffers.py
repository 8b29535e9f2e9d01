"""The model's buffers that all ranks have, with the same shapes and dtypes.

[Note: buffers that ranks agree on]
A broadcast must have the same bytes on all ranks, or gloo ends the process. So a rank that
registers, drops or reshapes a buffer goes on with the list of before until the next step has
compared the buffers of all ranks. For one that it no longer has in that form it sends zeros, and
ignores what it receives. torch's DistributedDataParallel looks them up before each broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class _Buffer:
    module: nn.Module
    key: str
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device


class CommonBuffers:
    """The model's buffers, as all ranks have them. See [Note: buffers that ranks agree on]."""

    def __init__(self, model: nn.Module) -> None:
        """Prepare. There are none before `confirm`."""
        self._model = model
        self._seen: tuple[_Buffer, ...] = ()
        self._agreed: tuple[_Buffer, ...] = ()

    def describe(self) -> Mapping[str, str]:
        """Return shape and dtype of this rank's buffers, by their names."""
        seen, said = [], {}
        for name, module in self._model.named_modules():
            for key, b in module._buffers.items():
                if b is not None:
                    seen.append(_Buffer(module, key, b.dtype, b.shape, b.device))
                    said[f"buffer {name}{'.' if name else ''}{key}"] = f"{b.dtype} {tuple(b.shape)}"
        self._seen = tuple(seen)
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
