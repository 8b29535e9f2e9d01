"""``deepspeed.monitor.config``: the blocks of monitors in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_engine.deepspeed.config import read_monitors
from zero_engine.monitoring.settings import (
    CometSettings,
    CsvSettings,
    MonitorSettings,
    TensorBoardSettings,
    WandbSettings,
)
from zero_engine.script.refusal import refuse_other_names

__all__ = [
    "CSVConfig",
    "CometConfig",
    "DeepSpeedMonitorConfig",
    "TensorBoardConfig",
    "WandbConfig",
    "get_monitor_config",
]

DeepSpeedMonitorConfig = MonitorSettings
TensorBoardConfig = TensorBoardSettings
CSVConfig = CsvSettings
WandbConfig = WandbSettings
CometConfig = CometSettings


def get_monitor_config(param_dict: Mapping[str, Any]) -> MonitorSettings:
    """The monitors that a configuration asks for; its other keys are passed over.

    Raises:
        ConfigError: a block has a key or a value that it may not have.
    """
    return read_monitors(param_dict)


refuse_other_names(__name__)
