"""Checkpoints at URLs: the files of a local checkpoint, committed by writing one object."""

import itertools
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load_file
from support.object_store import LAST, ROOT, Objects
from support.small import build_small, train_small
from torch.multiprocessing import ProcessExitedException

import zero_core
from zero_core import CheckpointCorruptError, CheckpointError, ConfigError
from zero_core.checkpoint.files import read_latest, read_weights
from zero_core.checkpoint.manifest import read_manifest, seal
from zero_core.checkpoint.storage import location_of
from zero_core.testing import assert_same, run_alone, spawn

NUM_WRITES = 9
"""Writes of one rank's save: a marker, 6 data files, the manifest and ``latest``."""


@pytest.fixture
def url():
    files = fsspec.filesystem("memory")
    yield "memory://bucket/run"
    if files.exists("/bucket"):
        files.rm("/bucket", recursive=True)


@pytest.fixture
def objects(tmp_path, monkeypatch):
    monkeypatch.setenv(ROOT, str(tmp_path / "store"))
    Objects.clear_instance_cache()
    return location_of("objects://run")


def _facts(directory, tag):
    return {n: f.model_dump() for n, f in read_manifest(directory / tag).files.items()}


def test_commands_read_a_url(url, tmp_path):
    engine = build_small()
    pending = []
    for _ in range(3):
        train_small(engine)
        pending.append(engine.async_save(url, keep_last=2))
    assert str(pending[-1].result()) == f"{url}/step-3"
    found = zero_core.inspect_checkpoint(url)
    assert (found["tags"], found["latest"]) == (["step-2", "step-3"], "step-3")
    assert zero_core.verify_checkpoint(url) == found["bytes"]
    zero_core.export_checkpoint(url, tmp_path / "hf")
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), engine.full_state_dict())
    assert zero_core.prune_checkpoints(url, keep_last=1) == ["step-2"]
    assert not fsspec.filesystem("memory").exists("/bucket/run/step-2")


def test_copy_of_a_url_is_a_local_checkpoint(objects, tmp_path):
    engine = build_small()
    engine.save_checkpoint(objects)
    store = tmp_path / "store" / "run"
    for source in (store, store.as_uri(), str(objects)):
        assert next(read_weights(source)).names == ("0.weight",)
        assert engine.resume(source) == {}


def test_second_save_of_a_tag_replaces_the_first(objects, tmp_path):
    engine = build_small()
    place = engine.save_checkpoint(objects, "best")
    train_small(engine)
    # Folders without a manifest: a save that just began, a recent killed save, and an old one.
    (tmp_path / "store" / "run" / "best" / f"data-{'2' * 32}").mkdir()
    for age_s, name in ((0, "data-" + "0" * 32), (2 * 24 * 3600, "data-" + "1" * 32)):
        file = tmp_path / "store" / "run" / "best" / name / "x"
        file.parent.mkdir()
        file.touch()
        os.utime(file, (time.time() - age_s,) * 2)
    engine.save_checkpoint(objects, "best")
    folders = sorted(p.name for p in place.iterdir() if p.is_dir())
    own = read_manifest(place).subfolder
    assert folders == sorted(["data-" + "0" * 32, "data-" + "2" * 32, own or ""])
    assert zero_core.verify_checkpoint(str(objects), "best")


def test_store_that_fails_after_the_commit_does_not_fail_the_save(objects, monkeypatch, caplog):
    engine = build_small()
    engine.save_checkpoint(objects)
    train_small(engine)
    monkeypatch.setattr(Objects, "is_down", True)
    assert engine.save_checkpoint(objects, keep_last=1).name == read_latest(objects) == "step-1"
    assert "no answer" in caplog.text
    with pytest.raises(zero_core.CheckpointFailedError, match="no answer"):
        zero_core.verify_checkpoint(str(objects))
    monkeypatch.undo()


def test_file_that_another_program_wrote_after_a_listing_is_read_whole(objects, tmp_path):
    latest = tmp_path / "store" / "run" / "latest"
    latest.parent.mkdir(parents=True)
    latest.write_bytes(b"step-9")
    assert [path.name for path in objects.iterdir()] == ["latest"]
    latest.write_bytes(b"step-10")
    assert read_latest(objects) == "step-10"


@pytest.mark.parametrize(("how", "message"), [("link", "is a link"), ("name", "of the form")])
def test_changed_data_folder_is_refused(how, message, objects, tmp_path):
    engine = build_small()
    engine.save_checkpoint(objects)
    place = tmp_path / "store" / "run" / "step-0"
    (data,) = place.glob("data-*")
    if how == "link":
        data.rename(tmp_path / "away")
        data.symlink_to(tmp_path / "away")
    else:
        content = json.loads((place / "manifest.json").read_text()) | {"subfolder": "else"}
        data.rename(place / "else")
        (place / "manifest.json").write_bytes(seal(content))
    with pytest.raises(CheckpointCorruptError, match=message):
        engine.load_checkpoint(place.parent)


def _save_and_die(root, last):
    os.environ |= {ROOT: root}
    engine = build_small()
    engine.save_checkpoint("objects://run", "one")
    train_small(engine)
    os.environ[LAST] = str(Objects.num_written + last)
    engine.save_checkpoint("objects://run", "two")


@pytest.mark.parametrize("last", [3, NUM_WRITES - 2, NUM_WRITES - 1, NUM_WRITES])
def test_writer_that_is_killed_between_objects_leaves_the_checkpoint_before(
    last, objects, tmp_path
):
    root = str(tmp_path / "store")
    dies = pytest.raises(ProcessExitedException) if last < NUM_WRITES else nullcontext()
    with dies:
        run_alone(_save_and_die, root, last)
    # The manifest is written before `latest`, which is the last write.
    assert read_latest(objects) == ("two" if last == NUM_WRITES else "one")
    whole = ["one", "two"] if last >= NUM_WRITES - 1 else ["one"]
    assert zero_core.inspect_checkpoint(str(objects))["tags"] == whole
    for tag in whole:
        assert zero_core.verify_checkpoint(str(objects), tag)
    engine = build_small()
    assert engine.resume(objects) == {}
    assert engine.global_steps == (1 if last == NUM_WRITES else 0)
    engine.save_checkpoint(objects, "two")
    assert zero_core.verify_checkpoint(str(objects))


def _save_on_two(rank, _world_size, root):
    os.environ[ROOT] = root
    engine = build_small(stage=3)
    engine.backward(engine(torch.full((2, 3), rank + 1.0)).square().mean())
    engine.step()
    engine.save_checkpoint("objects://run")
    engine.save_checkpoint(Path(root, "local"))
    engine.async_save("objects://run", "beside").result()


def test_ranks_save_together_and_another_number_of_them_loads(objects, tmp_path):
    spawn(_save_on_two, 2, str(tmp_path / "store"))
    local = tmp_path / "store" / "local"
    assert _facts(objects, "step-1") == _facts(objects, "beside") == _facts(local, "step-1")
    engine = build_small()
    engine.load_checkpoint(objects)
    there = engine.full_state_dict()
    engine.load_checkpoint(local)
    assert_same(engine.full_state_dict(), there)
    assert not [p for p in (tmp_path / "store" / "run").iterdir() if p.name.startswith(".")]


def test_steps_are_not_recorded_at_a_url(url):
    engine = build_small()
    with pytest.raises(ConfigError, match="is a URL, and a record of steps needs a folder"):
        engine.record(url)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("nothing-like-it://bucket", "cannot be opened"),
        ("zip::memory://none", "cannot be opened: FileNotFoundError"),
        ("sftp://host/run", "sftp writes into the files that are there"),
        ("dir://run::ftp://host", "ftp writes into the files"),
        (Path("s3://bucket/run"), "was a URL before it became a Path"),
    ],
)
def test_url_that_leads_nowhere_is_refused(place, reason):
    with pytest.raises(CheckpointError, match=reason):
        location_of(place)


def test_paths_stay_paths(tmp_path):
    for place in (tmp_path, str(tmp_path), tmp_path.as_uri(), f"local://{tmp_path}"):
        assert location_of(place) == tmp_path
    assert location_of("C:/run") == Path("C:/run")
    remote = location_of("memory://bucket/run")
    assert str(remote / "step-1") == "memory://bucket/run/step-1"
    assert (remote / "step-1").parent == remote
    assert len({*itertools.repeat(remote, 2)}) == 1
    chained = location_of("dir://run::memory://chained")
    (chained / "step-1").mkdir(parents=True)
    assert location_of("memory://chained/run/step-1").is_dir()
    assert location_of(str(chained / "step-1")) == chained / "step-1"
    assert [path.name for path in chained.iterdir()] == ["step-1"]
