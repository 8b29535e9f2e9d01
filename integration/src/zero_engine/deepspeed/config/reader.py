"""DeepSpeed's JSON, read as DeepSpeed reads it.

`read` sorts a configuration into what `zero_core.build` takes and what the DeepSpeed engine serves
itself. Defaults are DeepSpeed's. No key is ignored silently. A key without effect becomes a `Note`,
which `zero_engine.deepspeed.config.announce` prints with the configuration in effect. A key that
asks for a part that is not served is refused. As in DeepSpeed, an unknown key is refused in the
blocks that DeepSpeed checks, and has no effect elsewhere.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import pydantic

from zero_core.config import (
    Config,
    as_typed,
    block_of,
    check_plain,
    explain,
    read_config_text,
    shown,
)
from zero_core.errors import ConfigError
from zero_engine.deepspeed.config.hjson import parse_hjson
from zero_engine.deepspeed.config.keys import (
    FLAGS,
    HONOURED,
    REFUSED,
    UNNEEDED,
    as_bool,
    check_refused,
    core_config,
    keep_updates_to_steps,
    modernise,
    without_auto,
)
from zero_engine.monitoring.monitors import (
    COLLECTIVES,
    CommsLoggerSettings,
    FlopsProfilerSettings,
    MonitorSettings,
    ThroughputSettings,
)

TagValidation = Literal["IGNORE", "WARN", "FAIL"]

PATHS: Mapping[str, str] = {
    "cpu_checkpointing": "activation_checkpointing.cpu_checkpointing",
    "fp16_auto_cast": "fp16.auto_cast",
    "gather_16bit_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "monitors": "",
    "tag_validation": "checkpoint.tag_validation",
    "throughput": "timers.throughput",
    "allows_untested_optimizer": "zero_allow_untested_optimizer",
}
"""Where in a configuration fields of `Settings` come from; "" is the top."""


class Note(NamedTuple):
    """A key that was given and has no effect, or another effect than one might expect."""

    path: str
    value: Any
    text: str


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration, sorted.

    A field is named as its key is, unless `PATHS` has another path for it. What each key does is in
    docs/deepspeed-config.md.

    Attributes:
        raw: as given; the very dict, if it was one.
        core: for `zero_core.build`, with DeepSpeed's defaults where zero-core has others.
        steps_per_print: None is never.
        cpu_checkpointing: calls of `deepspeed.checkpointing.checkpoint` keep their inputs in host
            memory until backward.
        fp16_auto_cast: cast floating inputs of the model; otherwise they go in as they are.
        managed_gradient_accumulation: False: each ``step()`` ends an optimizer step, however many
            backwards came before it.
        allows_untested_optimizer: False refuses an optimizer that DeepSpeed calls untested; None
            is a key that is missing, which allows it here.
        notes: keys without effect, each with the reason.
    """

    raw: dict[str, Any]
    core: dict[str, Any]
    monitors: MonitorSettings = field(default_factory=MonitorSettings)
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    comms_logger: CommsLoggerSettings = field(default_factory=CommsLoggerSettings)
    flops_profiler: FlopsProfilerSettings = field(default_factory=FlopsProfilerSettings)
    throughput: ThroughputSettings = field(default_factory=ThroughputSettings)
    steps_per_print: int | None = None
    dataloader_drop_last: bool = False
    tag_validation: TagValidation = "WARN"
    gather_16bit_weights_on_model_save: bool = False
    cpu_checkpointing: bool = False
    fp16_auto_cast: bool = False
    dump_state: bool = False
    managed_gradient_accumulation: bool = True
    allows_untested_optimizer: bool | None = None
    log_level: str | None = None
    disable_python_gc: bool = False
    notes: tuple[Note, ...] = ()

    @property
    def zero_stage(self) -> int:
        zero: Mapping[str, Any] = self.core.get("zero_optimization", {})
        return int(zero.get("stage", 0))


Source = Mapping[str, Any] | str | PathLike[str]


def load(source: Source) -> dict[str, Any]:
    """Return the configuration as a dict: ``source`` itself if it is one.

    Raises:
        ConfigError: it cannot be read, is not an object in JSON or Hjson, is nested too deeply, or
            has a number that is not finite.
    """
    found = dict(source) if isinstance(source, Mapping) else parse_hjson(*_text_of(source))
    # accelerate writes Infinity there, for never
    check_plain({k: v for k, v in found.items() if k != "steps_per_print"})
    return source if isinstance(source, dict) else found


def _text_of(source: str | PathLike[str]) -> tuple[str, str]:
    """Return the text and a name for messages."""
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return source, "the configuration"
    path = Path(source)
    if os.path.isfile(path):  # False where base64 makes too long a name
        return read_config_text(path), str(path)
    if isinstance(source, str):
        try:
            return base64.urlsafe_b64decode(source).decode("utf-8"), "the base64 configuration"
        except (binascii.Error, UnicodeError, ValueError):
            pass  # then it was meant as a path
    raise ConfigError(
        f"the configuration {shown(str(source))} is neither a file that exists, nor JSON, nor "
        "base64 of JSON: pass a dict or the path of a JSON file"
    )


_SHARED = ("data_types", "optimizer")
"""Blocks of which zero-core reads what is not in the tables."""
_BLOCKS = frozenset(
    path.partition(".")[0] for path in (*HONOURED, *UNNEEDED, *REFUSED) if "." in path
)
"""Blocks whose keys are in the tables one by one."""
_VALIDATIONS: Mapping[str, TagValidation] = {"IGNORE": "IGNORE", "WARN": "WARN", "FAIL": "FAIL"}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "checkpoint.tag_validation": tuple(_VALIDATIONS),
    "log_level": ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
}

_Parsed = TypeVar("_Parsed", bound=pydantic.BaseModel)


def read(config: Source) -> Settings:
    """Read DeepSpeed's configuration: a dict, a file's path, a JSON text, or base64 of one.

    Nothing is printed, and ``config`` is not changed. `zero_core.build` resolves the batch triple,
    because it knows the number of ranks.

    Raises:
        ConfigError: a key has a value that is not served; the message says what to do.
    """
    raw = load(config)
    sorter = _Sorter()
    sorter.sort(as_typed(modernise(without_auto(raw, sorter.tell), sorter.tell), Config))
    core, own = core_config(sorter.core, sorter.tell), sorter.own
    zero = core.get("zero_optimization", {})
    flops = _parse(FlopsProfilerSettings, own, "flops_profiler")
    comms = _parse(CommsLoggerSettings, own, "comms_logger")
    if comms.enabled and comms.prof_ops:  # of which some may choose nothing
        unknown = [name for name in comms.prof_ops if not name.startswith(COLLECTIVES)]
        if comms.prof_all:
            text = "prof_all is true, which is the default: all collectives are logged"
            sorter.tell("comms_logger.prof_ops", list(comms.prof_ops), text)
        elif unknown:
            text = f"no collective of the engine's, which are {', '.join(COLLECTIVES)}"
            sorter.tell("comms_logger.prof_ops", unknown, text)
    flags = {path.rpartition(".")[2]: own[path] for path in FLAGS if path in own}
    if not flags.get("managed_gradient_accumulation", True):
        keep_updates_to_steps(core)
    flags["wall_clock_breakdown"] = flags.get("wall_clock_breakdown", False) or flops.enabled
    return Settings(
        raw=raw,
        core=core,
        monitors=get_monitor_config(own),
        comms_logger=comms,
        flops_profiler=flops,
        throughput=_parse(ThroughputSettings, own, "timers.throughput"),
        steps_per_print=core.get("steps_per_print"),
        tag_validation=_VALIDATIONS[own.get("checkpoint.tag_validation", "WARN").upper()],
        gather_16bit_weights_on_model_save=bool(
            zero.get("stage3_gather_16bit_weights_on_model_save", False)
        ),
        fp16_auto_cast=bool(sorter.core.get("fp16", {}).get("auto_cast", False)),
        allows_untested_optimizer=own.get("zero_allow_untested_optimizer"),
        log_level=own.get("log_level"),
        notes=tuple(sorter.notes),
        **flags,
    )


def get_monitor_config(param_dict: Mapping[str, Any]) -> MonitorSettings:
    """Return the monitors that a configuration asks for. Its other keys are ignored.

    Raises:
        ConfigError: a block has a key or a value that it may not have.
    """
    kinds = {name: type(block) for name, block in MonitorSettings()}
    return MonitorSettings(**{name: _parse(kinds[name], param_dict, name) for name in kinds})


class _Sorter:
    """Takes a configuration apart: ``core`` for zero-core, ``own`` by path, and ``notes``."""

    def __init__(self) -> None:
        self.core: dict[str, Any] = {}
        self.own: dict[str, Any] = {}
        self.notes: list[Note] = []

    def tell(self, path: str, value: Any, text: str) -> None:
        self.notes.append(Note(path, value, text))

    def sort(self, given: Mapping[str, Any]) -> None:
        for key, value in given.items():
            if key == "activation_checkpointing" and "enabled" in _mapping(key, value):
                self.core[key] = value  # this engine's own form: every block is computed again
            elif self._dispose(key, value):
                continue
            elif key in _BLOCKS:
                items = _mapping(key, value).items()
                left = {k: v for k, v in items if not self._dispose(f"{key}.{k}", v)}
                if key in _SHARED:
                    self.core[key] = left
                    continue
                for name, inner in left.items():
                    self._unknown(f"{key}.{name}", inner)
            elif key in Config.model_fields:
                is_block = block_of(Config.model_fields[key]) is not None
                self.core[key] = _mapping(key, value) if is_block else value
            else:
                self._unknown(key, value)

    def _dispose(self, path: str, value: Any) -> bool:
        if path in HONOURED:
            if path in FLAGS or path == "zero_allow_untested_optimizer":
                value = as_bool(path, value)
            elif path in _CHOICES and str(value).upper() not in _CHOICES[path]:
                expected = ", ".join(_CHOICES[path])
                raise ConfigError(f"{path}: expected one of {expected}, found {shown(value)}")
            self.own[path] = value
            for key, inner in value.items() if isinstance(value, Mapping) else ():
                if f"{path}.{key}" in UNNEEDED:
                    self._dispose(f"{path}.{key}", inner)
        elif path in UNNEEDED:
            self.tell(path, value, UNNEEDED[path])
        elif path in REFUSED:
            check_refused(path, value)
        else:
            return False
        return True

    def _unknown(self, path: str, value: Any) -> None:
        known = {*Config.model_fields, *HONOURED, *UNNEEDED, *REFUSED}
        close = difflib.get_close_matches(path, known, n=1, cutoff=0.8)
        hint = f": did you mean {close[0]!r}?" if close else ""
        self.tell(path, value, f"not a key of DeepSpeed's{hint}")


def _mapping(path: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: expected a block of keys, found {shown(value)}")
    return value


def _parse(kind: type[_Parsed], own: Mapping[str, Any], path: str) -> _Parsed:
    """Parse the block at ``path``. Unknown keys are refused, as in DeepSpeed."""
    block = _mapping(path, own.get(path, {}))
    try:
        return kind.model_validate(block)
    except pydantic.ValidationError as error:
        raise ConfigError(explain(error, kind, block, path)) from None
