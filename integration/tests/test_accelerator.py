"""Answers of ``deepspeed.accelerator.get_accelerator()`` on a machine without an accelerator."""

from __future__ import annotations

import inspect
import resource

import pytest
import torch

from zero_core.errors import ConfigError
from zero_engine.deepspeed.accelerator import CpuAccelerator, TorchAccelerator, get_accelerator

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")


def test_device_is_the_cpu_under_any_number() -> None:
    accelerator = get_accelerator()
    assert accelerator is get_accelerator()
    assert isinstance(accelerator, CpuAccelerator)
    assert accelerator.device_name(3) == accelerator.current_device_name() == accelerator._name
    assert torch.zeros(1, device=accelerator.current_device_name()).device.type == "cpu"
    assert accelerator.communication_backend_name() == "gloo"
    assert accelerator.on_accelerator(torch.zeros(1))


def test_random_numbers_repeat_from_a_state() -> None:
    accelerator = CpuAccelerator()
    state = accelerator.get_rng_state()
    drawn = torch.rand(3)
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
    accelerator.manual_seed_all(5)
    assert accelerator.initial_seed() == 5


def test_memory_is_that_of_the_process() -> None:
    accelerator = CpuAccelerator()
    before = accelerator.memory_allocated()
    held = torch.ones(8 * 2**20)  # 32 MiB
    assert accelerator.memory_allocated() - before > 30 * 2**20
    assert accelerator.max_memory_allocated() >= accelerator.memory_allocated() - 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert accelerator.max_memory_allocated() == pytest.approx(1024 * peak, rel=0.01)
    assert accelerator.available_memory() < accelerator.total_memory()
    del held


def test_ranges_nest_in_the_profilers_trace() -> None:
    accelerator = CpuAccelerator()
    with torch.profiler.profile() as trace:
        accelerator.range_push("outer")
        accelerator.range_push("inner")
        torch.ones(2).sum()
        accelerator.range_pop()
        accelerator.range_pop()
    names = {event.name for event in trace.events() or ()}
    assert {"outer", "inner"} <= names


def test_another_accelerator_than_torch_finds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    get_accelerator.cache_clear()
    with pytest.raises(ConfigError, match="DS_ACCELERATOR=cuda"):
        get_accelerator()
    get_accelerator.cache_clear()


def test_both_kinds_of_device_answer_the_same_questions() -> None:
    def public(kind: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}

    assert public(CpuAccelerator) == public(TorchAccelerator)
