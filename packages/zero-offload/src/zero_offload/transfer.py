"""Where a tier's gradients come from and where its new parameters go.

[Note: buffers]
landing   host buffers that cover ``[0, numel)`` once per gradient dtype, made when a gradient of
          that dtype first arrives. Gradients keep their dtype: 16 bits stay 16.
staging   two small host buffers per parameter dtype, where rounded parameters wait for their copy
          to the device: one is filled while the other is sent. Where a parameter shard is host
          memory itself there is none: the update writes the rounded values into it.
held      a host copy of a parameter shard that lasts, in place of staging, where the update needs
          the 16-bit parameter itself (a master weight that is split in two).

ZeRO-Offload (arXiv 2101.06840, section 4): per parameter and step one 16-bit gradient goes down
and one 16-bit parameter comes up, the least that an offloaded optimizer state allows. The byte
counters here are what a test holds that against; where the compute device is the CPU they count
what is handed over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from zero_offload.geometry import PUBLISHED_NUMEL, Geometry
from zero_offload.grads import GradLedger
from zero_offload.host_memory import HostMemory
from zero_offload.kernel_stepper import KERNEL_DTYPES
from zero_offload.streams import HostStreams, open_streams

__all__ = ["DeviceMover", "HostMover", "Mover"]

Release = Callable[[], None]
"""To be called before the memory of an offered gradient is written again."""


class Mover(ABC):
    """The way of gradients to a tier's memory and of parameters back to their shards.

    Attributes:
        bytes_d2h: gradient bytes copied from the compute device to the host so far.
        bytes_h2d: parameter bytes brought from the host to the compute device so far.
    """

    bytes_d2h: int = 0
    bytes_h2d: int = 0

    @abstractmethod
    def offer(self, start: int, grad: Tensor, ledger: GradLedger) -> Release | None:
        """Take a gradient and note in ``ledger`` where it lies; a release if it is being copied."""

    @abstractmethod
    def close_grads(self) -> Release:
        """No more is offered for a step; a call that waits for what was to have arrived, for the
        thread that updates."""

    @abstractmethod
    def open_params(self) -> None:
        """The parameters' readers so far are the last of the old values."""

    @abstractmethod
    def open_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        """In the thread that updates: block until there is memory for the values of ``spans``,
        each of which lies in one shard."""

    @abstractmethod
    def out(self, start: int, stop: int) -> Tensor:
        """Memory for the rounded values of ``[start, stop)``, one of the open spans."""

    @abstractmethod
    def publish(self, start: int, stop: int) -> torch.Event | None:
        """Bring what was written to `out` to the shards; an event if that takes time."""

    @abstractmethod
    def arrive(self, event: torch.Event) -> None:
        """Make the caller's current stream wait for a `publish`."""


class _Staging:
    """One of the two buffers of [Note: buffers]: filled run by run, then sent."""

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, Tensor] = {}
        self._used: dict[torch.dtype, int] = {}
        self._places: dict[int, Tensor] = {}
        self.sent: list[torch.Event] = []

    def open(self, needs: dict[torch.dtype, int], make: Callable[..., Tensor]) -> None:
        """Start again; enough memory for ``needs`` elements of each dtype."""
        for dtype, numel in needs.items():
            if dtype not in self._memory or self._memory[dtype].numel() < numel:
                self._memory.pop(dtype, None)  # before its successor is made
                self._memory[dtype] = make(numel, dtype)
        self._used, self._places, self.sent = {}, {}, []

    def place(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """The memory of the run that begins at ``start``; the same whenever it is asked for."""
        if start not in self._places:
            low = self._used.get(dtype, 0)
            self._used[dtype] = low + numel
            self._places[start] = self._memory[dtype][low : low + numel]
        return self._places[start]


class HostMover(Mover):
    """Gradients are copied to host buffers, parameters are copied back.

    Args:
        geometry: the flat space; its shards lie on ``device``, or on the host.
        device: the compute device.
        memory: makes the host buffers.
        streams: for another kind of device; found from ``device`` by default.
        is_staged: whether shards in host memory are staged too, as if they were elsewhere.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        memory: HostMemory,
        *,
        streams: HostStreams | None = None,
        is_staged: bool = False,
    ) -> None:
        self._geometry = geometry
        self._memory = memory
        self._streams = open_streams(device) if streams is None else streams
        self._is_staged = is_staged
        self._landing: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
        self._arrivals: list[torch.Event] = []
        self._staging = (_Staging(), _Staging())
        self._held: dict[int, Tensor] = {}  # by shard
        self._sent: list[tuple[int, int, torch.Event]] = []  # of what is held

    def offer(self, start: int, grad: Tensor, ledger: GradLedger) -> Release | None:
        """Start the one copy down, into the buffers of the gradient's dtype."""
        stop = start + grad.numel()
        event = None
        for base, buffer in self._landing_of(grad.dtype):
            a, b = max(start, base), min(stop, base + buffer.numel())
            if a < b:
                event = self._streams.to_host(
                    buffer[a - base : b - base], grad[a - start : b - start]
                )
                ledger.add(a, b, buffer, base)
        self.bytes_d2h += grad.numel() * grad.element_size()
        if event is None:
            return None
        self._arrivals = [event]  # down is in order: the last says all
        return partial(self._streams.release, event)

    def _landing_of(self, dtype: torch.dtype) -> list[tuple[int, Tensor]]:
        kept = dtype if dtype in KERNEL_DTYPES else self._geometry.master_dtype()
        if kept not in self._landing:
            parts = self._memory.parts(self._geometry.numel, kept)
            starts = accumulate((part.numel() for part in parts), initial=0)
            self._landing[kept] = list(zip(starts, parts, strict=False))
        return self._landing[kept]

    def close_grads(self) -> Release:
        """The caller's stream goes on: each offer has its own release."""
        arrivals = list(self._arrivals)

        def wait() -> None:
            for event in arrivals:
                self._streams.wait(event)

        return wait

    def open_params(self) -> None:
        """Copies up wait for the caller's stream."""
        self._streams.open_targets()

    def open_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        """Wait for the copies up of the spans before the last."""
        self._staging = self._staging[::-1]
        current = self._staging[0]
        for event in current.sent:
            self._streams.wait(event)
        current.open(self._staged_numel(spans), self._memory.empty)
        for start, stop in spans:
            self._wait_until_sent(start, stop)

    def _wait_until_sent(self, start: int, stop: int) -> None:
        """What is held of a span is overwritten after its last values were sent."""
        for a, b, event in self._sent:
            if a < stop and start < b:
                self._streams.wait(event)
        self._sent = [sent for sent in self._sent if sent[0] >= stop or start >= sent[1]]

    def _staged_numel(self, spans: Sequence[tuple[int, int]]) -> dict[torch.dtype, int]:
        """Elements to be staged by dtype; no less than other spans need, so that memory stays."""
        needs: dict[torch.dtype, int] = {}
        for start, stop in spans:
            view = self._geometry.view(start, stop)
            if self._must_stage(view) and self._geometry.shard_at(start) not in self._held:
                needs[view.dtype] = needs.get(view.dtype, 0) + stop - start
        for index, (_, shard) in enumerate(self._geometry.shards):
            if shard.dtype in needs and self._must_stage(shard) and index not in self._held:
                usual = min(shard.numel(), PUBLISHED_NUMEL)
                needs[shard.dtype] = max(needs[shard.dtype], usual)
        return needs

    def _must_stage(self, shard: Tensor) -> bool:
        return self._is_staged or shard.device.type != "cpu"

    def hold(self, start: int, stop: int) -> Tensor:
        """Host memory for the values of ``[start, stop)``, inside one shard, that lasts.

        The shard itself where it is host memory; else memory that `publish` sends from.
        """
        view = self._geometry.view(start, stop)
        if not self._must_stage(view):
            return view
        index = self._geometry.shard_at(start)
        if index not in self._held:
            self._hold_all(view.dtype)
        base, _ = self._geometry.shards[index]
        return self._held[index][start - base : stop - base]

    def _hold_all(self, dtype: torch.dtype) -> None:
        shards = list(enumerate(self._geometry.shards))
        own = [(i, t.numel()) for i, (_, t) in shards if t.dtype == dtype and self._must_stage(t)]
        memory = self._memory.tensors([numel for _, numel in own], dtype)
        self._held.update(zip((i for i, _ in own), memory, strict=True))

    def out(self, start: int, stop: int) -> Tensor:
        """Staging memory, or what is held, or the shard itself where it is host memory."""
        view = self._geometry.view(start, stop)
        if not self._must_stage(view) or self._geometry.shard_at(start) in self._held:
            return self.hold(start, stop)
        return self._staging[0].place(start, stop - start, view.dtype)

    def publish(self, start: int, stop: int) -> torch.Event | None:
        """Start the one copy up."""
        view = self._geometry.view(start, stop)
        self.bytes_h2d += view.numel() * view.element_size()
        if not self._must_stage(view):
            return None
        event = self._streams.to_device(view, self.out(start, stop))
        if event is not None:
            self._staging[0].sent = [event]  # up is in order
            if self._geometry.shard_at(start) in self._held:
                self._sent.append((start, stop, event))
        return event

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

    def offer(self, start: int, grad: Tensor, ledger: GradLedger) -> Release | None:
        """The gradient itself; it stays valid until the step returns."""
        event = self._record()
        if event is not None:
            self._offered.append(event)
        ledger.add(start, start + grad.numel(), grad, start)
        return None

    def close_grads(self) -> Release:
        """The stepping stream waits for the streams that produced the gradients."""
        for event in self._offered:
            self.arrive(event)
        self._offered.clear()
        return lambda: None

    def open_params(self) -> None:
        """Old and new values are in order on the caller's stream."""

    def open_spans(self, spans: Sequence[tuple[int, int]]) -> None:
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
