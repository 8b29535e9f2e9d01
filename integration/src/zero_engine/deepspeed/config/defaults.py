"""DeepSpeed's defaults and habits, put into a configuration for zero-core where it has others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zero_core.errors import ConfigError
from zero_engine.deepspeed.config.keys import REFUSED, UNNEEDED, check_refused
from zero_engine.deepspeed.config.names import Tell

CLIPPING = 1.0
"""``gradient_clipping`` where the key is missing."""
_AS_MADE = "as_made"
_LION = {"lr": 1e-3, "betas": (0.9, 0.999)}
"""DeepSpeed's defaults of Lion, which are not the paper's."""
_DTYPE_NAMES: Mapping[str, str] = {
    name: short
    for short, names in {
        "fp32": ("fp32", "float32", "float", "torch.float32"),
        "fp16": ("fp16", "float16", "half", "torch.float16"),
        "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    }.items()
    for name in names
}


def core_config(given: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Return ``given``, zero-core's keys as in DeepSpeed's JSON, with DeepSpeed's defaults.

    Raises:
        ConfigError: two keys contradict each other.
    """
    core = {"gradient_clipping": CLIPPING, "broadcast_buffers": False, **given}
    steps = core.get("steps_per_print")
    if isinstance(steps, float) and math.isinf(steps):
        tell("steps_per_print", steps, "never")
        del core["steps_per_print"]
    core["data_types"] = _data_types(core)
    if "fp16" in core:  # the engine casts inputs itself, or doesn't
        core["fp16"] = {k: v for k, v in core["fp16"].items() if k != "auto_cast"}
    for block in ("optimizer", "scheduler"):
        if block in core and "type" not in core[block]:
            tell(block, core.pop(block), "without a type there is none")
    if "optimizer" in core:
        core["optimizer"] = _optimizer(core["optimizer"], tell)
    return core


def _data_types(core: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``data_types``, in which buffers keep their dtype by default."""
    types = {"buffer_dtype": _AS_MADE, **core.get("data_types", {})}
    for key in ("buffer_dtype", "grad_accum_dtype", "param_dtype"):
        if key in types:
            types[key] = _DTYPE_NAMES.get(str(types[key]), types[key])
    asked = types.pop("param_dtype", None)
    is_on = [kind for kind in ("bf16", "fp16") if core.get(kind, {}).get("enabled")]
    enabled = is_on[0] if is_on else "fp32"
    if asked not in (None, enabled):
        raise ConfigError(
            f"data_types.param_dtype = {asked!r} contradicts the blocks fp16 and bf16, which say "
            f"{enabled!r}: leave it out"
        )
    return types


def _optimizer(block: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    params = dict(block.get("params", {}))
    for key in list(params):
        path = f"optimizer.params.{key}"
        if path in UNNEEDED:
            tell(path, params.pop(key), UNNEEDED[path])
        elif path in REFUSED:
            check_refused(path, params.pop(key))
    if str(block["type"]).lower() == "lion":
        params = {**_LION, **params}
    return {**block, "params": params}
