"""Peak of an engine's device memory against its plan, by the statistics of a device's allocator.

Activations are a few KiB here, so the peak is the engine's own.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import accelerator

import zero_core
from zero_core.comm import control
from zero_core.testing import RootAndBlocks, late_device, run_alone, simulate

WIDTH, NUM_BLOCKS, TOLERANCE = 224, 6, 0.03
PIECE_BYTES = 1 << 14  # of what full_state_dict moves at once: these models are small


def config(stage, dtype, **further):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        **further,
    }


Job = tuple[dict[str, Any], float]
"""A configuration and the size of the root."""
ROOT_OF_03 = 0.3 / 0.7 * NUM_BLOCKS
JOBS = [
    *((config(stage, dtype), 1) for stage, dtype in product(range(4), ("fp32", "bf16"))),
    *((config(stage, dtype), ROOT_OF_03) for stage, dtype in product((0, 2, 3), ("fp32", "bf16"))),
    *((config(stage, "bf16", gradient_accumulation_steps=2), 1) for stage in range(4)),
    (config(2, "bf16", communication_data_type="fp32"), 1),
    (config(2, "bf16", data_types={"grad_accum_dtype": "bf16"}), 1),
    (config(3, "fp32", optimizer={"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}), 1),
]
JOBS_OF = {1: [JOBS[0], JOBS[1], JOBS[9], JOBS[17]], 2: JOBS, 3: [JOBS[3], *JOBS[6:8], JOBS[17]]}


def measure(ranks, job):
    """Return the bytes held after build and steps, and the peaks of steps and of an export."""
    device = ranks.device
    accelerator.synchronize(device)
    before = accelerator.memory_allocated(device)
    settings, root = job
    engine = zero_core.build(RootAndBlocks(WIDTH, NUM_BLOCKS, root), settings, process_group=ranks)
    accelerator.synchronize(device)
    found = {"built": accelerator.memory_allocated(device) - before}
    accelerator.reset_peak_memory_stats(device)
    x = torch.ones(1, WIDTH, device=device)
    for step in range(2):
        for _ in range(engine.gradient_accumulation_steps):
            engine.backward(engine(x))
            engine.step()
        accelerator.synchronize(device)
        found[f"held {step}"] = accelerator.memory_allocated(device) - before
    found["peak"] = accelerator.max_memory_allocated(device) - before
    accelerator.reset_peak_memory_stats(device)
    engine.full_state_dict(rank=0)
    found["export"] = accelerator.max_memory_allocated(device) - before
    engine.close()
    return found


def _measure_all(world_size, folder):
    late_device.load()
    control.PIECE_BYTES = PIECE_BYTES
    rows = [simulate(measure, world_size, job, device="late") for job in JOBS_OF[world_size]]
    Path(folder, "rows").write_text(json.dumps(rows))


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)],
)
def test_peak_is_what_was_planned(world_size, tmp_path):
    run_alone(_measure_all, world_size, str(tmp_path))
    rows = json.loads((tmp_path / "rows").read_text())
    for (settings, root), ranks in zip(JOBS_OF[world_size], rows, strict=True):
        with torch.device("meta"):
            memory = zero_core.plan(
                RootAndBlocks(WIDTH, NUM_BLOCKS, root), settings, world_size
            ).memory
        planned, late = memory.device_bytes, memory.device.get("exchange buffers", 0)
        for found in ranks:
            assert abs(found["peak"] / planned - 1) <= TOLERANCE, (settings, root, found, planned)
            assert found["export"] <= (1 + TOLERANCE) * planned, (settings, root, found, planned)
            grown = found["held 0"] - found["built"]
            assert grown <= late + TOLERANCE * planned, (settings, root, found)
            assert found["held 1"] == found["held 0"], (settings, root, found)
