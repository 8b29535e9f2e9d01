"""Simulation of a step whose lanes overlap as in the engine's schedule.

Each piece of work has a duration, a resource, and earlier work that it depends on.

[Note: resources]
main      the computing thread, or the compute stream: in program order
link      collectives between ranks: in launch order
down      copies to the host: in launch order
host      the host's updates: among ready ones the lowest ``need``, then program order
up        copies to the device: in the order of "host"
file      reads and writes of NVMe offload: in the order of "host"

If ranks compute on the CPU, all running work shares ``cores``. If the running work asks for more,
all work that uses cores is slowed down by the same factor.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

IN_ORDER = ("main", "link", "down")
BY_NEED = ("host", "up", "file")


@dataclass(eq=False, slots=True)
class Work:
    """Piece of work that takes ``seconds`` on a resource, after all of ``after`` is done.

    ``cores`` are kept busy meanwhile. On host, up and file the lowest ``need`` goes first.
    `Schedule.run` sets ``start`` and ``stop``.
    """

    resource: str
    lane: str
    what: str
    seconds: float
    after: list[Work] = field(default_factory=list)
    cores: float = 0.0
    need: int = 0
    start: float = 0.0
    stop: float = -1.0
    _num_awaited: int = 0
    _left: float = 0.0


class Schedule:
    """Pieces of work in program order, which `run` simulates."""

    def __init__(self, cores: float | None) -> None:
        self._cores = cores
        self.work: list[Work] = []

    def add(
        self,
        resource: str,
        lane: str,
        what: str,
        seconds: float,
        after: Iterable[Work | None] = (),
        *,
        cores: float = 0.0,
        need: int = 0,
    ) -> Work:
        awaited = [work for work in after if work is not None]
        self.work.append(Work(resource, lane, what, seconds, awaited, cores, need))
        return self.work[-1]

    def run(self) -> None:
        """Set start and stop of all work. Work after later work of its resource: ValueError."""
        followers: dict[int, list[Work]] = {}
        queues: dict[str, deque[Work]] = {name: deque() for name in IN_ORDER}
        ready: dict[str, list[tuple[int, int, Work]]] = {name: [] for name in BY_NEED}

        place = {id(work): number for number, work in enumerate(self.work)}

        def offer(work: Work) -> None:
            if work.resource in ready and not work._num_awaited:
                heapq.heappush(ready[work.resource], (work.need, place[id(work)], work))

        for work in self.work:
            work._num_awaited, work._left = len(work.after), work.seconds
            for earlier in work.after:
                followers.setdefault(id(earlier), []).append(work)
            if work.resource in queues:
                queues[work.resource].append(work)
            offer(work)
        running: dict[str, Work] = {}
        now, num_done = 0.0, 0
        while num_done < len(self.work):
            for name, queue in queues.items():
                if name not in running and queue and not queue[0]._num_awaited:
                    running[name] = queue.popleft()
                    running[name].start = now
            for name, waiting in ready.items():
                if name not in running and waiting:
                    running[name] = heapq.heappop(waiting)[2]
                    running[name].start = now
            if not running:
                raise ValueError("work waits for work that cannot come before it")
            asked = sum(work.cores for work in running.values())
            slowed = 1.0 if self._cores is None or asked <= self._cores else asked / self._cores
            pace = {name: slowed if w.cores else 1.0 for name, w in running.items()}
            passed = min(w._left * pace[name] for name, w in running.items())
            now += passed
            for name, work in list(running.items()):
                work._left -= passed / pace[name]
                if work._left > 1e-12:
                    continue
                del running[name]
                work.stop = now
                num_done += 1
                for follower in followers.get(id(work), ()):
                    follower._num_awaited -= 1
                    offer(follower)
