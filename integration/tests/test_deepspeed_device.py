"""Each rank under `zero_engine.deepspeed` computes on the accelerator that its launcher gave it.

DeepSpeed chooses it in ``initialize`` (`_set_distributed_vars` in its runtime/engine.py), whoever
made the process group. No accelerator is needed: the choice is seen, and goes no further.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zero_engine import deepspeed

_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """Indices that were chosen, by a script that made the process group itself."""
    found: list[int] = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    # None of them is there for anything else: build() goes on with the CPU.
    monkeypatch.setattr("zero_engine.deepspeed.distributed.torch", _Torch(found))
    yield found
    dist.destroy_process_group()


class _Torch:
    """Stands for torch where the device is chosen."""

    def __init__(self, found: list[int], visible: int = 8) -> None:
        self.accelerator = Namespace(
            is_available=lambda: True,
            device_count=lambda: visible,
            set_device_index=found.append,
        )


def _initialize(**arguments: object) -> None:
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=_CONFIG, **arguments)  # type: ignore[arg-type]
    engine.destroy()


def test_initialize_takes_the_launchers_accelerator(
    chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    for arguments in ({}, {"dist_init_required": False}, {"args": Namespace(local_rank=-1)}):
        chosen.clear()
        _initialize(**arguments)
        assert chosen
        assert set(chosen) == {3}


def test_only_accelerator_that_a_rank_sees_is_its_own(
    chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr("zero_engine.deepspeed.distributed.torch", _Torch(chosen, visible=1))
    deepspeed.init_distributed()
    assert chosen == [0]


def test_device_rank_of_the_arguments_wins(
    chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    _initialize(args=Namespace(device_rank=5))
    assert chosen[-1] == 5


def test_current_accelerator_stays_without_a_launcher(
    chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    _initialize()
    assert chosen == []


def test_init_distributed_chooses_even_if_there_is_a_process_group(
    chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    deepspeed.init_distributed()
    assert chosen == [1]
