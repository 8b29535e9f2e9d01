"""Peak of device memory with offload against the plan, by the statistics of a device's allocator.

Activations are a few KiB here, so the peak is the engine's own.
"""

from __future__ import annotations

import gc
from itertools import product
from typing import Any

import pytest
import torch
from torch import accelerator

import zero_core
from zero_core.testing import Case, RootAndBlocks, late_device, run_alone, simulate

WIDTH, NUM_BLOCKS, TOLERANCE = 224, 6, 0.03
CPU = {"device": "cpu"}


def config(dtype: str, micro_steps: int = 1, **zero: Any) -> dict[str, Any]:
    zero["stage3_param_persistence_threshold"] = 0
    return Case(zero["stage"], dtype, micro_steps, zero=zero).config()


def offload(ratio: float) -> dict[str, Any]:
    return {**CPU, "ratio": ratio}


ROOT_OF_03 = 0.3 / 0.7 * NUM_BLOCKS
JOBS: list[tuple[dict[str, Any], float]] = [
    *(
        (config(dtype, stage=stage, offload_optimizer=offload(ratio)), 1.0)
        for dtype, stage, ratio in product(("fp32", "bf16"), (0, 2, 3), (1.0, 0.6))
    ),
    *(
        (config("bf16", micro_steps, stage=2, offload_optimizer=offload(ratio)), root)
        for micro_steps, ratio, root in (
            *((2, 1.0, 1.0), (2, 0.6, 1.0), (2, 0.6, ROOT_OF_03)),
            *((1, 1.0, ROOT_OF_03), (1, 0.6, ROOT_OF_03)),
        )
    ),
    (config("bf16", stage=3, offload_param=CPU), 1.0),
    (config("bf16", stage=3, offload_param=CPU, offload_optimizer=CPU), 1.0),
]
LOSSLESS = config("bf16", stage=2, offload_optimizer={**CPU, "lossless_upload": True})
"""Its peak is not planned here: what plain torch decodes in, on a device without Triton."""
JOBS_OF = {1: JOBS[8:], 2: JOBS}


def measure(ranks: Any, settings: dict[str, Any], root: float) -> list[int]:
    """Return the peak of three steps, and what is held after build and after each of them."""
    device = ranks.device
    accelerator.synchronize(device)
    before = accelerator.memory_allocated(device)
    engine = zero_core.build(RootAndBlocks(WIDTH, NUM_BLOCKS, root), settings, process_group=ranks)
    accelerator.synchronize(device)
    x, held = torch.ones(1, WIDTH, device=device), [accelerator.memory_allocated(device) - before]
    accelerator.reset_peak_memory_stats(device)
    for _ in range(3):
        for _ in range(engine.gradient_accumulation_steps):
            engine.backward(engine(x))
            engine.step()
        accelerator.synchronize(device)
        held.append(accelerator.memory_allocated(device) - before)
    peak = accelerator.max_memory_allocated(device) - before
    engine.close()
    return [peak, *held]


def _check_peaks(world_size: int) -> None:
    late_device.load()
    for settings, root in JOBS_OF[world_size]:
        gc.collect()  # what a cycle of the engine before still holds
        ranks = simulate(measure, world_size, settings, root, device="late")
        with torch.device("meta"):
            model = RootAndBlocks(WIDTH, NUM_BLOCKS, root)
        memory = zero_core.plan(model, settings, world_size).memory
        planned, exchanged = memory.device_bytes, memory.device.get("exchange buffers", 0)
        for peak, built, *held in ranks:
            assert abs(peak / planned - 1) <= TOLERANCE, (settings, root, peak, planned)
            assert max(held) == held[0], (settings, root, held)
            # Activations of the last step, and what reductions receive into, come after build.
            assert held[0] - built <= exchanged + TOLERANCE * planned / 10, (settings, held, built)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_peak_is_what_was_planned(world_size: int) -> None:
    run_alone(_check_peaks, world_size)


def _pinned_in_a_step(ranks: Any, settings: dict[str, Any]) -> int:
    engine = zero_core.build(RootAndBlocks(WIDTH, NUM_BLOCKS, 1.0), settings, process_group=ranks)
    x = torch.ones(1, WIDTH, device=ranks.device)
    late_device.start_trace()
    for _ in range(engine.gradient_accumulation_steps):
        engine.backward(engine(x))
        engine.step()
    accelerator.synchronize(ranks.device)
    found = [record.kind for record in late_device.stop_trace()]
    engine.close()
    return found.count("pinned_alloc")


def _check_pinned() -> None:
    late_device.load()
    for settings in (*(settings for settings, _ in JOBS[8:15] + JOBS[-2:]), LOSSLESS):
        assert simulate(_pinned_in_a_step, 1, settings, device="late") == [0], settings


def test_host_memory_is_page_locked_in_build() -> None:
    """It takes seconds for tens of GB: not within the first backward."""
    run_alone(_check_pinned)
