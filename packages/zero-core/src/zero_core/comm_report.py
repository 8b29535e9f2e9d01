"""What a rank has sent in a step, counted call by call: the measured side of `zero_core.traffic`.

Each collective of the engine's own counts itself when it is called, in whatever thread. A rank
that reads another's bytes in shared memory counts as one that is sent them, within the node.
Counting ends with the step: what comes after it (an evaluation, say) belongs to the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from zero_core.traffic import Links, Traffic

__all__ = ["FACTS", "GRADIENTS", "PARAMETERS", "Meter", "Placement"]

PARAMETERS, GRADIENTS, FACTS = "parameters", "gradients", "facts of the step"
_ORDER = [PARAMETERS, GRADIENTS, FACTS]


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a group are.

    Attributes:
        rank: this rank within the group.
        nodes: the node of each rank of the group.
    """

    rank: int
    nodes: tuple[int, ...]

    @classmethod
    def regular(cls, rank: int, world_size: int, per_node: int) -> Placement:
        """Of ``world_size`` ranks, each ``per_node`` consecutive ones share a node."""
        return cls(rank, tuple(r // per_node for r in range(world_size)))

    @property
    def near(self) -> int:
        """Other ranks of the group in this rank's node."""
        return self.nodes.count(self.nodes[self.rank]) - 1

    @property
    def per_node(self) -> int:
        """How many consecutive ranks of the group share a node, if all nodes are alike; else 1."""
        size = self.near + 1
        runs = [self.nodes[i : i + size] for i in range(0, len(self.nodes), size)]
        is_regular = all(len(run) == size and len(set(run)) == 1 for run in runs)
        is_apart = len({run[0] for run in runs}) == len(runs)
        return size if is_regular and is_apart else 1

    def direct(self, slice_bytes: int) -> tuple[int, int]:
        """Bytes sent (within the node, between nodes) when each other rank is sent a slice."""
        return self.near * slice_bytes, (len(self.nodes) - 1 - self.near) * slice_bytes

    def links(self, *, is_ring: bool) -> Links:
        """What the group's gathers cross."""
        return Links(len(self.nodes), self.per_node, is_ring)

    def among(self, ranks: Sequence[int]) -> Placement:
        """The placement of a subgroup that this rank is in."""
        return Placement(list(ranks).index(self.rank), tuple(self.nodes[r] for r in ranks))


class Meter:
    """Adds up what this rank sends in a step."""

    def __init__(self, world_size: int = 1, ranks_per_node: int = 1) -> None:
        self._ring = Links(world_size, ranks_per_node, is_ring=True)
        self._lock = threading.Lock()  # the lanes count, too
        self._open: dict[tuple[str, str], list[int]] = {}
        self._last: tuple[Traffic, ...] = ()

    def add(self, collective: str, content: str, sent: tuple[int, int]) -> None:
        """One call, and the bytes that it sends within the node and between nodes."""
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

    def end_step(self) -> None:
        """What was added since the last call is the last step's."""
        with self._lock:
            rows, self._open = self._open, {}
        ordered = sorted(rows.items(), key=lambda row: (_ORDER.index(row[0][1]), row[0][0]))
        self._last = tuple(Traffic(*key, *counts) for key, counts in ordered)

    def report(self) -> tuple[Traffic, ...]:
        """The last step's rows, parameters first; none before a step has ended."""
        return self._last
