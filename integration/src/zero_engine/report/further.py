"""Moves for a run that nothing in particular limits: what the plan says of other configurations.

Their effect is in bytes, which a plan knows to a few percent without the machine. What they do to
the time of a step is measured: the last move says how.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from zero_core.plan.result import Choice, Plan, format_bytes
from zero_engine.report.measured import Measured
from zero_engine.report.page import Move

_LEAST = 0.05
"""Share of the planned bytes below which a saving is not worth a move."""


def further_moves(found: Measured, plan: Plan | None) -> Iterator[Move]:
    """Yield what may be tried next, the surest first."""
    if plan is not None:
        yield from _fewer_bytes_sent(plan)
        yield from _less_memory(found, plan)
    yield Move(
        "Measure this machine once, and let the plan search for the fastest configuration",
        "predicts the time of a step for every choice",
        "zero-engine doctor --measure && zero-engine plan MODEL "
        f"--world-size {found.run.run.world_size} --fit fit.json",
        "MODEL is the folder or the config.json of the model.",
    )
    folder = found.run.folder
    yield Move(
        "Change one key, run again, and compare the two runs",
        "every axis side by side",
        f"zero-engine report {folder} {folder}-changed",
        "Losses, times, memory, traffic, events and configuration are compared.",
    )


def _fewer_bytes_sent(plan: Plan) -> Iterator[Move]:
    """Yield the exact choice that sends the fewest bytes between nodes."""
    now, *others = plan.traffic_choices or (None,)
    exact = [c for c in others if c is not None and not _rounds(c.settings)]
    if now is None or not exact:
        return
    best = min(exact, key=lambda choice: choice.between_nodes_bytes)
    saved = 1.0 - best.between_nodes_bytes / max(now.between_nodes_bytes, 1)
    if saved > _LEAST:
        yield Move(
            f"Send less between nodes without a changed bit: {best.name}",
            f"{format_bytes(now.between_nodes_bytes)} \u2192 "
            f"{format_bytes(best.between_nodes_bytes)} between nodes ({-saved:+.0%})",
            _paste(best.settings),
            f"Planned bytes of a rank and step; it keeps {format_bytes(best.kept_bytes)} for it.",
        )


def _rounds(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("zero_quantized_weights") or settings.get("zero_quantized_gradients"))


def _less_memory(found: Measured, plan: Plan) -> Iterator[Move]:
    """Yield the choice with the same numbers that takes the least memory."""
    is_host = found.run.run.environment.get("device") == "cpu"

    def nbytes(choice: Choice) -> int:
        return choice.device_bytes + is_host * choice.host_bytes

    best = min((c for c in plan.choices if not c.is_rounded), key=nbytes, default=plan.configured)
    now, then = nbytes(plan.configured), nbytes(best)
    if then < (1.0 - _LEAST) * now:
        settings = found.run.settings
        changed = {
            key: value for key, value in best.apply(settings).items() if value != settings.get(key)
        }
        yield Move(
            f"Take less memory with the same losses: {best}",
            f"{format_bytes(now)} \u2192 {format_bytes(then)} a rank ({then / now - 1.0:+.0%})",
            json.dumps(changed)[1:-1],
            "Planned bytes without activations. What is free may hold a larger micro-batch.",
        )


def _paste(settings: Mapping[str, Any]) -> str:
    return f'"zero_optimization": {json.dumps(dict(settings))}'
