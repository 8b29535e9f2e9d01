"""Forged or damaged checkpoints: no load accepts one that `verify_checkpoint` refuses."""

import contextlib
import json
import shutil
from functools import reduce
from operator import getitem

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zero_core
from zero_core import CheckpointCorruptError, CheckpointError
from zero_core.checkpoint.json_values import decode
from zero_core.checkpoint.manifest import BUFFERS, MANIFEST, parse, seal
from zero_core.checkpoint.safetensors_files import read_header, write_file


def _build(optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": optimizer, "params": {"lr": 0.1}},
        "fp16": {"enabled": True},
    }
    return zero_core.build(model, config)


def _train(engine):
    engine.backward(engine(torch.ones(3, 6).cumsum(0)).float().square().mean())
    engine.step()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folders = {}
    for optimizer in ("AdamW", "Muon"):
        engine = _build(optimizer)
        for _ in range(2):
            _train(engine)
        folders[optimizer] = tmp_path_factory.mktemp(optimizer)
        engine.save_checkpoint(folders[optimizer])
        engine.close()
    return folders


_GONE = object()
_VALUES = {
    "no numbers": (("scalars", "0.weight"), _GONE),
    "steps": (("progress", "global_steps"), -1),
    "loss scale": (("progress", "loss_scaler", "scale"), 0.0),
    "no groups": (("progress", "param_groups"), {"lr": 0.1}),
    "no schedule": (("progress", "lr_scheduler"), _GONE),
    "client state": (("client_state",), {"__tuple__": [1]}),
    "other structure": (
        ("whole_states", "0.weight", "state"),
        {"__items__": [["momentum", {"__call__": 1}]]},
    ),
    "number missing": (("scalars", "2.bias", "step"), _GONE),
    "number for a moment": (("scalars", "2.bias", "exp_avg"), 0.5),
}
"""Paths in a manifest, with wrong values."""
_FILES = {
    "no moment": ("exp_avg_sq-00000.safetensors", lambda found: {}),
    "short moment": (
        "exp_avg-00000.safetensors",
        lambda found: {key: value[:-1] for key, value in found.items()},
    ),
    "no whole tensor": ("whole-00000.safetensors", lambda found: {}),
    "no random state": (
        "rng-00000.safetensors",
        lambda found: {"torch": torch.zeros(5, dtype=torch.uint8)},
    ),
    "buffer of a parameter": (BUFFERS, lambda found: {**found, "0.weight": torch.zeros(4, 6)}),
}
"""Data files, with functions that change their tensors."""


def _make_up(source, folder, edit):
    shutil.copytree(source, folder)
    (place,) = (path for path in folder.iterdir() if path.is_dir())
    content = json.loads((place / MANIFEST).read_bytes())
    name, change = _FILES.get(edit, ("exp_avg-00000.safetensors", dict))
    found = {key: stored.value() for key, stored in read_header(place / name).items()}
    if edit in _VALUES:
        (*path, last), value = _VALUES[edit]
        owner = reduce(getitem, path, content)
        owner.pop(last, None)
        owner.update({} if value is _GONE else {last: value})
    elif edit == "further state":
        content["states"].append("max_exp_avg_sq")
        further = name.replace("exp_avg", "max_exp_avg_sq")
        content["files"] |= write_file(place, further, found)
    else:
        (place / name).unlink()
        content["files"] |= write_file(place, name, change(found))
    (place / MANIFEST).write_bytes(seal(content))


_OF_MUON = ("no whole tensor", "other structure")
_OF_THE_OPTIMIZER = ("number missing", "number for a moment", "further state")
"""Changes that only a load with an optimizer detects."""


@pytest.mark.parametrize("edit", [*_VALUES, *_FILES, "further state"])
def test_what_no_engine_can_load_is_refused_and_not_whole(saved, tmp_path, edit):
    optimizer = "Muon" if edit in _OF_MUON else "AdamW"
    assert zero_core.verify_checkpoint(saved[optimizer])
    _make_up(saved[optimizer], tmp_path / "made-up", edit)
    if edit not in _OF_THE_OPTIMIZER:
        with pytest.raises(CheckpointCorruptError):
            zero_core.verify_checkpoint(tmp_path / "made-up")
    engine = _build(optimizer)
    _train(engine)
    # The refused load must change nothing, so the saves before and after it have the same bytes.
    before = engine.save_checkpoint(tmp_path / "own", "before")
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(tmp_path / "made-up")
    after = engine.save_checkpoint(tmp_path / "own", "after")
    engine.close()
    files = json.loads((before / MANIFEST).read_bytes())["files"]
    assert json.loads((after / MANIFEST).read_bytes())["files"] == files


def _export(folder, **options):
    zero_core.export_checkpoint(folder, folder.with_name("hf"), **options)


@pytest.mark.parametrize("read", [zero_core.verify_checkpoint, _export])
def test_a_checkpoint_that_goes_while_it_is_read_is_not_said_to_be_damaged(saved, tmp_path, read):
    folder = tmp_path / "run"
    shutil.copytree(saved["AdamW"], folder)

    def remove(done, total):
        (folder / "step-2").rename(folder / "gone")

    with pytest.raises(CheckpointError, match="removed or replaced while") as caught:
        read(folder, progress=remove)
    assert not isinstance(caught.value, CheckpointCorruptError)
    assert not any((tmp_path / "hf").glob("*"))


@pytest.fixture(scope="module")
def manifest(saved):
    return (saved["AdamW"] / "step-2" / MANIFEST).read_bytes()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner),
    max_leaves=8,
)


@settings(max_examples=30)
@given(st.data())
def test_any_value_in_any_place_is_read_or_refused_by_an_error_of_ours(manifest, data):
    content = json.loads(manifest)
    owner = content
    for _ in range(data.draw(st.integers(1, 4))):
        keys = sorted(owner) if isinstance(owner, dict) else list(range(len(owner)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(owner[key], dict | list) or not owner[key]:
            break
        parent, owner = owner, owner[key]
    else:
        owner = parent
    owner[key] = data.draw(_JSON)
    with contextlib.suppress(CheckpointError):
        parse(seal(content), "it")


@settings(max_examples=30)
@given(_JSON)
def test_any_json_is_decoded_or_refused(value):
    for key in ("__tensor__", "__tuple__", "__mapping__", "__counter__", "__items__"):
        with contextlib.suppress(CheckpointCorruptError):
            decode({key: value})
