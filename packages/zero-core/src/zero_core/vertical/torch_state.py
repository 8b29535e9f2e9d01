"""State of torch's contexts, kept apart for each micro-batch of the vertical schedule.

[Note: contexts of a paused forward]
A forward may pause within contexts: autocast, ``no_grad``, a device, a choice of attention kernels,
checkpointing around a block. torch keeps their state per thread or process, and micro-batches share
a thread. So a pause exchanges the forward's state for the state before the step, and the end of
the pause exchanges it back. Contexts around the step apply to each micro-batch, and contexts in a
forward only to that forward. Dispatch keys reveal contexts that cannot be exchanged.
"""

from __future__ import annotations

from typing import Any

import torch

from zero_core._torch import context_settings, dispatch_keys


class TorchState:
    """State of torch's contexts at this object's creation, and exchanges of the current state."""

    def __init__(self, device: torch.device) -> None:
        self._settings = context_settings(device)
        self._outside = [get() for get, _ in self._settings]
        self._keys = dispatch_keys()

    def exchange(self, new: list[Any] | None = None) -> list[Any]:
        """Set ``new``, by default the state at this object's creation. Return the previous one."""
        # Otherwise autocast in another micro-batch would reuse a cached cast and its autograd node.
        torch.clear_autocast_cache()
        old = [get() for get, _ in self._settings]
        for (_, put), value, now in zip(self._settings, new or self._outside, old, strict=True):
            if value is not now:
                put(value)
        return old

    def is_as_before(self) -> bool:
        """Return False if contexts are active that `exchange` cannot leave. Call it after that."""
        return bool(dispatch_keys() == self._keys)
