"""Which settings work together: each combination is trained on a few ranks, or refused.

``python integration/tests/support_matrix.py`` trains all of them, minutes on two cores, and writes
docs/support-matrix.md and its data. Arguments choose a table (``options``, ``cross``), one of its
dtypes (``communication:fp32``), or a column (``communication::hpZ``). `refusal` asks the
configuration alone, which test_support_matrix.py compares with the page.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import multiprocessing
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from support_cross import OFF_ON, SWITCHES, Choice, Rule, choices, covering, find_rules
from torch.distributed.device_mesh import init_device_mesh

import zero_core
from zero_core.config import load_config
from zero_core.errors import ConfigError
from zero_core.testing import LR, Case, make_model, run_ddp, run_engine, spawn

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "benchmarks" / "support.json"
PAGE = DOCS / "support-matrix.md"
STEPS = 3
RANKS = {"communication": 4, "options": 2, "optimizers": 2, "cross": 4}
"""By table. Four are two nodes of two."""
NVME = "NVME"
"""In the place of a folder."""

Keys = Mapping[str, Any]
STAGES = (0, 1, 2, 3)
PARAMS: Mapping[str, Keys] = {
    "device": {},
    "host": {"offload_param": {"device": "cpu"}},
    "NVMe": {"offload_param": {"device": "nvme", "nvme_path": NVME}},
}
STATES: Mapping[str, Keys] = {
    "device": {},
    "host": {"offload_optimizer": {"device": "cpu"}},
    "host, ratio 0.5": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "host, 8 bits": {"offload_optimizer": {"device": "cpu", "state_dtype": "int8"}},
    "NVMe": {"offload_optimizer": {"device": "nvme", "nvme_path": NVME}},
}
QWZ = {"zero_quantized_weights": True}
HPZ = {"zero_hpz_partition_size": 2}
QGZ = {"zero_quantized_gradients": True}
COMMUNICATION: Mapping[str, Keys] = {
    "plain": {},
    "qwZ": QWZ,
    "hpZ": HPZ,
    "lossless weights": {"zero_lossless_weights": True},
    "lossless gradients": {"zero_lossless_gradients": True},
    "qgZ": QGZ,
    "all three": {**QWZ, **HPZ, **QGZ},
    "4-bit": {
        **QWZ,
        **HPZ,
        **QGZ,
        "zero_quantized_weights_format": "int4_difference",
        "zero_quantized_gradients_hadamard": True,
        "zero_quantized_gradients_within_node": "int8",
    },
    "qgZ, LoCo": {**QGZ, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}},
}
OPTIONS: Mapping[str, Keys] = {
    "accumulation": {"gradient_accumulation_steps": 3},
    "clipping": {"gradient_clipping": 0.5},
    "recomputation": {"activation_checkpointing": {"enabled": True}},
    "invariance": {"world_size_invariant": True},
    "check of replicas": {"check_replicas_every": 1},
    "no overflow check": {"check_grad_overflow": False},
}
OPTIMIZERS: Mapping[str, Keys] = {
    "Adam": {"lr": LR, "adam_w_mode": False},
    "SGD": {"lr": LR, "momentum": 0.9},
    "Adagrad": {"lr": LR, "initial_accumulator_value": 0.1},
    "RMSprop": {"lr": LR / 10},
    "NAdam": {"lr": LR},
    "Lion": {"lr": LR / 10},
    "Muon": {"lr": LR},
    "Adafactor": {"lr": LR},
}
DTYPES = ("fp32", "bf16", "fp16")
MEMORY_COPIES: Keys = {"memory_checkpoint": {"path": f"{NVME}/memory"}}
AXES: Mapping[str, tuple[str, ...]] = {
    "stage": tuple(map(str, STAGES)),
    "dtype": DTYPES,
    "parameters": tuple(PARAMS),
    "states": tuple(STATES),
    **dict.fromkeys(SWITCHES, OFF_ON),
    "invariance": OFF_ON,
    "copies in memory": OFF_ON,
    "optimizer": ("AdamW", *OPTIMIZERS),
}
"""The ten settings whose product is asked for."""
FP16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
# The largest difference of a loss (of 3 to 4) from the reference. The host's kernels round in
# another order; DDP adds gradients in 16 bits; quantized messages are not exact.
BOUNDS = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}
QUANTIZED_BOUND = 0.4


@dataclass(frozen=True)
class Combination:
    """A cell of a table, in one dtype.

    Attributes:
        table, column: where it is shown.
        stage, params, states: its row.
        dtype: of the weights in forward and backward.
    """

    table: str
    column: str
    stage: int
    params: str
    states: str
    dtype: str

    @property
    def is_exact(self) -> bool:
        """Whether no message is quantized."""
        exact = ("plain", "hpZ", "lossless weights", "lossless gradients")
        return self.column not in COMMUNICATION or self.column in exact

    @property
    def key(self) -> str:
        """The name of its result."""
        row = f"stage {self.stage}, parameters: {self.params}, states: {self.states}"
        return f"{self.table}: {self.column}; {row}; {self.dtype}"

    def case(self, folder: str) -> Case:
        """Its configuration, with a folder for files."""
        top: dict[str, Any] = {"fp16": FP16} if self.dtype == "fp16" else {}
        zero = {**PARAMS[self.params], **STATES[self.states]}
        accumulation, clipping = 1, 0.0
        if self.table == "communication":
            zero |= COMMUNICATION[self.column]
        elif self.table == "optimizers":
            top["optimizer"] = {"type": self.column, "params": OPTIMIZERS[self.column]}
        else:
            option = dict(OPTIONS[self.column])
            accumulation = option.pop("gradient_accumulation_steps", accumulation)
            clipping = option.pop("gradient_clipping", clipping)
            top |= option
        zero = json.loads(json.dumps(zero).replace(NVME, folder))
        return Case(self.stage, self.dtype, accumulation, clipping, zero=zero, top=top)


def combinations() -> Iterator[Combination]:
    """Yield all combinations, in the order of the page."""
    rows = list(itertools.product(STAGES, PARAMS, STATES))
    for column, row, dtype in itertools.product(COMMUNICATION, rows, DTYPES):
        yield Combination("communication", column, *row, dtype)
    for column, row in itertools.product(OPTIONS, rows):
        yield Combination("options", column, *row, "bf16")
    for column, row in itertools.product(OPTIMIZERS, rows):
        yield Combination("optimizers", column, *row, "bf16")


def all_choices() -> Iterator[Choice]:
    """Yield the product of `AXES`."""
    parts: dict[tuple[str, str], Keys] = {(name, "on"): SWITCHES[name] for name in SWITCHES}
    parts |= {("parameters", name): keys for name, keys in PARAMS.items()}
    parts |= {("states", name): keys for name, keys in STATES.items()}
    top: dict[tuple[str, str], Keys] = {
        ("optimizer", name): {"optimizer": {"type": name, "params": params}}
        for name, params in OPTIMIZERS.items()
    }
    top["dtype", "fp16"] = {"fp16": FP16}
    top["invariance", "on"] = OPTIONS["invariance"]
    top["copies in memory", "on"] = MEMORY_COPIES
    yield from choices(AXES, parts, top)


def build_refusal(combination: Combination | Choice, folder: str) -> str | None:
    """Return why no engine of one rank is built with an accepted configuration; None if it is."""
    try:
        zero_core.build(make_model(), combination.case(folder).config()).close()
    except ConfigError as error:
        return _plain(error)
    return None


def refusal(combination: Combination | Choice) -> str | None:
    """Return why the configuration is refused before there is a model; None if it is not."""
    try:
        load_config(combination.case("/nvme").config(), world_size=RANKS[combination.table])
    except ConfigError as error:
        return _plain(error)
    return None


def _plain(error: ConfigError) -> str:
    """Return an error's message without the stage that was found, and in one line."""
    return re.sub(r",? found \d", "", " ".join(str(error).split()))


def without_switches(choice: Choice) -> Choice:
    """Return a combination without `SWITCHES`, which have no effect on one rank."""
    return replace(choice, settings={**choice.settings, **dict.fromkeys(SWITCHES, "off")})


def _build(choice: Choice) -> tuple[str, str | None]:
    with tempfile.TemporaryDirectory() as folder:
        return choice.key, build_refusal(choice, folder)


def _ask_all() -> tuple[list[Rule], list[Choice]]:
    """Ask for every combination. Returns the rules of refusals, and what is to be trained."""
    logging.disable(logging.WARNING)
    told = [(choice, refusal(choice)) for choice in all_choices()]
    plain = {one.key: one for one in (without_switches(c) for c, why in told if why is None)}
    with multiprocessing.get_context("fork").Pool(2, torch.set_num_threads, (1,)) as pool:
        built = dict(pool.imap_unordered(_build, plain.values(), chunksize=16))
    asked: list[tuple[Choice, str | None]] = []
    for choice, why in told:
        kind, found = "refused", why
        if why is None:
            kind, found = "build", built[without_switches(choice).key]
        asked.append((choice, None if found is None else f"{kind}: {found}"))
    return find_rules(asked), covering([choice for choice, why in asked if why is None])


def _try_all(
    rank: int, world_size: int, folder: str, asked: list[Combination] | list[Choice]
) -> None:
    """Train every combination asked for that is not refused, and write what was found."""
    mesh = init_device_mesh("cpu", (2, 2)) if world_size == 4 else None
    references: dict[str, list[float]] = {}
    found: dict[str, str] = {}
    for number, combination in enumerate(asked):
        told = refusal(combination)
        if told is None:
            case = combination.case(f"{folder}/{number}")
            Path(folder, str(number)).mkdir(exist_ok=True)
            resume_from = (
                f"{folder}/{number}/checkpoints" if "memory_checkpoint" in case.top else None
            )
            try:
                run = run_engine(case, rank, STEPS, resume_from=resume_from, mesh=mesh)
                told = _judge(combination, case, run.losses, references, rank)
            except ConfigError as error:
                told = f"build: {_plain(error)}"
        else:
            told = f"refused: {told}"
        found[combination.key] = told
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")


def _asked(asked: str) -> list[Combination]:
    """Return the combinations of ``table``, ``table:dtype`` or ``table:dtype:column``."""
    table, dtype, column = [*asked.split(":"), "", ""][:3]
    return [
        one
        for one in combinations()
        if one.table == table and dtype in ("", one.dtype) and column in ("", one.column)
    ]


def _judge(
    combination: Combination | Choice,
    case: Case,
    losses: list[float],
    references: dict[str, list[float]],
    rank: int,
) -> str:
    """Compare losses with DDP's, or with those of stage 0 for optimizers that torch lacks."""
    optimizer = case.top.get("optimizer", {}).get("type", "AdamW")
    key = f"{optimizer} {case.dtype} {case.accumulation} {case.clipping}"
    if key not in references:
        plain = Case(0, case.dtype, case.accumulation, case.clipping, top=_shared(case))
        is_in_torch = optimizer not in ("Lion", "Muon", "Adafactor")
        run = run_ddp if is_in_torch else run_engine
        references[key] = run(plain, rank, STEPS).losses
    gap = max(abs(a - b) for a, b in zip(losses, references[key], strict=True))
    bound = BOUNDS[case.dtype] if combination.is_exact else QUANTIZED_BOUND
    if combination.states == "host, 8 bits":
        bound = max(bound, BOUNDS["bf16"])
    if math.isfinite(gap) and gap <= bound:
        return "tested"
    return f"failed: a loss is {gap:.3g} from the reference"


def _shared(case: Case) -> dict[str, Any]:
    """Return the keys that the reference has, too."""
    return {key: case.top[key] for key in ("optimizer", "fp16") if key in case.top}


def page(results: Mapping[str, Any]) -> str:
    """Return the page that shows ``results``. Rows and stages that are alike are one row."""
    found = results["found"]
    reasons: dict[str, int] = {}
    lines = [HEAD.format(**results["run"], **_counts(found))]
    for table, columns, text in (
        ("communication", COMMUNICATION, "Communication"),
        ("options", OPTIONS, "Options"),
        ("optimizers", OPTIMIZERS, "Optimizers"),
    ):
        lines += [f"\n## {text}\n", TEXTS[table], *_table(table, tuple(columns), found, reasons)]
    lines += _cross(results["cross"], reasons)
    lines += ["\n## Why a combination is refused\n", "| | message |", "|---|---|"]
    lines += [f"| {number} | {_escaped(reason)} |" for reason, number in reasons.items()]
    return "\n".join(lines) + "\n"


def _counts(found: Mapping[str, str]) -> dict[str, int]:
    kinds = [told.partition(":")[0] for told in found.values()]
    return {
        "total": len(kinds),
        "tested": kinds.count("tested"),
        "refused": kinds.count("refused") + kinds.count("build"),
        "failed": kinds.count("failed"),
    }


def _table(
    table: str, columns: tuple[str, ...], found: Mapping[str, str], reasons: dict[str, int]
) -> Iterator[str]:
    yield f"\n| parameters | states | stage | {' | '.join(columns)} |"
    yield "|---|---|---|" + "---|" * len(columns)
    for params in PARAMS:
        alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for states in STATES:
            rows: dict[tuple[str, ...], list[str]] = {}
            for stage in STAGES:
                cells = tuple(
                    _cell(table, column, stage, params, states, found, reasons)
                    for column in columns
                )
                rows.setdefault(cells, []).append(str(stage))
            for cells, stages in rows.items():
                alike.setdefault((", ".join(stages), cells), []).append(states)
        for (stages, cells), names in alike.items():
            where = "anywhere" if len(names) == len(STATES) else "; ".join(names)
            yield f"| {params} | {where} | {stages} | {' | '.join(cells)} |"


def cross_rules(results: Mapping[str, Any]) -> list[Rule]:
    """Return the rules of refusals of the product of `AXES`."""
    return [Rule(**rule) for rule in results["cross"]["rules"]]


def _cross(cross: Mapping[str, Any], reasons: dict[str, int]) -> Iterator[str]:
    """Yield the part of the page about the product of `AXES`."""
    rules = cross_rules({"cross": cross})
    accepted: Counter[tuple[str, ...]] = Counter()
    for choice in all_choices():
        if not any(rule.refuses(choice) for rule in rules):
            accepted[_place(choice.settings)] += 1
    kinds = Counter(told.partition(":")[0] for told in cross["trained"].values())
    total, num_accepted = math.prod(map(len, AXES.values())), accepted.total()
    yield CROSS.format(
        axes="\n".join(f"- {axis}: {' | '.join(values)}" for axis, values in AXES.items()),
        **cross["run"],
        total=total,
        accepted=num_accepted,
        refused=total - num_accepted,
        trained=kinds["tested"],
        failed=kinds["failed"],
        others=num_accepted - len(cross["trained"]),
        rules=len(rules),
    )
    yield "\n| | settings that exclude each other | |"
    yield "|---|---|---|"
    for rule in rules:
        number = reasons.setdefault(rule.message, len(reasons) + 1)
        pair = ", with ".join(f"{axis}: {' or '.join(of)}" for axis, of in rule.when.items())
        yield f"| {number} | {pair} | {'engine' if rule.is_built else 'configuration'} |"
    yield STAGE_TABLES
    each = total // math.prod(len(AXES[axis]) for axis in PLACE)
    tables: dict[tuple[str, ...], list[str]] = {}
    for stage in AXES["stage"]:
        lines = tuple(_shares(stage, accepted, each))
        tables.setdefault(lines, []).append(stage)
    for lines, stages in tables.items():
        yield f"\n### Stage {', '.join(stages)}\n"
        yield from lines


def _shares(stage: str, accepted: Mapping[tuple[str, ...], int], each: int) -> Iterator[str]:
    """Yield the table of a stage: how many combinations of a cell are accepted."""
    yield f"| parameters | states | {' | '.join(AXES['optimizer'])} |"
    yield "|---|---|" + "---|" * len(AXES["optimizer"])
    for params in AXES["parameters"]:
        rows: dict[tuple[str, ...], list[str]] = {}
        for states in AXES["states"]:
            places = [(stage, params, states, name) for name in AXES["optimizer"]]
            rows.setdefault(tuple(_share(accepted[p], each) for p in places), []).append(states)
        for cells, names in rows.items():
            where = "anywhere" if len(names) == len(STATES) else "; ".join(names)
            yield f"| {params} | {where} | {' | '.join(cells)} |"


PLACE = ("stage", "parameters", "states", "optimizer")


def _place(settings: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(settings[axis] for axis in PLACE)


def _share(number: int, each: int) -> str:
    return f"{number} of {each}" if number else "none"


def _cell(
    table: str,
    column: str,
    stage: int,
    params: str,
    states: str,
    found: Mapping[str, str],
    reasons: dict[str, int],
) -> str:
    dtypes = DTYPES if table == "communication" else ("bf16",)
    told = {
        dtype: found[Combination(table, column, stage, params, states, dtype).key]
        for dtype in dtypes
    }
    shown: dict[str, list[str]] = {}
    for dtype, text in told.items():
        kind, _, reason = text.partition(": ")
        if kind == "tested":
            mark = "✓"
        elif kind in ("failed", "not run yet"):
            mark = f"**{kind}**"
        else:
            mark = str(reasons.setdefault(reason, len(reasons) + 1))
        shown.setdefault(mark, []).append(dtype)
    if len(shown) == 1:
        return next(iter(shown))
    return ", ".join(f"{mark} {' '.join(names)}" for mark, names in shown.items())


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


TEXTS = {
    "communication": "In fp32, bf16 and fp16, with AdamW. The columns are keys of "
    "[quantized communication](quantized-communication.md).",
    "options": "In bf16, with AdamW and plain communication. The columns are "
    "`gradient_accumulation_steps` 3, `gradient_clipping`, `activation_checkpointing`, "
    "[`world_size_invariant`](world-size.md), "
    "`check_replicas_every` and `check_grad_overflow` false.",
    "optimizers": "In bf16, with plain communication. Further classes are in "
    "[optimizers](optimizers.md).",
}
CROSS = """
## Every combination of ten settings

{axes}

These are {total:,} combinations. The configuration of four ranks was asked for each of them. Where
it accepted, an engine was built on one rank, on which qwZ, hpZ and qgZ have no effect.

- **{refused:,} are refused**, each for at least one of {rules} pairs of settings.
- **{accepted:,} are accepted.** {trained} of these were trained, as above, on four ranks; {failed}
  of them had wrong losses. The other {others:,} were not trained as a whole, but any three of their
  settings were trained together in one that was.

Asked and trained with torch {torch}, {date}. This table has the pairs. The number is that of the
message; the last column says whether reading the configuration or building the engine refuses."""
STAGE_TABLES = """
Of the combinations of a cell with dtype, qwZ, hpZ, qgZ, invariance and copies in memory, so many
are accepted. "None" is a pair of the table above."""
HEAD = """# What works with what

A check mark means tested: three steps of a small model with every difficulty (tied, frozen and
unused parameters, odd sizes, buffers) have the losses of DDP, or of stage 0 where torch has no such
optimizer; with quantized messages up to a bound. Communication was tested on four ranks as two
nodes, the rest on two ranks. A number is the reason for a refusal, listed below. In the first three
tables nothing is accepted and left untested; for the
[product of ten settings](#every-combination-of-ten-settings) that would take hours.

**{total} combinations in these three tables: {tested} tested, {refused} refused, {failed} failed.**

Made by `python integration/tests/support_matrix.py` on a CPU, torch {torch}, {date}. A test in CI
asks for every refusal again and compares. Ranks that compute on a CPU have their parameters in host
memory anyway, so parameters on the "host" are moved nowhere here; their copies are tested on
[an accelerator made of threads](accelerators.md). [Data](benchmarks/support.json)."""


def main() -> None:
    """Train all combinations, or those that are asked for, and write the page."""
    before = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    run = {"date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__}
    results = {"run": run, "found": {}, "cross": {}, **before}
    for asked in sys.argv[1:] or RANKS:
        if asked == "cross":
            rules, chosen = _ask_all()
            trained = _train("cross", chosen)
            results["cross"] = {"run": run, "rules": [*map(asdict, rules)], "trained": trained}
        else:
            results["found"] |= _train(asked.partition(":")[0], _asked(asked))
            results["run"] = run
    found = {one.key: results["found"].get(one.key, "not run yet") for one in combinations()}
    results["found"] = found
    RESULTS.write_text(json.dumps(results, indent=0) + "\n", encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")
    print(_counts(found))
    for key, told in (found | results["cross"]["trained"]).items():
        if not told.startswith(("tested", "refused", "build")):
            print(key, told)


def _train(table: str, asked: list[Combination] | list[Choice]) -> dict[str, str]:
    """Train on the ranks of a table. Returns what was found by key."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_try_all, RANKS[table], folder, asked)
        found: dict[str, str] = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    main()
