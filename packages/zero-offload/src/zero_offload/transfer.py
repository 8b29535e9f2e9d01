"""Where a tier's gradients come from and where its new parameters go.

[Note: buffers]
grads     one flat host buffer ``[0, numel)`` per gradient dtype, made when a gradient of that dtype
          first arrives, pinned for an accelerator. Gradients keep their dtype: 16 bits stay 16.
staging   one flat host buffer per parameter dtype, where rounded parameters wait for their copy to
          the device. When the compute device is the CPU there is none: the update writes the
          rounded values into the parameter shards itself, which saves a pass.

ZeRO-Offload (arXiv 2101.06840, section 4): per parameter and step one 16-bit gradient goes down
and one 16-bit parameter comes up, the least that an offloaded optimizer state allows. The byte
counters here are what a test holds that against.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from zero_offload.geometry import Geometry
from zero_offload.kernel_stepper import KERNEL_DTYPES
from zero_offload.streams import HostStreams, open_streams

__all__ = ["DeviceMover", "HostMover", "Mover"]


class Mover(ABC):
    """The way of gradients to a tier's memory and of parameters back to their shards.

    Attributes:
        bytes_d2h: gradient bytes copied from the compute device to the host so far.
        bytes_h2d: parameter bytes brought from the host to the compute device so far.
    """

    bytes_d2h: int = 0
    bytes_h2d: int = 0

    @abstractmethod
    def offer(self, start: int, grad: Tensor) -> tuple[Tensor, int]:
        """Take a gradient; ``(source, base)`` as `GradLedger.add` wants it."""

    @abstractmethod
    def close_grads(self) -> None:
        """No more gradients for this step: the caller may reuse those it offered."""

    @abstractmethod
    def open_params(self) -> None:
        """The parameters' readers so far are the last of the old values."""

    @abstractmethod
    def begin(self) -> None:
        """In the thread that updates: block until gradients and buffers may be used."""

    @abstractmethod
    def out(self, start: int, stop: int) -> Tensor:
        """Memory for the rounded values of ``[start, stop)``, which lies inside one shard."""

    @abstractmethod
    def publish(self, start: int, stop: int) -> torch.Event | None:
        """Bring what was written to `out` to the shards; an event if that takes time."""

    @abstractmethod
    def arrive(self, event: torch.Event) -> None:
        """Make the caller's current stream wait for a `publish`."""


class HostMover(Mover):
    """Gradients are copied to host buffers, parameters are copied back.

    Args:
        geometry: the flat space; its shards lie on ``device``.
        device: the compute device.
        pin_memory: page-lock host buffers when ``device`` is an accelerator.
        streams: for another kind of device; found from ``device`` by default.
        is_staged: keep a staging buffer; by default only for an accelerator.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        *,
        pin_memory: bool,
        streams: HostStreams | None = None,
        is_staged: bool | None = None,
    ) -> None:
        self._geometry = geometry
        self._should_pin = pin_memory and device.type != "cpu"
        self._streams = open_streams(device) if streams is None else streams
        self._is_staged = device.type != "cpu" if is_staged is None else is_staged
        self._grads: dict[torch.dtype, Tensor] = {}
        dtypes = self._moved_dtypes() if self._is_staged else set()
        self._staging = {dtype: self._host_buffer(dtype) for dtype in dtypes}

    def _moved_dtypes(self) -> set[torch.dtype]:
        """Of the shards that parameters are copied back to."""
        return {t.dtype for _, t in self._geometry.shards}

    def _host_buffer(self, dtype: torch.dtype) -> Tensor:
        numel = self._geometry.numel
        if self._should_pin:
            try:
                return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._should_pin = False
                warnings.warn(
                    f"could not pin {numel * dtype.itemsize} bytes of host memory ({error}); "
                    f"transfers go through pageable memory and are slower. Raise the "
                    f"locked-memory limit or set pin_memory to false",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return torch.empty(numel, dtype=dtype, device="cpu")

    def offer(self, start: int, grad: Tensor) -> tuple[Tensor, int]:
        """Start the one copy down, into the buffer of the gradient's dtype."""
        if grad.dtype not in self._grads:
            kept = grad.dtype if grad.dtype in KERNEL_DTYPES else self._geometry.master_dtype()
            if kept not in self._grads:
                self._grads[kept] = self._host_buffer(kept)
            self._grads[grad.dtype] = self._grads[kept]
        buffer = self._grads[grad.dtype]
        self._streams.to_host(buffer[start : start + grad.numel()], grad)
        self.bytes_d2h += grad.numel() * grad.element_size()
        return buffer, 0

    def close_grads(self) -> None:
        """The caller's stream waits for the copies down."""
        self._streams.release_sources()

    def open_params(self) -> None:
        """Copies up wait for the caller's stream."""
        self._streams.open_targets()

    def begin(self) -> None:
        """Wait for the copies down, and for the last step's copies up."""
        self._streams.wait_host()

    def out(self, start: int, stop: int) -> Tensor:
        """Staging memory, or the shard itself where it is host memory."""
        view = self._geometry.view(start, stop)
        return self._staging[view.dtype][start:stop] if self._is_staged else view

    def publish(self, start: int, stop: int) -> torch.Event | None:
        """Start the one copy up."""
        view = self._geometry.view(start, stop)
        self.bytes_h2d += view.numel() * view.element_size()
        if not self._is_staged:
            return None
        return self._streams.to_device(view, self._staging[view.dtype][start:stop])

    def arrive(self, event: torch.Event) -> None:
        """The caller's stream waits for the copy up."""
        self._streams.arrive(event)


class DeviceMover(Mover):
    """Gradients are used where they are, parameters are written where they belong.

    On an accelerator everything is enqueued on the caller's current stream. Gradients may come
    from, and parameters go to, other streams; events order those.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self._geometry = geometry
        self._device = device
        self._offered: list[torch.Event] = []

    def _record(self) -> torch.Event | None:
        if self._device.type == "cpu":
            return None
        return torch.accelerator.current_stream(self._device).record_event()

    def offer(self, start: int, grad: Tensor) -> tuple[Tensor, int]:
        """The gradient itself; it stays valid until the step returns."""
        event = self._record()
        if event is not None:
            self._offered.append(event)
        return grad, start

    def close_grads(self) -> None:
        """The stepping stream waits for the streams that produced the gradients."""
        for event in self._offered:
            self.arrive(event)
        self._offered.clear()

    def open_params(self) -> None:
        """Old and new values are in order on the caller's stream."""

    def begin(self) -> None:
        """Likewise."""

    def out(self, start: int, stop: int) -> Tensor:
        """The shard itself."""
        return self._geometry.view(start, stop)

    def publish(self, start: int, stop: int) -> torch.Event | None:
        """Mark the point on the stepping stream from which the values are there."""
        return self._record()

    def arrive(self, event: torch.Event) -> None:
        """The caller's current stream waits for the event."""
        torch.accelerator.current_stream(self._device).wait_event(event)
