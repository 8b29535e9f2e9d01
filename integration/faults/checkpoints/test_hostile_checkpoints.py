"""A forged checkpoint is refused in time and before anything is written."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import zero_core
from faults.checkpoints.hostile import FILES_OF, TAGS, folders, manifests
from faults.checkpoints.small_checkpoints import build, digest, rewrite, train
from zero_core.checkpoint.files import read_buffers, read_weights
from zero_core.testing import SimulatedRanks, simulate

_MAX_S = 1.0
_MAX_BYTES = 32 << 20
_NEVER_FREE = 2**30  # more than this process has mapped without a use


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


def _refused(engine: zero_core.Engine, folder: Path, tag: str | None = None) -> str:
    """Load what must be refused, and return what went wrong with that: nothing, if "" ."""
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
    """Let this process map `_MAX_BYTES` more than it has, torch's memory included."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MAX_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_forged_manifests_with_a_valid_digest_are_refused(
    saved: Path, engine: zero_core.Engine, tmp_path: Path, count_faults: Callable[[int, int], None]
) -> None:
    with _little_memory(), pytest.raises(RuntimeError, match="alloc"):
        torch.empty(_NEVER_FREE, dtype=torch.uint8)  # the limit holds for torch's memory, too
    found, count = [], 0
    for name, change in manifests():
        folder = tmp_path / str(count)
        shutil.copytree(saved, folder)
        rewrite(folder / "t", change)
        why = _refused(engine, folder)
        found += [f"{name}: {why}"] if why else []
        count += 1
        shutil.rmtree(folder)
    print(f"{count - len(found)} of {count} hostile manifests were refused")
    count_faults(count, count - len(found))
    assert count >= 200
    assert not found, "\n".join(found)


def test_files_that_are_not_checkpoints_are_refused(
    saved: Path, engine: zero_core.Engine, tmp_path: Path, count_faults: Callable[[int, int], None]
) -> None:
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
    count_faults(count, count - len(found))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_outside_the_folder_is_refused(
    saved: Path, engine: zero_core.Engine, tmp_path: Path, tag: str
) -> None:
    folder = tmp_path / "inside"
    shutil.copytree(saved, folder)
    shutil.copytree(saved / "t", tmp_path / "x")
    assert not _refused(engine, folder, tag)
    folder.joinpath("latest").write_text(tag)
    assert not _refused(engine, folder)
    with pytest.raises(zero_core.CheckpointError):
        engine.save_checkpoint(folder, tag)


def _loads(ranks: SimulatedRanks, folder: str, stage: int, is_offloaded: bool) -> None:
    """Refuse every hostile manifest on both ranks, with the same state before and after."""
    engine = build(stage, is_offloaded=is_offloaded, process_group=ranks)
    train(engine, 1)
    control = engine.sharded_state.control
    before, found = digest(engine), []
    for number, (name, change) in enumerate(manifests()):
        if number % 5 and "client" not in name and "progress" not in name:
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
def test_a_refused_load_has_written_nothing_on_two_ranks(
    tmp_path: Path, stage: int, is_offloaded: bool
) -> None:
    simulate(_save, 2, str(tmp_path / "saved"), stage, is_offloaded)
    simulate(_loads, 2, str(tmp_path), stage, is_offloaded)
