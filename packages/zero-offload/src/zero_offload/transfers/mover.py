"""Copies of gradients and updated parameters between the compute device and host memory.

[Note: buffers]
gradient staging   host memory over ``[0, numel)`` per gradient dtype and layer, allocated by
                   `HostMover.reserve` or at the first gradient.
parameter staging  two host buffers per parameter dtype. One is filled with rounded parameters
                   while the other is copied to the device. An undo log adds a third.
offloaded          parameter shard off the device. The update writes to it directly in host memory,
                   or through a `ParamStore` if it is on the meta device.
held               permanent host copy of a parameter shard in place of staging, if the update reads
                   the 16-bit parameter as the upper half of a split master weight.
published weights  the values that were sent last, if new ones are sent as differences.

As in ZeRO-Offload (arXiv 2101.06840, section 4) a step copies, per element of a 16-bit parameter, a
16-bit gradient to the host and a 16-bit value to the device.

[Note: differences]
The host keeps the values that it sent last, but other code may have written to the shard since.
While the host updates, the device therefore computes a checksum of its values. If that equals the
host's checksum, the host sends the lossless difference if it is shorter, otherwise the new values.
A long span is sent in parts, which alternate between two buffers. Short parts are sent without a
checksum, as are up to three elements at either end, so that the other parts are whole words.

[Note: layers]
layer   host memory over the flat space for one micro-step's gradient, in the gradient's dtype.
sum     host memory over the flat space in the master weights' dtype.
folded  range whose gradients so far were added to the sum, which replaces them.

With few micro-steps, each has its own layer, and the update adds them in its own pass. If this
takes more than `SEPARATE_BYTES` per element, there is one layer. A background thread adds it to the
sum while the next micro-step computes. The update always adds the last micro-step's gradient. Both
methods add in order in the dtype of the sum, so they give the same bits.

At the end of backward the caller waits for the sums of squares of all gradients. An update
therefore first waits until the sums of squares of gradients that have arrived are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from itertools import accumulate, cycle, pairwise
from operator import attrgetter
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry, SpanMap
from zero_offload.flat.grads import GradLedger, add_up
from zero_offload.memory.host_memory import HostMemory
from zero_offload.memory.streams import (
    Checksum,
    HostStreams,
    enter_device,
    open_streams,
    with_index,
)
from zero_offload.protocols import ParamStore, UploadCodec
from zero_offload.rules.rule import KERNEL_DTYPES
from zero_offload.settings import INSTALL
from zero_offload.steppers.stepper import Stepper
from zero_offload.threads import Threads, num_kernel_threads

GROUP = "zero_core.upload_codecs"
SHORTEST_NBYTES = 1 << 16
"""Minimum bytes of new values that are sent as a difference."""
NUM_BUFFERS = 2
_WORD_NUMEL = 4
"""16-bit elements in a word of a checksum."""
_NUM_CHECKSUMS = 64
"""Number of checksums whose host memory is allocated at once."""


def resolve_upload_codec(codec: UploadCodec | str | None) -> UploadCodec | None:
    """Return the codec, which may be given by the name of its entry point. None stays None."""
    if isinstance(codec, str):
        found = tuple(entry_points(group=GROUP, name=codec))
        if not found:
            installed = sorted(entry.name for entry in entry_points(group=GROUP))
            what = f"no upload codec {codec!r} is installed, only {installed}"
            raise ValueError(f'{what}; "lossless" is in zero-comm: {INSTALL.format("zero-comm")}')
        codec = found[0].load()()
    if codec is not None and not isinstance(codec, UploadCodec):
        raise ValueError(
            f"an upload codec needs max_nbytes, checksum, encode and decode; {codec!r} lacks some"
        )
    return codec


def part_numel(published_numel: int) -> int:
    """Return a difference's maximum elements, so few that with overhead it fits in a run."""
    numel = published_numel - published_numel // 16
    return max(numel - numel % _WORD_NUMEL, _WORD_NUMEL)


@dataclass(slots=True)
class _Buffer:
    """Host memory for one difference, in use until the event ``sent`` has fired."""

    memory: Tensor
    sent: torch.Event | None = None


class UploadDifferences:
    """Sender of lossless differences of new parameters. See [Note: differences].

    Attributes:
        num_bytes: bytes of host memory for the values that were sent last.
        num_differences: number of parts sent as differences.
        num_changed: number of parts sent whole because the device's values had changed.
        waited_s: seconds that `send` waited for checksums and for copies to the device.
    """

    def __init__(
        self,
        geometry: Geometry,
        staged: Collection[int],
        codec: UploadCodec,
        memory: HostMemory,
        streams: HostStreams,
    ) -> None:
        self.num_differences = 0
        self.num_changed = 0
        self.waited_s = 0.0
        self._geometry = geometry
        self._codec = codec
        self._memory = memory
        self._streams = streams
        # Pageable memory is enough, because these values are never copied to the device.
        self._kept = {
            index: torch.zeros(shard.numel(), dtype=shard.dtype, device="cpu")
            for index, (_, shard) in enumerate(geometry.shards)
            if index in staged and shard.nbytes >= SHORTEST_NBYTES
            if codec.max_nbytes(1, shard.element_size())
        }
        self.num_bytes = sum(kept.nbytes for kept in self._kept.values())
        self._part_numel = part_numel(geometry.published_numel)
        room = max((self._room(kept) for kept in self._kept.values()), default=0)
        rooms = [memory.empty(room, torch.uint8) for _ in range(NUM_BUFFERS)]
        self._buffers = cycle([_Buffer(room) for room in rooms])
        if room:
            streams.reserve_difference(room)
        self._checksums: dict[int, Checksum] = {}  # checksums of opened parts, by first element
        self._free_values: list[Tensor] = []  # unused host memory of checksums
        if self._kept:
            self._add_values()
        self._sent: SpanMap[torch.Event] = SpanMap()

    def _room(self, values: Tensor) -> int:
        numel = min(values.numel(), self._part_numel)
        return self._codec.max_nbytes(numel, values.element_size())

    def _add_values(self) -> None:
        self._free_values += self._memory.empty(_NUM_CHECKSUMS, torch.int64).unbind()

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor | None]]:
        """Yield ``(a, b, values sent last)`` parts of a span, with None if these are not kept."""
        index = self._geometry.shard_at(start)
        base, kept = self._geometry.shards[index][0], self._kept.get(index)
        if kept is None:
            yield start, stop, None
            return
        first = min(start + (base - start) % _WORD_NUMEL, stop)
        last = max(stop - (stop - base) % _WORD_NUMEL, first)
        bounds = [start, *range(first, last, self._part_numel), last, stop]
        for low, high in pairwise(bounds):
            if low < high:
                yield low, high, kept[low - base : high - base]

    def open(self, start: int, stop: int) -> None:
        """Start to compute the device's checksums of a span before its update."""
        for low, high, kept in self._parts(start, stop):
            if kept is None or kept.nbytes < SHORTEST_NBYTES:
                continue
            if not self._free_values:
                self._add_values()
            earlier = [event for *_, event in self._sent.overlaps(low, high)]
            view = self._geometry.view(low, high)
            value = self._free_values.pop()
            self._checksums[low] = self._streams.checksum(self._codec, view, value, earlier)

    def send(self, start: int, view: Tensor, values: Tensor) -> tuple[torch.Event | None, int]:
        """Send the new values of an opened span. They must not change until the event fires.

        Return the event that fires on arrival, or None if the copy is complete, and the bytes sent.
        """
        event, nbytes = None, 0
        for low, high, kept in self._parts(start, start + view.numel()):
            part = slice(low - start, high - start)
            if kept is None:
                event, sent = self._streams.to_device(view[part], values[part]), values[part].nbytes
            else:
                event, sent = self._send_part(low, view[part], values[part], kept)
                if event is not None:
                    self._sent.put(low, high, event)
            nbytes += sent
        return event, nbytes

    def _send_part(
        self, start: int, view: Tensor, values: Tensor, kept: Tensor
    ) -> tuple[torch.Event | None, int]:
        checksum = self._checksums.pop(start, None)  # None for a short part
        nbytes = values.nbytes
        if checksum is not None:
            self._wait(checksum.event)
            self._free_values.append(checksum.value)
            # The device still has the values that were sent last.
            if int(checksum.value) == int(self._codec.checksum(kept)):
                buffer = next(self._buffers)
                self._wait(buffer.sent)
                room = buffer.memory[: self._room(values)]
                nbytes = self._codec.encode(kept, values, room, num_threads=num_kernel_threads())
            else:
                self.num_changed += 1
        kept.copy_(values)
        if nbytes >= values.nbytes:
            return self._streams.to_device(view, values), values.nbytes
        buffer.sent = self._streams.difference_to_device(self._codec, view, room[:nbytes])
        self.num_differences += 1
        return buffer.sent, nbytes

    def _wait(self, event: torch.Event | None) -> None:
        if event is not None:
            started = perf_counter()
            self._streams.wait(event)
            self.waited_s += perf_counter() - started


_SUM = -1
"""Layer number of the sum of the micro-steps' gradients."""

Release = Callable[[], None]
"""Function to call before the memory of an offered gradient is overwritten."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A gradient's copy to the host: number in the order of copies, and completion event."""

    number: int
    event: torch.Event


class Mover:
    """Mover for a tier on the compute device, which reads gradients and writes parameters in place.

    `close_grads` orders work on the current stream after the streams that produced gradients.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        store: ParamStore | None = None,
        streams: HostStreams | None = None,
    ) -> None:
        self.geometry = geometry
        self.device = device
        self.streams = streams or HostStreams()
        self._store = store
        self._rounded: dict[int, Tensor] = {}  # new values of runs in meta shards, by start
        self._offered: list[torch.Event] = []
        if store is None and any(t.is_meta for _, t in geometry.shards):
            raise ValueError(
                "params holds a shard on the meta device, which says that it is kept elsewhere: "
                "pass param_store, which takes its new values"
            )

    def _record(self) -> torch.Event | None:
        if self.device.type == "cpu":
            return None
        return torch.accelerator.current_stream(self.device).record_event()

    def offer(self, start: int, grad: Tensor, ledger: GradLedger) -> Release | None:
        """Record a gradient in ``ledger``. Return a `Release` if it is copied asynchronously."""
        event = self._record()
        if event is not None:
            self._offered.append(event)
        ledger.add(start, start + grad.numel(), grad, start)
        return None

    def close_grads(self) -> None:
        """Make the current stream wait for the streams that produced the offered gradients."""
        for event in self._offered:
            self.arrive(event)
        self._offered.clear()

    def open_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        """Prepare `out` for ``spans``, each inside one shard. In place this takes no work."""

    def out(self, start: int, stop: int) -> Tensor:
        """Return memory for the rounded values of ``[start, stop)``, one of the open spans."""
        view = self.geometry.view(start, stop)
        if view.is_meta:
            view = self._rounded[start] = torch.empty(stop - start, dtype=view.dtype, device="cpu")
        return view

    def publish(self, start: int, stop: int) -> torch.Event | None:
        """Publish the run's values in `out` to its shard. Return an event if asynchronous."""
        view = self.geometry.view(start, stop)
        if view.is_meta:
            assert self._store is not None, "checked at construction"
            self._store.write(start, self._rounded.pop(start))
        return None if self._is_offloaded(view) else self._record()

    def _is_offloaded(self, shard: Tensor) -> bool:
        return shard.is_meta or (shard.is_cpu and self.device.type != "cpu")

    def arrive(self, event: torch.Event) -> None:
        """Make the caller's current stream wait for an event of `publish`."""
        torch.accelerator.current_stream(self.device).wait_event(event)


class _Staging:
    """One buffer of parameter staging: filled run by run, then sent. See [Note: buffers]."""

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, Tensor] = {}
        self._used: dict[torch.dtype, int] = {}
        self._places: dict[int, Tensor] = {}
        self.sent: list[torch.Event] = []

    def open(self, needs: dict[torch.dtype, int], memory: HostMemory) -> None:
        """Clear the buffer and ensure room for ``needs`` elements of each dtype."""
        for dtype, numel in needs.items():
            if dtype not in self._memory or self._memory[dtype].numel() < numel:
                self._memory.pop(dtype, None)  # frees the old memory first
                self._memory[dtype] = memory.empty(numel, dtype)
        self._used, self._places, self.sent = {}, {}, []

    def reserve(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the memory of the run at ``start``, the same at each call until `open`."""
        if start not in self._places:
            low = self._used.get(dtype, 0)
            self._used[dtype] = low + numel
            self._places[start] = self._memory[dtype][low : low + numel]
        return self._places[start]


class HostMover(Mover):
    """Mover for a host tier: copies gradients to host buffers and parameters to their shards.

    ``is_staged`` also stages shards in host memory, for tests.

    Attributes:
        bytes_d2h: gradient bytes copied from the compute device to the host so far.
        bytes_h2d: parameter bytes copied from the host to the compute device so far.
        grad_bytes: bytes of the gradient staging.
        differences: sends new values as differences; None if they are sent whole.
        arrived: event after which all gradients so far have arrived; None if there is no copy.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        memory: HostMemory,
        *,
        store: ParamStore | None = None,
        streams: HostStreams | None = None,
        is_staged: bool = False,
        codec: UploadCodec | None = None,
    ) -> None:
        super().__init__(geometry, device, store, streams or open_streams(device))
        self.bytes_d2h = self.bytes_h2d = self.grad_bytes = 0
        self.differences: UploadDifferences | None = None
        self.arrived: torch.Event | None = None
        self._memory = memory
        self._is_staged = is_staged
        self._grads: dict[tuple[torch.dtype, int], SpanMap[tuple[int, Tensor]]] = {}
        self._reads: tuple[tuple[torch.Event | None, Future[Any]], ...] = ()
        self._arrivals: SpanMap[Arrival] = SpanMap()
        self._num_copies = 0
        # In order of use, the most recent buffer first.
        self._staging: tuple[_Staging, ...] = (_Staging(), _Staging())
        self._held: dict[int, Tensor] = {}  # held memory by shard index
        self._sent: SpanMap[torch.Event] = SpanMap()  # pending copies from held memory
        self._usual: dict[torch.dtype, int] = {}  # longest run of each dtype
        for _, shard in geometry.shards:
            if self._must_stage(shard):
                longest = min(shard.numel(), geometry.published_numel)
                self._usual[shard.dtype] = max(self._usual.get(shard.dtype, 0), longest)
        if codec is not None:
            staged = [i for i, (_, t) in enumerate(geometry.shards) if self._must_stage(t)]
            self.differences = UploadDifferences(geometry, staged, codec, memory, self.streams)

    def offer(self, start: int, grad: Tensor, ledger: GradLedger) -> Release | None:
        ledger.discard(start, start + grad.numel())
        return self.append(start, grad, ledger, 0)

    def append(self, start: int, grad: Tensor, ledger: GradLedger, layer: int) -> Release | None:
        """Start to copy a micro-step's gradient to a layer, in runs of ``published_numel``."""
        event = None
        staging = self._staging_of(self.kept_dtype(grad.dtype), layer)
        longest = self.geometry.published_numel
        for a, b, (base, buffer) in staging.overlaps(start, start + grad.numel()):
            for low in range(a, b, longest):
                high = min(low + longest, b)
                target, source = buffer[low - base : high - base], grad[low - start : high - start]
                event = self.streams.to_host(target, source)
                if event is not None:
                    self._num_copies += 1
                    self._arrivals.put(low, high, Arrival(self._num_copies, event))
            ledger.append(a, b, buffer, base)
        self.bytes_d2h += grad.numel() * grad.element_size()
        if event is None:
            return None
        self.arrived = event  # copies run in order: the last event covers all
        return partial(self.streams.release, event)

    def kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if dtype in KERNEL_DTYPES else self.geometry.master_dtype

    def sums(self) -> SpanMap[tuple[int, Tensor]]:
        """Return the memory for sums, in the master weights' dtype: ``(first element, tensor)``."""
        return self._staging_of(self.geometry.master_dtype, _SUM)

    def _staging_of(self, dtype: torch.dtype, layer: int) -> SpanMap[tuple[int, Tensor]]:
        key = dtype, layer
        if key not in self._grads:
            parts = self._memory.parts(self.geometry.numel, dtype)
            starts = accumulate((part.numel() for part in parts), initial=0)
            based = zip(starts, parts, strict=False)
            self._grads[key] = SpanMap((a, a + part.numel(), (a, part)) for a, part in based)
            self.grad_bytes += sum(part.nbytes for part in parts)
        return self._grads[key]

    def reserve(self, dtype: torch.dtype, num_micro_steps: int) -> None:
        """Allocate memory for gradients of ``dtype``, and parameter staging."""
        layers, has_sum = num_layers(num_micro_steps, self.kept_dtype(dtype))
        for layer in range(layers):
            self._staging_of(self.kept_dtype(dtype), layer)
        if has_sum:
            self.sums()
        needs = self._staged_numel([(start, start + 1) for start, _ in self.geometry.shards])
        for staging in self._staging:
            staging.open(needs, self._memory)

    def arrival(self, spans: Sequence[tuple[int, int]]) -> Arrival | None:
        """Return the last arrival of gradients in ``spans``, or None on a CPU."""
        found = [value for span in spans for *_, value in self._arrivals.overlaps(*span)]
        return max(found, key=attrgetter("number"), default=None)

    def note_read(self, read: Future[Any]) -> None:
        """Record a job that computes a sum of squares of gradients offered so far."""
        self._reads = (*(r for r in self._reads if not r[1].done()), (self.arrived, read))

    def make_way(self) -> None:
        """Block the updating thread while sums of squares of arrived gradients are computed."""
        for arrived, read in self._reads:
            if arrived is None or arrived.query():
                wait([read])

    def add_staging(self) -> None:
        self._staging = (*self._staging, _Staging())

    @property
    def waited_s(self) -> float:
        """Seconds for which `publish` has waited for the device so far."""
        return 0.0 if self.differences is None else self.differences.waited_s

    @property
    def is_full(self) -> bool:
        """Whether one of the next two buffers of parameter staging is still being sent."""
        return not all(e.query() for staging in self._staging[-2:] for e in staging.sent)

    def open_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        """Take the least recently used staging buffer, and wait for its copies to the device.

        If values are sent as differences, also start to compute the device's checksums.
        """
        self._staging = (self._staging[-1], *self._staging[:-1])
        current = self._staging[0]
        for event in current.sent:
            self.streams.wait(event)
        current.open(self._staged_numel(spans), self._memory)
        # Held memory must not be overwritten before its last copy is done.
        for start, stop in spans:
            for _, _, event in self._sent.overlaps(start, stop):
                self.streams.wait(event)
            self._sent.discard(start, stop)
            if self.differences is not None and self._must_stage(self.geometry.view(start, stop)):
                self.differences.open(start, stop)

    def _staged_numel(self, spans: Sequence[tuple[int, int]]) -> dict[torch.dtype, int]:
        """Return the number of elements to stage by dtype, at least the longest run's for reuse."""
        needs: dict[torch.dtype, int] = {}
        for start, stop in spans:
            view = self.geometry.view(start, stop)
            if self._must_stage(view) and self.geometry.shard_at(start) not in self._held:
                needs[view.dtype] = needs.get(view.dtype, 0) + stop - start
        return {dtype: max(numel, self._usual[dtype]) for dtype, numel in needs.items()}

    def _must_stage(self, shard: Tensor) -> bool:
        return (self._is_staged or not shard.is_cpu) and not shard.is_meta

    def hold(self, start: int, stop: int) -> Tensor:
        """Return permanent host memory for ``[start, stop)``, a range inside one shard.

        The result is the shard itself if it is in host memory. Otherwise `publish` copies from it.
        """
        view = self.geometry.view(start, stop)
        if not self._must_stage(view):
            return view
        index, dtype = self.geometry.shard_at(start), view.dtype
        if index not in self._held:  # All shards of a dtype are allocated together.
            shards = {
                i: shard.numel()
                for i, (_, shard) in enumerate(self.geometry.shards)
                if shard.dtype == dtype and self._must_stage(shard)
            }
            memory = self._memory.tensors([(numel, dtype) for numel in shards.values()])
            self._held.update(zip(shards, memory, strict=True))
        base, _ = self.geometry.shards[index]
        return self._held[index][start - base : stop - base]

    def out(self, start: int, stop: int) -> Tensor:
        view = self.geometry.view(start, stop)
        if self._is_offloaded(view):
            return super().out(start, stop)
        if not self._must_stage(view) or self.geometry.shard_at(start) in self._held:
            return self.hold(start, stop)
        return self._staging[0].reserve(start, stop - start, view.dtype)

    def publish(self, start: int, stop: int) -> torch.Event | None:
        view = self.geometry.view(start, stop)
        if self._is_offloaded(view):
            return super().publish(start, stop)
        nbytes, event = view.numel() * view.element_size(), None
        if self._must_stage(view):
            values = self.out(start, stop)
            if self.differences is None:
                event = self.streams.to_device(view, values)
            else:
                event, nbytes = self.differences.send(start, view, values)
        self.bytes_h2d += nbytes
        if event is not None:
            self._staging[0].sent = [event]  # copies run in order: the last event covers all
            if self.geometry.shard_at(start) in self._held:
                self._sent.put(start, start + view.numel(), event)
        return event

    def arrive(self, event: torch.Event) -> None:
        self.streams.arrive(event)


SEPARATE_BYTES = 8
"""Maximum bytes per element for layers: four of 16 bits."""

T = TypeVar("T")


def num_layers(num_micro_steps: int, dtype: torch.dtype) -> tuple[int, bool]:
    """Return the number of layers for gradients of ``dtype``, and whether there is a sum."""
    if num_micro_steps * dtype.itemsize <= max(SEPARATE_BYTES, dtype.itemsize):
        return num_micro_steps, False
    return 1, True


class GradSums:
    """Sums of a host tier's gradients. See [Note: layers]."""

    def __init__(self, mover: HostMover, stepper: Stepper) -> None:
        self._mover = mover
        self._stepper = stepper
        self.num_micro_steps = 1
        self._folds: SpanMap[Future[None]] = SpanMap()  # jobs that fold ranges
        self._running: set[Future[Any]] = set()
        self._threads = Threads(
            max_workers=1,
            thread_name_prefix="zero-offload-sums",
            initializer=enter_device,
            initargs=(with_index(mover.device),),
        )

    def add(self, start: int, grad: Tensor, ledger: GradLedger, *, is_last: bool) -> Release | None:
        """Start to copy a gradient to a free layer. Return a `Release`, or None on a CPU."""
        layers, has_sum = num_layers(self.num_micro_steps, self._mover.kept_dtype(grad.dtype))
        stop, release = start + grad.numel(), None
        for a, b, terms in ledger.terms(start, stop):
            if not terms:
                self._folds.discard(a, b)
            layer = len(terms) - any(True for _ in self._folds.overlaps(a, b))
            if layer >= layers:  # There are more micro-steps than expected.
                self._fold(a, b, ledger)
                layer = 0
            self.settle([(a, b)])  # A pending fold still reads the layers.
            release = self._mover.append(a, grad[a - start : b - start], ledger, layer) or release
        if has_sum and not is_last:
            self._fold(start, stop, ledger)
        return release

    def _fold(self, start: int, stop: int, ledger: GradLedger) -> None:
        """Start to add a range's layers to the sum, which replaces them in ``ledger``."""
        jobs: list[tuple[int, Tensor, list[tuple[int, int, list[Tensor]]]]] = []
        for a, b, (base, total) in self._mover.sums().overlaps(start, stop):
            jobs.append((a, total[a - base : b - base], ledger.segments(a, b)))
            ledger.add(a, b, total, base)

        def fold() -> None:
            for at, total, parts in jobs:
                for a, b, terms in parts:
                    add_up(terms, total[a - at : b - at])

        self._folds.put(start, stop, self._submit(fold))

    def square_sum(self, start: int, stop: int, ledger: GradLedger) -> Future[float]:
        parts, square_sum = ledger.segments(start, stop), self._stepper.square_sum
        future = self._submit(lambda: sum(square_sum(terms) for _, _, terms in parts))
        self._mover.note_read(future)
        return future

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        """Run a job in the thread after all gradients offered so far have arrived."""
        arrived, streams = self._mover.arrived, self._mover.streams

        def run() -> T:
            if arrived is not None:
                streams.wait(arrived)
            return job()

        future = self._threads.submit(run)
        self._running = {f for f in self._running if not f.done()} | {future}
        return future

    def replaced(self, start: int, stop: int) -> None:
        """Mark a range as not folded. Wait for all jobs, because they may read its memory."""
        wait(self._running)
        self._folds.discard(start, stop)

    def settle(self, spans: Sequence[tuple[int, int]]) -> None:
        for span in spans:
            for *_, fold in self._folds.overlaps(*span):
                fold.result()
