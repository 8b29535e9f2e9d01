"""The accelerator of each rank under `zero_engine.deepspeed`.

DeepSpeed selects the device in ``initialize`` (`_set_distributed_vars` in its runtime/engine.py),
even if the script created the process group. A fake torch records the selection.
"""

from __future__ import annotations

import inspect
import resource
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.facade import make
from zero_core.errors import ConfigError
from zero_engine import deepspeed
from zero_engine.deepspeed.accelerator import CpuAccelerator, TorchAccelerator, get_accelerator


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    found: list[int] = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    # Only the selection sees the fake accelerator. build() uses the CPU.
    monkeypatch.setattr("zero_engine.deepspeed.comm.torch", _torch(found))
    yield found
    dist.destroy_process_group()


def _torch(found: list[int], visible: int = 8) -> Namespace:
    accelerator = Namespace(
        is_available=lambda: True, device_count=lambda: visible, set_device_index=found.append
    )
    return Namespace(accelerator=accelerator)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, 3),
        ({"dist_init_required": False}, 3),
        ({"args": Namespace(local_rank=-1)}, 3),
        ({"args": Namespace(device_rank=5)}, 5),
    ],
)
def test_initialize_takes_the_launchers_accelerator_or_the_arguments(
    arguments: dict[str, Any], expected: int, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    make(**arguments).destroy()
    assert chosen[-1] == expected
    monkeypatch.setattr("zero_engine.deepspeed.comm.torch", _torch(chosen, visible=1))
    deepspeed.init_distributed()
    assert chosen[-1] == 0, "the only one that the rank sees"


def test_accelerator_stays_without_a_launcher_and_is_chosen_in_an_existing_group(
    chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    make().destroy()
    assert chosen == []
    monkeypatch.setenv("LOCAL_RANK", "1")
    deepspeed.init_distributed()
    assert chosen == [1]


on_a_cpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")


@on_a_cpu
def test_the_cpu_answers_under_any_number_what_a_device_answers() -> None:
    accelerator = get_accelerator()
    assert accelerator is get_accelerator()
    assert isinstance(accelerator, CpuAccelerator)
    assert accelerator.device_name(3) == accelerator.current_device_name() == accelerator._name
    assert torch.zeros(1, device=accelerator.current_device_name()).device.type == "cpu"
    assert accelerator.communication_backend_name() == "gloo"
    assert accelerator.on_accelerator(torch.zeros(1))
    state = accelerator.get_rng_state()
    drawn = torch.rand(3)
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
    accelerator.manual_seed_all(5)
    assert accelerator.initial_seed() == 5
    with torch.profiler.profile() as trace:
        accelerator.range_push("outer")
        accelerator.range_push("inner")
        torch.ones(2).sum()
        accelerator.range_pop()
        accelerator.range_pop()
    names = {event.name for event in trace.events() or ()}
    assert {"outer", "inner"} <= names

    def public(kind: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}

    assert public(CpuAccelerator) == public(TorchAccelerator)
    other, seen = TorchAccelerator(torch.device("cpu")), Namespace(amp=None)
    seen.set_rng_state = lambda *args: vars(seen).update(args=args)
    other._module = seen
    other.set_rng_state(device_index=0, new_state=state)
    assert seen.args == (state, 0)
    assert not hasattr(other, "amp"), "torch's, but not DeepSpeed's"


@on_a_cpu
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


@on_a_cpu
def test_another_accelerator_than_torch_finds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    get_accelerator.cache_clear()
    with pytest.raises(ConfigError, match="DS_ACCELERATOR=cuda"):
        get_accelerator()
    get_accelerator.cache_clear()
