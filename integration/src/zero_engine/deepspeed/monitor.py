"""``deepspeed.monitor``: configuration blocks of monitors, and `MonitorMaster`."""

from __future__ import annotations

import torch.distributed as dist

from zero_engine import monitoring
from zero_engine.deepspeed.config.reader import get_monitor_config as get_monitor_config
from zero_engine.monitoring import Monitor

DeepSpeedMonitorConfig = monitoring.MonitorSettings
TensorBoardConfig = monitoring.TensorBoardSettings
CSVConfig = monitoring.CsvSettings
WandbConfig = monitoring.WandbSettings
CometConfig = monitoring.CometSettings


class MonitorMaster(Monitor):
    """Monitors of the configuration ``monitor_config``, on rank 0."""

    def __init__(self, monitor_config: monitoring.MonitorSettings) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        super().__init__(monitor_config, rank=rank)
