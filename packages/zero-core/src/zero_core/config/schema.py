"""Reading of the configuration: DeepSpeed's JSON, typed, with every default spelled out.

In a `Config` the batch triple multiplies out, and no key was ignored in silence:
`zero_core.config.blocks` has the keys, `zero_core.config.rules` the rules between them. Names and
defaults follow DeepSpeed's documentation of its JSON configuration, except that
``gradient_clipping`` is off unless the key is there.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic
from pydantic import BaseModel

from zero_core.config.blocks import Config, as_whole, block_of
from zero_core.config.rules import check_rules, drop_further_keys, find_unneeded
from zero_core.errors import ConfigError

_log = logging.getLogger(__name__)

_OWN_AUTO = "zero_optimization.offload_optimizer.ratio"
"""Key at which "auto" is a value of this engine's own."""

_BF16_MOMENTS = {"state_dtype": "bfloat16"}
_BATCH = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def load_config(source: Mapping[str, Any] | str | Path, *, world_size: int) -> Config:
    """Read, check and resolve a configuration.

    Args:
        source: the configuration as a mapping, or the path of its JSON file.
        world_size: number of data-parallel ranks; the batch triple is resolved with it.

    Raises:
        ConfigError: with the path of the key, what was found, and what to do.
    """
    raw = dict(source) if isinstance(source, Mapping) else _read_json(Path(source))
    given = raw = _without_nulls(raw)
    # bf16.check_grad_overflow is DeepSpeed's place for it; here it holds at every precision.
    bf16 = raw.get("bf16")
    if isinstance(bf16, dict) and "check_grad_overflow" in bf16:
        raw = {**raw}
        raw["bf16"] = {k: v for k, v in bf16.items() if k != "check_grad_overflow"}
        if bf16.get("enabled"):
            raw.setdefault("check_grad_overflow", bf16["check_grad_overflow"])
    if isinstance(bf16, dict) and bf16.get("bf16_optimizer_states"):
        raw = _with_bf16_moments(raw)
    _refuse_auto(raw, "")
    raw = drop_further_keys(raw)
    raw.update(_resolve_batch(raw, world_size))
    try:
        config = Config.model_validate(raw)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None
    check_rules(config, world_size)
    for path, value, reason in find_unneeded(given, config):
        _log.info("%s = %r has no effect: %s", path, value, reason)
    return config


def _with_bf16_moments(raw: dict[str, Any]) -> dict[str, Any]:
    """Return ``raw`` with ``state_dtype`` "bfloat16" of an offloaded optimizer, unless given."""
    zero = raw.get("zero_optimization")
    if not isinstance(zero, dict):
        return raw
    offload = zero.get("offload_optimizer")
    if not isinstance(offload, dict) or offload.get("device", "none") == "none":
        return raw
    return {**raw, "zero_optimization": {**zero, "offload_optimizer": _BF16_MOMENTS | offload}}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration: {error}") from error
    return parse_json(text, str(path))


def parse_json(text: str, name: str) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys. Messages call it ``name``.

    Raises:
        ConfigError: it is not one.
    """

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError(f"{name}: duplicate key {twice[0]!r}: keep one of them")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=no_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: expected a JSON object, found {type(value).__name__}")
    return value


def _without_nulls(block: Mapping[str, Any]) -> dict[str, Any]:
    """Drop keys that are null: in DeepSpeed's JSON that means the default."""
    return {
        k: _without_nulls(v) if isinstance(v, Mapping) else v
        for k, v in block.items()
        if v is not None
    }


def _refuse_auto(block: Mapping[str, Any], path: str) -> None:
    for key, value in block.items():
        if value == "auto" and f"{path}{key}" != _OWN_AUTO:
            raise ConfigError(
                f'{path}{key}: "auto" is filled in by the Hugging Face integration; '
                "give a value here or leave the key out"
            )
        if isinstance(value, Mapping):
            _refuse_auto(value, f"{path}{key}.")


def _resolve_batch(raw: Mapping[str, Any], world_size: int) -> dict[str, int]:
    """Resolve the batch size = micro-batch size * accumulation steps * ranks from two of them."""
    given: dict[str, int] = {}
    for key in _BATCH:
        value = as_whole(raw.get(key, 1))
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{key}: expected a whole number >= 1, found {value!r}")
        if key in raw:
            given[key] = value
    total, micro, steps = (given.get(key) for key in _BATCH)
    if total is None and micro is None:
        raise ConfigError(
            "train_batch_size or train_micro_batch_size_per_gpu must be given: "
            "one of them is needed to know how many samples make a step"
        )
    if micro is None:
        assert total is not None
        steps = steps or 1
        micro = total // (world_size * steps)
    elif steps is None:
        steps = 1 if total is None else total // (micro * world_size)
    product = micro * steps * world_size
    if total not in (None, product):
        found = ", ".join(f"{key} = {value}" for key, value in given.items())
        raise ConfigError(
            f"{found} with {world_size} ranks does not multiply out: train_batch_size must equal "
            "train_micro_batch_size_per_gpu * gradient_accumulation_steps * number of ranks; "
            "leave one of them out and it is derived"
        )
    return dict(zip(_BATCH, (product, micro, steps), strict=True))


def _block_at(path: tuple[int | str, ...]) -> type[BaseModel] | None:
    """Return the block in which the last element of ``path`` would be a key."""
    block: type[BaseModel] | None = Config
    for key in path[:-1]:
        field = None if block is None else block.model_fields.get(str(key))
        block = None if field is None else block_of(field)
    return block


def _explain(error: Any) -> str:
    """Return one line for one of pydantic's errors."""
    path: tuple[int | str, ...] = error["loc"]
    name = ".".join(str(p) for p in path)
    if error["type"] == "extra_forbidden":
        block = _block_at(path)
        known = sorted(block.model_fields) if block is not None else []
        close = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
        return f"{name}: unknown key; {hint}"
    return f"{name}: {error['msg']}, found {error['input']!r}"
