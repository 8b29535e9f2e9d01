"""Bytes that a rank sends in the collectives of an optimizer step.

`Links` computes the bytes of one collective from its tensors' bytes. A result is a pair: bytes sent
to ranks of the same node, and bytes sent to other nodes. A read from another rank's shared memory
counts as bytes sent by that rank.

`Meter` adds up the bytes of a step's collectives, which `zero_core.footprint` predicts.
Collectives after a step (for example in an evaluation) count towards the next step.
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
"""Pairs (collective, content) that a `Meter` counts, in the order of its rows."""


@dataclass(frozen=True)
class Traffic:
    """Transfers of one ``collective`` and ``content`` in all micro-steps of an optimizer step."""

    # "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "to_host" or "to_device"
    collective: str
    content: str  # a constant at the top of this module
    num_calls: int
    within_node_bytes: int = 0  # sent to ranks of the same node (in a ring: mean over ranks)
    between_nodes_bytes: int = 0  # sent to other nodes (in a ring: mean over ranks)
    host_link_bytes: int = 0  # sent between a rank's device and its host

    @property
    def sent_bytes(self) -> int:
        return self.within_node_bytes + self.between_nodes_bytes + self.host_link_bytes


@dataclass(frozen=True)
class Links:
    """Layout of ranks over nodes, and the algorithms of collectives."""

    world_size: int
    ranks_per_node: int  # ranks of a node have consecutive numbers
    # True for accelerators: their library is assumed to all-gather along a ring. False for hosts:
    # a shard is sent once to each other node and forwarded within that node.
    is_ring: bool
    is_sequential: bool = False  # gradients are added rank by rank, not first per node

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    def direct(self, slice_bytes: int) -> tuple[int, int]:
        """Return the bytes of sending a slice to each other rank, as in an all-to-all."""
        near = self.ranks_per_node - 1
        return near * slice_bytes, (self.world_size - 1 - near) * slice_bytes

    def gather(self, shard_bytes: int) -> tuple[int, int]:
        if self.is_ring:  # one rank per node sends to the next node: take the mean over ranks
            total = (self.world_size - 1) * shard_bytes
            between = total // self.ranks_per_node if self.ranks_per_node < self.world_size else 0
            return total - between, between
        # Send the shard to one rank per other node. Within a node, send own and arrived shards.
        near = self.ranks_per_node - 1
        return near * self.num_nodes * shard_bytes, (self.num_nodes - 1) * shard_bytes

    def all_reduce(self, nbytes: int) -> tuple[int, int]:
        """Return the bytes of `ControlGroup.sum`: two ring passes or, on hosts, direct messages."""
        return self.gather(2 * nbytes // self.world_size) if self.is_ring else self.direct(nbytes)

    @property
    def sums_in_two_levels(self) -> bool:
        """Whether gradients are first summed per node: [Note: two levels] in `comm.device`."""
        is_apart = 1 < self.ranks_per_node < self.world_size
        return self.is_ring and is_apart and not self.is_sequential

    @property
    def codes_slices(self) -> bool:
        """Whether reductions can encode slices. An accelerator encodes all slices or none."""
        is_mixed = self.is_ring and self.ranks_per_node > 1 and not self.sums_in_two_levels
        return self.num_nodes > 1 and not is_mixed

    def reduction(self, slice_bytes: int, sum_bytes: int) -> tuple[int, int]:
        """Return the bytes of a reduction. ``sum_bytes``: size of the sum of a node's slices."""
        if not self.sums_in_two_levels:
            return self.direct(slice_bytes)
        near, others = self.ranks_per_node - 1, self.num_nodes - 1
        return near * self.num_nodes * slice_bytes, others * sum_bytes

    def among(self, ranks: Sequence[int]) -> Links:
        """Return the links of ``ranks``, as separate nodes unless nodes have equally long runs."""
        nodes = [rank // self.ranks_per_node for rank in ranks]
        size = nodes.count(nodes[0])
        runs = [nodes[i : i + size] for i in range(0, len(nodes), size)]
        is_even = all(len(run) == size and len(set(run)) == 1 for run in runs)
        is_apart = len({run[0] for run in runs}) == len(runs)
        per_node = size if is_even and is_apart else 1
        return Links(len(ranks), per_node, self.is_ring, self.is_sequential)


class Meter:
    """Counter of the bytes that this rank sends in a step."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self._lock = threading.Lock()  # the threads of `HostQueues` call `add`, too
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
        """End the step, so that `report` returns its rows."""
        with self._lock:
            rows, self._open = self._open, {}
        self._last = tuple(Traffic(*key, *rows[key]) for key in ORDER if key in rows)

    def report(self) -> tuple[Traffic, ...]:
        """Return the last step's rows in the order of `ORDER`. Empty until a step has ended."""
        return self._last
