"""Accesses to the same memory that nothing orders, found in a trace of streams and threads.

The rules are those of ``torch.cuda._sanitizer``: every stream has a vector clock, events carry
clocks from one stream to another, and two accesses of which one writes must be ordered. Memory is
compared part by part, because views of one buffer overlap: a **part** lies between two neighbouring
bounds of the ranges of memory in the trace.

A thread of the host is one more stream. What a thread launches is ordered after what the thread did
before. A thread that synchronizes with an event is ordered after it, and no other thread is. Where
threads order themselves (a queue, a lock), the trace says so by records "send" and "receive".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from torch.cuda._sanitizer import EventHandler

from support.late_device import TraceRecord

Range = tuple[int, int]
"""Address and number of bytes."""


class _Access(NamedTuple):
    """An operation's place in the trace."""

    stream: int
    number: int
    operation: str


@dataclass(frozen=True)
class Race:
    """Two accesses to the same memory that nothing orders."""

    address: int  # of the first byte
    first: str  # operation that is first in the trace, with its stream
    second: str  # the other one

    def __str__(self) -> str:
        return f"{self.second} is not ordered after {self.first} (memory at {self.address:#x})"


class HappensBefore:
    """Checks a trace, record by record, in the order in which the host made the calls.

    Streams, threads and events are named by any integers. Those of streams and of threads may
    coincide.
    """

    def __init__(self, ranges: Iterable[Range]) -> None:
        """Prepare for accesses to ``ranges`` of memory."""
        self.races: list[Race] = []  # found so far, one for each pair of operations
        self._bounds = sorted({bound for a, numel in ranges for bound in (a, a + numel)})
        self._handler = EventHandler()
        self._numbers: dict[tuple[str, int], int] = {}
        self._fresh = count(1)
        self._seen: set[tuple[str, str]] = set()
        self._last_write: dict[int, _Access] = {}  # of each part
        self._reads: dict[int, list[_Access]] = {}  # since that
        self._readers: dict[Range, set[int]] = {}  # streams that `record_stream` named

    def feed(self, record: TraceRecord, thread: int, streams: Iterable[int]) -> None:
        """Check the next record, a call of ``thread``. ``streams`` are all of its device."""
        reads, writes = _sized(record.reads), _sized(record.writes)
        host, stream = self._number("thread", thread), self._number("stream", record.stream)
        # An event stands for one of its records.
        event = self._number("event", record.event * 1_000_000 + record.version)
        handover = self._number("handover", record.event)
        handler = self._handler
        match record.kind:
            case "launch":
                self._order(host, stream)
                self._access(stream, f"{record.name} on stream {record.stream}", reads, writes)
            case "host_access":
                self._access(host, f"{record.name} in thread {thread}", reads, writes)
            case "event_record":
                self._order(host, stream)
                handler._handle_event_record(event, stream)
            case "event_wait":
                handler._handle_event_wait(event, stream)
            case "event_synchronize" | "event_query":
                handler._handle_event_wait(event, host)
            case "stream_synchronize" | "stream_query":
                self._order(stream, host)
            case "device_synchronize":
                for each in streams:
                    self._order(self._number("stream", each), host)
            case "record_stream":
                self._readers.setdefault(reads[0], set()).add(record.stream)
            case "free":
                self._free(host, record.stream, writes[0])
            case "pinned_free":
                self._forget(writes[0])
            case "send":  # what receives is ordered after all that the thread did so far
                handler._handle_event_record(handover, host)
            case "receive":
                handler._handle_event_wait(handover, host)

    def _free(self, host: int, stream: int, memory: Range) -> None:
        """Memory goes back to the pool of the stream that it was allocated on.

        That stream may overwrite it at once. If `record_stream` has named others, the allocator
        waits for them first, and no stream does.
        """
        readers = self._readers.pop(memory, set())
        reuse = self._number("stream", stream)
        if readers:
            reuse = self._number("stream", ~next(self._fresh))
            for before in (stream, *readers):
                self._order(self._number("stream", before), reuse)
        self._order(host, reuse)
        self._access(reuse, f"reuse of freed memory on stream {stream}", (), [memory])
        if readers:
            self._forget(memory)

    def _forget(self, memory: Range) -> None:
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
    for ``workers``. Records at positions ``without``, waits that are to be missed, are left out.
    """
    devices: dict[int, int] = {}  # the first that each thread used
    for record in trace:
        if record.device >= 0:
            devices.setdefault(record.thread, record.device)
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
        checker.feed(record, thread, streams[device])
        yield from checker.races[num_known:]


def _sized(ranges: Iterable[Range]) -> list[Range]:
    return [(begin, end - begin) for begin, end in ranges]
