"""What happens to the files of a checkpoint, whoever wrote them."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

SMALL = ("manifest.json", ".metadata", "latest")
"""Files of descriptions; the others hold tensors."""
SAMPLE = 100
"""Bytes that are changed in the files of each kind."""
ZEROS = 512
FLIPPED_SMALL = "one bit of `manifest.json`, `.metadata` or `latest` flipped"
FLIPPED_LARGE = "one bit of a file with tensors flipped"
KILLED_OVER = "both ranks killed while they save, under the name that is there"
KILLED_BESIDE = "both ranks killed while they save, under a new name"
FULL_OVER = "disk full while they save, under the name that is there"


class Fault(NamedTuple):
    """A change of a checkpoint: the row of the table, the files that it is about, and how."""

    row: str
    files: tuple[str, ...]
    change: Callable[[Path], object]


def files_of(folder: Path) -> list[Path]:
    """Return the files of a checkpoint, relative to ``folder``, without programs."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".py")
    return sorted(path.relative_to(folder) for path in found)


def faults(folder: Path, other: Path, marker: Path) -> Iterator[Fault]:
    """Yield what is done to copies of the checkpoint in ``folder``.

    Args:
        folder: the checkpoint.
        other: a checkpoint of the same training at another step, under the same name.
        marker: a file that a program within a file would make.
    """
    files = files_of(folder)
    yield from _flips(folder, files)
    for file in files:
        name, size = (file.name,), folder.joinpath(file).stat().st_size
        yield Fault(
            "a file cut in half", name, lambda c, f=file, n=size // 2: os.truncate(c / f, n)
        )
        yield Fault("a file's last byte cut off", name, _cut(file, size - 1))
        yield Fault("a file emptied", name, _cut(file, 0))
        yield Fault("a file missing", name, lambda c, f=file: (c / f).unlink())
        yield Fault("a named pipe in a file's place", name, lambda c, f=file: _pipe(c / f))
        yield Fault("a file twice as long", name, lambda c, f=file: _append(c / f))
        yield Fault(
            "a file of another step's checkpoint",
            name,
            lambda c, f=file: shutil.copyfile(other / f, c / f),
        )
        yield Fault(
            "a pickle that runs a program in a file's place",
            name,
            lambda c, f=file: (c / f).write_bytes(pickle.dumps(_Program(marker))),
        )
        for at in () if file.name in SMALL else range(0, size, max(ZEROS, size // 6)):
            yield Fault(f"{ZEROS} bytes of a file are zeros", name, _zeros(file, at, size))
    yield from _exchanged(files)
    if Path("latest") in files:
        yield from _latest(folder, other)


def _flips(folder: Path, files: list[Path]) -> Iterator[Fault]:
    for row, is_small in ((FLIPPED_SMALL, True), (FLIPPED_LARGE, False)):
        own = [file for file in files if (file.name in SMALL) == is_small]
        every = [(f, at) for f in own for at in range(folder.joinpath(f).stat().st_size)]
        for file, at in every[:: max(1, len(every) // SAMPLE)]:
            yield Fault(row, (file.name,), _flip(file, at))


def _flip(file: Path, at: int) -> Callable[[Path], object]:
    def change(copy: Path) -> None:
        data = bytearray(copy.joinpath(file).read_bytes())
        data[at] ^= 1 << at % 8
        copy.joinpath(file).write_bytes(data)

    return change


def _zeros(file: Path, at: int, size: int) -> Callable[[Path], object]:
    def change(copy: Path) -> None:
        with copy.joinpath(file).open("r+b") as opened:
            opened.seek(at)
            opened.write(bytes(min(ZEROS, size - at)))

    return change


def _cut(file: Path, size: int) -> Callable[[Path], object]:
    return lambda copy: os.truncate(copy / file, size)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _append(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data + data)


def _exchanged(files: list[Path]) -> Iterator[Fault]:
    """Yield exchanges of two neighbours of one kind, such as the same file of two ranks."""
    large = [file for file in files if file.name not in SMALL]
    for one, two in itertools.pairwise(large):

        def change(copy: Path, one: Path = one, two: Path = two) -> None:
            aside = copy / "aside"
            os.replace(copy / one, aside)
            os.replace(copy / two, copy / one)
            os.replace(aside, copy / two)

        yield Fault("two files exchanged", (one.name, two.name), change)


def _latest(folder: Path, other: Path) -> Iterator[Fault]:
    tag = folder.joinpath("latest").read_text()
    away = (f"../{other.name}/{tag}", str(other / tag), "/", "..", ".", "x" * 300, "no-such-tag")
    for text in away:
        yield Fault(
            "`latest` names something else",
            ("latest", text) if len(text) > 2 else ("latest",),
            lambda c, t=text: (c / "latest").write_text(t),
        )


class _Program:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self._marker),))
