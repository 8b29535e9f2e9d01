"""Runs public scripts with DeepSpeed and with this engine in its place, and compares the losses.

``nox -s compat`` starts it. Each side has two CPU ranks with one thread each. ``zero-engine run``
starts the scripts that have their own launcher. All others run on ranks with its import hook. DDP
replaces DeepSpeed where DeepSpeed cannot run a script on the CPU. Limits that libraries impose on
CPUs are lifted on both sides.

Each case's result is written when the case ends. The exit code is 1 if a case fails or if a loss at
any step differs by more than `TOLERANCE`.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from material import save_data, save_models
from pack import PACK, Case

from benchmarks.harness.forked_python import start_server
from benchmarks.harness.ranks import (
    CPU_ALONE,
    LOG_LENGTH,
    LOOPBACK,
    RankError,
    Row,
    own_environment,
    rank_variables,
    run_together,
    write_json,
)
from zero_engine.script.hook import hooked

HERE = Path(__file__).parent
RESULTS = HERE.parent / "lab" / "evidence" / "benchmarks" / "compat.json"
WARMUP_STEPS = 2
LIMIT_S = 600.0
TOLERANCE = 1e-3
"""Largest relative difference of a loss."""
LEAST_LOSS = 1e-3
"""A difference is relative to the loss or to this value, whichever is larger. Smaller losses, such
as GRPO's first one (0), are rounding errors."""
OURS = "zero-engine"
MODULES = {"deepspeed": "deepspeed", "ddp": "deepspeed", OURS: "zero_engine.deepspeed"}
"""Name of the module that a script gets for ``import deepspeed``."""
MEASURED = str(HERE / "measured.py")
RANKS = 2
MODELS = ("bert", "gpt2", "llama", "roberta", "t5", "vit")
PRELOADED = (
    "deepspeed",
    "torch._dynamo",
    "lightning.pytorch",
    "peft",
    "safetensors.torch",
    *(f"transformers.models.{m}.modeling_{m}" for m in MODELS),
    "transformers.trainer_seq2seq",
    "measured",
)


def run(side: str, case: Case, material: Path) -> Row:
    """Run a case's program on one side. A failure raises RankError with a rank's first error.

    The result has losses by rank and step, the median of the slowest rank's seconds per step, and
    the largest peak memory.
    """
    # A killed process may still write files until its server has ended it.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        program = [case.program, *(case.ddp if side == "ddp" else case.arguments)]
        if program[0].endswith(".py"):
            program[0] = str(HERE / "scripts" / program[0])
        config = folder / "deepspeed.json"
        places = {
            "{model}": str(material),
            "{data}": str(material / "data"),
            "{output}": str(folder / "output"),
            "{config}": str(config),
            "{files}": str(folder),
        }
        if case.config is not None:
            config.write_text(json.dumps(case.config), encoding="utf-8")
        for name, text in case.files.items():
            (folder / name).write_text(_filled(text, places), encoding="utf-8")
        filled = [_filled(argument, places) for argument in program]
        own = [_filled(argument, places) for argument in case.launcher]
        variables = {"COMPAT_RESULTS": scratch, "COMPAT_COMPARED": case.compared}
        if side == "ddp":
            variables["ACCELERATE_USE_CPU"] = "true"
        is_hooked = side == OURS
        if own:
            start = [sys.executable, "-m", "zero_engine", "run"] if is_hooked else []
            commands = [[*start, *own, MEASURED, *filled]]
            environments = [{**environment(), **variables}]
        else:
            commands, environments = commands_of(filled, variables, is_hooked=is_hooked)
        run_together(commands, environments, folder, limit_s=LIMIT_S)
        found = [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]
    if [rank["deepspeed"] for rank in found] != [MODULES[side]] * RANKS:
        raise RankError(f"{len(found)} ranks of {RANKS} have results", "")
    if not found[0]["losses"]:
        raise RankError("it trained without a loss", "")
    if min(len(rank["step_seconds"]) for rank in found) <= WARMUP_STEPS:
        raise RankError(f"it took {WARMUP_STEPS} steps or fewer, of which none is timed", "")
    slowest = list(map(max, zip(*(rank["step_seconds"] for rank in found), strict=True)))
    return {
        "losses": [rank["losses"] for rank in found],
        "step_seconds": statistics.median(slowest[WARMUP_STEPS:]),
        "peak_bytes": max(rank["peak_bytes"] for rank in found),
    }


def commands_of(
    program: Sequence[str], variables: Mapping[str, str], *, is_hooked: bool
) -> tuple[list[list[str]], list[dict[str, str]]]:
    """Return the command ``measured.py PROGRAM`` and its environment for each rank.

    Ranks are forked from a process that has imported the libraries, because imports take seconds.
    With ``is_hooked``, ``import deepspeed`` serves this engine, as under ``zero-engine run``.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])  # a free port
    shared = {
        **environment(is_hooked=is_hooked),
        # Lightning recognizes a rank of torchrun by this variable.
        "TORCHELASTIC_RUN_ID": "compat",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        **variables,
    }
    command = [_python(is_hooked=is_hooked), MEASURED, *program]
    own = [rank_variables(rank, RANKS, per_node=RANKS, port=port) for rank in range(RANKS)]
    return [command] * RANKS, [{**shared, **variables_of} for variables_of in own]


@functools.cache
def _python(*, is_hooked: bool) -> str:
    trl = ("trl.trainer.sft_trainer",) if find_spec("trl") else ()
    return start_server(environment(is_hooked=is_hooked), *PRELOADED, *trl)


def environment(*, is_hooked: bool = False) -> dict[str, str]:
    """Return the environment of CPU programs: one thread per rank, offline, on the loopback."""
    own = own_environment()
    found = {
        **own,
        **CPU_ALONE,
        "PYTHONPATH": os.pathsep.join([str(HERE), own["PYTHONPATH"]]),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "TOKENIZERS_PARALLELISM": "false",
    }
    return hooked(found) if is_hooked else found


def _filled(text: str, places: dict[str, str]) -> str:
    for name, place in places.items():
        text = text.replace(name, place)
    return text


def difference(theirs: Row, ours: Row) -> float:
    pairs = [
        pair
        for one, other in zip(theirs["losses"], ours["losses"], strict=True)
        for pair in zip(one, other, strict=True)
    ]
    worst = max(abs(a - b) / max(abs(a), LEAST_LOSS) for a, b in pairs)
    return worst if all(map(math.isfinite, (x for pair in pairs for x in pair))) else math.inf


def compare(case: Case, material: Path) -> Row:
    """Run a case on both sides. The row has ``failure`` and ``log`` if a side failed."""
    missing = [name for name in case.needs if find_spec(name) is None]
    row: Row = {"family": case.family, "name": case.name, "reference": case.reference}
    if missing:
        return {**row, "failure": f"{missing[0]} is not installed here"}
    runs: dict[str, Row] = {}
    for side in (case.reference, OURS):
        try:
            runs[side] = run(side, case, material)
        except RankError as error:
            log = error.log[-LOG_LENGTH:]
            return {**row, "failed": side, "failure": str(error), "log": log}
    counts = {side: {len(losses) for losses in run["losses"]} for side, run in runs.items()}
    if len(set().union(*counts.values())) > 1:
        found = ", ".join(f"{side} has {sorted(number)}" for side, number in counts.items())
        return {**row, "failed": OURS, "failure": f"numbers of losses differ: {found}", "log": ""}
    return {
        **row,
        **{side: {**run, "losses": run["losses"][0]} for side, run in runs.items()},
        "difference": difference(*runs.values()),
        "compared": case.compared,
    }


def is_good(row: Row | None) -> bool:
    return row is not None and "failure" not in row and row["difference"] <= TOLERANCE


def in_words(row: Row) -> str:
    if "failure" in row:
        return f"FAILED with {row.get('failed', 'both')}: {row['failure']}"
    theirs, ours = row[row["reference"]], row[OURS]
    step, peak = (ours[key] / theirs[key] for key in ("step_seconds", "peak_bytes"))
    word = "" if is_good(row) else "TOO MUCH: "
    return (
        f"{word}losses differ by {row['difference']:.1e} at most from {row['reference']}; "
        f"step {step:.2f}, peak {peak:.2f} of theirs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="part of a case's name; repeatable")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    chosen = [c for c in PACK if not options.only or any(part in c.key for part in options.only)]
    if not chosen:
        sys.exit(f"no case has {options.only} in its name")
    known = json.loads(options.results.read_text()) if options.results.exists() else {}
    found = {case.key: known[case.key] for case in PACK if case.key in known}
    with tempfile.TemporaryDirectory() as folder:
        material = Path(folder)
        save_models(material)
        save_data(material / "data")
        for case in chosen:
            found[case.key] = compare(case, material)
            write_json(options.results, found)
            print(f"{case.key}: {in_words(found[case.key])}", flush=True)
    good = [case for case in PACK if is_good(found.get(case.key))]
    print(f"{len(good)} of {len(PACK)} run, {len(PACK) - len(found)} have not been run")
    bad = [case.key for case in chosen if case not in good]
    if bad:
        sys.exit(f"failed: {', '.join(bad)}")


if __name__ == "__main__":
    main()
