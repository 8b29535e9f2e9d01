"""No ratio and no stage changes a bit, whatever the optimizer, the dtype and the rest of the step.

Ratio {0, 0.001, 0.3, 0.5, 0.999, 1} x stage {1, 2, 3} x accumulation x clipping x {fp32, bf16, fp16
with overflow} x five optimizers. Each of the combinations without the ratio is run at one ratio, in
turn, with AdamW (test_host_rules.py has the other optimizers at three ratios); with
``ZERO_OFFLOAD_GRID=full`` each is run at all six, with all five, on 1, 2 and 3 ranks. fp32 and bf16
are held against DDP with torch's optimizer, too.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from zero_core.testing import LR, Case, Trace, run_ddp, run_engine, spawn

RATIOS = (0.0, 0.001, 0.3, 0.5, 0.999, 1.0)
IS_FULL = os.environ.get("ZERO_OFFLOAD_GRID") == "full"
STEPS = 3
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "Adam": {"adam_w_mode": False, "lr": LR, "weight_decay": 0.01},
    "AdamW": {"lr": LR, "weight_decay": 0.1},
    "Adagrad": {"lr": LR, "initial_accumulator_value": 0.1},
    "SGD": {"lr": LR, "momentum": 0.9, "dampening": 0.1},
    "Lion": {"lr": LR / 10, "weight_decay": 0.1},
}
DTYPES = ("fp32", "bf16", "fp16")
FP16 = {"enabled": True, "initial_scale_power": 14, "hysteresis": 1}
"""A loss scale whose first gradients overflow."""

# Losses of 3 to 4. fp32: kernels and torch's loops differ by ulps, which Adam's quotient and Lion's
# sign can turn into a step of another direction for elements whose gradient is all but zero. bf16:
# DDP adds the ranks' gradients in bf16, the engine in fp32. Each bound is twice the largest gap
# measured.
LOSS = {"fp32": 1e-4, "bf16": 0.1}


def _cases(optimizer: str, dtype: str) -> list[Case]:
    """In groups of equal accumulation and clipping, which must agree bit by bit."""
    found = []
    combinations = itertools.product((1, 3), (0.0, 0.5), (1, 2, 3))
    for number, (accumulation, clipping, stage) in enumerate(combinations):
        ratios = RATIOS if IS_FULL else (RATIOS[(number + number // 6) % 6],)
        top: dict[str, Any] = {"optimizer": {"type": optimizer, "params": OPTIMIZERS[optimizer]}}
        if dtype == "fp16":
            top["fp16"] = FP16
        found += [
            Case(
                stage,
                dtype,
                accumulation,
                clipping,
                zero={"offload_optimizer": {"device": "cpu", "ratio": ratio}},
                top=top,
            )
            for ratio in ratios
        ]
    return found


def _compare(rank: int, world_size: int, optimizer: str) -> None:
    for dtype in DTYPES:
        firsts: dict[tuple[Any, ...], Trace] = {}
        for case in _cases(optimizer, dtype):
            key = (case.accumulation, case.clipping)
            trace = run_engine(case, rank, STEPS)
            if key not in firsts:
                firsts[key] = trace
                _check_against_oracle(case, trace, rank)
            first = firsts[key]
            assert trace.losses == first.losses, case
            assert trace.num_skipped == first.num_skipped, case
            for name, value in first.values.items():
                assert torch.equal(trace.values[name], value), (case, name)


def _check_against_oracle(case: Case, trace: Trace, rank: int) -> None:
    if case.dtype == "fp16":
        assert 0 < trace.num_skipped < STEPS, "some steps overflow, and some do not"
        return
    expected = run_ddp(case, rank, STEPS)
    gaps = [abs(a - b) for a, b in zip(trace.losses, expected.losses, strict=True)]
    assert max(gaps) <= LOSS[case.dtype], (case, max(gaps))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS if IS_FULL else ["AdamW"])
@pytest.mark.parametrize("world_size", [1, 2, 3] if IS_FULL else [2])
def test_no_ratio_and_no_stage_changes_a_bit(world_size: int, optimizer: str) -> None:
    spawn(_compare, world_size, optimizer)
