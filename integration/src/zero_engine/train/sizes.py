"""Shapes and settings of models that are asked for by their number of parameters.

Depths are those of GPT-3's models (arXiv 2005.14165, table 2.1). The width follows from the number
of parameters, and heads have 128 channels.
"""

from __future__ import annotations

import math
import re
from typing import Any

from zero_core.errors import ConfigError

HEAD_WIDTH = 128
_DEPTHS = {125e6: 12, 350e6: 24, 1.3e9: 24, 2.7e9: 32, 13e9: 40, 30e9: 48, 66e9: 64, 175e9: 96}
"""Blocks by number of parameters."""
_SMALLEST, _LARGEST = 10**6, 10**12
_SCALES = {"k": 10**3, "m": 10**6, "b": 10**9}

DEFAULTS: dict[str, Any] = {
    "context": 128,
    "eval_windows": 1,
    "eval_every": 1000,
    "save_every": 1000,
    "keep_last": 1,
    "log_every": 1,
    "sample_tokens": 0,
}
"""Settings of a run whose model is asked for by size, where the user gives no others.

Each pass over a large model takes long, so it is evaluated at the start and at the end alone.
"""


def parse_size(text: str) -> int:
    """Return the parameters that ``text`` asks for: "350m", "2.2b" or a plain number."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([kmb]?)", text.strip().lower())
    number = float(match[1]) * _SCALES.get(match[2], 1) if match else math.nan
    if not _SMALLEST <= number <= _LARGEST:
        raise ConfigError(f"--size {text}: expected parameters such as 350m or 2.2b, up to 1000b")
    return round(number)


def shape_of(num_params: int) -> dict[str, int]:
    """Return layers, width and heads of a GPT-2 that has at least ``num_params`` in its blocks.

    A block of width w has 12 w^2 weights.
    """
    nearest = min(_DEPTHS, key=lambda known: abs(math.log(known / num_params)))
    width = math.sqrt(num_params / (12 * _DEPTHS[nearest]))
    heads = max(1, math.ceil(width / HEAD_WIDTH))
    width_of_heads = heads * HEAD_WIDTH
    layers = max(1, math.ceil(num_params / (12 * width_of_heads**2)))
    return {"layers": layers, "width": width_of_heads, "heads": heads}


def largest_unit(width: int, vocab: int, context: int) -> int:
    """Return the elements of a block or of what is around the blocks, whichever has more."""
    block = 12 * width**2 + 13 * width
    return max(block, (vocab + context + 2) * width)
