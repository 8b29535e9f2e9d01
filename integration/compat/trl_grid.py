"""All of TRL's trainers with DDP and with ``zero-engine run``, and generation at stage 3.

``nox -s compat`` runs it. Ranks, measurements and rows are those of `compare`. A trainer's losses
are compared with those of DDP from the same seed; tokens with those of a plain model on each rank
and of DeepSpeed, at each call. The options are those of `compare`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from cases import Case, Config, Planned
from compare import EVIDENCE, Sides, parser_of_tables, run_table
from families.trl_scripts import ZERO_2, ZERO_3, ZERO_3_OFFLOAD
from scripts import generate, trl_trainer

RESULTS = EVIDENCE / "benchmarks" / "trl.json"
PAGE = EVIDENCE / "trl.md"
HEAD = """# TRL's trainers, and generation

    nox -s compat

All trainers of TRL 1.16 that need no server, with tiny models and local data. `zero-engine run`
starts them on 2 ranks of one thread on the CPU, and torchrun starts them as DDP ("theirs"). Those
whose method generates text do so. "Loss" is the largest relative difference from DDP at any step
and on any rank, where losses below 1e-3 are compared as if they were 1e-3; more than 1e-3 fails.
The models have two blocks of width 32. They show that everything runs, not what it costs: each side
was timed once.

The last rows are calls of `generate`: on every rank 4 prompts of 16 tokens get 32 new tokens each,
from a Llama of 6 blocks of width 192. "Theirs" is a plain model on each rank, or DeepSpeed 0.19.8
at stage 3. With `--gathered` both sides generate within `GatheredParameters`, as TRL's trainers do.
Tokens must be equal. [Data](benchmarks/trl.json).
"""
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

ZERO_3_TRAINED: Config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
}
_MODEL = "--model={model}/speaker"


def _generation(way: str, reference: str, *options: str) -> Case:
    return Case(
        "generation",
        f"{way}, {' '.join((reference, *options))}",
        "generate.py",
        (way, _MODEL, "--deepspeed={config}", *options),
        ZERO_3_TRAINED,
        ddp=(way, _MODEL) if reference == "plain" else (),
        tolerance=0.0,
    )


GENERATION = [
    *(_generation(way, reference) for way in generate.WAYS for reference in ("plain", "deepspeed")),
    _generation("greedy", "deepspeed", "--gathered"),
]
ALL = [*GRID, *GENERATION]


def main() -> None:
    """Run the grid."""
    options = parser_of_tables(__doc__, RESULTS, PAGE).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        material = Path(folder)
        shapes = {"policy": (2, 32), "teacher": (2, 48), "speaker": (6, 192)}
        trl_trainer.save_models(material, shapes)
        sides = Sides(material)
        try:
            run_table(HEAD, ALL, PLANNED, options, sides)
        finally:
            sides.close()


if __name__ == "__main__":
    main()
