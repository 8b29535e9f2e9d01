"""A byte of a checkpoint changes, or some are cut off or appended: all readers refuse it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_core
from zero_core.checkpoint.files import read_buffers, read_weights
from zero_core.checkpoint.load import read_client_state

_SAMPLE = int(os.environ.get("ZERO_FAULTS_SAMPLE", "0"))
"""Bytes of each file that are tried. 0: all."""
Count = Callable[[int, int], None]


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.frozen(self.line(x))).square().mean()


def _build() -> zero_core.Engine:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}}
    return zero_core.build(_Small(), config)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = _build()
    engine.backward(engine(torch.randn(4, 3)))
    engine.step()
    folder = tmp_path_factory.mktemp("bytes")
    engine.save_checkpoint(folder, "t", {"epoch": 1})
    engine.close()
    return folder


def _positions(size: int) -> list[int]:
    every = range(size)
    return sorted(random.Random(0).sample(every, _SAMPLE)) if 0 < _SAMPLE < size else list(every)


def _check(path: Path, readers: list[Callable[[], object]], count_faults: Count) -> None:
    """Change each byte of a file, its length too, and require all readers to refuse it."""
    data, wrong, count = path.read_bytes(), [], 0
    flips = [(at, mask) for at in _positions(len(data)) for mask in (1 << at % 8, 0xFF)]
    changed = [
        (f"byte {at} ^ {m}", data[:at] + bytes([data[at] ^ m]) + data[at + 1 :]) for at, m in flips
    ]
    changed += [(f"cut at {at}", data[:at]) for at in _positions(len(data))[::7]]
    changed += [(f"{tail!r} appended", data + tail) for tail in (b"\0", b"\n", b" ", b"}", data)]
    for name, found in changed:
        path.write_bytes(found)
        for number, read in enumerate(readers):
            count += 1
            try:
                read()
                wrong.append(f"{path.name}, {name}: reader {number} took it")
            except zero_core.CheckpointError:
                pass
            except Exception as error:
                wrong.append(f"{path.name}, {name}: reader {number} raised {error!r:.100}")
    path.write_bytes(data)
    print(f"{path.name}: {count - len(wrong)} of {count} reads were refused")
    count_faults(count, count - len(wrong))
    assert not wrong, "\n".join(wrong[:20])


def test_every_byte_of_the_manifest(saved: Path, tmp_path: Path, count_faults: Count) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    engine = _build()
    path = folder / "t" / "manifest.json"
    readers = [lambda: engine.load_checkpoint(folder), lambda: read_client_state(folder)]
    _check(path, readers, count_faults)
    engine.load_checkpoint(folder)
    engine.close()


def test_every_byte_of_every_file(saved: Path, tmp_path: Path, count_faults: Count) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    engine = _build()
    for path in sorted(folder.joinpath("t").glob("*.safetensors")):
        readers: list[Callable[[], object]] = [lambda: engine.load_checkpoint(folder)]
        if path.name.startswith(("master_weight", "value")):
            readers.append(lambda: list(read_weights(folder)))
        if path.name.startswith("buffers"):
            readers.append(lambda: read_buffers(folder))
        _check(path, readers, count_faults)
    engine.load_checkpoint(folder)
    engine.close()
