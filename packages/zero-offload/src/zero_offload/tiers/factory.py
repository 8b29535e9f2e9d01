"""Factory of host and device tiers, and clocks that measure their work."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry, Intervals, freeze_groups
from zero_offload.memory.host_memory import HostMemory
from zero_offload.protocols import (
    AdamKernel,
    DeviceTierFactory,
    Groups,
    OptimizerClass,
    ParamStore,
    StateTier,
    UploadCodec,
)
from zero_offload.rules.resolve import check_elementwise, check_kernel_class, resolve_rule
from zero_offload.rules.rule import KERNEL_DTYPES
from zero_offload.settings import INSTALL, OffloadSettings
from zero_offload.steppers.file_stepper import FileStepper
from zero_offload.steppers.memory_stepper import MemoryStepper
from zero_offload.steppers.stepper import SpanMemory, Stepper
from zero_offload.steppers.torch_stepper import FUSED_ALIGNMENT, TorchStepper
from zero_offload.tiers.flat_tier import DeviceTier, HostTier
from zero_offload.transfers.mover import SHORTEST_NBYTES, HostMover, Mover


class HostClock:
    """Clock for the seconds of synchronous work in `measure`."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        started = perf_counter()
        yield
        self._seconds += perf_counter() - started

    def take(self) -> float:
        """Return the seconds measured since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class DeviceClock(HostClock):
    """Clock for the seconds of device work enqueued in `measure`. `take` omits unfinished work."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._spans: deque[tuple[torch.Event, torch.Event]] = deque()

    def mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        torch.accelerator.current_stream(self._device).record_event(event)
        return event

    @contextmanager
    def measure(self) -> Iterator[None]:
        start = self.mark()
        yield
        self._spans.append((start, self.mark()))

    def take(self) -> float:
        while self._spans and self._spans[0][1].query():
            start, end = self._spans.popleft()
            self._seconds += start.elapsed_time(end) / 1e3
        return super().take()


_log = logging.getLogger(__name__)


class OffloadTiers:
    """Factory of host and device tiers. `zero_offload.create_tier` explains the settings.

    Attribute ``rule`` is the host kernel's update rule, or None if torch's optimizer updates.
    """

    def __init__(
        self,
        geometry: Geometry,
        settings: OffloadSettings,
        *,
        device: torch.device,
        optimizer_class: OptimizerClass,
        groups: Groups,
        adam_kernel: AdamKernel | None,
        device_tier: DeviceTierFactory,
        param_store: ParamStore | None = None,
        upload_codec: UploadCodec | None = None,
    ) -> None:
        check_elementwise(optimizer_class)
        if adam_kernel is not None:
            check_kernel_class(optimizer_class)
        self.device = device
        self.optimizer_class = optimizer_class
        dtype = settings.state_dtype
        self.rule = resolve_rule(adam_kernel, optimizer_class, freeze_groups(groups), dtype)
        if self.rule and any(shard.dtype not in KERNEL_DTYPES for _, shard in geometry.shards):
            if dtype != "float32":
                raise ValueError(
                    f"offload_optimizer.state_dtype = {dtype!r} is not served for float64 "
                    f'parameters: use "float32"'
                )
            self.rule = None
        if self.rule is None and settings.nvme_path is not None:
            raise ValueError(
                f'offload_optimizer.device = "nvme" does not serve {optimizer_class.__qualname__} '
                f"with these settings: its update is not one of an installed host kernel. Use "
                f'device "cpu", or Adam, AdamW, Adagrad, SGD or Lion by name, without amsgrad or '
                f"float64, and with cpu-adam: {INSTALL.format('cpu-adam')}"
            )
        self.end = settings.host_share
        self.device_budget = settings.device_budget
        self.undo_buffer_size = settings.undo_buffer_size
        self._settings = settings
        self._device_tier = device_tier
        self._param_store = param_store
        self._upload_codec = upload_codec
        self._has_warned = False

    @property
    def can_undo(self) -> bool:
        """Whether the host's updates can be undone: they use a kernel and are in host memory."""
        return self.rule is not None and self._settings.nvme_path is None

    def alignment(self, groups: Groups) -> int:
        """Return the alignment, in elements, of split points that change no bit on a CPU."""
        if self.device.type != "cpu":
            return 1
        if self.rule is not None:
            return self.rule.block
        return FUSED_ALIGNMENT if any(group.get("fused") for group in groups) else 1

    def make_clock(self) -> HostClock:
        return HostClock() if self.device.type == "cpu" else DeviceClock(self.device)

    def make_host(self, part: Geometry, share: Intervals, groups: Groups) -> HostTier:
        """Create a host tier with its own worker thread. ``share``: elements of ``part``."""
        is_on_cpu = self.device.type == "cpu"
        should_pin = self._settings.pin_memory and not is_on_cpu
        memory = HostMemory(should_pin=should_pin, limit_bytes=self._settings.pin_memory_bytes)
        store, codec = self._store_of(share), self._upload_codec
        mover = HostMover(part, self.device, memory, store=store, codec=codec)
        has_differences = mover.differences is not None and mover.differences.num_bytes > 0
        if codec is not None and part.numel and not has_differences and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "lossless_upload has no effect: no shard of 16-bit or 32-bit parameters with %d "
                "bytes or more is on an accelerator and updated by the host",
                SHORTEST_NBYTES,
            )
        folder, count = self._settings.nvme_path, self._settings.buffer_count
        if folder is None:
            # On an accelerator the upper half of a split master is the memory that is copied to it.
            stepper = self._make_stepper(part, groups, is_in_place=is_on_cpu, upper=mover.hold)
        else:
            assert self.rule is not None, "refused by the constructor"
            frozen = freeze_groups(groups)
            stepper = FileStepper(part, self.rule, frozen, folder=folder, buffer_count=count)
        return HostTier(part, stepper, mover)

    def make_device(self, part: Geometry, share: Intervals, groups: Groups) -> StateTier:
        """Create a tier on the compute device. On a CPU it uses the host's update."""
        store = self._store_of(share)
        if self.device.type == "cpu":
            stepper = self._make_stepper(part, groups, is_in_place=True, upper=part.view)
            return DeviceTier(part, stepper, Mover(part, self.device, store))
        return self._device_tier(
            numel=part.numel,
            pieces=[(p.start, p.stop, p.group) for p in part.pieces],
            params=part.shards,
            device=self.device,
            optimizer_class=self.optimizer_class,
            groups=[{k: v for k, v in group.items() if k != "params"} for group in groups],
            param_store=store,
        )

    def _store_of(self, share: Intervals) -> ParamStore | None:
        return None if self._param_store is None else _PartStore(self._param_store, share)

    def _make_stepper(
        self, part: Geometry, groups: Groups, *, is_in_place: bool, upper: SpanMemory
    ) -> Stepper:
        frozen = freeze_groups(groups)
        if self.rule is None:
            cpu = torch.device("cpu")
            return TorchStepper(part, cpu, self.optimizer_class, frozen, is_in_place=is_in_place)
        return MemoryStepper(part, self.rule, frozen, is_in_place=is_in_place, upper=upper)


class _PartStore:
    """`ParamStore` that accepts offsets of a part's flat space."""

    def __init__(self, store: ParamStore, share: Intervals) -> None:
        self._store = store
        self._share = share

    def write(self, start: int, values: Tensor) -> None:
        self._store.write(self._share.element(start), values)
