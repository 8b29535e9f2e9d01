"""Meter of what a rank sends in a step, call by call: the measured side of `plan.traffic`.

Each collective of the engine's own counts itself when it is called, in whatever thread. A rank
that reads another's bytes in shared memory counts as one that is sent them, within the node.
Counting ends with the step: what comes after it (an evaluation, say) belongs to the next one.
"""

from __future__ import annotations

import threading

from zero_core.comm.links import Links, Traffic

PARAMETERS, GRADIENTS, FACTS = "parameters", "gradients", "facts of the step"
MATRICES = "momenta of matrices"
_ORDER = [
    ("all_gather", PARAMETERS),
    ("reduce_scatter", GRADIENTS),
    ("all_to_all", GRADIENTS),
    ("all_gather", GRADIENTS),
    ("all_reduce", FACTS),
    ("all_gather", MATRICES),
]
"""Of rows, as in a plan."""


class Meter:
    """Adds up what this rank sends in a step."""

    def __init__(self, world_size: int = 1, ranks_per_node: int = 1) -> None:
        self._ring = Links(world_size, ranks_per_node, is_ring=True)
        self._lock = threading.Lock()  # threads of queues count, too
        self._open: dict[tuple[str, str], list[int]] = {}
        self._last: tuple[Traffic, ...] = ()

    def add(self, collective: str, content: str, sent: tuple[int, int]) -> None:
        """One call, and the bytes that it sends within the node and between nodes."""
        assert (collective, content) in _ORDER
        with self._lock:
            row = self._open.setdefault((collective, content), [0, 0, 0])
            row[0] += 1
            row[1] += sent[0]
            row[2] += sent[1]

    def add_all_reduce(self, content: str, nbytes: int) -> None:
        """A sum over all ranks: both halves of it, 2 / world_size of ``nbytes`` to everyone."""
        size = self._ring.world_size
        if size > 1:
            self.add("all_reduce", content, self._ring.ring(2 * nbytes // size))

    def add_all_gather(self, content: str, nbytes: int) -> None:
        """A gather of ``nbytes`` from every rank."""
        if self._ring.world_size > 1:
            self.add("all_gather", content, self._ring.ring(nbytes))

    def end_step(self) -> None:
        """Close the step: rows added since the last call are the last step's."""
        with self._lock:
            rows, self._open = self._open, {}
        self._last = tuple(Traffic(*key, *rows[key]) for key in _ORDER if key in rows)

    def report(self) -> tuple[Traffic, ...]:
        """The last step's rows, in the order of a plan's. None before a step has ended."""
        return self._last
