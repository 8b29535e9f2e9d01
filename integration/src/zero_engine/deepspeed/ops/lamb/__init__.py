"""``deepspeed.ops.lamb``: importable, refused when it is used."""

from __future__ import annotations

from zero_engine.deepspeed.errors import Unserved
from zero_engine.script.refusal import refuse_other_names

__all__ = ["FusedLamb"]

FusedLamb = Unserved(
    "ops.lamb.FusedLamb",
    "its step depends on the norm of whole parameters, and the engine updates slices: use "
    "FusedAdam or FusedLion",
)

refuse_other_names(__name__)
