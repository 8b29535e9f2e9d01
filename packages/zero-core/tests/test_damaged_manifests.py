"""Bytes of a manifest or of a header that are not what was written: an error of this package."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn, ones

import zero_core
from zero_core import CheckpointCorruptError, CheckpointError
from zero_core.checkpoint.json_values import decode
from zero_core.checkpoint.manifest import MANIFEST, parse, seal
from zero_core.checkpoint.safetensors_files import read_header


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    engine = zero_core.build(nn.Linear(3, 2), config)
    place = engine.save_checkpoint(tmp_path_factory.mktemp("saved"))
    engine.close()
    return (place / MANIFEST).read_bytes()


def test_flipped_cut_and_longer_manifests_are_refused(manifest: bytes) -> None:
    assert parse(manifest, "it").states
    chosen = random.Random(0).sample(range(len(manifest)), 300)
    last = range(len(manifest) - 90, len(manifest))  # the digest
    changed = []
    for at in (*chosen, *last):
        flipped = manifest[at] ^ (1 << at % 8)
        changed.append(manifest[:at] + bytes([flipped]) + manifest[at + 1 :])
    changed += [manifest[:at] for at in (*chosen[::5], *last)]
    changed += [manifest + tail for tail in (b"\n", b" ", b"\0", b"}", manifest)]
    for data in changed:
        with pytest.raises(CheckpointError):
            parse(data, "it")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner),
    max_leaves=8,
)


@settings(max_examples=30)
@given(st.data())
def test_any_value_in_any_place_is_read_or_refused_by_an_error_of_ours(
    manifest: bytes, data: st.DataObject
) -> None:
    content: dict[str, Any] = json.loads(manifest)
    owner: Any = content
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
@given(st.binary(max_size=40), st.integers(0, 200))
def test_any_header_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, middle: bytes, at: int
) -> None:
    data = save({"a": ones(2, 3), "b": ones(0)})
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(data[:at] + middle + data[at + len(middle) :])
    try:
        for stored in read_header(path).values():
            stored.value()
    except CheckpointError:
        pass


@settings(max_examples=30)
@given(_JSON)
def test_any_json_is_decoded_or_refused(value: Any) -> None:
    for key in ("__tensor__", "__tuple__", "__mapping__", "__counter__", "__items__"):
        with contextlib.suppress(CheckpointCorruptError):
            decode({key: value})


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_deep_json_is_refused(tmp_path: Path, opening: bytes) -> None:
    text = opening * 10**5
    with pytest.raises(CheckpointCorruptError, match="not readable"):
        parse(text, "it")
    path = tmp_path / "deep.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointCorruptError, match="not a whole safetensors file"):
        read_header(path)
