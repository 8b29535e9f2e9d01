"""The plan of a run's configuration, and planned bytes beside measured ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zero_core.errors import ConfigError, ZeroError
from zero_core.footprint import Plan, Traffic, TrafficChoice, format_bytes, plan
from zero_engine.report import charts
from zero_engine.report.measured import Measured, sent_bytes
from zero_engine.report.page import Block, Chart, Table, Text
from zero_engine.report.run import Run
from zero_engine.terminal import require


def plan_of(run: Run, limit: int | None) -> tuple[Plan | None, str]:
    """Return the plan of a run's configuration, and why there is none or what it leaves out.

    Args:
        run: whose model has a Hugging Face configuration.
        limit: bytes that one rank may take, None if unknown.
    """
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
    """Return inputs of a micro-batch as recorded, if the model is a causal language model."""
    require("train", "a plan", "transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    steps, micro = run.ranks[0].steps, run.run.config["train_micro_batch_size_per_gpu"]
    shape = tuple(steps[-1].input_shape) if steps else ()
    is_causal = run.run.model.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not is_causal or len(shape) != 2 or shape[0] != micro:
        return None
    ids = torch.zeros(shape, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


# ----------------------------------------------------------------------- bytes


def planned_memory(measured: Mapping[str, int], found: Plan | None, note: str) -> Iterator[Block]:
    """Yield long-lived bytes of a rank by kind, and what the plan leaves out."""
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
    """Yield bytes of a step by collective and link, measured and planned, and for each flag."""
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
    if plan is not None and plan.traffic_choices:
        yield Text("What a rank sends in a step: measured, and planned with each flag on and off.")
        yield _flags(sent, plan.traffic_choices)


def _by_collective(traffic: Sequence[Traffic]) -> dict[tuple[str, str], int]:
    """Return planned bytes by collective and link, named as in `sent_bytes`, none that are 0."""
    names = {"to_host": "copies to the host", "to_device": "copies to the device"}
    found: Counter[tuple[str, str]] = Counter()
    for row in traffic:
        name = names.get(row.collective, f"{row.collective}: {row.content}")
        found[name, "within a node"] += row.within_node_bytes
        found[name, "between nodes"] += row.between_nodes_bytes
        found[name, "host link"] += row.host_link_bytes
    return {key: nbytes for key, nbytes in found.items() if nbytes}


def _flags(sent: Sequence[tuple[str, str, int]], choices: Sequence[TrafficChoice]) -> Table:
    """Return bytes by content and link: a row that is measured, and one of each choice."""
    exchanged = {(name, link): n for name, link, n in sent if link != "host link"}
    rows = [("measured", _by_content(exchanged), "")]
    rows += [
        (choice.name, _by_content(_by_collective(choice.traffic)), format_bytes(choice.kept_bytes))
        for choice in choices
    ]
    keys = list(dict.fromkeys(key for _, table, _ in rows for key in table))
    return Table(
        ["flags", *(f"{content}, {link}" for content, link in keys), "memory for it"],
        [[name, *(format_bytes(table[key]) for key in keys), kept] for name, table, kept in rows],
    )


def _by_content(sent: Mapping[tuple[str, str], int]) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for (name, link), nbytes in sent.items():
        found[name.partition(": ")[2], link] += nbytes
    return found
