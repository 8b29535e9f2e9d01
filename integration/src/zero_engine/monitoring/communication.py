"""``comms_logger``: what the engine's collectives have sent, step by step and in all.

Calls and bytes are `zero_core.Engine.comm_report`'s. Collectives run beside compute, so they have
no latency of their own that could be told.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from zero_core.comm.meter import Traffic
from zero_engine.monitoring.observer import Observed, Observer, StepFacts
from zero_engine.monitoring.settings import CommsLoggerSettings

_logs: weakref.WeakSet[CommunicationLog] = weakref.WeakSet()


class CommunicationLog(Observer):
    """Sums of what this rank sends. See `log_summary`."""

    def __init__(
        self, engine: Observed, settings: CommsLoggerSettings, *, say: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._say = say
        self._rows: dict[str, list[int]] = {}
        self.steps = 0
        """Steps added up so far."""
        _logs.add(self)

    def step_done(self, facts: StepFacts) -> None:
        """Add the step's rows. With ``verbose``, print them."""
        self.steps += 1
        for row in self._engine.comm_report():
            if self._is_asked_for(row.collective):
                self._add(row, facts.global_steps)

    def _is_asked_for(self, collective: str) -> bool:
        """DeepSpeed's names say more: all_gather_into_tensor, reduce_scatter_tensor."""
        names = self._settings.prof_ops
        return self._settings.prof_all or any(name.startswith(collective) for name in names)

    def _add(self, row: Traffic, step: int) -> None:
        name = f"{row.collective} ({row.content})" if self._settings.debug else row.collective
        total = self._rows.setdefault(name, [0, 0, 0])
        found = (row.num_calls, row.within_node_bytes, row.between_nodes_bytes)
        for index, value in enumerate(found):
            total[index] += value
        if self._settings.verbose:
            self._say(
                f"comm op: {name} | step: {step} | calls: {found[0]} | "
                f"bytes within node: {found[1]} | bytes between nodes: {found[2]}"
            )

    def summary(self) -> dict[str, dict[str, int]]:
        """Return calls, and bytes sent within and between nodes, by collective."""
        keys = ("count", "within_node_bytes", "between_nodes_bytes")
        return {name: dict(zip(keys, row, strict=True)) for name, row in self._rows.items()}

    def table(self) -> str:
        lines = [
            f"{'Comm. Op': <34}{'Count': >12}{'Sent in node (B)': >20}{'Between nodes (B)': >20}"
        ]
        lines += [
            f"{name: <34}{count: >12}{within: >20}{between: >20}"
            for name, (count, within, between) in self._rows.items()
        ]
        return "\n".join([*lines, f"{self.steps} steps, rank {self._engine.rank}"])

    def print(self) -> None:
        self._say(self.table())


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
    summaries: list[Mapping[str, Any]] = [log.summary() for log in logs]
    return {"summary": {k: v for one in summaries for k, v in one.items()}} if return_dict else None
