"""All of TRL's trainers with DDP and with ``zero-engine run``, at three settings of ZeRO.

``nox -s compat`` runs it. Ranks, measurements and rows are those of `compare`, but for the side
that losses are compared with: a trainer as DDP runs it, from the same seed. Rows that are in the
file of results already are kept; ``--again`` begins anew.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import report
from cases import Case, Config, Planned
from compare import DOCS, Sides, compare
from families.trl_scripts import ZERO_2, ZERO_3, ZERO_3_OFFLOAD
from scripts import trl_trainer

from benchmarks.harness.ranks import write_json

RESULTS = DOCS / "benchmarks" / "trl.json"
PAGE = DOCS / "trl.md"
HEAD = """# TRL's trainers

    nox -s compat

All trainers of TRL 1.16 that run without a server, with tiny models and local data, started by
`zero-engine run` on 2 ranks of one thread on the CPU, and by torchrun as DDP ("theirs"). They
generate where their method does. "Loss" is the largest relative difference from DDP at any step
and on any rank (of losses below 1e-3: relative to that); more than 1e-3 fails. Models of two blocks
of 32 show that all of it runs, not what it costs. [Data](benchmarks/trl.json).
"""
WHY = "the reference: a Trainer's own DDP"
SETTINGS: dict[str, Config] = {
    "stage 2": ZERO_2,
    "stage 3": ZERO_3,
    "stage 3, all offloaded": ZERO_3_OFFLOAD,
}
PLANNED = [
    Planned("TRL", "A2POTrainer, stage 3", "TRL refuses it: it copies its model as the reference"),
    *(
        Planned("TRL", f"{name}Trainer", "a rollout or teacher server of vLLM's is needed")
        for name in ("AsyncGRPO", "AsyncDistillation", "ServerDistillation")
    ),
]


def _case(name: str, setting: str) -> Case:
    common = (name, "--model={model}", "--output_dir={output}")
    trainer = trl_trainer.CASES[name].trainer
    return Case(
        "TRL",
        f"{trainer if name != 'bema_dpo' else 'DPOTrainer with BEMA'}, {setting}",
        "trl_trainer.py",
        (*common, "--deepspeed={config}"),
        SETTINGS[setting],
        ddp=common,
        needs=("trl", "datasets"),
    )


GRID = [
    _case(name, setting)
    for name in trl_trainer.CASES
    for setting in SETTINGS
    if (name, setting[:7]) != ("a2po", "stage 3")
]


def main() -> None:
    """Run what is missing, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="part of a case's name; repeatable")
    parser.add_argument("--again", action="store_true", help="keep no results")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.results.exists() and not options.again:
        found = json.loads(options.results.read_text(encoding="utf-8"))
    chosen = [c for c in GRID if not options.only or any(part in c.key for part in options.only)]
    with tempfile.TemporaryDirectory() as folder:
        material = Path(folder)
        trl_trainer.save_models(material)
        sides = Sides(material)
        try:
            for case in chosen:
                if case.key not in found or not report.is_good(found[case.key]):
                    found[case.key] = compare(case, 1, sides)
                    print(f"{case.key}: {report.in_words(found[case.key])}", flush=True)
                    write_json(options.results, found)
        finally:
            sides.close()
    options.page.write_text(report.page(HEAD, GRID, PLANNED, found), encoding="utf-8")
    bad = [case.key for case in chosen if not report.is_good(found[case.key])]
    if bad:
        sys.exit(f"failed: {', '.join(bad)}")


if __name__ == "__main__":
    main()
