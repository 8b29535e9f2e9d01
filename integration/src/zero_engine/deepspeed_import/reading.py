"""Finds a checkpoint of DeepSpeed's, and its form."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

from zero_core import CheckpointError
from zero_core.errors import CheckpointCorruptError
from zero_engine.deepspeed_import.source import Source
from zero_engine.deepspeed_import.stage_0 import read_stage_0
from zero_engine.deepspeed_import.universal import FOLDER, read_universal
from zero_engine.deepspeed_import.zero_stages import read_zero

_LATEST = ("latest", "latest_universal")
_MAX_TAG = 1024
_SPARE_BYTES = 1 << 30
"""Buffers under several names are written several times."""
_MAX_RATIO = 4
"""Of a file's size to what it takes on a disk that compresses. Beyond it, the file has holes."""
_MALFORMED = (
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    ValueError,
    RuntimeError,
    ArithmeticError,
)


def find_place(directory: Path, tag: str | None) -> Path:
    """Return the folder of checkpoint ``tag``, or of the newest one, or ``directory`` itself."""
    if tag is None:
        if (directory / FOLDER / "optimizer_state.pt").is_file():
            return directory
        named = [directory / name for name in _LATEST if (directory / name).is_file()]
        if named:
            with named[0].open(encoding="utf-8", errors="replace") as file:
                tag = file.read(_MAX_TAG).strip()
        elif any(directory.glob("*_states.pt")):
            return directory
        else:
            raise CheckpointError(
                f"{directory} holds no checkpoint of DeepSpeed's: there is neither a file 'latest' "
                "nor a file *_model_states.pt in it"
            )
    if tag in {"", ".", ".."} or Path(tag).name != tag:
        raise CheckpointError(f"{directory}: {tag!r:.200} is no tag, which is a folder's name")
    if not (directory / tag).is_dir():
        raise CheckpointError(f"there is no folder {directory / tag}")
    return directory / tag


def read_source(place: Path, frozen: Sequence[str]) -> Source:
    """Read the checkpoint in folder ``place``, whatever its form."""
    for pattern, what in (
        ("layer_*expert*_states.pt", "mixtures of experts (DeepSpeed-MoE)"),
        ("expp_rank_*_optim_states.pt", "mixtures of experts (DeepSpeed-MoE)"),
        ("layer_*-model_*states.pt", "pipeline parallelism"),
        ("mp_rank_01*_model_states.pt", "tensor parallelism"),
    ):
        if any(place.glob(pattern)):
            raise CheckpointError(f"{place} is a checkpoint of {what}, which is not imported")
    try:
        source = _read(place, frozen)
        source.check_extent(size_of(place) + _SPARE_BYTES)
        return source
    except _MALFORMED as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointCorruptError(
            f"{place} is not as DeepSpeed writes its checkpoints: {type(error).__name__} {error}"
        ) from error


def _read(place: Path, frozen: Sequence[str]) -> Source:
    if (place / FOLDER / "optimizer_state.pt").is_file():
        return read_universal(place)
    optim_files = sorted(place.glob("*_optim_states.pt"))
    if optim_files:
        return read_zero(place, optim_files)
    return read_stage_0(place, frozen)


def size_of(place: Path) -> int:
    """Return the bytes of the files that are read, without the holes of sparse ones.

    Links are not followed, and a file under several names counts once.
    """
    found = {}
    for path in place.rglob("*.pt"):
        facts = path.lstat()
        if stat.S_ISREG(facts.st_mode):
            on_disk = facts.st_blocks * 512 * _MAX_RATIO
            found[facts.st_dev, facts.st_ino] = min(facts.st_size, on_disk)
    return sum(found.values())
