"""Monitoring of a run: scalars, times, memory, floating-point operations, bytes sent.

An engine calls each `StepObserver` at the start and end of forward, backward and step.
`zero_engine.deepspeed.engine.engine` makes the observers that a configuration requests.
"""

from __future__ import annotations

from zero_engine.monitoring.breakdowns import (
    CommunicationLog,
    FlopsProfiler,
    MemoryBreakdown,
    Throughput,
    ThroughputTimer,
    WallClock,
    log_summary,
)
from zero_engine.monitoring.monitors import Event, Monitor, Scalars, StepFacts, StepObserver

__all__ = [
    "CommunicationLog",
    "Event",
    "FlopsProfiler",
    "MemoryBreakdown",
    "Monitor",
    "Scalars",
    "StepFacts",
    "StepObserver",
    "Throughput",
    "ThroughputTimer",
    "WallClock",
    "log_summary",
]
