"""How much optimizer state the compute device has room for, and how long its updates take."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from time import perf_counter

import torch

__all__ = ["DeviceClock", "DeviceRoom", "MemoryReading", "read_memory"]

MARGIN = 0.05
"""Share of the device's memory that is left alone: fragmentation, and libraries' own."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes of one device's memory as this process sees them.

    Attributes:
        available: held by torch's allocator, used or not, and free on the device; no more than this
            process may take (``set_per_process_memory_fraction``).
        peak: the most that tensors have taken at once so far.
        total: of the device, or what this process may take of it.
    """

    available: int
    peak: int
    total: int


@cache
def _tell_unbounded(why: str) -> None:
    warnings.warn(
        f"the device's free memory is not known ({why}): ratio auto has no lower bound, and may "
        f"move more to the device than fits; give a ratio or a device_budget",
        RuntimeWarning,
        stacklevel=2,
    )


def read_memory(device: torch.device) -> MemoryReading | None:
    """A reading, or None where the device's memory is the host's or is not accounted for."""
    if device.type == "cpu":
        return None
    try:
        free, total = torch.accelerator.get_memory_info(device)
        reserved = torch.accelerator.memory_reserved(device)
        peak = torch.accelerator.max_memory_allocated(device)
    except (AttributeError, RuntimeError) as error:  # torch 2.10's, or a backend without it
        _tell_unbounded(str(error))
        return None
    allowed = round(_allowed_fraction(device) * total)
    return MemoryReading(min(free + reserved, allowed), peak, min(total, allowed))


def _allowed_fraction(device: torch.device) -> float:
    """The share of the device's memory that torch's allocator may take; 1 without a limit."""
    module = torch.get_device_module(device)
    fraction: Callable[[torch.device], float] | None = getattr(
        module, "get_per_process_memory_fraction", None
    )
    return 1.0 if fraction is None else fraction(device)


class DeviceRoom:
    """The smallest ratio whose device share fits beside all else.

    All else is what the peak so far held besides the state that was on the device at that time.

    Args:
        numel: elements of the flat space.
        element_bytes: what an element takes on the device.
        read: a reading of its memory, or None where there is no bound.
    """

    def __init__(
        self, numel: int, element_bytes: int, read: Callable[[], MemoryReading | None]
    ) -> None:
        self._numel = numel
        self._element_bytes = element_bytes
        self._read = read
        self._peak = 0
        self._numel_at_peak = 0

    def least_ratio(self, device_numel: int) -> float:
        """The bound, 0 to 1.

        Args:
            device_numel: elements that were on the device since the last call.
        """
        now = self._read()
        if now is None or not self._numel or not self._element_bytes:
            return 0.0
        if now.peak > self._peak:
            self._peak, self._numel_at_peak = now.peak, device_numel
        spare = now.available - now.peak - MARGIN * now.total
        fitting = self._numel_at_peak + spare / self._element_bytes
        return min(max(1.0 - fitting / self._numel, 0.0), 1.0)


class DeviceClock:
    """Seconds that the device spends on what is enqueued within `measure`.

    On an accelerator the calls return before the work is done, so events on the caller's current
    stream take the time; nothing waits for them until `take`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._spans: list[tuple[torch.Event, torch.Event]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Within, count what the current stream is given, or on a CPU what is done."""
        if self._device.type == "cpu":
            started = perf_counter()
            yield
            self._seconds += perf_counter() - started
            return
        ends = [torch.Event(self._device, enable_timing=True) for _ in range(2)]
        stream = torch.accelerator.current_stream(self._device)
        stream.record_event(ends[0])
        yield
        stream.record_event(ends[1])
        self._spans.append((ends[0], ends[1]))

    def take(self) -> float:
        """The seconds since the last call."""
        for start, end in self._spans:
            end.synchronize()  # the caller waits for the device, a step after it was enqueued
            self._seconds += start.elapsed_time(end) / 1e3
        self._spans.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds
