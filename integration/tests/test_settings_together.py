"""Combinations of settings: training of choices that cover the accepted pairs of values."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from zero_core.config import load_config
from zero_core.errors import ConfigError
from zero_core.testing import LR, Case, run_ddp, run_engine, spawn

STEPS, RANKS = 3, 4
NVME = "NVME"
"""Placeholder for the path of a folder."""
QWZ = {"zero_quantized_weights": True}
HPZ = {"zero_hpz_partition_size": 2}
QGZ = {"zero_quantized_gradients": True}
FP16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
ZERO: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "stage": {str(stage): {"stage": stage} for stage in range(4)},
    "parameters": {
        "device": {},
        "host": {"offload_param": {"device": "cpu"}},
        "NVMe": {"offload_param": {"device": "nvme", "nvme_path": NVME}},
    },
    "states": {
        "device": {},
        "host": {"offload_optimizer": {"device": "cpu"}},
        "host, ratio 0.5": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        "host, 8 bits": {"offload_optimizer": {"device": "cpu", "state_dtype": "int8"}},
        "NVMe": {"offload_optimizer": {"device": "nvme", "nvme_path": NVME}},
    },
    "communication": {
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
    },
}
"""Values of each axis, as keys of ``zero_optimization``."""
TOP: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "dtype": {"fp32": {}, "bf16": {}, "fp16": {"fp16": FP16}},
    "optimizer": {
        "AdamW": {},
        **{
            name: {"optimizer": {"type": name, "params": params}}
            for name, params in {
                "Adam": {"lr": LR, "adam_w_mode": False},
                "SGD": {"lr": LR, "momentum": 0.9},
                "Adagrad": {"lr": LR, "initial_accumulator_value": 0.1},
                "RMSprop": {"lr": LR / 10},
                "NAdam": {"lr": LR},
                "Lion": {"lr": LR / 10},
                "Muon": {"lr": LR},
                "Adafactor": {"lr": LR},
            }.items()
        },
    },
    "option": {
        "none": {},
        "accumulation": {"gradient_accumulation_steps": 3},
        "clipping": {"gradient_clipping": 0.5},
        "recomputation": {"activation_checkpointing": {"enabled": True}},
        "invariance": {"world_size_invariant": True},
        "check of replicas": {"check_replicas_every": 1},
        "no overflow check": {"check_grad_overflow": False},
        "copies in memory": {"memory_checkpoint": {"path": f"{NVME}/memory"}},
    },
}
"""Values of each axis, as keys at the top of the configuration."""
AXES = {axis: tuple(values) for axis, values in (ZERO | TOP).items()}
# Maximum difference of a loss (3 to 4) from the reference, by dtype. Host kernels round
# differently, DDP sums gradients in 16 bits, and quantized messages are inexact.
BOUNDS = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}
QUANTIZED_BOUND = 0.4
EXACT = ("plain", "hpZ", "lossless weights", "lossless gradients")

Choice = tuple[str, ...]
"""A value of each of `AXES`, in their order."""


def case_of(choice: Choice, folder: str) -> Case:
    settings = dict(zip(AXES, choice, strict=True))
    zero: dict[str, Any] = {}
    top: dict[str, Any] = {}
    for axis, value in settings.items():
        (zero if axis in ZERO else top).update((ZERO | TOP)[axis][value])
    found = json.loads(json.dumps({"zero": zero, "top": top}).replace(NVME, folder))
    return Case(
        found["zero"].pop("stage"),
        settings["dtype"],
        found["top"].pop("gradient_accumulation_steps", 1),
        found["top"].pop("gradient_clipping", 0.0),
        **found,
    )


def is_accepted(choice: Choice) -> bool:
    try:
        load_config(case_of(choice, "/nvme").config(), world_size=RANKS)
    except ConfigError:
        return False
    return True


def covering(refused: Collection[Choice]) -> Iterator[Choice]:
    """Yield choices to cover all pairs of values. The caller adds rejected ones to ``refused``."""
    draw = random.Random(0)
    values = list(AXES.values())
    missing = {
        ((first, one), (second, other))
        for first, second in itertools.combinations(range(len(AXES)), 2)
        for one, other in itertools.product(values[first], values[second])
    }
    for pair in sorted(missing):
        fixed, attempts, is_found = dict(pair), 0, True
        while pair in missing and is_found:
            attempts += 1
            found = []
            for number in range(60):
                drawn = [draw.choice(of) for of in values]
                if number % 2 or attempts > 3:  # defaults make most pairs acceptable
                    drawn[1:] = [of[0] for of in values[1:]]
                choice = tuple(fixed.get(n, value) for n, value in enumerate(drawn))
                if choice not in refused and is_accepted(choice):
                    pairs = set(itertools.combinations(enumerate(choice), 2))
                    found.append((len(missing & pairs), choice, pairs))
            if is_found := bool(found):
                _, choice, pairs = max(found)
                yield choice
                if choice not in refused:
                    missing -= pairs
    for pair, stage in itertools.product(missing, values[0]):  # other values are defaults
        fixed = {0: stage, **dict(pair)}
        choice = tuple(fixed.get(n, of[0]) for n, of in enumerate(values))
        assert choice in refused or not is_accepted(choice), f"{pair} never ran"


def _train_all(rank: int, world_size: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    references: dict[str, list[float]] = {}
    refused: set[Choice] = set()
    wrong, trained = [], []
    for number, choice in enumerate(covering(refused)):
        own = Path(folder, str(number))
        own.mkdir(exist_ok=True)
        case = case_of(choice, str(own))
        resume_from = str(own / "checkpoints") if "memory_checkpoint" in case.top else None
        try:
            losses = run_engine(case, rank, STEPS, resume_from=resume_from, mesh=mesh).losses
        except ConfigError:
            refused.add(choice)  # build() refuses more, because it knows the model
            continue
        trained.append(choice)
        gap = _gap(case, losses, references, rank)
        settings = dict(zip(AXES, choice, strict=True))
        bound = BOUNDS[case.dtype]
        if settings["communication"] not in EXACT:
            bound = QUANTIZED_BOUND
        elif settings["states"] == "host, 8 bits":
            bound = BOUNDS["bf16"]
        if not gap <= bound:
            wrong.append((gap, settings))
    assert not wrong, f"rank {rank}: {wrong}"
    assert {value for choice in trained for value in enumerate(choice)} == {
        (n, value) for n, of in enumerate(AXES.values()) for value in of
    }


def _gap(case: Case, losses: list[float], references: dict[str, list[float]], rank: int) -> float:
    optimizer = case.top.get("optimizer", {}).get("type", "AdamW")
    key = f"{optimizer} {case.dtype} {case.accumulation} {case.clipping}"
    if key not in references:
        top = {key: case.top[key] for key in ("optimizer", "fp16") if key in case.top}
        plain = Case(0, case.dtype, case.accumulation, case.clipping, top=top)
        run = run_engine if optimizer in ("Lion", "Muon", "Adafactor") else run_ddp
        references[key] = run(plain, rank, STEPS).losses
    gaps = [abs(a - b) for a, b in zip(losses, references[key], strict=True)]
    return max(gaps) if all(map(math.isfinite, gaps)) else math.inf


@pytest.mark.slow
def test_settings_that_are_accepted_together_train_together(tmp_path: Path) -> None:
    spawn(_train_all, RANKS, str(tmp_path))
