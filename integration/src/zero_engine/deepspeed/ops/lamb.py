"""``deepspeed.ops.lamb``: importable, refused when it is used."""

from __future__ import annotations

from zero_engine.deepspeed.errors import Unserved

__all__ = ["FusedLamb"]

FusedLamb = Unserved(
    "ops.lamb.FusedLamb",
    "its step depends on the norm of whole parameters, and the engine updates slices: use "
    "FusedAdam or FusedLion",
)
