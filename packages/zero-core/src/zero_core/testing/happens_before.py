"""Accesses to the same memory that nothing orders, found in a trace of streams and threads.

The rules are those of ``torch.cuda._sanitizer``: every stream has a vector clock, events carry
clocks from one stream to another, and two accesses of which one writes must be ordered. Memory is
compared part by part, because views of one buffer overlap: a **part** lies between two neighbouring
bounds of the ranges of memory in the trace.

A thread of the host is one more stream. What a thread launches is ordered after what the thread did
before. A thread that synchronizes with an event is ordered after it, and no other thread is. Where
threads order themselves (a queue, a lock), the trace says so by `HappensBefore.send` and
`HappensBefore.receive`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from torch.cuda._sanitizer import EventHandler

from zero_core.testing.late_device import TraceRecord

Range = tuple[int, int]
"""Address and number of bytes."""


class _Access(NamedTuple):
    """An operation's place in the trace."""

    stream: int
    number: int
    operation: str


@dataclass(frozen=True)
class Race:
    """Two accesses to the same memory that nothing orders.

    Attributes:
        address: of the first byte.
        first: operation that is first in the trace, with its stream.
        second: the other one.
    """

    address: int
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.second} is not ordered after {self.first} (memory at {self.address:#x})"


class HappensBefore:
    """Checks a trace, record by record, in the order in which the host made the calls.

    Streams, threads and events are named by any integers. Those of streams and of threads may
    coincide.

    Attributes:
        races: found so far, one for each pair of operations.
    """

    def __init__(self, ranges: Iterable[Range]) -> None:
        """Prepare for accesses to ``ranges`` of memory."""
        self.races: list[Race] = []
        self._bounds = sorted({bound for a, numel in ranges for bound in (a, a + numel)})
        self._handler = EventHandler()
        self._numbers: dict[tuple[str, int], int] = {}
        self._fresh = count(1)
        self._seen: set[tuple[str, str]] = set()
        self._last_write: dict[int, _Access] = {}  # of each part
        self._reads: dict[int, list[_Access]] = {}  # since that
        self._readers: dict[Range, set[int]] = {}  # streams that `record_stream` named

    def launch(
        self,
        thread: int,
        stream: int,
        operation: str,
        *,
        reads: Iterable[Range] = (),
        writes: Iterable[Range] = (),
    ) -> None:
        """A thread enqueues an operation on a stream."""
        target = self._stream(stream)
        self._order(self._thread(thread), target)
        self._access(target, f"{operation} on stream {stream}", reads, writes)

    def host_access(
        self,
        thread: int,
        operation: str,
        *,
        reads: Iterable[Range] = (),
        writes: Iterable[Range] = (),
    ) -> None:
        """A thread itself reads or writes memory."""
        self._access(self._thread(thread), f"{operation} in thread {thread}", reads, writes)

    def record_event(self, thread: int, event: int, stream: int) -> None:
        """A thread records an event on a stream."""
        self._order(self._thread(thread), self._stream(stream))
        self._handler._handle_event_record(self._event(event), self._stream(stream))

    def wait_event(self, event: int, stream: int) -> None:
        """A stream waits for the last record of an event."""
        self._handler._handle_event_wait(self._event(event), self._stream(stream))

    def synchronize_event(self, event: int, thread: int) -> None:
        """A thread waits for an event, or finds that it has fired."""
        self._handler._handle_event_wait(self._event(event), self._thread(thread))

    def synchronize_stream(self, stream: int, thread: int) -> None:
        """A thread waits for all that is on a stream."""
        self._order(self._stream(stream), self._thread(thread))

    def synchronize_device(self, streams: Iterable[int], thread: int) -> None:
        """A thread waits for all that is on some streams."""
        for stream in streams:
            self.synchronize_stream(stream, thread)

    def send(self, thread: int, what: int) -> None:
        """A thread hands something over: `receive` is ordered after all that it did so far."""
        self._handler._handle_event_record(self._number("handover", what), self._thread(thread))

    def receive(self, what: int, thread: int) -> None:
        """A thread receives what was handed over last under that number."""
        self._handler._handle_event_wait(self._number("handover", what), self._thread(thread))

    def record_stream(self, memory: Range, stream: int) -> None:
        """Memory is also used on a stream, besides the one that it was allocated on."""
        self._readers.setdefault(memory, set()).add(stream)

    def free(self, thread: int, stream: int, memory: Range) -> None:
        """Memory goes back to the pool of the stream that it was allocated on.

        That stream may overwrite it at once. If `record_stream` has named others, the allocator
        waits for them first, and no stream does.
        """
        readers = self._readers.pop(memory, set())
        reuse = self._stream(stream)
        if readers:
            reuse = self._number("stream", ~next(self._fresh))
            for before in (stream, *readers):
                self._order(self._stream(before), reuse)
        self._order(self._thread(thread), reuse)
        self._access(reuse, f"reuse of freed memory on stream {stream}", (), [memory])
        if readers:
            self.forget(memory)

    def forget(self, memory: Range) -> None:
        """Memory that nothing uses any more has new contents from now on."""
        for part in self._parts(memory):
            self._last_write.pop(part, None)
            self._reads.pop(part, None)

    def _parts(self, memory: Range) -> range:
        start, nbytes = memory
        return range(bisect_left(self._bounds, start), bisect_left(self._bounds, start + nbytes))

    def _access(
        self, stream: int, operation: str, reads: Iterable[Range], writes: Iterable[Range]
    ) -> None:
        # Not by the handler's own method, which takes the Python stack of each operation.
        self._handler.seq_num += 1
        now = _Access(stream, self._handler.seq_num, operation)
        self._handler.syncs.update_seq_num(stream, now.number)
        written = {part for memory in writes for part in self._parts(memory)}
        read = {part for memory in reads for part in self._parts(memory)} - written
        for part in read:
            if part in self._last_write:
                self._compare(part, self._last_write[part], now)
            self._reads.setdefault(part, []).append(now)
        for part in written:
            before = self._reads.pop(part, None)
            if before is None and part in self._last_write:
                before = [self._last_write[part]]
            for access in before or ():
                self._compare(part, access, now)
            self._last_write[part] = now

    def _compare(self, part: int, first: _Access, second: _Access) -> None:
        syncs, pair = self._handler.syncs, (first.operation, second.operation)
        is_ordered = syncs.is_ordered_after(second.stream, first.number, first.stream)
        if not is_ordered and pair not in self._seen:
            self._seen.add(pair)
            self.races.append(Race(self._bounds[part], *pair))

    def _order(self, source: int, target: int) -> None:
        event = next(self._fresh)
        self._handler._handle_event_record(event, source)
        self._handler._handle_event_wait(event, target)
        self._handler._handle_event_deletion(event)

    def _stream(self, stream: int) -> int:
        return self._number("stream", stream)

    def _thread(self, thread: int) -> int:
        return self._number("thread", thread)

    def _event(self, event: int) -> int:
        return self._number("event", event)

    def _number(self, kind: str, name: int) -> int:
        key = kind, name
        if key not in self._numbers:
            self._numbers[key] = next(self._fresh)
            if kind in ("stream", "thread"):
                self._handler._handle_stream_creation(self._numbers[key])
        return self._numbers[key]


_WAITS = {
    "event_wait",
    "event_query",
    "event_synchronize",
    "stream_query",
    "stream_synchronize",
    "device_synchronize",
    "record_stream",
}


def wait_of(record: TraceRecord, roots: Sequence[str]) -> str:
    """Return the line that waited, as ``file:line function``. Empty: no line of ``roots`` did.

    What an operator waits for by itself (a copy that blocks) is no wait of a line.

    Args:
        record: of any kind.
        roots: folders of the sources of interest.
    """
    if record.kind not in _WAITS or record.name:
        return ""
    return next(
        (frame for frame in record.stack.splitlines() if frame.startswith(tuple(roots))), ""
    )


def find_races(
    trace: Sequence[TraceRecord], *, workers: Collection[int] = (), without: Collection[int] = ()
) -> Iterator[Race]:
    """Yield the races of a trace of the late device.

    Threads of one device take turns (a thread of autograd's works while its caller waits), except
    for ``workers``.

    Args:
        trace: what `late_device.stop_trace` returned.
        workers: numbers of threads that run beside the others.
        without: positions in the trace of records to leave out: waits that are to be missed.
    """
    devices = _devices_of_threads(trace)
    dropped = set(without)
    ranges = [r for record in trace for r in (*_sized(record.reads), *_sized(record.writes))]
    used = {record.device for record in trace if record.device >= 0}
    checkers = {device: HappensBefore(ranges) for device in used}
    owner_of_event: dict[int, int] = {}
    streams: dict[int, set[int]] = {device: set() for device in checkers}
    for position, record in enumerate(trace):
        if record.kind == "event_record":
            owner_of_event[record.event] = record.device
        device = record.device
        if device < 0 and record.event in owner_of_event:
            device = owner_of_event[record.event]
        if device < 0:
            device = devices.get(record.thread, -1)
        if device not in checkers or position in dropped:
            continue  # a device on which nobody works may be waited for, too
        if record.stream >= 0:
            streams[device].add(record.stream)
        thread = record.thread if record.thread in workers else 0
        checker = checkers[device]
        num_known = len(checker.races)
        _feed(checker, record, thread, streams[device])
        yield from checker.races[num_known:]


def _devices_of_threads(trace: Sequence[TraceRecord]) -> dict[int, int]:
    """Return the first device that each thread used."""
    found: dict[int, int] = {}
    for record in trace:
        if record.device >= 0:
            found.setdefault(record.thread, record.device)
    return found


def _feed(checker: HappensBefore, record: TraceRecord, thread: int, streams: set[int]) -> None:
    stream, reads, writes = record.stream, _sized(record.reads), _sized(record.writes)
    event = record.event * 1_000_000 + record.version  # an event stands for one of its records
    match record.kind:
        case "launch":
            checker.launch(thread, stream, record.name, reads=reads, writes=writes)
        case "host_access":
            checker.host_access(thread, record.name, reads=reads, writes=writes)
        case "event_record":
            checker.record_event(thread, event, stream)
        case "event_wait":
            checker.wait_event(event, stream)
        case "event_synchronize" | "event_query":
            checker.synchronize_event(event, thread)
        case "stream_synchronize" | "stream_query":
            checker.synchronize_stream(stream, thread)
        case "device_synchronize":
            checker.synchronize_device(streams, thread)
        case "record_stream":
            checker.record_stream(reads[0], stream)
        case "free":
            checker.free(thread, stream, writes[0])
        case "pinned_free":
            checker.forget(writes[0])
        case "send":
            checker.send(thread, record.event)
        case "receive":
            checker.receive(record.event, thread)


def _sized(ranges: Iterable[Range]) -> list[Range]:
    """Turn addresses of begin and end into addresses and numbers of bytes."""
    return [(begin, end - begin) for begin, end in ranges]
