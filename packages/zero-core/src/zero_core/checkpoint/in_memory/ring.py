"""Exchange of copies between nodes: each rank sends its slice to the same rank of the next node."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest

import torch
from torch import Tensor

from zero_core.checkpoint.in_memory.slot import Slot, check_plain_size
from zero_core.checkpoint.safetensors_files import bytes_of
from zero_core.comm.p2p import Messages, wait_all

_BLOCK_BYTES = 8 << 20
_MAX_CARD_BYTES = 128 << 20


class Ring:
    """Connections of a rank with its neighbours among the nodes.

    Attributes:
        target: the rank that keeps this one's copy.
        source: the rank whose copy this one keeps.
    """

    def __init__(self, messages: Messages, *, rank: int, world_size: int, per_node: int) -> None:
        """Every rank makes its own, in one order."""
        self.target = (rank + per_node) % world_size
        self.source = (rank - per_node) % world_size
        self._messages = messages
        self._channel = messages.next_channel()

    def swap(self, slot: Slot, files: Mapping[str, int], marker: bytes) -> None:
        """Send ``files`` (name and bytes) of ``slot`` and its marker, and store the source's.

        Every rank must call it.

        Raises:
            RuntimeError: a neighbour is gone.
        """
        card = _tensor(json.dumps([files, marker.decode()]).encode())
        size = torch.empty(1, dtype=torch.int64)
        self._exchange(torch.tensor([card.numel()]), size)
        if not 0 < int(size) <= _MAX_CARD_BYTES:
            raise RuntimeError(f"rank {self.source} announces {int(size)} bytes about its copy")
        received = torch.empty(int(size), dtype=torch.uint8)
        self._exchange(card, received)
        their_files, their_marker = json.loads(bytes(bytes_of(received)))
        for name, nbytes in their_files.items():
            check_plain_size(name, nbytes)
        slot.invalidate(self.source)
        for out, into in zip_longest(_blocks(slot, files), _blocks(slot, their_files)):
            self._exchange(out, into)
        slot.commit(self.source, their_marker.encode())

    def _exchange(self, given: Tensor | None, into: Tensor | None) -> None:
        works = []
        if into is not None:
            works.append(self._messages.irecv(into, self.source, self._channel))
        if given is not None:
            works.append(self._messages.isend(given, self.target, self._channel))
        wait_all(works)


def _blocks(slot: Slot, files: Mapping[str, int]) -> Iterator[Tensor]:
    """Yield the bytes of each message, where they are in memory."""
    for name, size in files.items():
        data = slot.file(name, size)
        for start in range(0, size, _BLOCK_BYTES):
            yield data[start : start + _BLOCK_BYTES]


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
