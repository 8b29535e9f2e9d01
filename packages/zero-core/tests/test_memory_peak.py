"""What is resident on a host, at its peak and after many steps; no more than what is held.

Each measurement is a process of its own, so that its peak is its own. glibc is told to give large
tensors back when they are freed; what it keeps otherwise is the allocator's, not the engine's.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core.testing import run_alone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

WIDTH, DEPTH = 384, 40
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


def make_config(dtype: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
    }


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(value) * 1024


def train(depth: int, dtype: str, rows: int, steps: int) -> zero_core.Engine:
    engine = zero_core.build(Deep(depth), make_config(dtype))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts from here
    for _ in range(steps):
        engine.backward(engine(torch.ones(rows, WIDTH)))
        engine.step()
    return engine


def measure(dtype: str, rows: int) -> dict[str, int]:
    train(2, dtype, rows, 2)  # libraries and kernels are there from now on
    before = status("VmRSS")
    engine = train(DEPTH, dtype, rows, 3)
    early = status("VmRSS") - before
    peak = status("VmHWM") - before
    for _ in range(12):
        engine.backward(engine(torch.ones(rows, WIDTH)))
        engine.step()
    return {"peak": peak, "early": early, "late": status("VmRSS") - before}


def _check(dtype: str, rows: int) -> None:
    # Large tensors go back to the system when they are freed.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    found = measure(dtype, rows)
    with torch.device("meta"):
        model = Deep(DEPTH)
    inputs = [torch.ones(rows, WIDTH)]
    planned = zero_core.plan(
        model, make_config(dtype), 1, device_type="cpu", example_inputs=inputs
    ).memory.device_bytes
    print(f"{dtype}, {rows} rows: peak {found['peak'] / planned:.3f} of the plan, {found}")
    assert 0.95 < found["peak"] / planned < 1.05
    assert found["late"] - found["early"] < 0.01 * planned


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows", [2, 256])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_peak_is_what_was_planned_and_does_not_grow(dtype: str, rows: int) -> None:
    run_alone(_check, dtype, rows)
