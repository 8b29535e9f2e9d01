"""Files of a checkpoint, read only where they are what the manifest says."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from zero_core.checkpoint.disk import open_regular, size_of
from zero_core.checkpoint.manifest import MANIFEST, Manifest
from zero_core.checkpoint.safetensors_files import StoredTensor, read_header
from zero_core.errors import CheckpointCorruptError, CheckpointError

_BLOCK_BYTES = 1 << 20
"""Bytes of a file read at once: they stay in the processor's cache for their checksum."""
_ADVICE = "load an older checkpoint by its tag"


class CheckedFiles:
    """Files of a checkpoint, each chunk of which is checked before its first use.

    Attributes:
        folder: the checkpoint's.
        manifest: its manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._headers: dict[str, Mapping[str, StoredTensor]] = {}
        self._checked: dict[str, set[int]] = {}

    def chunks(self) -> list[tuple[str, int]]:
        """Return name and number of each chunk of all files."""
        files = self.manifest.files
        return [(n, i) for n in sorted(files) for i in range(len(self.manifest.crcs(n)[1]))]

    def check(self, chunks: Sequence[tuple[str, int]]) -> None:
        """Compare chunks with their checksums, those that have not been compared before.

        Raises:
            CheckpointCorruptError: a file is missing, or is not what was written.
        """
        by_name: dict[str, list[int]] = {}
        for name, index in chunks:
            if index not in self._checked.setdefault(name, set()):
                by_name.setdefault(name, []).append(index)
        for name, indices in by_name.items():
            self._check_file(name, indices)

    def _check_file(self, name: str, indices: Sequence[int]) -> None:
        path = self.folder / name
        expected = self.manifest.files[name].bytes
        chunk, crcs = self.manifest.crcs(name)
        try:
            with open_regular(path, follows_links=False) as file:
                if size_of(file) != expected:
                    raise CheckpointCorruptError(
                        f"{path} is damaged: it has {size_of(file)} bytes, {expected} were "
                        f"written; {_ADVICE}"
                    )
                for index in indices:
                    file.seek(index * chunk)
                    found = _crc_of(file, min(chunk, expected - index * chunk), path)
                    if found != crcs[index]:
                        raise CheckpointCorruptError(
                            f"{path} is damaged between the bytes {index * chunk} and "
                            f"{min((index + 1) * chunk, expected)}: expected crc32 "
                            f"{crcs[index]}, found {found}; {_ADVICE}"
                        )
                    self._checked[name].add(index)
        except CheckpointCorruptError:
            raise
        except (OSError, CheckpointError) as error:
            raise CheckpointCorruptError(f"{path} cannot be read: {error}; {_ADVICE}") from error

    def trust(self) -> None:
        """Note that other ranks have checked all chunks of these very files."""
        for name, index in self.chunks():
            self._checked.setdefault(name, set()).add(index)

    def tensors(self, name: str) -> Mapping[str, StoredTensor]:
        """Return the tensors of file ``name``. Its header is checked.

        Raises:
            CheckpointCorruptError: the file is missing, or is not what was written.
        """
        if name not in self._headers:
            if name not in self.manifest.files:
                raise CheckpointCorruptError(
                    f"{self.folder / MANIFEST} has no file {name}: the checkpoint is not whole"
                )
            self.check([(name, 0)])
            found = read_header(self.folder / name, follows_links=False)
            first = min((t.start for t in found.values()), default=1)
            self.check(self._chunks_of(name, 0, first))
            self._headers[name] = found
        return self._headers[name]

    def check_range(self, name: str, tensor: StoredTensor, first: int, last: int) -> None:
        """Check the chunks that have elements ``[first, last)`` of a tensor of file ``name``."""
        size = tensor.dtype.itemsize
        self.check(self._chunks_of(name, tensor.start + first * size, tensor.start + last * size))

    def _chunks_of(self, name: str, low: int, high: int) -> list[tuple[str, int]]:
        chunk = self.manifest.crcs(name)[0]
        return [(name, index) for index in range(low // chunk, -(-high // chunk))]


def _crc_of(file: IO[bytes], count: int, path: Path) -> int:
    crc, left = 0, count
    while left:
        data = file.read(min(left, _BLOCK_BYTES))
        if not data:
            raise CheckpointCorruptError(f"{path} ended while it was read")
        crc = zlib.crc32(data, crc)
        left -= len(data)
    return crc
