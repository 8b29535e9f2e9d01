"""Unordered accesses to the same memory, found in a trace of streams and threads.

The rules are those of ``torch.cuda._sanitizer``. Every stream has a vector clock, and events carry
clocks between streams. Two accesses must be ordered if one of them writes. The bounds of all
address ranges in the trace split memory into **parts**, which are checked separately.

A host thread counts as one more stream. A job is ordered after everything its launching thread did
before. Synchronising with an event orders only the calling thread. Trace records "send" and
"receive" describe synchronisation between threads, such as a queue or a lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from torch.cuda._sanitizer import EventHandler

from support.fake_cuda import TraceRecord

Range = tuple[int, int]
"""Address and number of bytes of a piece of memory."""


class _Access(NamedTuple):
    """An access by an operation. ``number`` is the operation's sequence number in the trace."""

    stream: int
    number: int
    operation: str


@dataclass(frozen=True)
class Race:
    address: int  # address of the first byte
    first: str  # the earlier operation in the trace, with its stream
    second: str  # the later operation, with its stream

    def __str__(self) -> str:
        return f"{self.second} is not ordered after {self.first} (memory at {self.address:#x})"


class HappensBefore:
    """Checks the trace records of one device in call order."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self.races: list[Race] = []  # one per pair of descriptions, however often it occurs
        self._bounds = sorted({bound for a, numel in ranges for bound in (a, a + numel)})
        self._handler = EventHandler()
        self._numbers: dict[tuple[str, int], int] = {}
        self._fresh = count(1)
        self._seen: set[tuple[str, str]] = set()
        self._last_write: dict[int, _Access] = {}  # by part
        self._reads: dict[int, list[_Access]] = {}  # reads since the last write, by part
        self._readers: dict[Range, set[int]] = {}  # streams passed to `record_stream`, by block

    def feed(self, record: TraceRecord, thread: int, streams: Iterable[int]) -> None:
        """Check the next record, a call by ``thread``. ``streams`` are the device's streams."""
        reads, writes = _sized(record.reads), _sized(record.writes)
        host, stream = self._number("thread", thread), self._number("stream", record.stream)
        # each recording of an event gets a separate clock
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
            case "send":  # the receiver is ordered after everything the sender did before
                handler._handle_event_record(handover, host)
            case "receive":
                handler._handle_event_wait(handover, host)

    def _free(self, host: int, stream: int, memory: Range) -> None:
        """Record the block's reuse as a write, after its stream and users by `record_stream`."""
        readers = self._readers.pop(memory, set())
        reuse = self._number("stream", stream)
        if readers:
            reuse = self._number("stream", ~next(self._fresh))
            for before in (stream, *readers):
                self._order(self._number("stream", before), reuse)
        self._order(host, reuse)
        self._access(reuse, f"reuse of freed memory on stream {stream}", (), [memory])
        if readers:  # the block's next contents are unrelated
            for part in self._parts(memory):
                self._last_write.pop(part, None)
                self._reads.pop(part, None)

    def _parts(self, memory: Range) -> range:
        start, nbytes = memory
        return range(bisect_left(self._bounds, start), bisect_left(self._bounds, start + nbytes))

    def _access(
        self, stream: int, operation: str, reads: Iterable[Range], writes: Iterable[Range]
    ) -> None:
        # Bypasses the handler's method, which records a Python stack for each operation.
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
    """Return the innermost frame in ``roots`` of an explicit wait or `record_stream`, else ""."""
    if record.kind not in _WAITS or record.name:
        return ""
    return next(
        (frame for frame in record.stack.splitlines() if frame.startswith(tuple(roots))), ""
    )


def find_races(
    trace: Sequence[TraceRecord], *, workers: Collection[int] = (), without: Collection[int] = ()
) -> Iterator[Race]:
    """Yield the races in a trace of the fake CUDA. ``without``: positions of records to ignore.

    Threads in ``workers`` are tracked separately. The others count as one thread, because they
    never run at the same time. For example, a caller waits for its autograd thread.
    """
    devices: dict[int, int] = {}  # the first device that each thread used
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
            continue
        if record.stream >= 0:
            streams[device].add(record.stream)
        thread = record.thread if record.thread in workers else 0
        checker = checkers[device]
        num_known = len(checker.races)
        checker.feed(record, thread, streams[device])
        yield from checker.races[num_known:]


def _sized(ranges: Iterable[Range]) -> list[Range]:
    return [(begin, end - begin) for begin, end in ranges]
