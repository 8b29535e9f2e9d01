"""Monitoring of a run: scalars, times, memory, floating-point operations, bytes sent.

An engine calls observers at the borders of forward, backward and step; see
`zero_engine.monitoring.observer`. `zero_engine.deepspeed.engine.engine` makes those that a
configuration asks for.
"""

from __future__ import annotations

from zero_engine.monitoring.breakdowns import (
    MemoryBreakdown,
    Throughput,
    ThroughputTimer,
    WallClock,
)
from zero_engine.monitoring.communication import CommunicationLog, log_summary
from zero_engine.monitoring.flops import FlopsProfiler
from zero_engine.monitoring.monitors import Event, Monitor, Scalars
from zero_engine.monitoring.observer import StepFacts, StepObserver

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
