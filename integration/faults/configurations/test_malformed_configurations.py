"""Malformed input is refused with a message that names the key. Random input has no other error."""

from __future__ import annotations

import json
import math
import os
import reprlib
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from faults.harness import ENVIRONMENT
from zero_comm.quantizer.message import CorruptMessageError, Packing
from zero_core import check_config, load_config
from zero_core.comm.shared_memory import read_card
from zero_core.config.schema import SCHEMA_FILE
from zero_core.errors import CollectiveError, ConfigError
from zero_engine.deepspeed.config.reader import read

WORLD_SIZE = 2
MOST_CHARACTERS = 3000  # an unknown key's message lists all known keys
NAN, INF = math.nan, math.inf
BASE: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
SCHEMA: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)
HOSTILE: tuple[Any, ...] = (
    *(True, -1, 0, 7, 1.5, -0.1, 1.1, 10**30, 1e300, 10**400, NAN, INF, -INF, "", "nonsense"),
    *([], [1], [None], [[]], ["x"], {}, {"x": 1}, [0.9], [0.9, 1.0], [-0.1, 0.9], [NAN, 0.9]),
)
"""Values for every key. The schema decides which of them a key accepts."""
# Settings without which the keys of a block are not checked.
BESIDE: Mapping[str, Any] = {
    "step_records": {"folder": "runs/mine"},
    "zero_optimization": {"stage": 3, "zero_quantized_gradients": True},
    "zero_optimization.offload_optimizer": {"device": "cpu"},
    "zero_optimization.offload_param": {"device": "cpu"},
    "activation_checkpointing": {"enabled": True},
}
OF_OPTIMIZERS = {
    "SGD": ("momentum", "dampening", "nesterov"),
    "RMSprop": ("alpha", "centered"),
    "Adagrad": ("lr_decay", "initial_accumulator_value"),
    "Muon": ("muon_lr", "adam_lr"),
    "Adadelta": ("rho",),
    "NAdam": ("momentum_decay",),
    "Rprop": ("etas", "step_sizes"),
    "Adafactor": ("beta2_decay", "d"),
}
"""Parameters that AdamW does not have, by optimizer."""
OF_SCHEDULES: Mapping[tuple[str, ...], tuple[str, Mapping[str, Any]]] = {
    ("cycle_", "decay_"): ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}),
    ("lr_range_test_",): ("LRRangeTest", {}),
    ("total_num_steps",): ("WarmupDecayLR", {"total_num_steps": 10}),
    ("warmup_min_ratio", "cos_min_ratio"): ("WarmupCosineLR", {"total_num_steps": 10}),
    ("step_size", "gamma"): ("StepLR", {"step_size": 3}),
    ("T_max", "eta_min"): ("CosineAnnealingLR", {"T_max": 9}),
}
"""Maps prefixes of parameters to a schedule that has such parameters and to the parameters that the
schedule requires. Parameters without such a prefix are tried with WarmupLR."""


class Malformed(NamedTuple):
    """A configuration that must be refused.

    Attributes:
        key: text that each line of the message must contain.
        content: configuration, or the bytes of a file.
        is_for_deepspeed: whether the DeepSpeed reader must refuse it, too.
    """

    key: str
    content: Mapping[str, Any] | bytes
    is_for_deepspeed: bool = True


def _paths(block: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in block["properties"].items():
        if key != "$schema":
            yield (*prefix, key)
        for kind in (value, *value.get("anyOf", ())):
            if "$ref" in kind:
                inner = SCHEMA["$defs"][kind["$ref"].rpartition("/")[2]]
                yield from _paths(inner, (*prefix, key))


PATHS = list(_paths(SCHEMA))


def _at(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return `BASE` with ``value`` at ``path``, and with the keys that ``path`` requires."""
    config = json.loads(json.dumps(BASE))
    if path[:2] == ("optimizer", "params"):
        kind = next((k for k, keys in OF_OPTIMIZERS.items() if path[-1] in keys), "AdamW")
        config["optimizer"] = {"type": kind}
    if path[:1] == ("scheduler",):
        begins = (row for starts, row in OF_SCHEDULES.items() if path[-1].startswith(starts))
        kind, needed = next(begins, ("WarmupLR", {}))
        config["scheduler"] = {"type": kind, "params": dict(needed)}
    block = config
    for depth, key in enumerate(path[:-1]):
        beside = BESIDE.get(".".join(path[: depth + 1]), {})
        block[key] = block = {**beside, **block.get(key, {})}
    block[path[-1]] = value
    return config


SERVED_BY_DEEPSPEED: Mapping[str, tuple[Any, ...]] = {
    "gradient_clipping": (True,),
    "steps_per_print": (INF, -INF),
    "zero_optimization": (True,),
    "zero_optimization.zero_hpz_partition_size": (0,),
    "optimizer": ({}, {"x": 1}),
    "scheduler": ({}, {"x": 1}),
    "activation_checkpointing": ({"x": 1},),
    "sparse_gradients": ({}, {"x": 1}),
    "scheduler.params.warmup_type": ("", "nonsense"),
    "optimizer.params.fp32_optimizer_states": HOSTILE,
    "optimizer.params.set_grad_none": HOSTILE,
    "zero_force_ds_cpu_optimizer": HOSTILE,
}
"""Values that DeepSpeed and this project's DeepSpeed facade accept."""


def malformed_configurations() -> Iterator[Malformed]:
    """Yield values that the schema excludes, for each of its keys, and other malformed input."""
    for path in PATHS:
        key = ".".join(path)
        takes_booleans = VALIDATOR.is_valid(_at(path, False))
        served = [(type(value), value) for value in SERVED_BY_DEEPSPEED.get(key, ())]
        for value in HOSTILE:
            config = _at(path, value)
            is_finite = all(map(math.isfinite, _numbers(value)))
            if (VALIDATOR.is_valid(config) and is_finite) or (takes_booleans and value == 0):
                continue
            yield Malformed(key, config, (type(value), value) not in served)
    for block in {path[:-1] for path in PATHS}:
        # These blocks refuse unknown keys. Elsewhere the reader may only note them.
        is_checked = block[:1] == ("zero_optimization",) or block == ("fp16",)
        path = (*block, "no_such_key")
        yield Malformed(".".join(path), _at(path, 1), is_checked)
    yield from _contradictions()
    yield from _texts()


def _contradictions() -> Iterator[Malformed]:
    """Yield unsupported settings. Most contradictions are in zero-core's test_config.py."""
    zero = "zero_optimization"
    offload = f"{zero}.offload_optimizer"
    blocks: tuple[tuple[str, Mapping[str, Any]], ...] = (
        (f"{zero}.mics_shard_size", {zero: {"mics_shard_size": 4}}),
        (f"{zero}.zenflow", {zero: {"zenflow": {"topk_ratio": 0.1}}}),
        (offload, {zero: {"offload_optimizer": {"device": "cpu", "super_offload": True}}}),
        (
            f"{offload}.nvme_path",
            {zero: {"offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere/at/all"}}},
        ),
        (
            f"{zero}.offload_param.nvme_path",
            {zero: {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nowhere"}}},
        ),
        ("sparse_gradients", {"sparse_gradients": True}),
        ("amp", {"amp": {"enabled": True}}),
    )
    for key, block in blocks:
        yield Malformed(key, {**BASE, **block})
    for name in ("Adamm", "", "Lamb", "OneBitAdam", "LBFGS"):
        yield Malformed("optimizer.type", {**BASE, "optimizer": {"type": name}})
    for name in ("Warmup", "", "LambdaLR", "ReduceLROnPlateau", "LRScheduler"):
        yield Malformed("scheduler.type", {**BASE, "scheduler": {"type": name, "params": {}}})
    for name, key in (("WarmupDecayLR", "total_num_steps"), ("StepLR", "step_size")):
        yield Malformed(key, {**BASE, "scheduler": {"type": name, "params": {}}})
    for path in (("fp16", "enabled"), ("gradient_clipping",), ("optimizer", "params", "lr")):
        yield Malformed(".".join(path), _at(path, "auto"), is_for_deepspeed=False)
    yield Malformed("train_batch_size", {})
    yield Malformed("keys must be strings", {**BASE, 3: 4})  # type: ignore[dict-item]
    nested: Any = 1
    for _ in range(100_000):
        nested = {"a": nested}
    cycle: dict[str, Any] = {}
    cycle["again"] = cycle
    for deep in (nested, {"a": cycle}):
        yield Malformed("nested more than", {**BASE, "zero_optimization": deep})


def _texts() -> Iterator[Malformed]:
    """Yield texts that are not JSON, or that only some JSON readers accept."""
    base = json.dumps(BASE)[1:-1].encode()
    yield Malformed("duplicate key", b'{"train_batch_size": 8, "train_batch_size": 8}')
    yield Malformed("duplicate key", b"{" + base + b', "bf16": {"enabled": true, "enabled": 1}}')
    yield Malformed(
        "zero_optimization.stage", b"{" + base + b', "zero_optimization": {"stage": NaN}}'
    )
    yield Malformed("gradient_clipping", b"{" + base + b', "gradient_clipping": 1e400}')
    yield Malformed("gradient_clipping", b"{" + base + b', "gradient_clipping": -Infinity}')
    yield Malformed("seed", b"{" + base + b', "seed": ' + b"9" * 300 + b"}")
    yield Malformed("", b"{" + base + b', "seed": ' + b"9" * 5000 + b"}")
    yield Malformed("", b"{" + base + b', "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    yield Malformed("", b'{"a": ' * 100_000 + b"1" + b"}" * 100_000)
    yield Malformed("larger than", b'{"a": "' + b"x" * (5 << 20) + b'"}')
    opened = (b"", b" ", b"{", b"[]", b"[1, 2]", b"{" + base, b"{" + base + b'} {"a": 1}')
    others = (b"null", b"3", b'"x"', b"true", b"\x00", b"{\xff\xfe}", b'{"a": "\xc3"}')
    for text in (*opened, *others, b'\xff\xfe{\x00"\x00a\x00"\x00'):
        yield Malformed("", text)
    # DeepSpeed reads Hjson, and skips a byte order mark.
    hjson = (b"{'a': 1}", b'{"a": 1,}', b"{a: 1}", b'{"a": 1} // x')
    for text in (*hjson, b"\xef\xbb\xbf{" + base + b"}"):
        yield Malformed("", text, is_for_deepspeed=False)


def _as_zero_core(source: Mapping[str, Any] | Path) -> None:
    check_config(source, world_size=WORLD_SIZE)


def _as_deepspeed(source: Mapping[str, Any] | Path) -> None:
    check_config(read(source).core, world_size=WORLD_SIZE)


def outcome(reader: Callable[[Any], None], case: Malformed, folder: Path) -> str:
    """Return "refused", or how the reader failed to refuse the configuration."""
    try:
        if isinstance(case.content, bytes):
            (folder / "zero.json").write_bytes(case.content)
            reader(folder / "zero.json")
        else:
            reader(case.content)
    except ConfigError as error:
        said = str(error)
        lines = said.splitlines()
        # The message has a line for each wrong key.
        if not lines or any(case.key not in line for line in lines):
            return f"no key: {said[:200]}"
        if len(lines) > 2 or len(said) > MOST_CHARACTERS:
            return f"too long: {said[:300]}"
        return "refused"
    except BaseException as error:
        return f"raw {type(error).__name__}: {str(error)[:200]}"
    return "accepted"


@pytest.mark.parametrize("reader", [_as_zero_core, _as_deepspeed])
def test_every_malformed_configuration_is_refused_with_its_key(reader, tmp_path):
    tried = [c for c in malformed_configurations() if reader is _as_zero_core or c.is_for_deepspeed]
    found = [(case, outcome(reader, case, tmp_path)) for case in tried]
    wrong = [
        f"{c.key}: {reprlib.repr(c.content)} -> {what}" for c, what in found if what != "refused"
    ]
    kinds = Counter(what.partition(":")[0].partition(" ")[0] for _, what in found)
    print(f"{reader.__name__}: {len(tried)} malformed configurations: {dict(kinds)}")
    assert not wrong, f"{len(wrong)} of {len(tried)}:\n" + "\n".join(wrong[:50])
    assert len(tried) >= 4000


MANY = settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))


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
    """Check that both readers return a valid configuration or name each wrong key in a line."""
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
@example({**BASE, "train_batch_size": {"\x1b": "auto"}})
@example({**BASE, "fp16": {"enabled": True, "initial_scale_power": 5000}})
@example({**BASE, "seed": 2**64})
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
@example(b'[true, 3, 1, "' + b"0" * 32 + b'", "", {}]')
@example(b'[1, 3, 1, "' + b"0" * 32 + b'", "", {"0": 4}]')
def test_any_description_of_a_window_is_read_or_refused(row: bytes) -> None:
    try:
        pid, descriptor, nbytes, secret, _, ends = read_card(row, 1)
    except CollectiveError:
        return
    assert pid > 0
    assert (descriptor or 0) >= 0
    assert nbytes >= 0
    assert len(bytes.fromhex(secret)) == 16
    assert all(end >= 0 for end in ends.values())


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
    is_float = kind in ("e4m3", "e5m2")  # a changed byte may encode NaN in these formats
    assert is_float or bool(out.isfinite().all())


NOBODY_READS = 1
"""Exit code of a command whose output is closed."""


@pytest.mark.parametrize("verb", ["plan --layers 1", "config", "doctor", "--help"])
def test_reader_that_has_left_causes_no_traceback(verb: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "zero_engine", *verb.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    ) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()  # the output is closed before the command writes
        said = command.stderr.read()  # may hold warnings of imported libraries
        assert "Traceback" not in said
        assert "Pipe" not in said
    assert command.returncode == NOBODY_READS
