"""Forged, damaged and half-written checkpoints are refused quickly, with nothing written."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_core
from faults.checkpoints.hostile import FILES_OF, TAGS, folders, manifests
from faults.checkpoints.small_checkpoints import build, digest, rewrite, train
from faults.harness import Program
from zero_core.checkpoint.files import find, read_buffers, read_weights
from zero_core.checkpoint.load import read_client_state
from zero_core.checkpoint.manifest import MANIFEST
from zero_core.testing import SimulatedRanks, simulate

_MAX_S = 1.0
_MAX_BYTES = 32 << 20
_NEVER_FREE = 2**30  # more bytes than this process has mapped but unused


def _save(ranks: SimulatedRanks | None, folder: str, stage: int, is_offloaded: bool) -> None:
    engine = build(stage, is_offloaded=is_offloaded, process_group=ranks)
    train(engine, 2)
    engine.save_checkpoint(folder, "t", {"epoch": 1})
    engine.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    _save(None, str(folder), 0, False)
    return folder


@pytest.fixture(scope="module")
def engine(saved: Path) -> Iterator[zero_core.Engine]:
    engine = build(0)
    train(engine, 1)
    yield engine
    engine.close()


def _manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "t" / MANIFEST).read_bytes())
    return content


def _refused(engine: zero_core.Engine, folder: Path, tag: str | None = None) -> str:
    """Load a checkpoint that must be refused. Return what went wrong, or an empty string."""
    before, began = digest(engine), time.perf_counter()
    try:
        with _little_memory():
            engine.load_checkpoint(folder, tag)
        return "was loaded"
    except zero_core.CheckpointError as error:
        if "alloc" in str(error) or "MemoryError" in str(error):
            return f"asked for memory: {error}"
    except Exception as error:
        return f"raised {error!r:.200}"
    seconds = time.perf_counter() - began
    if digest(engine) != before:
        return "was written into the engine"
    return f"took {seconds} s" if seconds > _MAX_S else ""


@contextmanager
def _little_memory() -> Iterator[None]:
    """Let this process map at most `_MAX_BYTES` more than now, torch's memory included."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MAX_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_forged_manifests_with_a_valid_digest_are_refused(saved, engine, tmp_path):
    with _little_memory(), pytest.raises(RuntimeError, match="alloc"):
        # Checks that the limit holds for torch's allocations, too.
        torch.empty(_NEVER_FREE, dtype=torch.uint8)
    found, count = [], 0
    for name, change in manifests(_manifest(saved)):
        folder = tmp_path / str(count)
        shutil.copytree(saved, folder)
        rewrite(folder / "t", change)
        why = _refused(engine, folder)
        found += [f"{name}: {why}"] if why else []
        count += 1
        shutil.rmtree(folder)
    print(f"{count - len(found)} of {count} hostile manifests were refused")
    assert count >= 200
    assert not found, "\n".join(found)


def test_files_that_are_not_checkpoints_are_refused(saved, engine, tmp_path):
    found, count = [], 0
    for file, name, change in folders():
        folder = tmp_path / str(count)
        shutil.copytree(saved, folder)
        change(folder / "t")
        why = _refused(engine, folder)
        found += [f"{name}: {why}"] if why else []
        readers: dict[str, Callable[[Path], object]] = {
            "read_weights": lambda f: list(read_weights(f)),
            "read_buffers": read_buffers,
            "verify_checkpoint": zero_core.verify_checkpoint,
        }
        for reader, read in readers.items():
            try:
                read(folder)
                if file in FILES_OF[reader]:
                    found.append(f"{name}: taken by {reader}")
            except zero_core.CheckpointError:
                pass
            except Exception as error:
                found.append(f"{name}, {reader}: raised {error!r:.200}")
        count += 1
        shutil.rmtree(folder)
    print(f"{count - len(found)} of {count} hostile folders were refused")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_outside_the_folder_is_refused(saved, engine, tmp_path, tag):
    folder = tmp_path / "inside"
    shutil.copytree(saved, folder)
    shutil.copytree(saved / "t", tmp_path / "x")
    assert not _refused(engine, folder, tag)
    folder.joinpath("latest").write_text(tag)
    assert not _refused(engine, folder)
    with pytest.raises(zero_core.CheckpointError):
        engine.save_checkpoint(folder, tag)


def test_a_save_over_a_checkpoint_on_a_full_disk_leaves_it_as_it_was(saved, engine, tmp_path):
    folder = tmp_path / "full"
    shutil.copytree(saved, folder)
    before = {file.name: file.read_bytes() for file in folder.joinpath("t").iterdir()}
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = max(map(len, before.values()))
    for twelfths in range(12):
        resource.setrlimit(resource.RLIMIT_FSIZE, (twelfths * size // 12, most))
        try:
            with pytest.raises(zero_core.CheckpointError):
                engine.save_checkpoint(folder, "t")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        zero_core.verify_checkpoint(folder)
        assert {f.name: f.read_bytes() for f in folder.joinpath("t").iterdir()} == before


def _loads(ranks: SimulatedRanks, folder: str, stage: int, is_offloaded: bool) -> None:
    """Refuse hostile manifests on both ranks, and check that no state changes."""
    engine = build(stage, is_offloaded=is_offloaded, process_group=ranks)
    train(engine, 1)
    control = engine.sharded_state.control
    before, found = digest(engine), []
    for number, (name, change) in enumerate(manifests(_manifest(Path(folder, "saved")))):
        if number % 7 and "client" not in name and "progress" not in name:
            continue
        place = Path(folder, f"copy-{number}")
        if ranks.rank == 0:
            shutil.copytree(Path(folder, "saved"), place)
            rewrite(place / "t", change)
        control.barrier()
        try:
            engine.load_checkpoint(place)
            found.append(f"{name}: loaded")
        except zero_core.CheckpointError:
            pass
        if digest(engine) != before:
            found.append(f"{name}: written")
            before = digest(engine)
    engine.close()
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("stage", "is_offloaded"),
    [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True)],
)
def test_a_refused_load_has_written_nothing_on_two_ranks(tmp_path, stage, is_offloaded):
    simulate(_save, 2, str(tmp_path / "saved"), stage, is_offloaded)
    simulate(_loads, 2, str(tmp_path), stage, is_offloaded)


_SAMPLE = int(os.environ.get("ZERO_FAULTS_SAMPLE", "0"))
"""Number of bytes of each file that are changed; 0: all."""


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.frozen(self.line(x))).square().mean()


def _build_small() -> zero_core.Engine:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}}
    return zero_core.build(_Small(), config)


@pytest.fixture(scope="module")
def saved_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = _build_small()
    engine.backward(engine(torch.randn(4, 3)))
    engine.step()
    folder = tmp_path_factory.mktemp("bytes")
    engine.save_checkpoint(folder, "t", {"epoch": 1})
    engine.close()
    return folder


def _positions(size: int) -> list[int]:
    every = range(size)
    return sorted(random.Random(0).sample(every, _SAMPLE)) if 0 < _SAMPLE < size else list(every)


def _check(path: Path, readers: list[Callable[[], object]]) -> None:
    """Change each byte of a file, and the file's length. All readers must refuse each variant."""
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
    assert not wrong, "\n".join(wrong[:20])


def test_every_byte_of_the_manifest(saved_step: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved_step, tmp_path / "copy"))
    engine = _build_small()
    path = folder / "t" / "manifest.json"
    readers = [lambda: engine.load_checkpoint(folder), lambda: read_client_state(folder)]
    _check(path, readers)
    engine.load_checkpoint(folder)
    engine.close()


def test_every_byte_of_every_file(saved_step: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved_step, tmp_path / "copy"))
    engine = _build_small()
    for path in sorted(folder.joinpath("t").glob("*.safetensors")):
        readers: list[Callable[[], object]] = [lambda: engine.load_checkpoint(folder)]
        if path.name.startswith(("master_weight", "value")):
            readers.append(lambda: list(read_weights(folder)))
        if path.name.startswith("buffers"):
            readers.append(lambda: read_buffers(folder))
        _check(path, readers)
    engine.load_checkpoint(folder)
    engine.close()


SCRIPT = str(Path(__file__).with_name("saving_program.py"))
STEPS = 40
KILLS = 12


def _saving_program(folder: Path) -> Program:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return Program(*launcher, SCRIPT, str(folder), str(STEPS))


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {weight.names[0]: weight.value for weight in read_weights(folder)}


def _newest(folder: Path) -> str:
    return find(folder, None).name if folder.joinpath("latest").exists() else ""


def test_killed_at_any_moment_the_newest_checkpoint_is_whole_and_training_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    with _saving_program(tmp_path / "straight") as straight:
        assert straight.end() == 0, straight.output
    folder, moments = tmp_path / "killed", random.Random(0)
    for _ in range(KILLS):
        before = _newest(folder)
        with _saving_program(folder) as program:
            program.wait_for(lambda before=before: _newest(folder) != before)
            time.sleep(moments.uniform(0.0, 0.1))
            program.kill_all()
        found = _newest(folder)
        assert _weights(folder), found
        if found == f"step-{STEPS}":
            break
    with _saving_program(folder) as last:
        assert last.end() == 0, last.output
    assert _newest(folder) == f"step-{STEPS}"
    theirs = _weights(tmp_path / "straight")
    for name, value in _weights(folder).items():
        assert torch.equal(value, theirs[name]), name
    left = list(folder.glob(".*"))  # marker files of ranks, which are removed after a day
    assert all(path.is_file() and not path.stat().st_size for path in left), left
