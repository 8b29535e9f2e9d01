"""``deepspeed.monitor``: the blocks of monitors in a configuration, and `MonitorMaster`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from zero_engine.deepspeed.config.reader import read_monitors
from zero_engine.monitoring.monitors import Monitor
from zero_engine.monitoring.settings import (
    CometSettings,
    CsvSettings,
    MonitorSettings,
    TensorBoardSettings,
    WandbSettings,
)

DeepSpeedMonitorConfig = MonitorSettings
TensorBoardConfig = TensorBoardSettings
CSVConfig = CsvSettings
WandbConfig = WandbSettings
CometConfig = CometSettings


def get_monitor_config(param_dict: Mapping[str, Any]) -> MonitorSettings:
    """Return the monitors that a configuration asks for. Its other keys are ignored.

    Raises:
        ConfigError: a block has a key or a value that it may not have.
    """
    return read_monitors(param_dict)


class MonitorMaster(Monitor):
    """The monitors that ``monitor_config`` asks for, on rank 0."""

    def __init__(self, monitor_config: MonitorSettings) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        super().__init__(monitor_config, rank=rank)
