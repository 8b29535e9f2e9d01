"""Retention of checkpoints: failed or killed saves leave nothing, and older ones are pruned."""

from __future__ import annotations

import os
import resource
import stat
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.former_checkpoints import make_version_1, rewrite
from torch import nn

import zero_core
from zero_core import CheckpointCorruptError, CheckpointError
from zero_core.checkpoint.files import Reader, read_buffers, read_manifest, read_weights
from zero_core.checkpoint.storage.local import Aside, remove_stale


def _build() -> zero_core.Engine:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
    return zero_core.build(model, config)


def _train(engine: zero_core.Engine) -> None:
    engine.backward(engine(torch.ones(2, 3)).square().mean())
    engine.step()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_last_ones_multiples_and_names_of_ones_own_stay(tmp_path: Path) -> None:
    engine = _build()
    engine.save_checkpoint(tmp_path, "best", is_latest=False)
    for _ in range(6):
        _train(engine)
        engine.save_checkpoint(tmp_path, keep_last=2, keep_every=3)
    assert _names(tmp_path) == ["best", "latest", "step-3", "step-5", "step-6"]
    tried = zero_core.prune_checkpoints(tmp_path, keep_last=1, is_trial=True)
    assert tried == ["step-3", "step-5"]
    assert zero_core.prune_checkpoints(tmp_path, keep_last=1) == tried
    assert _names(tmp_path) == ["best", "latest", "step-6"]
    with pytest.raises(CheckpointError, match="keep_last = 0: expected 1 or more"):
        engine.save_checkpoint(tmp_path, keep_last=0)


def test_only_tags_of_the_form_that_is_saved_are_pruned(tmp_path: Path) -> None:
    engine = _build()
    for step in range(1, 5):
        _train(engine)
        engine.save_checkpoint(tmp_path, f"best-{step}")
        engine.save_checkpoint(tmp_path, f"run1-{step}", keep_last=1)
        engine.save_checkpoint(tmp_path, keep_last=2)
    best = [f"best-{step}" for step in range(1, 5)]
    assert _names(tmp_path) == [*best, "latest", "run1-4", "step-3", "step-4"]
    tmp_path.joinpath("step-3", "manifest.json").write_text("{")  # it cannot be read
    engine.save_checkpoint(tmp_path, "step-99", keep_last=1)  # not of step 99
    assert zero_core.prune_checkpoints(tmp_path, keep_last=1) == ["step-4"]
    assert zero_core.prune_checkpoints(tmp_path, keep_last=1, prefixes=["best-"]) == best[:3]
    assert _names(tmp_path) == ["best-4", "latest", "run1-4", "step-3", "step-99"]


def test_steps_decide_what_stays_not_the_times_of_a_copy(tmp_path: Path) -> None:
    engine = _build()
    for step in range(1, 12):
        _train(engine)
        if step > 7:
            engine.save_checkpoint(tmp_path)
    for age, step in enumerate((9, 8, 11, 10)):
        os.utime(tmp_path / f"step-{step}" / "manifest.json", (age, age))
    assert zero_core.prune_checkpoints(tmp_path, keep_last=2) == ["step-8", "step-9"]
    # The training goes back: what it had saved beyond is older than what it saves now.
    (tmp_path / "latest").write_text("step-10\n")
    assert zero_core.prune_checkpoints(tmp_path, keep_last=1) == ["step-11"]


def test_pruning_reads_no_manifest_of_a_checkpoint_that_stays(tmp_path: Path) -> None:
    engine = _build()
    for _ in range(3):
        _train(engine)
        engine.save_checkpoint(tmp_path)
    opened, is_on = set(), [True]

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if is_on and event == "open" and str(arguments[0]).endswith("manifest.json"):
            opened.add(Path(str(arguments[0])).parent.name)

    sys.addaudithook(note)
    try:
        assert zero_core.prune_checkpoints(tmp_path, keep_last=2) == ["step-1"]
    finally:
        is_on.clear()
    assert opened == {"step-1"}


def test_save_that_finds_no_room_leaves_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    engine = _build()
    engine.save_checkpoint(tmp_path, "first")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))  # as a full disk
    try:
        with pytest.raises(CheckpointError, match=r"could not be written .* make room there"):
            engine.save_checkpoint(tmp_path, "second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert _names(tmp_path) == ["first", "latest"]
    assert engine.load_checkpoint(tmp_path)[0] == tmp_path / "first"


def test_what_killed_saves_left_is_gone_after_the_next_one(tmp_path: Path) -> None:
    engine = _build()
    for tag in ("one", "two"):
        engine.save_checkpoint(tmp_path, tag)
    (tmp_path / "one").rename(tmp_path / ".one.old")  # between the two renames
    (tmp_path / ".three.saving").mkdir()
    (tmp_path / ".three.saving" / "exp_avg-00000.safetensors").write_bytes(b"x")
    (tmp_path / ".latest.saving").write_text("x")
    (tmp_path / ".two.old").mkdir()  # half removed: its manifest is gone
    (tmp_path / ".two.old" / "exp_avg-00000.safetensors").write_bytes(b"x")
    (tmp_path / ".mine.old").mkdir()  # no checkpoint
    marks = [tmp_path / f".{letter * 32}-0" for letter in "ab"]
    for mark in marks:
        mark.touch()
    os.utime(marks[0], (0, 0))  # the other may be of a save under way
    live = Aside(tmp_path, "live")
    live.make()
    engine.save_checkpoint(tmp_path, "four")
    hidden = [marks[1].name, ".live.saving", ".mine.old"]
    assert _names(tmp_path) == sorted([*hidden, "four", "latest", "one", "two"])
    live.remove()
    engine.load_checkpoint(tmp_path, "one")


def test_folder_under_way_survives_other_programs_that_clear_up(tmp_path: Path) -> None:
    is_over, errors = threading.Event(), []

    def clear_up() -> None:
        try:
            while not is_over.is_set():
                remove_stale(tmp_path)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=clear_up)
    thread.start()
    try:
        for _ in range(300):
            aside = Aside(tmp_path, "t")
            aside.make()
            (aside.folder / "file").touch()
            aside.remove()
    finally:
        is_over.set()
        thread.join()
    assert not errors


def test_links_are_neither_written_through_nor_read(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in (".latest.saving", ".t.saving", "latest"):
        (folder / name).symlink_to(victim)
    engine = _build()
    (folder / ".t.saving").unlink()
    engine.save_checkpoint(folder, "t")
    assert victim.read_text() == "precious"
    assert _names(folder) == ["latest", "t"]
    place = folder / "t"
    assert len({stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()}) == 1
    reader = Reader(place, read_manifest(place))
    parts = reader.parts("master_weight", "0.weight", 0, 9)
    reader.read_parts(parts)  # the file is checked, and replaced after it
    weights = place / parts[0].file
    weights.rename(tmp_path / "moved")
    weights.symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointCorruptError, match="is a link"):
        reader.read_parts(parts)
    with pytest.raises(CheckpointCorruptError, match="is a link"):
        list(read_weights(folder))


def test_version_1_is_read_by_all_readers(tmp_path: Path) -> None:
    engine = _build()
    _train(engine)
    make_version_1(engine.save_checkpoint(tmp_path, "t"))
    other = _build()
    other.load_checkpoint(tmp_path)
    assert other.global_steps == 1
    by_name = {weight.names[0]: weight.value for weight in read_weights(tmp_path)}
    assert torch.equal(by_name["0.weight"], other.full_state_dict()["0.weight"])
    assert torch.equal(read_buffers(tmp_path)["1.running_mean"], other.module[1].running_mean)


@pytest.mark.parametrize("name", ["buffers", "master_weight-00000"])
def test_readers_without_an_engine_check_what_they_read(tmp_path: Path, name: str) -> None:
    place = _build().save_checkpoint(tmp_path, "t")
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


def test_checkpoint_is_verified_described_and_exported_without_an_engine(tmp_path: Path) -> None:
    engine = _build()
    _train(engine)
    engine.save_checkpoint(tmp_path, "t", {"epoch": 3})
    told: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        told.append((done, total))

    found = zero_core.inspect_checkpoint(tmp_path)
    assert zero_core.verify_checkpoint(tmp_path, progress=note) == found["bytes"]
    assert told[-1] == (found["bytes"], found["bytes"])
    assert (found["step"], found["tags"], found["client_state"]) == (1, ["t"], ["epoch"])
    written = zero_core.export_checkpoint(
        tmp_path, tmp_path / "hf", dtype=torch.bfloat16, progress=note
    )
    assert told[-1] == (len(written), found["parameters"])
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    expected = engine.full_state_dict(dtype=torch.bfloat16)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[k], expected[k]) for k in exported if k.startswith("0"))
