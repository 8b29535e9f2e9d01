"""What a run tells: scalars to monitors, times, floating-point operations, bytes sent.

`make_monitor` and `make_observers` make what a configuration asks for. The engine calls the
observers at the borders of forward, backward and step; see `zero_engine.monitoring.observer`.
"""

from __future__ import annotations

from zero_engine.monitoring.observer import Observed, Observer, StepFacts, StepObserver

__all__ = ["Observed", "Observer", "StepFacts", "StepObserver"]
