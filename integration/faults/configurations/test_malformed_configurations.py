"""Malformed and fuzzed input is refused with one line that names its key; commands end well."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from faults.configurations.malformed_configurations import (
    BASE,
    Malformed,
    malformed_configurations,
    write,
)
from faults.harness import ENVIRONMENT
from zero_comm.quantizer.message import CorruptMessageError, Packing
from zero_core import check_config, load_config
from zero_core.comm.shared_memory import read_card
from zero_core.config import Config
from zero_core.config.blocks import block_of
from zero_core.errors import CollectiveError, ConfigError
from zero_engine.deepspeed.config.reader import read

WORLD_SIZE = 2
MOST_CHARACTERS = 3000  # an unknown key's message lists the known ones


def _as_zero_core(source: Mapping[str, Any] | Path) -> None:
    check_config(source, world_size=WORLD_SIZE)


def _as_deepspeed(source: Mapping[str, Any] | Path) -> None:
    check_config(read(source).core, world_size=WORLD_SIZE)


def outcome(reader: Any, case: Malformed, folder: Path) -> str:
    """Return "refused", or what is wrong with what the reader did."""
    try:
        reader(write(case.content, folder))
    except ConfigError as error:
        said = str(error)
        if case.key not in said:
            return f"no key: {said[:200]}"
        if len(said.splitlines()) != 1 or len(said) > MOST_CHARACTERS:
            return f"not one line: {said[:300]}"
        return "refused"
    except BaseException as error:
        return f"raw {type(error).__name__}: {str(error)[:200]}"
    return "accepted"


@pytest.mark.parametrize("reader", [_as_zero_core, _as_deepspeed])
def test_every_malformed_configuration_is_refused_with_its_key(reader, tmp_path, count_faults):
    tried = [c for c in malformed_configurations() if reader is _as_zero_core or c.is_for_deepspeed]
    found = [(case, outcome(reader, case, tmp_path)) for case in tried]
    wrong = [f"{case.name} -> {what}" for case, what in found if what != "refused"]
    kinds = Counter(what.partition(":")[0].partition(" ")[0] for _, what in found)
    print(f"{reader.__name__}: {len(tried)} malformed configurations: {dict(kinds)}")
    count_faults(len(tried), len(tried) - len(wrong))
    assert not wrong, f"{len(wrong)} of {len(tried)}:\n" + "\n".join(wrong)
    assert len(tried) >= 400


MANY = settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))


def _paths(block: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, field in block.model_fields.items():
        yield (*prefix, key)
        inner = block_of(field)
        if inner is not None:
            yield from _paths(inner, (*prefix, key))


PATHS = [
    *_paths(Config),
    *(("optimizer", "params", key) for key in ("lr", "betas", "eps", "momentum", "fused")),
    *(("scheduler", "params", key) for key in ("warmup_max_lr", "total_num_steps", "warmup_type")),
]
NAMES = ["auto", "cpu", "nvme", "none", "fp16", "AdamW", "SGD", "Muon", "WarmupLR", "OneCycle"]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10)
    | st.integers()
    | st.floats()
    | st.sampled_from([*NAMES, "", "1e-3", "5e8", "\n", "\x00", "\ud800"])
    | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def _with(changes: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    config = json.loads(json.dumps(BASE))
    for path, value in changes:
        block = config
        for key in path[:-1]:
            inner = block.get(key)
            block[key] = block = inner if isinstance(inner, dict) else {}
        block[path[-1]] = value
    return config


CONFIGS = st.lists(st.tuples(st.sampled_from(PATHS), VALUES), max_size=4).map(_with)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, float):
        yield value


def _is_served_or_refused(source: Any) -> None:
    """Hold both readers to it: a configuration of finite numbers, or a line for each wrong key."""
    for reader in (lambda it: it, lambda it: read(it).core):
        for check in (load_config, check_config):
            try:
                found = check(reader(source), world_size=2)
            except ConfigError as error:
                lines = str(error).splitlines()
                assert lines
                assert all(line.strip() and line.isprintable() for line in lines), lines
            else:
                assert all(map(math.isfinite, _numbers(found.model_dump())))
                total, micro = found.train_batch_size, found.train_micro_batch_size_per_gpu
                assert total == micro * found.gradient_accumulation_steps * 2


@MANY
@given(CONFIGS)
@example({**BASE, "optimizer": {"type": "AdamW", "params": {"lr": math.inf}}})
@example({**BASE, "zero_optimization": {"stage": True}})
@example({**BASE, "fp16": 3})
@example({**BASE, "train_batch_size": {"\x1b": "auto"}})
@example({**BASE, "optimizer": {"type": "AdamW", "params": 3}})
@example({**BASE, "optimizer": {"type": "AdamW", "params": []}})
@example({**BASE, "fp16": {"enabled": True, "initial_scale_power": 5000}})
@example({**BASE, "seed": 2**64})
@example({**BASE, "train_micro_batch_size_per_gpu": 1e300})
@example({**BASE, "zero_optimization": {"zero_hpz_partition_size": {}}})
@example({**BASE, "zero_optimization": {"offload_optimizer": {"\n": 1}}})
def test_any_values_at_any_keys_are_served_or_refused(config: dict[str, Any]) -> None:
    _is_served_or_refused(config)


TEXT = json.dumps(
    {
        **BASE,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}},
    }
).encode()


@MANY
@given(st.lists(st.tuples(st.integers(0, len(TEXT)), st.integers(0, 9), st.binary(max_size=6))))
@example([(0, 0, b"\xef\xbb\xbf")])
@example([(1, 0, b'"seed": ' + b"9" * 5000 + b", ")])
@example([(1, 0, b'"a": ' + b"[" * 100_000 + b"]" * 100_000 + b", ")])
@example([(0, 0, b"\xff\xfe")])
@example([(1, 0, b"'''")])
def test_any_bytes_are_served_or_refused(edits: list[tuple[int, int, bytes]]) -> None:
    content = bytearray(TEXT)
    for start, length, new in edits:
        content[start : start + length] = new
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(content)
        file.flush()
        _is_served_or_refused(Path(file.name))


@MANY
@given(st.binary(max_size=120) | VALUES.map(lambda v: json.dumps(v).encode()))
@example(b"[" * 100_000)
@example(b'[true, 3, 1, "' + b"0" * 32 + b'", ""]')
def test_any_description_of_a_window_is_read_or_refused(row: bytes) -> None:
    try:
        pid, descriptor, nbytes, secret, _ = read_card(row, 1)
    except CollectiveError:
        return
    assert pid > 0
    assert (descriptor or 0) >= 0
    assert nbytes >= 0
    assert len(secret) == 16


NUMEL = 300


@pytest.mark.parametrize("kind", ["int8", "int4", "e4m3", "e5m2"])
@settings(MANY, max_examples=500)
@given(
    seed=st.integers(0, 99),
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4),
    has_checksum=st.booleans(),
)
def test_any_change_of_a_quantized_message_is_found_or_gives_finite_values(
    kind: str, seed: int, edits: list[tuple[int, int]], has_checksum: bool
) -> None:
    packing = Packing(kind, has_checksum=has_checksum)
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
    rows = torch.zeros(1, packing.nbytes(NUMEL), dtype=torch.uint8)
    packing.pack(values, rows)
    sent = rows.clone()
    for place, mask in edits:
        rows[0, place % rows.shape[1]] ^= mask
    out = torch.empty(NUMEL)
    try:
        packing.unpack(rows, out, senders=[0])
    except CorruptMessageError:
        return
    assert torch.equal(rows, sent) or not has_checksum
    is_float = kind in ("e4m3", "e5m2")  # a changed value may be one of theirs for NaN
    assert is_float or bool(out.isfinite().all())


NOBODY_READS = 1
"""Exit code of a command whose output is closed."""


def _start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "zero_engine", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )


@pytest.mark.parametrize("verb", ["plan --layers 1", "config", "doctor", "--help"])
def test_reader_that_has_left_causes_no_traceback(verb: str) -> None:
    with _start(*verb.split()) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()  # before anything is written
        said = command.stderr.read()  # libraries may warn as they are imported
        assert "Traceback" not in said
        assert "Pipe" not in said
    assert command.returncode == NOBODY_READS
