"""Configurations by name, and the other forms of ``zero=...``."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_core import ConfigError
from zero_engine.deepspeed.config.source import load

_OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
_ZEROPP = {
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
    "zero_hpz_partition_size": "auto",
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "stage1": {"stage": 1},
    "stage1-offload": {"stage": 1, **_OFFLOAD},
    "stage2": {"stage": 2},
    "stage2-offload": {"stage": 2, **_OFFLOAD},
    "stage3": {"stage": 3},
    "stage3-offload": {"stage": 3, **_OFFLOAD},
    "stage3-offload-params": {"stage": 3, **_OFFLOAD, "offload_param": {"device": "cpu"}},
    "stage3-zeropp": {"stage": 3, **_ZEROPP},
}
"""``zero_optimization`` by name: what is sharded, and what rests in host memory. ``zeropp`` is
ZeRO++ (Wang et al., arXiv 2306.10209): weights and gradients are quantized to send them, and each
node keeps a second copy of the weights."""


def read_zero(zero: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of ``zero``: a preset's name, a JSON file's path, or itself.

    "auto" values are still in it.

    Raises:
        ConfigError: no such preset or file, or the file is not a JSON object.
    """
    if isinstance(zero, Mapping):
        return copy.deepcopy(dict(zero))
    if isinstance(zero, str) and zero in PRESETS:
        return {"zero_optimization": copy.deepcopy(dict(PRESETS[zero]))}
    if Path(zero).suffix == ".json" or Path(zero).is_file():
        return copy.deepcopy(load(zero))
    near = difflib.get_close_matches(str(zero), PRESETS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"zero = {str(zero)!r} is neither a preset nor a file: {hint}"
        f"Presets: {', '.join(PRESETS)}; or give a configuration, or the path of its JSON file"
    )
