"""Collectives of the control group among hosts, by direct messages between each pair of ranks.

[Note: messages of different sizes never meet]
Ranks that take different branches start different exchanges. gloo's collectives match them by their
order alone, and where two of different sizes meet, gloo ends the process of the receiver with
``std::terminate``. Here a message is found by its sender and its tag, and the tag has the exchange
and the number of bytes. So ranks on different branches wait for each other, until the wait's
timeout raises an error that names them. Only sizes that differ by a multiple of `_NUM_SIZES` bytes
share a tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_core.comm.fused_sum import add_in_rank_order
from zero_core.comm.p2p import Kind, Messages, tag_of, wait_all
from zero_core.protocols import Work

_NUM_SIZES = 32_749
"""The largest prime below 2**15: tags are 31 bits."""


class HostLibrary:
    """`zero_core.comm.device_library.ControlLibrary` over messages between hosts."""

    def __init__(self, messages: Messages, *, rank: int, world_size: int) -> None:
        """Every rank makes those of a process group in one order."""
        self.rank = rank
        self.world_size = world_size
        self._messages = messages
        self._channel = messages.next_channel()
        self._peers = [(rank + k) % world_size for k in range(1, world_size)]

    def all_gather(self, out: Tensor, shard: Tensor) -> Work:
        slices = out.view(self.world_size, shard.numel())
        works = [self._receive(slices[p], p, Kind.CONTROL_GATHER) for p in self._peers]
        works += [self._send(shard, p, Kind.CONTROL_GATHER) for p in self._peers]
        if slices[self.rank].data_ptr() != shard.data_ptr():
            slices[self.rank].copy_(shard)
        return _Works(works)

    def exchange(
        self, out: Tensor, parts: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Work:
        given, slots = torch.split(parts, list(sent)), torch.split(out, list(received))
        kind = Kind.CONTROL_EXCHANGE
        works = [self._receive(slots[p], p, kind) for p in self._peers if received[p]]
        works += [self._send(given[p], p, kind) for p in self._peers if sent[p]]
        slots[self.rank].copy_(given[self.rank])
        return _Works(works)

    def all_reduce(self, values: Tensor) -> Work:
        rows = values.new_empty(self.world_size, values.numel())
        rows[self.rank] = values.view(-1)
        works = [self._receive(rows[p], p, Kind.CONTROL_SUM) for p in self._peers]
        works += [self._send(rows[self.rank], p, Kind.CONTROL_SUM) for p in self._peers]
        return _Sum(works, values, rows)

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        """See `ControlLibrary`. A binomial tree: no rank sends more than log2(ranks) times."""
        size = self.world_size
        place = (self.rank - source) % size
        # A rank receives from the one without its lowest bit, and sends to those with lower bits.
        reach = place & -place if place else 1 << (size - 1).bit_length()
        flat = tensor.view(-1)
        if place:
            self._receive(flat, (source + place - reach) % size, Kind.CONTROL_BROADCAST).wait()
        works = []
        while reach > 1:
            reach //= 2
            if place + reach < size:
                target = (source + place + reach) % size
                works.append(self._send(flat, target, Kind.CONTROL_BROADCAST))
        return _Works(works)

    def _send(self, tensor: Tensor, target: int, kind: Kind) -> Work:
        return self._messages.isend(tensor, target, self._tag(tensor, kind))

    def _receive(self, tensor: Tensor, source: int, kind: Kind) -> Work:
        return self._messages.irecv(tensor, source, self._tag(tensor, kind))

    def _tag(self, tensor: Tensor, kind: Kind) -> int:
        return tag_of(self._channel, kind, tensor.nbytes % _NUM_SIZES)


@dataclass(eq=False)
class _Works:
    works: Sequence[Work]

    def wait(self) -> None:
        wait_all(self.works)


@dataclass(eq=False)
class _Sum(_Works):
    values: Tensor
    rows: Tensor

    def wait(self) -> None:
        """Sum in rank order."""
        super().wait()
        first, *others = self.rows
        add_in_rank_order(first, others)
        self.values.copy_(first.view_as(self.values))
