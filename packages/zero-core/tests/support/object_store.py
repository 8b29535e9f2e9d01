"""A stand-in for an object store: whole objects in a folder, no renames, links or locks."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

ROOT = "OBJECTS_ROOT"
"""Environment variable: folder of the objects."""
LAST = "OBJECTS_LAST"
"""Environment variable: number of writes that a process completes before it is killed."""


class Objects(DirFileSystem):  # type: ignore[misc]
    protocol = "objects"
    num_written = 0
    is_down = False
    """Whether listings and reads of data fail, like those of a store that does not answer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path=os.environ[ROOT], fs=LocalFileSystem(auto_mkdir=True), **options)
        self._sizes: dict[str, int] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("objects://").strip("/")

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            self._count()
        elif self.is_down and "data-" in path:
            raise ConnectionError("no answer")
        file = super().open(path, mode, **options)
        # As in s3fs, a replaced object is read up to its old size if a listing cached that size.
        size = self._sizes.get(self._join(path))
        return file if "w" in mode or size is None else io.BytesIO(file.read(size))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        if self.is_down:
            raise ConnectionError("no answer")
        found = super().ls(path, detail=True, **options)
        self._sizes |= {self._join(entry["name"]): entry["size"] for entry in found}
        return found if detail else [entry["name"] for entry in found]

    def invalidate_cache(self, path: str | None = None) -> None:
        self._sizes.clear()

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._count()
        whole = Path(self._join(path))
        whole.parent.mkdir(parents=True, exist_ok=True)
        part = whole.with_name(f"{whole.name}.part")
        part.write_bytes(value)
        part.replace(whole)

    def mv(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("a store has no renames")

    def _count(self) -> None:
        """Count a write. Kill the process if the count exceeds environment variable `LAST`."""
        Objects.num_written += 1
        if Objects.num_written > int(os.environ.get(LAST, "1000000")):
            os.kill(os.getpid(), signal.SIGKILL)


fsspec.register_implementation("objects", Objects, clobber=True)
