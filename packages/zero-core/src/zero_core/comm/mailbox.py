"""Messages of two numbers between the processes of a host, each one write to a pipe.

gloo sends a few bytes in several notes, each of which wakes its thread. That thread polls while
another one holds the lock of the connection, so where ranks have one core each a message took a
tick of the scheduler, 4 ms. A pipe costs two short calls, and its end tells that its writer died.

A message is found by its sender and its tag. Those of one tag arrive in the order in which they
were posted, and go to the letters in the order in which these were made.
"""

from __future__ import annotations

import os
import select
import struct
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable
from threading import Lock

_MESSAGE = struct.Struct("=qqq")
"""The tag and the two numbers. Below ``PIPE_BUF``, so that it is written at once or not at all."""
_MAX_READ = 2048 * _MESSAGE.size
_BESIDE_S = 0.01
"""Time after which a thread that waits beside a reading one looks whether its letter came."""
_FULL_S = 0.01
"""Time between two tries to write to a full pipe."""
_MAX_POLL_S = 3600.0


class Letter:
    """A message that is expected of ``peer``.

    Attributes:
        content: its two numbers, None until it has arrived.
    """

    __slots__ = ("content", "peer")

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.content: tuple[int, int] | None = None


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
        self.ends: dict[int, int] = {}
        self._readers: dict[int, int] = {}
        self._writers: dict[int, int] = {}
        self._poll = select.poll()
        self._reading = Lock()  # held by the one thread that reads
        self._ended: set[int] = set()  # peers
        self._sorting = Lock()  # of what follows, by peer and tag
        self._letters: dict[tuple[int, int], deque[Letter]] = {}
        self._early: dict[tuple[int, int], deque[tuple[int, int]]] = {}

    def make_pipes(self, peers: Iterable[int]) -> None:
        """Make the pipes that ``peers`` write to. Raise OSError where that is not possible."""
        for peer in peers:
            self._readers[peer], self.ends[peer] = pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._descriptors.update(pipe)

    def connect(self, peer: int, pid: int, end: int) -> bool:
        """Open the pipe to ``peer``: the ``end`` of its process. Return whether that worked."""
        try:
            writer = os.open(f"/proc/{pid}/fd/{end}", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        self._descriptors.add(writer)
        self._writers[peer] = writer
        return True

    def begin(self, peers: Collection[int]) -> None:
        """Close all but the pipes from and to ``peers``, which have connected."""
        self._writers = {peer: end for peer, end in self._writers.items() if peer in peers}
        self._readers = {peer: end for peer, end in self._readers.items() if peer in peers}
        kept = {*self._writers.values(), *self._readers.values()}
        _close(self._descriptors - kept)
        self._descriptors &= kept
        self._peer_of = {reader: peer for peer, reader in self._readers.items()}
        for reader in self._peer_of:
            self._poll.register(reader, select.POLLIN)

    def post(self, peer: int, tag: int, first: int, second: int) -> None:
        """Send a message. One to a peer that has ended is lost.

        Raises:
            RuntimeError: the peer has read nothing for too long.
        """
        message, deadline = _MESSAGE.pack(tag, first, second), None
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
                with self._reading:
                    self._read(_FULL_S)

    def expect(self, peer: int, tag: int) -> Letter:
        """Return a letter for the next message of ``peer`` with ``tag`` that has none."""
        letter, key = Letter(peer), (peer, tag)
        with self._sorting:
            early = self._early.get(key)
            if early:
                letter.content = early.popleft()
            else:
                self._letters.setdefault(key, deque()).append(letter)
        return letter

    def wait(self, letter: Letter) -> tuple[int, int]:
        """Wait for a letter, and return its numbers.

        Raises:
            RuntimeError: its peer has ended, or sent none for too long.
        """
        deadline = None
        while letter.content is None:
            now = time.monotonic()
            deadline = deadline or now + self._timeout_s
            if now > deadline:
                raise RuntimeError(f"Timed out: no message for {self._timeout_s:g} s")
            if self._reading.acquire(timeout=_BESIDE_S):
                try:
                    if letter.content is None:  # no other thread has sorted it meanwhile
                        if letter.peer in self._ended:
                            raise RuntimeError(
                                "Connection closed by peer: "
                                f"rank {letter.peer} ended or dropped its engine"
                            )
                        self._read(min(deadline - now, _MAX_POLL_S))
                finally:
                    self._reading.release()
        return letter.content

    def _read(self, seconds: float) -> None:
        """Sort what has arrived, or arrives first within ``seconds``."""
        for descriptor, event in self._poll.poll(seconds * 1000):
            peer = self._peer_of[descriptor]
            if not event & select.POLLIN:
                self._poll.unregister(descriptor)
                self._ended.add(peer)
                continue
            data = os.read(descriptor, _MAX_READ)
            with self._sorting:
                for tag, first, second in _MESSAGE.iter_unpack(data):
                    letters = self._letters.get((peer, tag))
                    if letters:
                        letters.popleft().content = first, second
                    else:
                        self._early.setdefault((peer, tag), deque()).append((first, second))


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
