"""``deepspeed.monitor.monitor``: `MonitorMaster`, for scripts that write scalars themselves."""

from __future__ import annotations

import torch.distributed as dist

from zero_engine.monitoring.monitors import Monitor, sinks_of
from zero_engine.monitoring.settings import MonitorSettings
from zero_engine.script.refusal import refuse_other_names

__all__ = ["MonitorMaster"]


class MonitorMaster(Monitor):
    """Every monitor that ``monitor_config`` asks for, on rank 0."""

    def __init__(self, monitor_config: MonitorSettings) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        super().__init__(sinks_of(monitor_config, rank=rank), enabled=monitor_config.enabled)


refuse_other_names(__name__)
