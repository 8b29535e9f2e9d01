"""Units of a model and the position of every element in their flat buffers."""

from zero_core.layout.arithmetic import (
    ALIGNMENT,
    Layout,
    ParamSpec,
    Piece,
    Segment,
    Slot,
    UnitLayout,
)

__all__ = [
    "ALIGNMENT",
    "Layout",
    "ParamSpec",
    "Piece",
    "Segment",
    "Slot",
    "UnitLayout",
]
