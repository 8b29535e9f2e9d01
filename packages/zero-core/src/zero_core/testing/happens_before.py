"""Accesses to the same memory that nothing orders, found in a trace of streams and threads.

The rules are those of ``torch.cuda._sanitizer``: every stream has a vector clock, events carry
clocks from one stream to another, and two accesses of which one writes must be ordered. Memory is
compared by pages of `PAGE_BYTES`, because views of one buffer overlap.

A thread of the host is one more stream. What a thread launches is ordered after what the thread did
before. A thread that synchronizes with an event is ordered after it, and no other thread is. Where
threads order themselves (a queue, a lock), the trace says so by `HappensBefore.hand_over`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from torch.cuda._sanitizer import EventHandler, UnsynchronizedAccessError

PAGE_BYTES = 512
"""Bytes of a page. Buffers of an engine begin at multiples of it on accelerators."""

Range = tuple[int, int]
"""Address and number of bytes."""


@dataclass(frozen=True)
class Race:
    """Two accesses to one page that nothing orders.

    Attributes:
        page: address of the page.
        first: operation that is first in the trace, with its stream.
        second: the other one.
    """

    page: int
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.second} is not ordered after {self.first} (page at {self.page:#x})"


@dataclass
class HappensBefore:
    """Checks a trace, record by record, in the order in which the host made the calls.

    Streams, threads and events are named by any integers. Those of streams and of threads may
    coincide.

    Attributes:
        races: found so far, one for each pair of operations.
    """

    races: list[Race] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._handler = EventHandler()
        self._numbers: dict[tuple[str, int], int] = {}
        self._fresh = count(1)
        self._seen: set[tuple[str, str]] = set()
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

    def hand_over(self, source: int, target: int) -> None:
        """What a thread did so far comes before what another thread does from now on."""
        self._order(self._thread(source), self._thread(target))

    def record_stream(self, memory: Range, stream: int) -> None:
        """Memory is also used on a stream, besides the one that it was allocated on."""
        self._readers.setdefault(memory, set()).add(stream)

    def free(self, thread: int, stream: int, memory: Range) -> None:
        """Memory goes back to the pool of the stream that it was allocated on.

        From now on that stream may overwrite it, after those that `record_stream` has named.
        """
        target = self._stream(stream)
        for reader in self._readers.pop(memory, ()):
            self._order(self._stream(reader), target)
        self._order(self._thread(thread), target)
        self._access(target, f"reuse of freed memory on stream {stream}", (), [memory])

    def _access(
        self, stream: int, operation: str, reads: Iterable[Range], writes: Iterable[Range]
    ) -> None:
        written = {page for memory in writes for page in _pages(memory)}
        read = {page for memory in reads for page in _pages(memory)} - written
        names = {page: [""] for page in read | written}
        found = self._handler._handle_kernel_launch(stream, read, written, set(), operation, names)
        for error in found:
            assert isinstance(error, UnsynchronizedAccessError)
            first, second = error.previous_access.operator, error.current_access.operator
            if (first, second) not in self._seen:
                self._seen.add((first, second))
                self.races.append(Race(error.data_ptr * PAGE_BYTES, first, second))

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
            if kind != "event":
                self._handler._handle_stream_creation(self._numbers[key])
        return self._numbers[key]


def _pages(memory: Range) -> range:
    start, nbytes = memory
    return range(start // PAGE_BYTES, -(-(start + nbytes) // PAGE_BYTES))
