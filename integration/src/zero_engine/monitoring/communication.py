"""``comms_logger``: what the engine's collectives have sent, step by step and in all.

Calls and bytes are `zero_core.Engine.comm_report`'s. Collectives run beside compute, so they have
no latency of their own that could be told.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from zero_core import ShardedModel
from zero_core.footprint import Traffic
from zero_engine.monitoring.monitors import StepFacts, StepObserver
from zero_engine.monitoring.settings import CommsLoggerSettings

_logs: weakref.WeakSet[CommunicationLog] = weakref.WeakSet()


class CommunicationLog(StepObserver):
    """Sums of what this rank sends. See `log_summary`."""

    def __init__(
        self, engine: ShardedModel, settings: CommsLoggerSettings, *, say: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._say = say
        self.steps = 0
        """Steps added up so far."""
        self._sums: dict[str, Counter[str]] = {}
        _logs.add(self)

    def step_done(self, facts: StepFacts) -> None:
        """Add the step's rows. With ``verbose``, print them."""
        self.steps += 1
        for row in self._engine.comm_report():
            # DeepSpeed's names say more: all_gather_into_tensor, reduce_scatter_tensor.
            is_named = any(name.startswith(row.collective) for name in self._settings.prof_ops)
            if self._settings.prof_all or is_named:
                self._add(row, facts.global_steps)

    def _add(self, row: Traffic, step: int) -> None:
        name = f"{row.collective} ({row.content})" if self._settings.debug else row.collective
        found = Counter(
            count=row.num_calls,
            within_node_bytes=row.within_node_bytes,
            between_nodes_bytes=row.between_nodes_bytes,
        )
        self._sums.setdefault(name, Counter()).update(found)
        if self._settings.verbose:
            calls, within, between = found.values()
            self._say(
                f"comm op: {name} | step: {step} | calls: {calls} | "
                f"bytes within node: {within} | bytes between nodes: {between}"
            )

    def summary(self) -> dict[str, dict[str, int]]:
        """Return calls, and bytes sent within and between nodes, by collective."""
        return {name: dict(sums) for name, sums in self._sums.items()}

    def print(self) -> None:
        lines = [
            f"{'Comm. Op': <34}{'Count': >12}{'Sent in node (B)': >20}{'Between nodes (B)': >20}"
        ]
        for name, row in self._sums.items():
            count, within, between = row.values()
            lines.append(f"{name: <34}{count: >12}{within: >20}{between: >20}")
        self._say("\n".join([*lines, f"{self.steps} steps, rank {self._engine.rank}"]))


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the bytes sent so far, on rank 0 (``deepspeed.comm.log_summary``).

    Args:
        show_straggler: not served: nothing is timed.
        return_dict: return the numbers, on every rank.

    Raises:
        ValueError: ``show_straggler``, or no engine logs its communication.
    """
    if show_straggler:
        raise ValueError(
            "log_summary(show_straggler=True) is not served: collectives run beside compute and "
            "are not timed; leave it out"
        )
    logs = list(_logs)
    if not logs:
        raise ValueError(
            "nothing was logged: set comms_logger.enabled to true in the configuration"
        )
    for log in logs:
        log.print()
    summary = {name: row for log in logs for name, row in log.summary().items()}
    return {"summary": summary} if return_dict else None
