"""Bytes that a rank sends in a step: the links that a collective crosses, and their meter.

`Links` gives the bytes of one collective, for a plan and for the meter alike. A pair of bytes is
what a rank sends within its node and what it sends to other nodes. A rank that reads another's
bytes in shared memory counts as one that is sent them.

`Meter` counts call by call, in whatever thread: what a plan (`zero_core.footprint`) foretells.
What comes after a step (an evaluation, say) belongs to the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

PARAMETERS, GRADIENTS, FACTS = "parameters", "gradients", "facts of the step"
WHOLES = "whole parameters"
ORDER = [
    ("all_gather", PARAMETERS),
    ("reduce_scatter", GRADIENTS),
    ("all_to_all", GRADIENTS),
    ("all_gather", GRADIENTS),
    ("all_reduce", FACTS),
    ("all_to_all", WHOLES),
]
"""Of the rows of a meter and of a plan."""


@dataclass(frozen=True)
class Traffic:
    """One kind of transfer in one optimizer step, all micro-steps included."""

    # "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "to_host" or "to_device"
    collective: str
    content: str  # what is carried
    num_calls: int  # per step
    within_node_bytes: int = 0  # that a rank sends to ranks of its own node (mean over ranks)
    between_nodes_bytes: int = 0  # that it sends to other nodes
    host_link_bytes: int = 0  # between its device and its host

    @property
    def sent_bytes(self) -> int:
        return self.within_node_bytes + self.between_nodes_bytes + self.host_link_bytes


@dataclass(frozen=True)
class Links:
    """Layout of ranks over nodes, and the way of a gather."""

    world_size: int
    ranks_per_node: int  # these have consecutive numbers
    # Ranks are accelerators, whose library gathers round a ring, as NCCL does. Otherwise a shard is
    # sent to each other node once and handed on there, as the engine does on gloo.
    is_ring: bool
    is_sequential: bool = False  # gradients are added one after another, whatever the nodes are

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    def direct(self, slice_bytes: int) -> tuple[int, int]:
        """Every other rank gets its own slice, as in all-to-alls and `reduction`s of one level."""
        near = self.ranks_per_node - 1
        return near * slice_bytes, (self.world_size - 1 - near) * slice_bytes

    def gather(self, shard_bytes: int) -> tuple[int, int]:
        if self.is_ring:  # one rank of a node sends to the next node
            total = (self.world_size - 1) * shard_bytes
            between = total // self.ranks_per_node if self.ranks_per_node < self.world_size else 0
            return total - between, between
        # To one rank of each other node, which hands on what arrived, besides its own shard.
        near = self.ranks_per_node - 1
        return near * self.num_nodes * shard_bytes, (self.num_nodes - 1) * shard_bytes

    def all_reduce(self, nbytes: int) -> tuple[int, int]:
        """A control group's sum: both halves of a ring, or all to everyone."""
        return self.gather(2 * nbytes // self.world_size) if self.is_ring else self.direct(nbytes)

    @property
    def sums_in_two_levels(self) -> bool:
        """Whether gradients are summed within each node first: [Note: two levels] of `device`."""
        is_apart = 1 < self.ranks_per_node < self.world_size
        return self.is_ring and is_apart and not self.is_sequential

    @property
    def codes_slices(self) -> bool:
        """Whether reductions may code what goes to other nodes.

        An accelerator's library takes one way for all slices of an exchange: where those for its
        own node travel with them, none is coded.
        """
        is_mixed = self.is_ring and self.ranks_per_node > 1 and not self.sums_in_two_levels
        return self.num_nodes > 1 and not is_mixed

    def reduction(self, slice_bytes: int, sum_bytes: int) -> tuple[int, int]:
        """``sum_bytes`` are those of a sum of slices of ``slice_bytes`` each."""
        if not self.sums_in_two_levels:
            return self.direct(slice_bytes)
        near, others = self.ranks_per_node - 1, self.num_nodes - 1
        return near * self.num_nodes * slice_bytes, others * sum_bytes

    def among(self, ranks: Sequence[int]) -> Links:
        """Return the links among ``ranks``. Spread unevenly, each rank counts as a node."""
        nodes = [rank // self.ranks_per_node for rank in ranks]
        size = nodes.count(nodes[0])
        runs = [nodes[i : i + size] for i in range(0, len(nodes), size)]
        is_even = all(len(run) == size and len(set(run)) == 1 for run in runs)
        is_apart = len({run[0] for run in runs}) == len(runs)
        per_node = size if is_even and is_apart else 1
        return Links(len(ranks), per_node, self.is_ring, self.is_sequential)


class Meter:
    """Adds up what this rank sends in a step, over ``links``."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self._lock = threading.Lock()  # threads of queues count, too
        self._open: dict[tuple[str, str], list[int]] = {}
        self._last: tuple[Traffic, ...] = ()

    def add(self, collective: str, content: str, sent: tuple[int, int]) -> None:
        assert (collective, content) in ORDER
        if self.links.world_size == 1:
            return
        with self._lock:
            row = self._open.setdefault((collective, content), [0, 0, 0])
            row[0] += 1
            row[1] += sent[0]
            row[2] += sent[1]

    def end_step(self) -> None:
        """Close the step: rows added since the last call are the last step's."""
        with self._lock:
            rows, self._open = self._open, {}
        self._last = tuple(Traffic(*key, *rows[key]) for key in ORDER if key in rows)

    def report(self) -> tuple[Traffic, ...]:
        """Return the last step's rows, in the order of a plan's. None before a step has ended."""
        return self._last
