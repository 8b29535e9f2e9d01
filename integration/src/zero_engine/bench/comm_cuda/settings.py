"""Sizes of the benchmark: the real ones, and those of its dry run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

__all__ = ["BAR", "BAR_NUMEL", "DRY", "DTYPES", "KINDS", "MI", "REAL", "Settings"]

MI: Final = 1 << 20
KINDS: Final = ("int8", "int4", "e4m3", "e5m2")
DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
BAR: Final = 0.8
"""Share of copy bandwidth that is asked for."""
BAR_NUMEL: Final = 64 * MI
"""Elements from which on it is asked for."""


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    kinds: tuple[str, ...]
    numels: tuple[int, ...]
    """Elements, each a multiple of ``pattern_numel``."""
    pattern_numel: int
    """Elements that a tensor repeats; a multiple of every block size. See `jobs`."""
    rounds: int
    calls: int
    """Calls of each contender in a round, timed together."""
    sum_rows: int = 8


REAL: Final = Settings(KINDS, (MI, 4 * MI, 16 * MI, 64 * MI, 256 * MI), MI, rounds=7, calls=10)
DRY: Final = Settings(KINDS, (1 << 10, 1 << 12), 1 << 10, rounds=1, calls=1)
