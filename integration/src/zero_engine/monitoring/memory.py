"""``memory_breakdown``: memory in use at the borders of forward, backward and step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod

import torch

from zero_engine.machine import used_bytes
from zero_engine.monitoring.observer import Observer

_GB = 1e9
_HOST = torch.device("cpu")


class MemoryBreakdown(Observer):
    """Printer of the memory that device and process hold after each part of a micro-step."""

    def __init__(self, device: torch.device, *, say: Callable[[str], None]) -> None:
        self._device = device
        self._say = say

    def _print(self, part: str) -> None:
        held = [f"host {used_bytes(_HOST) / _GB:.3f}"]
        if self._device.type != "cpu":
            now = torch.accelerator.memory_allocated(self._device)
            most = torch.accelerator.max_memory_allocated(self._device)
            held.insert(0, f"device {now / _GB:.3f} (peak {most / _GB:.3f})")
        self._say(f"memory after {part} (GB): {', '.join(held)}")

    end_forward = partialmethod(_print, "forward")
    end_backward = partialmethod(_print, "backward")
    end_step = partialmethod(_print, "step")
