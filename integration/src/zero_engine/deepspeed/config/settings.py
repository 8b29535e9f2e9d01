"""A DeepSpeed configuration, sorted into zero-core's part and the DeepSpeed engine's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zero_engine.monitoring.settings import (
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


@dataclass(frozen=True, slots=True)
class Note:
    """A key that was given and has no effect, or another effect than one might expect."""

    path: str
    value: Any
    text: str
    is_warning: bool = False


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
