"""Messages of two numbers between the processes of a host, each one write to a pipe.

gloo sends a few bytes in several notes, each of which wakes its thread. That thread polls while
another one holds the lock of the connection, so where ranks have one core each a message took a
tick of the scheduler, 4 ms. A pipe costs two short calls, and its end shows that its writer died.

A message is found by its sender, its tag and its number among those. So each letter gets its own
message, whoever reads it from the pipe, in whatever order the letters are waited for.

[Note: interrupts]
Ctrl-C raises between two calls in the main thread. What is read from a pipe is therefore kept by
the same call in C, and sorted in steps that may be repeated. A reader that was interrupted finds
its own mark and goes on; others wait for it.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import stat
import struct
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from itertools import chain, count, repeat
from threading import Condition, RLock, get_ident

_log = logging.getLogger(__name__)

Letter = tuple[int, int, int]
"""A message that is expected: its peer, tag and number."""

_MESSAGE = struct.Struct("=qqqq")
"""Tag, number, and what it says. Below ``PIPE_BUF``: written at once or not at all."""
_MAX_READ = 2048 * _MESSAGE.size
_FULL_S = 0.01
"""Longest time between two tries to write to a full pipe."""
_MAX_POLL_S = 3600.0


class Mailbox:
    """This rank's messages from and to its peers. Any thread may use it.

    Attributes:
        ends: the descriptors that peers open to write to this rank, until `begin`.
    """

    def __init__(self, timeout_s: float) -> None:
        """Make it without peers. ``timeout_s`` is the longest wait for one."""
        self._timeout_s = timeout_s
        self._descriptors: set[int] = set()
        weakref.finalize(self, _close, self._descriptors)
        _mailboxes.add(self)
        self.ends: dict[int, int] = {}
        self._readers: dict[int, int] = {}
        self._writers: dict[int, int] = {}
        self._peer_of: dict[int, int] = {}
        self._poll: select.poll  # of the readers; Windows has none
        self._sent: defaultdict[tuple[int, int], count[int]] = defaultdict(count)
        self._expected: defaultdict[tuple[int, int], count[int]] = defaultdict(count)
        self._raw: deque[tuple[int, tuple[int, int, int, int]]] = deque()  # read, not sorted
        self._lock = RLock()  # of all that follows
        self._changed = Condition(self._lock)
        self._reader: int | None = None  # the one thread that reads
        self._ended: set[int] = set()  # peers
        self._contents: dict[Letter, tuple[int, int]] = {}

    def make_pipes(self, peers: Iterable[int]) -> None:
        """Make the pipes that ``peers`` write to. Raise OSError where that is not possible."""
        self._poll = select.poll()
        for peer in peers:
            self._readers[peer], self.ends[peer] = pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._descriptors.update(pipe)

    def connect(self, peer: int, pid: int, end: int) -> bool:
        """Open the pipe to ``peer``: the ``end`` of its process. Return whether that worked."""
        try:
            writer = os.open(f"/proc/{pid}/fd/{end}", os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                _log.warning("cannot reach process %d by a pipe: %s", pid, error)
            return False
        self._descriptors.add(writer)
        self._writers[peer] = writer
        return stat.S_ISFIFO(os.fstat(writer).st_mode)  # else the peer has failed since

    def begin(self, peers: Collection[int]) -> None:
        """Close all but the pipes from and to ``peers``, which have connected."""
        self.ends.clear()
        self._writers = {peer: end for peer, end in self._writers.items() if peer in peers}
        self._readers = {peer: end for peer, end in self._readers.items() if peer in peers}
        kept = {*self._writers.values(), *self._readers.values()}
        _close(self._descriptors - kept)
        self._descriptors &= kept
        self._peer_of = {reader: peer for peer, reader in self._readers.items()}
        for reader in self._peer_of:
            self._poll.register(reader, select.POLLIN)

    def forked(self) -> None:
        """Close the pipes in a child of this process, or peers would not see the process end."""
        _close(self._descriptors)
        self._descriptors.clear()

    def post(self, peer: int, tag: int, first: int, second: int) -> None:
        """Send a message. One to a peer that has ended is lost.

        Raises:
            RuntimeError: the peer has read nothing for too long.
        """
        message, deadline = _MESSAGE.pack(tag, next(self._sent[peer, tag]), first, second), None
        while True:
            try:
                os.write(self._writers[peer], message)
                return
            except BrokenPipeError:
                return
            except BlockingIOError:  # it is full: the peer may be waiting for this rank likewise
                deadline = deadline or time.monotonic() + self._timeout_s
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"rank {peer} has read no message for {self._timeout_s:g} s"
                    ) from None
                with self._lock:
                    may_read = self._become_reader(_FULL_S)
                if may_read:
                    self._read(_FULL_S)

    def expect(self, peer: int, tag: int) -> Letter:
        """Return a letter for the next message of ``peer`` with ``tag``."""
        return peer, tag, next(self._expected[peer, tag])

    def wait(self, letter: Letter) -> tuple[int, int]:
        """Wait for a letter, and return its numbers. Once.

        Raises:
            RuntimeError: its peer has ended, or sent none for too long.
        """
        peer, deadline = letter[0], None
        while True:
            with self._lock:
                self._sort()
                found = self._contents.pop(letter, None)
                if found is not None:
                    return found
                if peer in self._ended:
                    raise RuntimeError(
                        f"Connection closed by peer: rank {peer} ended or dropped its engine"
                    )
                now = time.monotonic()
                deadline = deadline or now + self._timeout_s
                if now >= deadline:
                    raise RuntimeError(
                        f"Timed out: no message of rank {peer} for {self._timeout_s:g} s"
                    )
                may_read = self._become_reader(deadline - now)
            if may_read:
                self._read(min(deadline - now, _MAX_POLL_S))

    def _become_reader(self, seconds: float) -> bool:
        """Return whether this thread is to read. If another one is, wait until it has read."""
        if self._reader in (None, get_ident()):
            self._reader = get_ident()
            return True
        self._changed.wait(seconds)
        return False

    def _read(self, seconds: float) -> None:
        """Read and sort what has arrived, or arrives first within ``seconds``."""
        try:
            for descriptor, event in self._poll.poll(seconds * 1000):
                peer = self._peer_of[descriptor]
                if event & select.POLLIN:
                    data = map(os.read, (descriptor,), (_MAX_READ,))
                    messages = chain.from_iterable(map(_MESSAGE.iter_unpack, data))
                    self._raw.extend(zip(repeat(peer), messages))  # see [Note: interrupts]
                else:
                    self._poll.unregister(descriptor)
                    with self._lock:
                        self._ended.add(peer)
        finally:
            with self._lock:
                self._sort()
                self._reader = None
                self._changed.notify_all()

    def _sort(self) -> None:
        while self._raw:
            peer, (tag, number, first, second) = self._raw[0]
            self._contents[peer, tag, number] = first, second
            self._raw.popleft()


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


_mailboxes = weakref.WeakSet[Mailbox]()


def _forked() -> None:
    for mailbox in list(_mailboxes):
        mailbox.forked()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)
