"""The two slots of a folder in memory, and their exchange between nodes.

A slot has files that are written in place, and markers.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_core.checkpoint.manifest import BUFFERS, is_sealed
from zero_core.checkpoint.safetensors_files import Blocks, arrange, bytes_of
from zero_core.checkpoint.storage import create, no_room, write_all
from zero_core.comm.p2p import Messages, wait_all
from zero_core.errors import CheckpointError
from zero_core.protocols import StateTier

_BLOCK_BYTES = 8 << 20  # of a message
_MAX_CARD_BYTES = 128 << 20
_OWNED = re.compile(r".+-([0-9]{5})\.(?:json|safetensors)")
_ADVICE = (
    "make the memory larger (a container's by --shm-size), give a folder in larger memory as "
    "memory_checkpoint.path, or leave memory_checkpoint out"
)


@dataclass(frozen=True)
class Slice:
    """Elements ``[start, stop)`` of a state of ``tier``, read in blocks of ``block_numel``."""

    tier: StateTier
    name: str
    start: int
    stop: int
    block_numel: int

    @property
    def dtype(self) -> torch.dtype:
        return self.tier.read_state(self.name, self.start, min(self.start + 1, self.stop)).dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start,)

    def __iter__(self) -> Iterator[Tensor]:
        for low in range(self.start, self.stop, self.block_numel):
            yield self.tier.read_state(self.name, low, min(low + self.block_numel, self.stop))


class Slot:
    """A slot that this process writes.

    Its files are mapped: that takes half the time of writing to them. Memory is reserved before, as
    a write to a page for which there is none would end the process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # its files
        self._files: dict[str, Tensor] = {}

    def write(self, name: str, tensors: Mapping[str, Tensor | Blocks]) -> int:
        """Write a safetensors file in place, and return its bytes."""
        header, size, blocks = arrange(tensors)
        into, stop = self.file(name, len(header) + size), len(header)
        into[:stop] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for block in blocks:
            start, stop = stop, stop + block.nbytes
            into[start:stop] = block.view(-1).view(torch.uint8)
        return into.numel()

    def file(self, name: str, size: int) -> Tensor:
        """Return the bytes of a file, as they are in memory. It gets ``size`` of them."""
        found = self._files.get(name)
        if found is None or found.numel() != size:
            try:
                self.folder.mkdir(mode=0o700, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(self.folder / name, flags, 0o600)
                try:
                    os.posix_fallocate(descriptor, 0, size)
                    os.ftruncate(descriptor, size)
                    mapped = mmap.mmap(descriptor, size)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise no_room(self.folder / name, error, _ADVICE) from error
            found = self._files[name] = torch.frombuffer(mapped, dtype=torch.uint8)
        return found

    def size(self, name: str) -> int:
        return self._files[name].numel()

    def invalidate(self, rank: int) -> None:
        """Remove the marker of a rank, before its files are overwritten."""
        self._marker(rank).unlink(missing_ok=True)

    def commit(self, rank: int, marker: bytes) -> None:
        """Put the marker of a rank into place, once all its files are written."""
        aside = self.folder / f".{self._marker(rank).name}"
        aside.unlink(missing_ok=True)
        try:
            with create(aside) as file:
                write_all(file, marker)
        except OSError as error:
            raise no_room(aside, error, _ADVICE) from error
        aside.rename(self._marker(rank))

    def _marker(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.json"


def slot_folders(folder: Path) -> list[Path]:
    return [folder / "0", folder / "1"]


def read_markers(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the markers of a slot, by rank, whose files are there in the size that they had."""
    found = {}
    for path in sorted(folder.glob("rank-?????.json")):
        with suppress(OSError):  # another rank writes it
            data = path.read_bytes()
            if is_sealed(data):
                marker = json.loads(data)
                sizes = {name: (folder / name).stat().st_size for name in marker["files"]}
                if sizes == marker["files"]:
                    found[int(marker["rank"])] = marker
    return found


def drop_others(folder: Path, attempt: str) -> None:
    """Remove the markers that the launch's start ``attempt`` did not write."""
    for slot in slot_folders(folder):
        for rank, marker in read_markers(slot).items():
            if marker["attempt"] != attempt:
                Slot(slot).invalidate(rank)


def drop_strangers(folder: Path, ranks: set[int]) -> None:
    """Remove the files of all but these ``ranks``."""
    for slot in slot_folders(folder):
        for path in sorted(slot.glob("*")):
            match = _OWNED.fullmatch(path.name)
            owner = int(match[1]) if match else 0 if path.name == BUFFERS else -1
            if owner not in ranks:
                path.unlink(missing_ok=True)


class Ring:
    """Connections of a rank with ``target``, which keeps its copy, and ``source``, the reverse."""

    def __init__(self, messages: Messages, *, rank: int, world_size: int, per_node: int) -> None:
        """Every rank makes its own, in one order."""
        self.target = (rank + per_node) % world_size
        self.source = (rank - per_node) % world_size
        self._messages = messages
        self._channel = messages.next_channel()

    def swap(self, slot: Slot, files: Mapping[str, int], marker: bytes) -> None:
        """Send ``files`` of ``slot`` and its marker, store the source's, on all ranks."""
        said = json.dumps([files, marker.decode()]).encode()
        card = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        size = torch.empty(1, dtype=torch.int64)
        self._exchange(torch.tensor([card.numel()]), size)
        if not 0 < int(size) <= _MAX_CARD_BYTES:
            raise RuntimeError(f"rank {self.source} announces {int(size)} bytes about its copy")
        received = torch.empty(int(size), dtype=torch.uint8)
        self._exchange(card, received)
        their_files, their_marker = json.loads(bytes(bytes_of(received)))
        for name, nbytes in their_files.items():
            if not (name == BUFFERS or _OWNED.fullmatch(name)) or "/" in name or nbytes < 0:
                raise CheckpointError(
                    f"a peer sends the file {name!r:.80} of {nbytes} bytes: no copy has it"
                )
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
