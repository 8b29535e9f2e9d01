"""Parameters in a file: damage, restarts, and buffers that are too small.

That they change no bit is shown by rows of test_equalities.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_core
from zero_core.testing import Case, batch, make_model, train
from zero_offload import create_param_tier
from zero_offload.errors import StorageCorruptError

pytestmark = pytest.mark.filterwarnings("ignore:the file system of .* has no direct I/O")
HOST = {"offload_optimizer": {"device": "cpu"}}
BATCHES = [batch(step, 0, 0) for step in range(6)]


def _engine(folder: Path, **keys: Any) -> tuple[zero_core.Engine, Any]:
    made: list[Any] = []

    def factory(**arguments: Any) -> Any:
        made.append(create_param_tier(**arguments))
        return made[0]

    params = {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0, **keys}
    zero = {**HOST, "offload_param": params, "stage3_param_persistence_threshold": 0}
    config = Case(3, "bf16", zero=zero).config()
    return zero_core.build(make_model(), config, param_tier=factory), made[0]


def test_a_damaged_file_stops_the_forward_and_is_named(tmp_path: Path) -> None:
    engine, tier = _engine(tmp_path, buffer_count=2)  # no shard stays in one from step to step
    train(engine, BATCHES[:2])
    engine.full_state_dict()  # waits for the update, and reads all shards
    blocks = tier.file.blocks
    descriptor = os.open(f"/proc/self/fd/{blocks.fileno()}", os.O_WRONLY)
    tier.fetch(
        2, torch.empty(blocks.block_bytes[tier.file.block_of(2)] // 2, dtype=torch.bfloat16)
    ).wait()
    os.pwrite(descriptor, b"\x7f" * 64, blocks.offset(tier.file.block_of(2)))
    os.fsync(descriptor)
    os.close(descriptor)
    with pytest.raises(StorageCorruptError, match=str(tmp_path)):
        train(engine, BATCHES[2:3])


def test_a_run_on_a_file_resumes_from_its_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    engine, tier = _engine(tmp_path)
    train(engine, BATCHES[:3])
    engine.save_checkpoint(tmp_path / "kept")
    expected = train(engine, BATCHES[3:])
    other, _ = _engine(tmp_path, max_in_cpu=900)
    other.load_checkpoint(tmp_path / "kept")
    assert train(other, BATCHES[3:]) == expected
    plain = zero_core.build(make_model(), Case(2, "bf16", zero=HOST).config())
    plain.load_checkpoint(tmp_path / "kept")
    assert train(plain, BATCHES[3:]) == expected
    report = engine.memory_report()
    assert report["host parameters"] == 0
    assert report["file parameters"] > 0
    assert tier.file.blocks.bytes_read > 0


def test_a_shard_that_exceeds_a_buffer_is_refused_by_the_configurations_key(tmp_path: Path) -> None:
    with pytest.raises(zero_core.ConfigError, match=r"offload_param\.buffer_size = 100 elements"):
        _engine(tmp_path, buffer_size=100)
