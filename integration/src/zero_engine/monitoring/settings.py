"""Blocks of DeepSpeed's JSON about monitoring. Names and defaults are DeepSpeed's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
"""Names in ``comm_report()``. DeepSpeed's are longer: all_gather_into_tensor."""


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorBoardSettings(_Block):
    """``tensorboard``: event files in ``output_path/job_name``."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class CsvSettings(TensorBoardSettings):
    """``csv_monitor``: one file per name in ``output_path/job_name``."""


class WandbSettings(_Block):
    """``wandb``: a run of Weights & Biases."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class CometSettings(_Block):
    """``comet``: an experiment of Comet."""

    enabled: bool = False
    samples_log_interval: PositiveInt = 100
    """Samples between two values of a name."""
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: Literal["get", "create", "get_or_create"] | None = None


class MonitorSettings(_Block):
    """Blocks of the sinks of scalars. Several sinks can be enabled."""

    tensorboard: TensorBoardSettings = TensorBoardSettings()
    csv_monitor: CsvSettings = CsvSettings()
    wandb: WandbSettings = WandbSettings()
    comet: CometSettings = CometSettings()

    @property
    def enabled(self) -> bool:
        blocks = (self.tensorboard, self.csv_monitor, self.wandb, self.comet)
        return any(block.enabled for block in blocks)


class FlopsProfilerSettings(_Block):
    """``flops_profiler``: floating-point operations of one step, counted by torch."""

    enabled: bool = False
    profile_step: Annotated[int, Field(ge=0)] = 1
    """Step to count. The first step is 0."""
    recompute_fwd_factor: float = 0.0
    """No effect: backward is counted, not estimated."""
    module_depth: Annotated[int, Field(ge=-1)] = -1
    """Deepest modules in the table. -1: all."""
    top_modules: PositiveInt = 1
    """Number of modules with the most operations that are named per depth."""
    detailed: bool = True
    output_file: str | None = None


class CommsLoggerSettings(_Block):
    """``comms_logger``: what the engine's collectives send."""

    enabled: bool = False
    prof_all: bool = True
    """Log all collectives, or only those in ``prof_ops``."""
    prof_ops: tuple[str, ...] = ()
    """Names that begin with one of `COLLECTIVES`."""
    verbose: bool = False
    """Print a line per collective after each step."""
    debug: bool = False
    """Add the content that a collective carries to its name."""


class ThroughputSettings(_Block):
    """``timers.throughput``: samples per second, every ``steps_per_print`` steps."""

    enabled: bool = True
    synchronized: bool = True
    """No effect: the device is synchronized when a line is printed."""
