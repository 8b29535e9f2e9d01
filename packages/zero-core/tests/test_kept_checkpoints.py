"""Retention of checkpoints, removal of what killed saves left, and reads of stored files."""

import os
import stat
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.changed_checkpoints import rewrite
from support.small import build_small, train_small
from torch import nn

import zero_core
from zero_core import CheckpointCorruptError, CheckpointError
from zero_core.checkpoint.files import Reader, read_buffers, read_weights
from zero_core.checkpoint.storage import Aside, remove_stale
from zero_core.testing import Case, assert_same, on_ranks


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_last_ones_multiples_and_other_names_stay(tmp_path, caplog):
    engine = build_small()
    engine.save_checkpoint(tmp_path, "best", is_latest=False)
    assert engine.resume(tmp_path) is None
    assert "has checkpoints (best) and no file 'latest'" in caplog.text
    for step in range(1, 7):
        train_small(engine)
        engine.save_checkpoint(tmp_path, f"best-{step}", is_latest=False)
        engine.save_checkpoint(tmp_path, f"run1-{step}", keep_last=1)
        engine.save_checkpoint(tmp_path, keep_last=2, keep_every=3)
    best = [f"best-{step}" for step in range(1, 7)]
    steps = ["step-3", "step-5", "step-6"]
    assert _names(tmp_path) == ["best", *best, "latest", "run1-6", *steps]
    tried = zero_core.prune_checkpoints(tmp_path, keep_last=1, is_trial=True)
    assert tried == ["step-3", "step-5"]
    assert zero_core.prune_checkpoints(tmp_path, keep_last=1) == tried
    tmp_path.joinpath("step-6", "manifest.json").write_text("{")
    engine.save_checkpoint(tmp_path, "step-99", keep_last=1)  # tag and step number differ
    assert zero_core.prune_checkpoints(tmp_path, keep_last=1, prefixes=["best-"]) == best[:5]
    assert _names(tmp_path) == ["best", "best-6", "latest", "run1-6", "step-6", "step-99"]
    with pytest.raises(CheckpointError, match="keep_last = 0: expected 1 or more"):
        engine.save_checkpoint(tmp_path, keep_last=0)


def test_steps_decide_what_stays_and_only_manifests_of_others_are_read(tmp_path):
    engine = build_small()
    for step in range(1, 12):
        train_small(engine)
        if step > 7:
            engine.save_checkpoint(tmp_path)
    for age, step in enumerate((9, 8, 11, 10)):  # as in a copied folder, times are out of order
        os.utime(tmp_path / f"step-{step}" / "manifest.json", (age, age))
    opened, is_on = set(), [True]

    def note(event, arguments):
        if is_on and event == "open" and str(arguments[0]).endswith("manifest.json"):
            opened.add(Path(str(arguments[0])).parent.name)

    sys.addaudithook(note)
    try:
        assert zero_core.prune_checkpoints(tmp_path, keep_last=2) == ["step-8", "step-9"]
    finally:
        is_on.clear()
    assert opened == {"step-8", "step-9"}
    # As if resumed from step 10: the checkpoint of step 11 then counts as older.
    (tmp_path / "latest").write_text("step-10\n")
    assert zero_core.prune_checkpoints(tmp_path, keep_last=1) == ["step-11"]


def test_what_killed_saves_left_is_gone_after_the_next_one(tmp_path):
    engine = build_small()
    for tag in ("one", "two"):
        engine.save_checkpoint(tmp_path, tag)
    (tmp_path / "one").rename(tmp_path / ".one.old")  # as left by a kill between two renames
    (tmp_path / ".three.saving").mkdir()
    (tmp_path / ".three.saving" / "exp_avg-00000.safetensors").write_bytes(b"x")
    (tmp_path / ".latest.saving").write_text("x")
    (tmp_path / ".two.old").mkdir()  # partly removed: lacks its manifest
    (tmp_path / ".two.old" / "exp_avg-00000.safetensors").write_bytes(b"x")
    (tmp_path / ".two.old" / "tokenizer.json").touch()
    (tmp_path / ".mine.old").mkdir()
    marks = [tmp_path / f".{letter * 32}-0" for letter in "ab"]
    for mark in marks:
        mark.touch()
    for mark in (marks[0], tmp_path / ".latest.saving"):
        os.utime(mark, (0, 0))  # the recent marker may belong to a save in progress
    live = Aside(tmp_path, "live")
    live.make()
    engine.save_checkpoint(tmp_path, "four")
    hidden = [marks[1].name, ".live.saving", ".mine.old"]
    assert _names(tmp_path) == sorted([*hidden, "four", "latest", "one", "two"])
    assert (tmp_path / "two" / "tokenizer.json").exists()
    live.remove()
    engine.load_checkpoint(tmp_path, "one")


def test_a_save_keeps_other_files_in_the_folder_of_its_tag(tmp_path):
    engine, place = build_small(), tmp_path / "best"
    (place / "sub").mkdir(parents=True)
    (place / "tokenizer.json").touch()
    for has_frozen in (True, False):
        engine.save_checkpoint(tmp_path, "best", has_frozen=has_frozen)
        assert {"sub", "tokenizer.json"} < set(_names(place))
        assert (place / "value-00000.safetensors").exists() == has_frozen
    assert _names(tmp_path) == ["best", "latest"]
    (tmp_path / "mine").touch()
    with pytest.raises(CheckpointError, match="mine is a file: move it"):
        engine.save_checkpoint(tmp_path, "mine")
    engine.load_checkpoint(tmp_path)


def test_folder_under_way_survives_other_programs_that_clear_up(tmp_path):
    is_over = threading.Event()

    def clear_up():
        while not is_over.is_set():
            remove_stale(tmp_path)

    with ThreadPoolExecutor() as pool:
        clearing = pool.submit(clear_up)
        try:
            for _ in range(300):
                aside = Aside(tmp_path, "t")
                aside.make()
                aside.describe(b"{}")
                aside.commit(is_latest=True)
        finally:
            is_over.set()
        clearing.result()


def test_links_are_neither_written_through_nor_read(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "latest").symlink_to(victim)
    engine = build_small()
    engine.save_checkpoint(folder, "t")
    assert victim.read_text() == "precious"
    assert _names(folder) == ["latest", "t"]
    place = folder / "t"
    assert len({stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()}) == 1
    reader = Reader(place)
    parts = reader.parts("master_weight", "0.weight", 0, 9)
    reader.read_parts(parts)
    weights = parts[0].path
    weights.rename(tmp_path / "moved")
    weights.symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointCorruptError, match="is a link"):
        reader.read_parts(parts)
    with pytest.raises(CheckpointCorruptError, match="is a link"):
        list(read_weights(folder))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_a_stored_checkpoint_of_version_2_loads(ranks):
    # Two ranks wrote this checkpoint at stage 3 with bf16.
    stored = Path(__file__).parent / "data" / "checkpoint-version-2"
    zero_core.verify_checkpoint(stored)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    config = Case(1, dtype="bf16").config()
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    engine = zero_core.build(model, config, process_group=ranks)
    _, client_state = engine.load_checkpoint(stored)
    assert engine.global_steps == 2
    assert client_state == {"seen": 8, "best": torch.tensor([0.5])}
    expected = load_file(stored / "expected" / "model.safetensors")
    assert_same(engine.full_state_dict(dtype=torch.float32), expected)
    assert engine.states.get_full("0.weight", "exp_avg").any()


@pytest.mark.parametrize("name", ["buffers", "master_weight-00000"])
def test_readers_without_an_engine_check_what_they_read(tmp_path, name):
    place = build_small().save_checkpoint(tmp_path, "t")
    path = place / f"{name}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    read = read_buffers if name == "buffers" else lambda folder: list(read_weights(folder))
    with pytest.raises(CheckpointCorruptError, match="is damaged between the bytes 0 and"):
        read(tmp_path)
    with pytest.raises(CheckpointCorruptError):
        zero_core.verify_checkpoint(tmp_path)
    rewrite(place, lambda content: content.update(files={}))
    with pytest.raises(CheckpointCorruptError, match="files has no buffers"):
        read(tmp_path)


def test_checkpoint_is_verified_described_and_exported_without_an_engine(tmp_path):
    engine = build_small()
    train_small(engine)
    engine.save_checkpoint(tmp_path, "t", {"epoch": 3})
    told = []
    found = zero_core.inspect_checkpoint(tmp_path)
    assert (
        zero_core.verify_checkpoint(tmp_path, progress=lambda *now: told.append(now))
        == found["bytes"]
    )
    assert told[-1] == (found["bytes"], found["bytes"])
    assert (found["step"], found["tags"], found["client_state"]) == (1, ["t"], ["epoch"])
    written = zero_core.export_checkpoint(
        tmp_path, tmp_path / "hf", dtype=torch.bfloat16, progress=lambda *now: told.append(now)
    )
    assert told[-1] == (len(written), found["parameters"])
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    expected = engine.full_state_dict(dtype=torch.bfloat16)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[k], expected[k]) for k in exported if k.startswith("0"))
