"""Content of a report: the verdict on a run, and the blocks of each section."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zero_core.config import find_unneeded, load_config
from zero_core.errors import ConfigError, ZeroError
from zero_core.footprint import Plan, Traffic, format_bytes, plan
from zero_engine.report import charts
from zero_engine.report.diagnosis import Cause, diagnose, show_s, transient_bytes
from zero_engine.report.page import Block, Chart, Code, Moves, Page, Table, Text, Verdict
from zero_engine.report.run import WAITS, Measured, Run, kept_bytes, measure, sent_bytes
from zero_engine.terminal import count, require

_MAX_ROWS = 50
_NUM_MOVES = 3
_TITLES = {
    "nan": "Gradients are not finite in some steps",
    "recomputation": "Memory is nearly full of blocks' activations",
    "straggler": "One slow rank keeps the others waiting",
    "threads": "Too few threads compute on this machine",
    "nvme": "The disk delays the update of parameters",
    "host": "The host's update delays each training step",
    "pageable": "Copies are slow, because memory is pageable",
    "link": "The link between ranks limits each step",
    "micro_batch": "Tiny micro-batches exchange messages far too often",
    "outside": "The program outside the engine takes time",
}
"""Titles of a report by `Cause.key`, of 6 to 8 words."""
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def compose(run: Run, memory_limit: int | None) -> Page:
    found = measure(run)
    verdict, causes = judge(found, memory_limit)
    plan, note = plan_of(run, memory_limit or memory_of(found))
    moves = [
        {
            "change": _upper(cause.change),
            "gain": cause.gain_text,
            "paste": _merged(cause.paste, found.run.given or found.run.settings),
            "why": f"Predicted from this run: {cause.why}.",
        }
        for cause in causes[:_NUM_MOVES]
    ]
    num_first = 0 if found.run.failures else 1  # no move cures a failure
    further = moves[num_first:]
    none = "No further move" if moves else "No move"
    none = f"{none}: the run's times predict no gain that is worth a change."
    sections: dict[str, Iterable[Block]] = {
        "Next moves": [Text(verdict.sentence), Moves(further) if further else Text(none)],
        "Memory": _memory(found, plan, note),
        "One step": _step(found),
        "Bytes sent": sent_and_planned(found, plan),
        "Training": _training(found),
        "Ranks side by side": _side_by_side(found),
        "Checkpoints, failures, resumes": _events(found),
        "Configuration": _configuration(found),
        "Environment": _environment(found),
    }
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    records = f"{count(found.num_all, 'step')} on {count(len(found.ranks), 'rank')}"
    return Page(
        f"{run.folder}: report",
        verdict,
        Moves(moves[:num_first]),
        {title: list(blocks) for title, blocks in sections.items()},
        f"Made {made} by zero-engine report from the records of {records}.",
    )


def _merged(paste: str, given: Mapping[str, Any]) -> str:
    """Return each block that ``paste`` changes as a whole, with the keys that were ``given``."""
    if not paste.startswith('"'):
        return paste
    change = json.loads(f"{{{paste}}}")
    if "offload_optimizer" in change:
        change = {"zero_optimization": change}
    whole = _over(given, change)
    return json.dumps({key: whole[key] for key in change}, indent=2)[2:-2]


def _over(old: Any, new: Any) -> Any:
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    return {**old, **{key: _over(old.get(key), value) for key, value in new.items()}}


def first_sentence(run: Run, memory_limit: int | None = None) -> str:
    return judge(measure(run), memory_limit)[0].sentence


def memory_of(found: Measured) -> int | None:
    environment = found.run.run.environment
    if environment.get("device") != "cpu":
        return environment.get("device_memory")
    whole = environment.get("host_memory")
    return None if whole is None else int(whole) // max(found.run.run.ranks_per_node, 1)


def bounds(found: Measured) -> dict[str, float]:
    rank = max(found.ranks, key=lambda rank: rank.compute_s)
    lanes = {
        "compute": rank.compute_s,
        "gathers": found.lane("gather"),
        "reductions": found.lane("reduce"),
        "copies": found.lane("copies"),
        "host updates": max(found.lane("host") - found.lane("file wait"), 0.0),
        "file": found.lane("file"),
    }
    return {name: seconds for name, seconds in lanes.items() if seconds > 0.0}


def judge(found: Measured, memory_limit: int | None) -> tuple[Verdict, list[Cause]]:
    limit = memory_limit or memory_of(found)
    causes = diagnose(found, limit)
    peak = max((rank.peak_bytes for rank in found.ranks), default=0)
    parts = []
    if limit:
        spare = limit - peak
        parts.append(
            f"it fits with {format_bytes(spare)} of {format_bytes(limit)} a rank to spare"
            if spare >= 0
            else f"it takes {format_bytes(-spare)} more than the {format_bytes(limit)} of a rank"
        )
    else:
        parts.append(f"a rank takes {format_bytes(peak)} at most")
    lanes = bounds(found)
    share = None
    if lanes:
        name = max(lanes, key=lanes.__getitem__)
        share = min(lanes[name] / max(found.seconds, 1e-12), 1.0)
        parts.append(
            f"a step of {show_s(found.seconds)} is at {share:.0%} of its bound, which is {name}"
        )
    title, evidence = "No change is predicted to help here", f"{_upper(', '.join(parts))}."
    if causes:
        cause = causes[0]
        title, evidence = _TITLES[cause.key], f"{_upper(cause.sentence)}."
        sentence = (
            f"The limit is {cause.sentence}; {', '.join(parts)}; "
            f"{cause.change[:1].lower()}{cause.change[1:]}: {cause.gain_text}."
        )
        is_poor = cause.rank == 0 or cause.gain > 0.25
        state = "poor" if is_poor else "fair"
    else:
        sentence = f"Nothing stands out: {', '.join(parts)}."
        state = "good"
    failures = found.run.failures
    if failures:
        title, evidence = "A rank failed before the run ended", f"{_upper(failures[0])}."
        sentence, state = f"{evidence} {sentence}", "poor"
    return Verdict(title, evidence, _facts(found, peak, share), state, sentence), causes


def _facts(found: Measured, peak: int, share: float | None) -> dict[str, str]:
    run, num_recorded = found.run.run, len(found.ranks)
    environment, numel = run.environment, run.num_parameters
    samples = sum(rank.samples for rank in found.ranks) / max(found.seconds, 1e-9)
    last = [rank.steps[-1] for rank in found.run.ranks if rank.steps]
    losses = [step.loss for step in last if step.loss is not None]
    size = f"{numel / 1e9:.3g} B" if numel >= 999.5e6 else f"{numel / 1e6:.3g} M"
    tokens = "not recorded"
    shapes = {tuple(step.input_shape) for rank in found.run.ranks for step in rank.steps}
    if last and "vocab_size" in run.model and len(shapes) == 1 == len(last[0].input_shape) - 1:
        tokens = f"{samples * last[0].input_shape[1]:,.0f}"
    device = str(environment.get("device_name", environment.get("device", "not recorded")))
    if device == "cpu":
        device = f"CPU, {count(int(environment.get('cores', 0)), 'core')}"
    skipped = f", {found.num_skipped} skipped" if found.num_skipped else ""
    recorded = f" ({num_recorded} recorded)" if num_recorded < run.world_size else ""
    nodes = run.world_size // max(run.ranks_per_node, 1)
    return {
        "tokens a second": tokens,
        "last loss": f"{sum(losses) / len(losses):.4g}" if losses else "not recorded",
        "model size": f"{size} parameters",
        "device": device,
        "date": time.strftime("%Y-%m-%d", time.gmtime(run.started_at)),
        "a step": show_s(found.seconds),
        "samples a second": f"{samples:.4g}",
        "peak memory of a rank": format_bytes(peak),
        "of the bound": "not measured" if share is None else f"{share:.0%}",
        "steps": f"{found.num_all}{skipped}",
        "ranks": f"{run.world_size}{recorded}" + (f" on {nodes} nodes" if nodes > 1 else ""),
    }


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _memory(found: Measured, plan: Plan | None, note: str) -> Iterator[Block]:
    transient, moment = transient_bytes(found)
    if transient:
        yield Text(
            f"The tallest moment of a step is {moment}: {format_bytes(transient)} above what is "
            "held when the step begins."
        )
    for spec in charts.memory_over_step(found.run.ranks):
        yield Chart(spec)
    yield from planned_memory(kept_bytes(found.run.ranks[0]), plan, note)
    yield Table(
        ["rank", "after a step", "most"],
        [
            [str(rank.run.rank), format_bytes(usual.held_bytes), format_bytes(usual.peak_bytes)]
            for rank, usual in zip(found.run.ranks, found.ranks, strict=True)
        ][:_MAX_ROWS],
    )
    if found.run.run.environment.get("device") == "cpu":
        yield Text(
            "On a CPU a rank's memory is its process's resident memory: torch, the interpreter and "
            "what the allocator keeps count in the table, and are left out of the chart."
        )


def _step(found: Measured) -> Iterator[Block]:
    if not found.has_times:
        yield Text("No times were taken.")
        return
    for spec in charts.lanes(found.run.ranks):
        yield Chart(spec)
    yield Table(
        ["lane", "needs", "of a step"],
        [
            [name, show_s(seconds), f"{seconds / max(found.seconds, 1e-12):.0%}"]
            for name, seconds in sorted(bounds(found).items(), key=lambda item: -item[1])
        ],
    )
    if not found.lane("copies"):
        why = "the state tier has timed none"
        if found.run.run.environment.get("device") == "cpu":
            why = "ranks compute on the host, where nothing is copied to a device and back"
        elif not found.run.run.shares.get("host"):
            why = "the host updates nothing, so that gradients and states stay on the device"
        yield Text(f"There is no lane of copies: {why}.")
    yield Text(
        "A step is never shorter than its longest lane needs. Red is time in which the program "
        "waits."
    )


def _training(found: Measured) -> Iterator[Block]:
    ranks, first = found.run.ranks, found.run.ranks[0]
    losses = {"training": charts.loss_series(ranks)}
    if found.run.held_out:
        losses["held out"] = list(found.run.held_out)
    series = {
        "loss": losses,
        "gradient norm": {"gradient norm": charts.series_of(first, "grad_norm")},
    }
    if first.run.config["fp16"]["enabled"]:
        series["loss scale"] = {"loss scale": charts.series_of(first, "loss_scale")}
    series["seconds of a step"] = {"seconds": charts.series_of(first, "seconds")}
    for title, lines in series.items():
        spec = charts.over_steps(lines, title)
        if spec is not None:
            yield Chart(spec)
    skipped = [step for step in first.steps if not step.is_taken]
    if skipped:
        yield Text(f"{len(skipped)} of {len(first.steps)} steps were skipped on all ranks.")
        yield Table(
            ["step", "parameter and rank", "loss scale after"],
            [[str(s.step), s.why_skipped, f"{s.loss_scale:g}"] for s in skipped[:_MAX_ROWS]],
        )
    else:
        yield Text("No step was skipped.")


def _side_by_side(found: Measured) -> Iterator[Block]:
    spec = charts.ranks_side_by_side(found)
    if spec is not None:
        yield Chart(spec)
    yield Table(
        ["rank", "host", "step", "own work", *WAITS.values()],
        [
            [
                str(rank.run.rank),
                str(rank.run.environment.get("host", "")),
                show_s(usual.seconds),
                show_s(usual.own_s),
                *(show_s(usual.waits.get(name, 0.0)) for name in WAITS),
            ]
            for rank, usual in zip(found.run.ranks, found.ranks, strict=True)
        ][:_MAX_ROWS],
    )


def _events(found: Measured) -> Iterator[Block]:
    for failure in found.run.failures:
        yield Text(f"{_upper(failure)}.")
    if found.run.absent:
        named = ", ".join(map(str, found.run.absent[:_MAX_ROWS]))
        yield Text(f"There are no records of {count(len(found.run.absent), 'rank')}: {named}.")
    if all(rank.end is None for rank in found.run.ranks):
        yield Text("No rank has recorded an end: the run goes on, or it was killed.")
    rows: list[tuple[float, list[str]]] = []
    for rank in found.run.ranks:
        number, is_first = str(rank.run.rank), rank is found.run.ranks[0]
        for start in rank.starts if is_first else ():
            what = "resumed" if start.first_step else "started"
            rows.append((start.started_at, [what, "all", str(start.first_step), "", ""]))
        for event in rank.events:
            if is_first or event.what == "failed":
                who = number if event.what in ("failed", "ended") else "all"
                waited = show_s(event.seconds) if event.seconds else ""
                rows.append((event.at, [event.what, who, str(event.step), waited, event.text]))
        if rank.end is None and rank.steps:
            last = rank.steps[-1]
            rows.append((last.at, ["last step", number, str(last.step), "", "no end was recorded"]))
    yield Table(
        ["when (UTC)", "what", "rank", "after step", "waited", ""],
        [
            [time.strftime("%m-%d %H:%M:%S", time.gmtime(at)), *cells]
            for at, cells in sorted(rows)[-_MAX_ROWS:]
        ],
    )


def _configuration(found: Measured) -> Iterator[Block]:
    run = found.run.run
    micro, steps = (
        run.config[key] for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    yield Text(
        f"{run.config['train_batch_size']} samples a step = {micro} a rank and micro-step * "
        f"{count(steps, 'micro-step')} * {count(run.world_size, 'rank')}. "
        "Values that differ from the defaults:"
    )
    try:
        batch = {"train_micro_batch_size_per_gpu": micro}
        default = load_config(batch, world_size=run.world_size).model_dump(mode="json")
    except ConfigError:
        default = {}
    leaves = [leaf for leaf in _leaves("", run.config, default) if leaf[0] not in _BATCH]
    yield Code("\n".join(f"{path} = {json.dumps(value)}" for path, value in leaves) or "none")
    idle = [
        [path, json.dumps(value, default=str), reason]
        for path, value, reason in find_unneeded(found.run.given or {}, found.run.ranks[0].config)
    ]
    if idle:
        yield Text("Without effect:")
        yield Table(["key", "value", "why"], idle)
    else:
        yield Text("Every key that was given has an effect.")


def _leaves(path: str, value: Any, default: Any) -> Iterator[tuple[str, Any]]:
    if value == default:
        return
    if not isinstance(value, Mapping):
        yield path, value
        return
    inner = default if isinstance(default, Mapping) else {}
    for name, below in value.items():
        yield from _leaves(f"{path}.{name}" if path else name, below, inner.get(name))


def _environment(found: Measured) -> Iterator[Block]:
    rows: list[list[str]] = []
    first: Mapping[str, Any] = found.run.run.environment
    for key, value in first.items():
        others = {str(rank.run.environment.get(key)) for rank in found.run.ranks}
        if isinstance(value, dict):
            shown = ", ".join(f"{name} {version}" for name, version in value.items())
        elif key.endswith("_memory"):
            shown = format_bytes(int(value))
        else:
            shown = ", ".join(sorted(others))
        rows.append([key.replace("_", " "), shown])
    rows.append(["parameters", f"{found.run.run.num_parameters:,}"])
    rows.append(["trained", f"{found.run.run.num_trainable:,}"])
    rows.append(["records", str(Path(found.run.folder))])
    yield Table(["", ""], rows)


def plan_of(run: Run, limit: int | None) -> tuple[Plan | None, str]:
    """Return the plan of a run's configuration, and the reason why it is missing or incomplete."""
    if not run.run.model:
        return None, "no plan: the model has no Hugging Face configuration to make it from"
    is_host = run.run.environment.get("device") == "cpu"

    def make(inputs: Mapping[str, Any] | None) -> Plan:
        return plan(
            dict(run.run.model),
            run.settings,
            run.run.world_size,
            device_memory=None if is_host else limit,
            host_memory=limit * run.run.ranks_per_node if is_host and limit else None,
            ranks_per_node=run.run.ranks_per_node,
            example_inputs=inputs,
            device_type="cpu" if is_host else "accelerator",
        )

    try:
        inputs = _inputs(run)
        if inputs is None:
            return make(None), "Activations are not planned: no tokens are recorded."
        try:
            return make(inputs), ""
        except ConfigError as error:
            return make(None), f"Activations are not planned: {error}."
    except ZeroError as error:
        return None, f"no plan: {error}"


def _inputs(run: Run) -> dict[str, torch.Tensor] | None:
    require("train", "a plan", "transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    steps, micro = run.ranks[0].steps, run.run.config["train_micro_batch_size_per_gpu"]
    shape = tuple(steps[-1].input_shape) if steps else ()
    is_causal = run.run.model.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not is_causal or len(shape) != 2 or shape[0] != micro:
        return None
    ids = torch.zeros(shape, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def planned_memory(measured: Mapping[str, int], found: Plan | None, note: str) -> Iterator[Block]:
    in_plan = Counter[str]()
    if found is not None:
        in_plan = Counter(found.memory.device) + Counter(found.memory.host)
    rows = [
        [
            kind,
            "no plan" if found is None else format_bytes(in_plan.get(kind, 0)),
            format_bytes(measured[kind]) if kind in measured else "not measured by kind",
        ]
        for kind in dict.fromkeys([*measured, *in_plan])
        if measured.get(kind) or in_plan.get(kind)
    ]
    if rows:
        yield Table(["bytes of rank 0 by kind", "planned", "measured"], rows)
    if note:
        yield Text(note)


def sent_and_planned(found: Measured, plan: Plan | None) -> Iterator[Block]:
    sent = sent_bytes(found.run.ranks[0])
    rows = [{"collective": name, "link": link, "mib": n / 2**20} for name, link, n in sent]
    spec = charts.bars(rows, "mib", "collective", "link", "MiB that rank 0 sends in a step")
    if spec is None:
        yield Text("Nothing is sent: there is one rank.")
    else:
        yield Chart(spec)
        planned = {} if plan is None else _by_collective(plan.traffic)
        measured = {(name, link): n for name, link, n in sent}
        yield Table(
            ["collective", "link", "planned", "measured"],
            [
                [
                    *key,
                    "no plan" if plan is None else format_bytes(planned.get(key, 0)),
                    format_bytes(measured.get(key, 0)),
                ]
                for key in dict.fromkeys([*measured, *planned])
            ],
        )


def _by_collective(traffic: Sequence[Traffic]) -> dict[tuple[str, str], int]:
    names = {"to_host": "copies to the host", "to_device": "copies to the device"}
    found: Counter[tuple[str, str]] = Counter()
    for row in traffic:
        name = names.get(row.collective, f"{row.collective}: {row.content}")
        found[name, "within a node"] += row.within_node_bytes
        found[name, "between nodes"] += row.between_nodes_bytes
        found[name, "host link"] += row.host_link_bytes
    return {key: nbytes for key, nbytes in found.items() if nbytes}
