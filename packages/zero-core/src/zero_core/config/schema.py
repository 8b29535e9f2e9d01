"""Loading of the configuration: DeepSpeed's JSON, typed, with every default filled in.

The batch sizes of the `Config` that `load_config` returns are consistent. `zero_core.config.blocks`
has the keys, `zero_core.config.rules` the rules between them.
"""

from __future__ import annotations

import difflib
import errno
import json
import logging
import math
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin

import pydantic
from pydantic import BaseModel

from zero_core.config.blocks import LARGEST, Config, as_kind, as_whole, block_of, keys_of
from zero_core.config.rules import check_rules, drop_further_keys, find_unneeded
from zero_core.errors import ConfigError

_log = logging.getLogger(__name__)

_OWN_AUTO = ("accumulation_schedule", "zero_optimization.offload_optimizer.ratio")
"""Keys at which "auto" is a value that this engine defines."""

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SCHEMA_FILE = Path(__file__).with_name("zero.schema.json")
"""Path of the JSON Schema, which is part of the wheel."""
_OF_OPTIMIZERS = {n: f"optimizer.params.{n}" for n in ("lr", "betas", "eps", "weight_decay")}
_OF_OPTIMIZERS["learning_rate"] = _OF_OPTIMIZERS["lr"]
MAX_DEPTH = 32
"""Largest nesting depth of blocks and lists."""
_MAX_TEXT_BYTES = 4 << 20
_MAX_SHOWN = 80
"""Largest number of characters of a value or a key that a message quotes."""


def load_config(source: Mapping[str, Any] | str | Path, *, world_size: int) -> Config:
    """Read, check and resolve a configuration.

    Args:
        source: the configuration as a mapping, or the path of its JSON file.
        world_size: number of data-parallel ranks, which also resolves the batch sizes.

    Raises:
        ConfigError: ``source`` cannot be read, or a key or value is not valid.
    """
    if world_size < 1:
        raise ConfigError(f"world_size = {world_size}: must be at least 1")
    if isinstance(source, str) and source.lstrip().startswith("{"):
        raise ConfigError("the configuration is JSON text: give json.loads(text), or a file's path")
    if not isinstance(cast(object, source), Mapping | str | Path):
        raise ConfigError(
            f"the configuration is of type {type(source).__name__}: expected a mapping, or the "
            "path of a JSON file"
        )
    if not isinstance(source, Mapping):
        source = parse_json(read_config_text(Path(source)), str(source))
    check_plain(source)
    given = raw = as_typed(without_nulls(source), Config)
    # DeepSpeed has check_grad_overflow in the block bf16. Here it applies at every precision.
    bf16, zero = raw.get("bf16"), raw.get("zero_optimization")
    if isinstance(bf16, dict) and "check_grad_overflow" in bf16:
        raw = {**raw, "bf16": {k: v for k, v in bf16.items() if k != "check_grad_overflow"}}
        is_checked = as_kind(bf16["check_grad_overflow"], bool)
        if not isinstance(is_checked, bool):
            found = f"Input should be a valid boolean, found {shown(is_checked)}"
            raise ConfigError(f"bf16.check_grad_overflow: {found}")
        if bf16.get("enabled"):
            raw.setdefault("check_grad_overflow", is_checked)
    has_states = isinstance(bf16, dict) and bf16.get("bf16_optimizer_states")
    if has_states and isinstance(zero, dict):
        offload = zero.get("offload_optimizer")
        if isinstance(offload, dict) and offload.get("device", "none") != "none":
            offload = {"state_dtype": "bfloat16", **offload}
            raw = {**raw, "zero_optimization": {**zero, "offload_optimizer": offload}}
    for path, value in _walk(raw):
        where, is_key = _name_path(path), all(isinstance(key, str) for key in path)
        if isinstance(value, str) and value == "auto" and is_key and where not in _OWN_AUTO:
            raise ConfigError(
                f'{where}: "auto" is filled in by the Hugging Face integration; '
                "give a value here or leave the key out"
            )
    raw = drop_further_keys(raw)
    raw.update(_resolve_batch(raw, world_size))
    config = load_effective(raw)
    check_rules(config, world_size)
    for key, value, reason in find_unneeded(given, config):
        _log.info("%s = %r has no effect: %s", key, value, reason)
    return config


def load_effective(written: Mapping[str, Any]) -> Config:
    """Load a resolved configuration from the result of ``Config.model_dump(mode="json")``.

    Such a configuration has all keys with their defaults. `load_config` would refuse some of the
    defaults as explicit values, such as a ratio without offload.

    Raises:
        ConfigError: a key is unknown, or a value is not valid.
    """
    try:
        return Config.model_validate(written)
    except pydantic.ValidationError as error:
        raise ConfigError(explain(error, Config, written)) from None


def read_config_text(path: Path, name: str = "the configuration") -> str:
    """Return the UTF-8 text of a regular file of at most 4 MiB. ``name`` is for messages."""
    place = str(path)
    if len(place) > _MAX_SHOWN:  # keep the end of the path, which has the file's name
        place = f"...{place[-_MAX_SHOWN:]}"
    problem = f"cannot read {name} {place!r}"
    try:
        # Checked before opening, because opening a pipe without a writer would block forever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        with path.open("rb") as file:
            content = file.read(_MAX_TEXT_BYTES + 1)
        if len(content) > _MAX_TEXT_BYTES:
            raise OSError(errno.EFBIG, f"larger than {_MAX_TEXT_BYTES} bytes")
        return content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{problem}: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or a NUL character in the path
        raise ConfigError(f"{problem}: {error}") from None


def parse_json(text: str, name: str) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys. ``name`` is for messages."""
    doubled: list[tuple[dict[str, Any], str]] = []

    def as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                doubled.append((found, key))
            found[key] = value
        return found

    try:
        value = json.loads(text, object_pairs_hook=as_dict)
    except RecursionError:
        raise ConfigError(f"{name} is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:  # invalid JSON, or a number with thousands of digits
        hint = "; is there a trailing comma, or a name in single quotes?"
        hint = hint if "property name" in str(error) else ""
        raise ConfigError(f"{name} is not JSON: {error}{hint}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: expected a JSON object, found {type(value).__name__}")
    if doubled:
        block, key = doubled[0]  # `_walk` misses a block that a duplicate key has replaced
        where = next((_name_path((*p, key)) for p, inner in _walk(value) if inner is block), key)
        raise ConfigError(f"{name}: {where}: duplicate key {shown(key)}: keep one of them")
    return value


def check_plain(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for non-string keys, non-finite floats, long integers and deep nesting."""
    for path, value in _walk(config):
        name = _name_path(path)
        if isinstance(value, Mapping):
            wrong = next((key for key in value if not isinstance(key, str)), None)
            if wrong is not None:
                where = f"{name}: " if name else ""
                raise ConfigError(f"{where}keys must be strings, found {shown(wrong)}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name}: expected a finite number, found {value!r}")
        elif isinstance(value, int) and abs(value) >= 2 * LARGEST:
            raise ConfigError(f"{name}: expected a number of at most 64 bits, found {shown(value)}")


_Path = tuple[Any, ...]


def _walk(config: Mapping[str, Any]) -> Iterator[tuple[_Path, Any]]:
    left: list[tuple[_Path, Any]] = [((), config)]
    while left:
        path, value = left.pop()
        yield path, value
        inner: list[tuple[Any, Any]] = []
        if isinstance(value, Mapping):
            inner = list(value.items())
        elif isinstance(value, list | tuple):
            inner = list(enumerate(value))
        if inner and len(path) >= MAX_DEPTH:
            raise ConfigError(f"{_name_path(path[:3])}: nested more than {MAX_DEPTH} deep")
        left += [((*path, key), value) for key, value in reversed(inner)]


def _name_path(path: Sequence[Any]) -> str:
    names = (str(key) for key in path)
    return ".".join(n if n.isprintable() and len(n) <= _MAX_SHOWN else shown(n) for n in names)


def shown(value: Any) -> str:
    """Return a short, one-line quotation of ``value`` for messages."""
    try:
        text = repr(value)
    except ValueError:  # an integer with thousands of digits
        return f"a number of {value.bit_length()} bits"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def without_nulls(block: Mapping[str, Any]) -> dict[str, Any]:
    """Drop keys with the value null, which means the default in DeepSpeed's JSON."""
    return {
        k: without_nulls(v) if isinstance(v, Mapping) else v
        for k, v in block.items()
        if v is not None
    }


def as_typed(block: Mapping[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """Return ``block``, of type ``kind``, with strings converted to numbers and booleans.

    As in DeepSpeed, "2" is a valid number, and "true", 1 and 0 are valid booleans: templates and
    command lines write them. Other values stay unchanged.
    """
    typed: dict[str, Any] = {}
    for key, value in block.items():
        field = kind.model_fields.get(key)
        inner = None if field is None else block_of(field)
        if inner is not None and isinstance(value, Mapping):
            value = as_typed(value, inner)
        elif field is not None:
            value = as_kind(value, *_kinds(field.annotation))
        typed[key] = value
    return typed


def _kinds(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (Annotated, Union, UnionType):
        for inner in get_args(annotation):
            yield from _kinds(inner)
    else:
        yield annotation


def _resolve_batch(raw: Mapping[str, Any], world_size: int) -> dict[str, int]:
    """Compute the missing values of batch size = micro-batch size * accumulation steps * ranks."""
    given: dict[str, int] = {}
    for key in (key for key in _BATCH if key in raw):
        value = as_whole(raw[key])
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{key}: expected a whole number >= 1, found {shown(value)}")
        if value > LARGEST:
            raise ConfigError(f"{key}: expected at most 2**63, found {shown(value)}")
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
    if total is None and product > LARGEST:
        found = " * ".join(key for key in _BATCH[1:] if key in given)
        raise ConfigError(f"{found} * {world_size} ranks: expected at most 2**63")
    if total not in (None, product):
        found = ", ".join(f"{key} = {value}" for key, value in given.items())
        raise ConfigError(
            f"{found} with {world_size} ranks does not multiply out: train_batch_size must equal "
            "train_micro_batch_size_per_gpu * gradient_accumulation_steps * number of ranks; "
            "leave one of them out and it is derived"
        )
    return dict(zip(_BATCH, (product, micro, steps), strict=True))


def explain(
    error: pydantic.ValidationError, kind: type[BaseModel], raw: Any, place: str = ""
) -> str:
    """Return one line per wrong key of ``raw``, a block of type ``kind`` at path ``place``."""
    causes: dict[str, list[str]] = {}
    for found in error.errors(include_url=False, include_context=False):
        path, block = _key_of(found["loc"], kind, raw)
        where = _name_path((place, *path) if place else path)
        cause = f"{found['msg'].removeprefix('Value error, ')}, found {shown(found['input'])}"
        field = block.model_fields.get(str(path[-1])) if block is not None and path else None
        if field is not None and (inner := block_of(field)) and found["type"] == "model_type":
            cause = f'expected a block, as {{"{next(iter(inner.model_fields))}": ...}}, found '
            cause += shown(found["input"])
        if found["type"] == "extra_forbidden":
            known = sorted(block.model_fields) if block is not None else []
            name = str(path[-1])[:_MAX_SHOWN]
            paths = reversed([path for path, _ in keys_of(Config)])  # inner keys override others
            tree = _OF_OPTIMIZERS | {path.rpartition(".")[2]: path for path in paths}
            close = [tree[name]] if name in tree and len(path) == 1 else []
            close += difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            close += [tree[n] for n in difflib.get_close_matches(name, tree, n=1, cutoff=0.8)]
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
            cause = f"unknown key; {hint}"
        if cause not in causes.setdefault(where, []):
            causes[where].append(cause)
    return "\n".join(f"{where}: {'; or '.join(found)}" for where, found in causes.items())


def _key_of(loc: _Path, kind: type[BaseModel], raw: Any) -> tuple[_Path, type[BaseModel] | None]:
    """Return the path in ``raw`` of a pydantic error's ``loc``, and the type of its last block."""
    block: type[BaseModel] | None = None
    inner: type[BaseModel] | None = kind
    for depth, key in enumerate(loc):
        block = inner
        if isinstance(raw, Mapping) and key not in raw and block is not None:
            return loc[: depth + 1], block
        try:
            raw = raw[key]
        except (KeyError, IndexError, TypeError):
            return loc[:depth], block
        field = None if block is None else block.model_fields.get(str(key))
        inner = None if field is None else block_of(field)
    return loc, block
