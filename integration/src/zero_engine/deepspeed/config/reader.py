"""DeepSpeed's JSON, read as DeepSpeed reads it.

`read` sorts a configuration into what `zero_core.build` takes and what the DeepSpeed engine serves
itself. Defaults are DeepSpeed's. No key is ignored silently. A key without effect becomes a `Note`,
which `zero_engine.deepspeed.config.announce` prints with the configuration in effect. A key that
asks for a part that is not served is refused. As in DeepSpeed, an unknown key is refused in the
blocks that DeepSpeed checks, and has no effect elsewhere.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import pydantic

from zero_core.config import Config, as_typed, block_of, explain, shown
from zero_core.errors import ConfigError
from zero_engine.deepspeed.config.keys import FLAGS, HONOURED, REFUSED, UNNEEDED, check_refused
from zero_engine.deepspeed.config.names import (
    as_bool,
    core_config,
    keep_updates_to_steps,
    modernise,
    without_auto,
)
from zero_engine.deepspeed.config.settings import Note, Settings, TagValidation
from zero_engine.deepspeed.config.source import Source, load
from zero_engine.monitoring.settings import (
    COLLECTIVES,
    CometSettings,
    CommsLoggerSettings,
    CsvSettings,
    FlopsProfilerSettings,
    MonitorSettings,
    TensorBoardSettings,
    ThroughputSettings,
    WandbSettings,
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
        monitors=read_monitors(own),
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


def read_monitors(blocks: Mapping[str, Any]) -> MonitorSettings:
    """Return the monitors among ``blocks``.

    Raises:
        ConfigError: a block has a key or a value that it may not have.
    """
    return MonitorSettings(
        tensorboard=_parse(TensorBoardSettings, blocks, "tensorboard"),
        csv_monitor=_parse(CsvSettings, blocks, "csv_monitor"),
        wandb=_parse(WandbSettings, blocks, "wandb"),
        comet=_parse(CometSettings, blocks, "comet"),
    )


class _Sorter:
    """Takes a configuration apart: ``core`` for zero-core, ``own`` by path, and ``notes``."""

    def __init__(self) -> None:
        self.core: dict[str, Any] = {}
        self.own: dict[str, Any] = {}
        self.notes: list[Note] = []

    def tell(self, path: str, value: Any, text: str, *, is_warning: bool = False) -> None:
        self.notes.append(Note(path, value, text, is_warning))

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
        self.tell(path, value, f"not a key of DeepSpeed's{hint}", is_warning=True)


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
