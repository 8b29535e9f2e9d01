"""The same script with DeepSpeed itself and with ``zero-engine run``: losses, time and memory.

``nox -s compat`` runs it. Ranks are processes on the CPU. Sides take turns, round by round; step
times and peaks are medians over rounds. Ends with code 1 if a loss differs by more than the
tolerance at any step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.ranks import CPU_ALONE, LOOPBACK, own_environment, run_together

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
SCRIPT = TESTS / "scripts" / "run_lm.py"
MEASURED = HERE / "measured.py"
RANKS = 2
WARMUP_STEPS = 2
TOLERANCE = 1e-3
"""Of a loss, relative: both sides compute in fp32, in another order."""

CPU = {"device": "cpu"}
GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
CASES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3, **GATHER},
    "stage 2, optimizer offloaded": {"stage": 2, "offload_optimizer": CPU},
    "stage 3, all offloaded": {
        "stage": 3,
        **GATHER,
        "offload_optimizer": CPU,
        "offload_param": CPU,
    },
}
SIDES = {
    "deepspeed": ("-m", "torch.distributed.run", "--standalone"),
    "zero_engine.deepspeed": ("-m", "zero_engine", "run"),
}
"""The name of the module that a script imports as deepspeed, and what starts its ranks."""


@dataclass(frozen=True)
class Run:
    """One run of one side: by step, losses and seconds (the slowest rank's); the larger peak."""

    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    peak_bytes: int


def arguments_of(model: Path, config: Path, output: Path) -> list[str]:
    """What the script is given, on both sides."""
    return [
        *(f"--model_name_or_path={model}", f"--deepspeed={config}", f"--output_dir={output}"),
        *("--do_train", "--train_samples=132", "--num_train_epochs=1"),
        *("--per_device_train_batch_size=4", "--gradient_accumulation_steps=2"),
        *("--learning_rate=1e-3", "--warmup_steps=2", "--max_grad_norm=1.0", "--logging_steps=1"),
        *("--eval_strategy=no", "--save_strategy=no", "--report_to=none", "--disable_tqdm=true"),
    ]


def config_of(zero: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration with this block."""
    auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": auto},
        "zero_optimization": zero,
    }


def run_side(side: str, zero: dict[str, Any], model: Path) -> Run:
    """Train with ``side`` on new ranks.

    Raises:
        RankError: it failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        config, output = root / "deepspeed.json", root / "output"
        config.write_text(json.dumps(config_of(zero)), encoding="utf-8")
        command = [
            *(sys.executable, *SIDES[side], f"--nproc-per-node={RANKS}", str(MEASURED)),
            *(str(SCRIPT), *arguments_of(model, config, output)),
        ]
        environment = {
            **own_environment(),
            **CPU_ALONE,
            "COMPAT_RESULTS": scratch,
            "GLOO_SOCKET_IFNAME": LOOPBACK,
        }
        run_together([command], [environment], root)
        ranks = [json.loads(file.read_text()) for file in sorted(root.glob("rank*.json"))]
        state = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))
    assert [rank["deepspeed"] for rank in ranks] == [side] * RANKS
    return Run(
        tuple(entry["loss"] for entry in state["log_history"] if "loss" in entry),
        tuple(map(max, zip(*(rank["step_seconds"] for rank in ranks), strict=True))),
        max(rank["peak_bytes"] for rank in ranks),
    )


def difference(one: Run, other: Run) -> float:
    """The largest relative difference of the losses of any step."""
    pairs = zip(one.losses, other.losses, strict=True)
    return max(abs(a - b) / abs(a) for a, b in pairs)


def summary(runs: list[Run]) -> dict[str, Any]:
    """Medians over rounds."""
    times = [statistics.median(run.step_seconds[WARMUP_STEPS:]) for run in runs]
    return {
        "losses": runs[0].losses,
        "step_seconds": statistics.median(times),
        "peak_bytes": statistics.median(run.peak_bytes for run in runs),
    }


def compare(names: list[str], rounds: int, model: Path) -> dict[str, Any]:
    """Run all cases, sides in turn; by case, both sides' medians and the losses' difference."""
    found = {}
    for name in names:
        runs: dict[str, list[Run]] = {side: [] for side in SIDES}
        for number in range(rounds):
            # Neither side is always the first one after a pause.
            for side in list(SIDES) if number % 2 == 0 else list(SIDES)[::-1]:
                runs[side].append(run_side(side, CASES[name], model))
        theirs, ours = runs.values()
        worst = max(difference(a, b) for a, b in zip(theirs, ours, strict=True))
        found[name] = {
            **{side: summary(done) for side, done in runs.items()},
            "difference": worst,
        }
        print(f"{name}: losses differ by {worst:.1e} at most", flush=True)
    return found


def as_table(found: dict[str, Any]) -> Table:
    """The result for people."""
    table = Table(title=f"DeepSpeed itself / zero-engine run: {RANKS} ranks on the CPU, fp32")
    for heading in ("case", "largest difference of a loss", "step, ms", "peak per rank, MiB"):
        table.add_column(heading)
    for name, case in found.items():
        sides = [case[side] for side in SIDES]
        table.add_row(
            name,
            f"{case['difference']:.1e}",
            " / ".join(f"{1e3 * side['step_seconds']:.0f}" for side in sides),
            " / ".join(f"{side['peak_bytes'] / 2**20:.0f}" for side in sides),
        )
    return table


def main() -> None:
    """Read the options, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--only", action="append", choices=list(CASES), help="a case; repeatable")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--output", type=Path, default=HERE.parent / "benchmarks/results")
    options = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from lm_models import save_models

    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder), layers=options.layers, width=options.width)
        found = compare(options.only or list(CASES), options.rounds, Path(folder, "gpt2"))
    options.output.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"rounds": options.rounds, "cases": found}, indent=2)
    (options.output / "compat.json").write_text(text, encoding="utf-8")
    Console().print(as_table(found))
    late = [name for name, case in found.items() if not case["difference"] <= TOLERANCE]
    if late:
        sys.exit(f"losses differ by more than {TOLERANCE:.0e}: {', '.join(late)}")


if __name__ == "__main__":
    main()
