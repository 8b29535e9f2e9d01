"""A table of equalities: a configuration with a variant gives the bits of one without it.

`Row` is one line of the table and `check` runs it. `cover` chooses rows: each pair of values that
some valid row has is in one of them.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import zero_core
from zero_core.comm.groups import Ranks
from zero_core.testing.models import make_model
from zero_core.testing.oracle import Case, Trace
from zero_core.testing.ranks import run_on_processes
from zero_core.testing.scenarios import BY_NAME, SCENARIOS
from zero_core.testing.simulated import simulate

FOLDER = "FOLDER"
"""Stands for a folder of the run's own in a configuration."""


@dataclass(frozen=True)
class Variant:
    """Keys of a configuration that change no bit."""

    zero: Mapping[str, Any] = field(default_factory=dict)  # what it adds to ``zero_optimization``
    base: Mapping[str, Any] = field(default_factory=dict)  # what the other one has there
    top: Mapping[str, Any] = field(default_factory=dict)  # what it adds at the top
    base_top: Mapping[str, Any] = field(default_factory=dict)  # what both have at the top
    further: Mapping[str, Any] = field(default_factory=dict)  # adds to arguments of ``build()``
    stages: Sequence[int] = (0, 1, 2, 3)  # ZeRO stages that serve it
    # numbers of ranks that serve it, and how many of them share a node
    ranks: Sequence[tuple[int, int]] = ((1, 1), (2, 2), (3, 1), (4, 2))
    width: int = 33  # of the model, with shards of gradients that are worth quantizing
    family: str = ""  # variants of one family share rows where `cover` is asked to: see there


@dataclass(frozen=True)
class Row:
    """One equality."""

    scenario: str  # what is done, by its name in `SCENARIOS` or `BY_NAME`
    variant: str  # name of what is added
    stage: int  # ZeRO stage of both sides
    dtype: str  # of forward and backward: "fp32", "bf16" or "fp16"
    ranks: int  # number of simulated ranks
    per_node: int  # how many of them share a node

    def __str__(self) -> str:
        where = f"{self.ranks} ranks" + (f", {self.per_node} a node" * (self.per_node > 1))
        return f"{self.variant}: {self.scenario}, stage {self.stage}, {self.dtype}, {where}"


def cover(
    variants: Mapping[str, Variant],
    *,
    scenarios: Sequence[str] = tuple(SCENARIOS),
    dtypes: Sequence[str] = ("fp32", "bf16", "fp16"),
    strength: int = 2,
    by_family: bool = False,
) -> list[Row]:
    """Return rows in which all sets of ``strength`` values occur that may occur together.

    Among rows that add equally many sets, one with about two ranks is chosen.
    ``by_family``: of the variants of a family any may be in a set, and each has all its stages.
    """
    rows = [
        Row(scenario, name, stage, dtype, *sizes)
        for name, variant in variants.items()
        for scenario, stage, dtype, sizes in itertools.product(
            scenarios, variant.stages, dtypes, variant.ranks
        )
    ]
    families = {n: v.family or n for n, v in variants.items()} if by_family else {}
    sets = []
    for row in rows:
        family = families.get(row.variant, row.variant)
        values = (row.scenario, family, row.stage, row.dtype, (row.ranks, row.per_node))
        own: set[tuple[Any, ...]] = set(itertools.combinations(enumerate(values), strength))
        sets.append(own | ({(row.variant, row.stage)} if by_family else set()))
    having: dict[tuple[Any, ...], list[int]] = {}
    for number, own in enumerate(sets):
        for one in own:
            having.setdefault(one, []).append(number)
    draw, missing, chosen = random.Random(0), set(having), []
    for one in sorted(having, key=str):
        if one in missing:
            drawn = draw.sample(having[one], min(40, len(having[one])))
            best = max(drawn, key=lambda n: (len(missing & sets[n]), -abs(2 - rows[n].ranks)))
            missing -= sets[best]
            chosen.append(rows[best])
    return sorted(chosen, key=str)


def check(row: Row, variant: Variant, folder: Path, *, is_simulated: bool = True) -> None:
    """Compare both sides of a row bit by bit, on threads if ``is_simulated``, else processes."""
    run: Callable[..., object] = simulate if is_simulated else run_on_processes
    run(_compare, row.ranks, row, variant, folder, ranks_per_node=row.per_node)


def _compare(ranks: Ranks, row: Row, variant: Variant, folder: Path) -> None:
    base = Variant(base=variant.base, base_top=variant.base_top, width=variant.width)
    plain = _run(ranks, row, base, folder / "plain")
    found = _run(ranks, row, variant, folder / "variant")
    for number, (one, other) in enumerate(zip(found.losses, plain.losses, strict=True)):
        assert repr(one) == repr(other), (
            f"{row}: loss {number} of rank {ranks.rank} is {one}, not {other}"
        )
    assert found.num_skipped == plain.num_skipped, row
    assert found.values.keys() == plain.values.keys(), row
    for name, value in plain.values.items():
        where = f"{row}: {name} on rank {ranks.rank}"
        bits = [each.contiguous().view(torch.uint8) for each in (found.values[name], value)]
        assert torch.equal(*bits), f"{where} is {found.values[name]}, not {value}"


def _run(ranks: Ranks, row: Row, variant: Variant, folder: Path) -> Trace:
    scenario, more = {**SCENARIOS, **BY_NAME}[row.scenario]
    folder.mkdir(exist_ok=True)
    zero = {**variant.base, **variant.zero}
    top = {**more, **variant.base_top, **variant.top}
    if row.dtype == "fp16":  # some steps overflow, and some do not
        top["fp16"] = {"enabled": True, "hysteresis": 1, "initial_scale_power": 14}
    config = Case(row.stage, row.dtype, zero=zero, top=top).config()
    config = json.loads(json.dumps(config).replace(FOLDER, str(folder)))
    engine = zero_core.build(
        make_model(variant.width), config, process_group=ranks, **variant.further
    )
    losses = scenario(engine, folder)
    values = engine.full_state_dict(dtype=torch.float32)
    with engine.gathered() as model:  # the rounded copies, besides the master weights
        values |= {f"gathered {n}": p.detach().clone() for n, p in model.named_parameters()}
    trained = [n for n, p in engine.module.named_parameters() if p.requires_grad]
    # Where both sides have the same parts, each rank reads its own.
    state_of = engine.states.get_full if "stage" in zero else engine.states.get_local
    for what, name in itertools.product(engine.sharded_state.tier.state_names(), trained):
        values[f"{what} of {name}"] = state_of(name, what)
    found = Trace(losses, values, engine.skipped_steps)
    engine.close()
    return found
