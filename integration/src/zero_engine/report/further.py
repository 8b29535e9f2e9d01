"""Next moves: what the causes of a run ask for, then what its plan and this machine say.

Each effect is measured in the run, taken of a layer of its size on this machine, or planned. Where
none of these knows a further change, there are fewer moves.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zero_core.plan.result import Choice, format_bytes
from zero_engine.planning import TimedPlan
from zero_engine.report.diagnosis import Cause, show_s
from zero_engine.report.measured import Measured
from zero_engine.report.page import Move
from zero_engine.report.planned import Planned, plan_of
from zero_engine.report.probe import batch_scaling, is_of_this_machine

NUM_MOVES = 3
_LEAST = 0.05
"""Share below which a saving is not worth a move."""


def next_moves(
    found: Measured, causes: Sequence[Cause], planned: Planned, limit: int | None
) -> list[Move]:
    """Return at most `NUM_MOVES` changes, the one to begin with first.

    Args:
        found: the usual step.
        causes: of what limits it, the first one most.
        planned: the plan of the run.
        limit: bytes that one rank may take, None if unknown.
    """
    moves: dict[str, Move] = {}
    for move in _all(found, causes, planned, limit):
        moves.setdefault(move.paste, move)
        if len(moves) == NUM_MOVES:
            break
    return list(moves.values())


def _all(
    found: Measured, causes: Sequence[Cause], planned: Planned, limit: int | None
) -> Iterator[Move]:
    for cause in causes:
        why = f"Predicted from this run: {cause.why}."
        yield Move(_upper(cause.change), cause.gain_text, cause.paste, why)
    plan = planned.plan
    if plan is not None:
        yield from _faster(found, plan)
    if not any(cause.key == "micro_batch" for cause in causes):
        yield from _more_samples(found)
    if plan is not None:
        yield from _fewer_bytes_sent(plan)
        yield from _less_memory(found, plan)
    yield from _recomputation(found, planned, limit)
    yield from _rates(found, planned)


def _faster(found: Measured, plan: TimedPlan) -> Iterator[Move]:
    """Yield the fastest choice, where the rates of the machine are known."""
    now, best = plan.configured, plan.best
    if best is None or best is now or now.step_time is None or best.step_time is None:
        return
    before, after = now.step_time.total_s, best.step_time.total_s
    yield Move(
        f"Take the fastest of the configurations that fit: {best}",
        f"{show_s(before)} \u2192 {show_s(after)} a step ({after / before - 1.0:+.0%})",
        _changed(best, found.run.settings),
        "Both are planned by the rates that are kept of this machine; a step as it is was measured "
        f"at {show_s(found.seconds)}.",
    )


def _fewer_bytes_sent(plan: TimedPlan) -> Iterator[Move]:
    """Yield the exact choice that sends the fewest bytes between nodes."""
    if not plan.traffic_choices or not plan.traffic_choices[0].between_nodes_bytes:
        return
    now, *others = plan.traffic_choices
    exact = [choice for choice in others if not _rounds(choice.settings)]
    best = min(exact, key=lambda choice: choice.between_nodes_bytes, default=now)
    change = best.between_nodes_bytes / now.between_nodes_bytes - 1.0
    if change < -_LEAST:
        yield Move(
            f"Send less between nodes with the same numbers: {best.name}",
            f"{format_bytes(now.between_nodes_bytes)} \u2192 "
            f"{format_bytes(best.between_nodes_bytes)} between nodes ({change:+.0%})",
            f'"zero_optimization": {json.dumps(dict(best.settings))}',
            f"Planned bytes of a rank and step; it keeps {format_bytes(best.kept_bytes)} for it.",
        )


def _rounds(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("zero_quantized_weights") or settings.get("zero_quantized_gradients"))


def _less_memory(found: Measured, plan: TimedPlan) -> Iterator[Move]:
    """Yield the choice with the same numbers that takes the least memory."""
    is_host = found.run.run.environment.get("device") == "cpu"

    def nbytes(choice: Choice) -> int:
        return choice.device_bytes + is_host * choice.host_bytes

    kept = plan.memory.device.get("activations", 0)
    best = min((c for c in plan.choices if not c.is_rounded), key=nbytes, default=plan.configured)
    now, then = nbytes(plan.configured), nbytes(best)
    if then < (1.0 - _LEAST) * now:
        yield Move(
            f"Take less memory with the same numbers: {best}",
            f"{format_bytes(now)} \u2192 {format_bytes(then)} a rank ({then / now - 1.0:+.0%})",
            _changed(best, found.run.settings),
            f"Planned bytes {'with' if kept else 'without'} activations. What becomes free may "
            "hold a larger micro-batch.",
        )


def _changed(choice: Choice, settings: Mapping[str, Any]) -> str:
    """Return the keys of a configuration that make a choice, as a line to paste."""
    made = choice.apply(settings)
    changed = {key: value for key, value in made.items() if value != settings.get(key)}
    if "activation_checkpointing" in settings and "activation_checkpointing" not in made:
        changed["activation_checkpointing"] = {"enabled": False}
    return json.dumps(changed)[1:-1]


def _recomputation(found: Measured, planned: Planned, limit: int | None) -> Iterator[Move]:
    """Yield recomputation of activations, or its end where it is on."""
    run = found.run
    was = bool((run.run.config.get("activation_checkpointing") or {}).get("enabled"))
    block = {**run.settings.get("activation_checkpointing", {}), "enabled": not was}
    forward = max(rank.places.get("forward", 0.0) for rank in found.ranks)
    if len(run.run.units) < 3 or not planned.activation_bytes or not forward:
        return
    changed = plan_of(run, limit, {"activation_checkpointing": block})
    before, after = planned.activation_bytes, changed.activation_bytes
    change = f"activations {format_bytes(before)} \u2192 {format_bytes(after)}"
    paste = f'"activation_checkpointing": {json.dumps(block)}'
    if was and after > before:
        yield Move(
            "Keep the activations of blocks in place of computing them again",
            f"up to {show_s(forward)} of {show_s(found.seconds)} a step less; {change}",
            paste,
            "A step has one forward less, whose time was measured. Bytes are planned.",
        )
    elif not was and 0 < after < (1.0 - _LEAST) * before:
        yield Move(
            "Compute the activations of blocks again in backward",
            f"{change} a rank ({after / before - 1.0:+.0%})",
            paste,
            f"Planned bytes. A step takes up to {show_s(forward)} more, one forward as it was "
            "measured, and the memory may hold a larger micro-batch.",
        )


def _more_samples(found: Measured) -> Iterator[Move]:
    """Yield twice the samples at once, where a layer's time says that it is worth it."""
    rank, run = found.first, found.run.run
    micro = int(run.config["train_micro_batch_size_per_gpu"])
    steps = int(run.config["gradient_accumulation_steps"])
    share = batch_scaling(found, 2)
    samples = sum(each.samples for each in found.ranks)
    if share is None or not samples or (steps > 1 and steps % 2):
        return
    work = rank.places.get("forward", 0.0) + rank.places.get("backward", 0.0)
    saved = work * (1.0 - share)
    if saved < _LEAST * found.seconds:
        return
    size = {"train_micro_batch_size_per_gpu": 2 * micro, "gradient_accumulation_steps": steps // 2}
    if steps == 1:
        size["gradient_accumulation_steps"] = 1
        change, note = "Compute twice the samples a step", "It changes what a step trains on."
    else:
        change, note = "Compute twice the samples in a micro-step", "A step has the same samples."
    before, after = found.seconds / samples, (found.seconds - saved) / samples
    yield Move(
        change,
        f"{show_s(before)} \u2192 {show_s(after)} a sample ({after / before - 1.0:+.0%})",
        json.dumps(size)[1:-1],
        f"A layer of this size takes {share:.0%} of the time for twice the rows at once, measured "
        f"here. {note}",
    )


def _rates(found: Measured, planned: Planned) -> Iterator[Move]:
    """Yield the measurement of the machine, where a plan would have times with it."""
    plan, run = planned.plan, found.run
    if plan is None or plan.step_time is not None or not planned.activation_bytes:
        return
    if is_of_this_machine(run.run):
        yield Move(
            "Measure this machine once, for predicted times of all configurations",
            "a step is no faster by itself; this page then names the fastest that fits",
            f"zero-engine doctor --measure && zero-engine report {shlex.quote(str(run.folder))}",
            "It takes about a minute. No time is planned here, as no rates of this machine are "
            "kept.",
        )


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
