"""Each rank under `zero_engine.deepspeed` computes on the accelerator that its launcher gave it.

DeepSpeed chooses it in ``initialize`` (`_set_distributed_vars` in its runtime/engine.py), whoever
made the process group. No accelerator is needed: the choice is seen, and goes no further.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.facade import make
from zero_engine import deepspeed


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """Indices that were chosen, by a script that made the process group itself."""
    found: list[int] = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    # None of them is there for anything else: build() goes on with the CPU.
    monkeypatch.setattr("zero_engine.deepspeed.distributed.torch", _torch(found))
    yield found
    dist.destroy_process_group()


def _torch(found: list[int], visible: int = 8) -> Namespace:
    """Return what stands for torch where the device is chosen."""
    accelerator = Namespace(
        is_available=lambda: True,
        device_count=lambda: visible,
        set_device_index=found.append,
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
    monkeypatch.setattr("zero_engine.deepspeed.distributed.torch", _torch(chosen, visible=1))
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
