"""``deepspeed.monitor``: configuration blocks of monitors, and `MonitorMaster`."""

from __future__ import annotations

import torch.distributed as dist

from zero_engine.deepspeed.config.reader import get_monitor_config as get_monitor_config
from zero_engine.monitoring import settings
from zero_engine.monitoring.monitors import Monitor

DeepSpeedMonitorConfig = settings.MonitorSettings
TensorBoardConfig = settings.TensorBoardSettings
CSVConfig = settings.CsvSettings
WandbConfig = settings.WandbSettings
CometConfig = settings.CometSettings


class MonitorMaster(Monitor):
    """Monitors of the configuration ``monitor_config``, on rank 0."""

    def __init__(self, monitor_config: settings.MonitorSettings) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        super().__init__(monitor_config, rank=rank)
