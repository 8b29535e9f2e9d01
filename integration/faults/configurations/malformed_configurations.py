"""Malformed configurations: each has one cause at one key, whose path the message must name.

Types and unknown keys are tried at every key of the schema; ranges and contradictions are listed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel

from zero_core.config import Config
from zero_core.config.blocks import block_of

BASE: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
NAN, INF = math.nan, math.inf
HUGE = 10**30

# Keys that are only looked at beside others.
BESIDE: Mapping[str, Any] = {
    "step_records": {"folder": "runs/mine"},
    "zero_optimization": {"stage": 3, "zero_quantized_gradients": True},
    "zero_optimization.offload_optimizer": {"device": "cpu"},
    "zero_optimization.offload_param": {"device": "cpu"},
    "activation_checkpointing": {"enabled": True},
    "scheduler": {"type": "WarmupLR"},
}
# What DeepSpeed takes, and the facade of DeepSpeed therefore too.
TAKEN_BY_DEEPSPEED = {
    ("gradient_clipping", True),
    ("steps_per_print", INF),
    ("steps_per_print", -INF),
    ("zero_optimization", True),
    ("zero_optimization.zero_hpz_partition_size", 0),
}
# Keys that the facade of DeepSpeed serves by itself, or by a table of names.
READ_APART = ("data_types.", "activation_checkpointing.", "scheduler.params.warmup_type")


class Malformed(NamedTuple):
    """A configuration that must be refused.

    ``key`` is in the message. ``content`` is a mapping, or the bytes of a file.
    """

    key: str
    content: Mapping[str, Any] | bytes
    is_for_deepspeed: bool = True

    @property
    def name(self) -> str:
        if isinstance(self.content, bytes):
            return f"{self.key}: {self.content[:40]!r}"
        return f"{self.key}: {json.dumps(self.content, default=str)[:120]}"


def malformed_configurations() -> list[Malformed]:
    """Return all of them."""
    return [*_of_types(Config, ""), *_unknown_keys(Config, ""), *_listed(), *_texts()]


def _at(path: str, value: Any) -> dict[str, Any]:
    """Return the base with ``value`` at ``path``, and what must stand beside it."""
    config = json.loads(json.dumps(BASE))
    block, parents = config, path.split(".")
    where = ""
    for key in parents[:-1]:
        where = f"{where}.{key}".strip(".")
        given = block.get(key)
        block[key] = block = {**BESIDE.get(where, {}), **(given or {})}
    block[parents[-1]] = value
    return config


def _case(path: str, value: Any, key: str | None = None) -> Malformed:
    is_taken = any(path == at and value == v and type(value) is type(v) for at, v in _TAKEN)
    is_apart = path.startswith(READ_APART)
    return Malformed(key or path, _at(path, value), not (is_taken or is_apart))


_TAKEN = tuple(TAKEN_BY_DEEPSPEED)
_LISTS_AND_BLOCKS: tuple[Any, ...] = ([], [1], {}, {"x": 1}, [[]])
_WRONG: Mapping[Any, tuple[Any, ...]] = {
    bool: (2, "maybe", "", 0.5, NAN, *_LISTS_AND_BLOCKS),
    int: (True, False, "two", "5e8", 1.5, NAN, INF, -INF, HUGE, 1e300, *_LISTS_AND_BLOCKS),
    float: (True, "half", "", NAN, INF, -INF, 10**400, *_LISTS_AND_BLOCKS),
    str: (3, True, 0.5, NAN, *_LISTS_AND_BLOCKS),
    Literal: ("nonsense", 7, True, NAN, *_LISTS_AND_BLOCKS),
    tuple: (3, True, [3], [None], [["x"]], {}, NAN),
    BaseModel: (3, "x", True, [], ["x"], NAN),
    dict: (3, "x", True, [], ["x"], NAN),
}


def _kinds(annotation: Any) -> set[Any]:
    """Return the keys of `_WRONG` that describe a field's type."""
    if annotation in (bool, int, float, str):
        return {annotation}
    origin = get_origin(annotation)
    if origin in (Literal, tuple, dict):
        return {origin}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {BaseModel}
    return {kind for inner in get_args(annotation) for kind in _kinds(inner)}


def _wrong_for(kinds: set[Any]) -> list[Any]:
    """Return what is wrong for every one of the ``kinds``."""
    first, *others = sorted(kinds, key=str)
    found = list(_WRONG[first])
    for kind in others:
        allowed = [value for value in found if _is_wrong(value, _WRONG[kind])]
        found = allowed
    return found


def _is_wrong(value: Any, wrong: tuple[Any, ...]) -> bool:
    return any(value is w or (type(value) is type(w) and value == w) for w in wrong)


def _of_types(block: type[BaseModel], path: str) -> Iterator[Malformed]:
    for key, field in block.model_fields.items():
        where = f"{path}{key}"
        inner = block_of(field)
        values = _wrong_for({BaseModel} if inner is not None else _kinds(field.annotation))
        for value in values:
            if where == "zero_optimization.stage" and value == {"x": 1}:
                continue
            yield _case(where, value)
        if inner is not None:
            yield from _of_types(inner, f"{where}.")


def _unknown_keys(block: type[BaseModel], path: str) -> Iterator[Malformed]:
    # DeepSpeed warns of one at the top and of those of some blocks.
    is_checked = path.startswith("zero_optimization.") or path == "fp16."
    config = _at(f"{path}no_such_key", 1)
    yield Malformed(f"{path}no_such_key", config, is_checked)
    for key, field in block.model_fields.items():
        inner = block_of(field)
        if inner is not None:
            yield from _unknown_keys(inner, f"{path}{key}.")


_PARAMS = "optimizer.params."
_SCHEDULE = "scheduler.params."


def _listed() -> Iterator[Malformed]:
    """Yield values out of range, names that are not known, and contradictions."""
    ranges: Mapping[str, tuple[Any, ...]] = {
        "train_batch_size": (0, -1, 7, -0.5),
        "train_micro_batch_size_per_gpu": (0, -1, 1e19),
        "gradient_accumulation_steps": (0, -2),
        "gradient_clipping": (-1, -0.001),
        "gradient_predivide_factor": (0, -1),
        "steps_per_print": (0, -1),
        "seed": (-1, 2**64),
        "fp16.loss_scale": (-1,),
        "fp16.initial_scale_power": (-1, 128, 5000),
        "fp16.loss_scale_window": (0, -1),
        "fp16.hysteresis": (0, -1),
        "fp16.min_loss_scale": (0, -1),
        "zero_optimization.stage": (4, -1, 3.5),
        "zero_optimization.reduce_bucket_size": (-1,),
        "zero_optimization.stage3_max_live_parameters": (-1,),
        "zero_optimization.zero_hpz_partition_size": (0, -1, 3),
        "zero_optimization.zeropp_loco_param.err_beta": (-0.1, 1.1),
        "zero_optimization.zeropp_loco_param.reset_T": (0, -1),
        "zero_optimization.offload_optimizer.ratio": (-0.1, 1.1, "fast"),
        "zero_optimization.offload_optimizer.buffer_count": (0, -1),
        "zero_optimization.offload_optimizer.pin_memory_bytes": (-1,),
        "zero_optimization.offload_optimizer.device_budget": (-1,),
        "zero_optimization.offload_optimizer.undo_buffer_size": (0, -1),
        "zero_optimization.offload_optimizer.cpuadam_cores_perc": (-0.1, 1.1),
        "zero_optimization.offload_optimizer.parameters": ([],),
        "zero_optimization.offload_param.buffer_size": (0, -1),
        "zero_optimization.offload_param.max_in_cpu": (-1,),
        "tiled_compute.tile_tokens": (0, -1),
        "activation_checkpointing.number_checkpoints": (0, -1),
    }
    for path, values in ranges.items():
        for value in values:
            yield _case(path, value)
    yield from _optimizers()
    yield from _schedules()
    yield from _contradictions()
    for path in ("fp16.enabled", "gradient_clipping", "zero_optimization.stage", f"{_PARAMS}lr"):
        yield Malformed(path, _at(path, "auto"), is_for_deepspeed=False)


def _optimizers() -> Iterator[Malformed]:
    number = (NAN, INF, -INF, -1, "1e-3", True, [], {})
    pairs = ([0.9], [0.9, 0.99, 0.999], [0.9, 1.0], [-0.1, 0.9], [NAN, 0.9], [0.9, "x"], 0.9, "x")
    for key, values in {
        "lr": (*number, 10**400),
        "weight_decay": number,
        "eps": (NAN, INF, -1e-8, "x", True),
        "betas": (*pairs, [True, 0.9], [0.9, INF], {"a": 1}),
        "amsgrad": (1, "true", 0.5),
        "adam_w_mode": (1, "yes"),
        "torch_adam": (1, "yes"),
        "bias_correction": (0, "no"),
        "fused": (1, "yes"),
        "no_such_key": (1, NAN),
    }.items():
        for value in values:
            yield _case(f"{_PARAMS}{key}", value)
    others: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
        "SGD": {"momentum": (NAN, INF, -1, "x", True), "dampening": (NAN, "x"), "nesterov": (1,)},
        "RMSprop": {"alpha": (NAN, -1, "x"), "momentum": (NAN, -1), "centered": (1,)},
        "Adagrad": {"lr_decay": (NAN, -1), "initial_accumulator_value": (NAN, -1)},
        "Lion": {"betas": ([0.9, 1.0], [0.9]), "lr": (NAN, -1)},
        "Muon": {"muon_lr": (NAN, -1, "x"), "adam_lr": (INF,), "momentum": (NAN, -1)},
        "Adadelta": {"rho": (1.5, -0.5, NAN)},
        "NAdam": {"momentum_decay": (NAN, -1)},
        "Rprop": {"etas": ([NAN, 1.2], [0.5]), "step_sizes": ([INF, 1], "x")},
        "Adafactor": {"beta2_decay": (NAN, "x"), "eps": ([NAN, 1e-3], [-1, 1e-3])},
    }
    for kind, params in others.items():
        for key, values in params.items():
            for value in values:
                given = {"optimizer": {"type": kind, "params": {key: value}}}
                yield Malformed(f"{_PARAMS}{key}", {**BASE, **given})
    for kind in ("Adamm", "", "Lamb", "OneBitAdam", "LBFGS"):
        yield Malformed("optimizer.type", {**BASE, "optimizer": {"type": kind}})


def _schedules() -> Iterator[Malformed]:
    rate = (NAN, INF, -1, "x", True, [1e-3, 1e-3], [NAN])
    whole = (NAN, INF, -1, 1.5, "10", True)
    tables: Mapping[str, tuple[Mapping[str, Any], Mapping[str, tuple[Any, ...]]]] = {
        "WarmupLR": (
            {},
            {
                "warmup_min_lr": rate,
                "warmup_max_lr": rate,
                "warmup_num_steps": whole,
                "warmup_type": (3, "cubic", True, []),
                "no_such_key": (1,),
            },
        ),
        "WarmupDecayLR": ({"total_num_steps": 10}, {"total_num_steps": whole}),
        "WarmupCosineLR": (
            {"total_num_steps": 10},
            {"warmup_min_ratio": (NAN, -1, "x"), "cos_min_ratio": (NAN, INF, -1, True)},
        ),
        "OneCycle": (
            {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
            {
                "cycle_min_lr": rate,
                "cycle_max_lr": rate,
                "cycle_first_step_size": (0, -1, NAN, "x"),
                "cycle_second_step_size": (-1, NAN),
                "cycle_first_stair_count": (-1, 1.5, NAN),
                "decay_step_size": (-1, NAN),
                "decay_lr_rate": (NAN, -1, "x"),
                "cycle_momentum": (1, "x"),
                "cycle_min_mom": (NAN, -1, 1.5),
                "cycle_max_mom": (NAN, "x"),
                "decay_mom_rate": (NAN, "x"),
            },
        ),
        "LRRangeTest": (
            {},
            {
                "lr_range_test_min_lr": rate,
                "lr_range_test_step_size": (0, *whole),
                "lr_range_test_step_rate": (NAN, INF, "x"),
                "lr_range_test_staircase": (1, "x"),
            },
        ),
        "StepLR": ({"step_size": 3}, {"step_size": (0, *whole), "gamma": (NAN, -1, "x")}),
        "CosineAnnealingLR": ({"T_max": 9}, {"T_max": (0, *whole), "eta_min": (NAN, "x")}),
    }
    for kind, (needed, params) in tables.items():
        for key, values in params.items():
            for value in values:
                block = {"type": kind, "params": {**needed, key: value}}
                is_apart = key == "warmup_type" and isinstance(value, str)
                yield Malformed(f"{_SCHEDULE}{key}", {**BASE, "scheduler": block}, not is_apart)
    missing = {
        "WarmupDecayLR": "total_num_steps",
        "OneCycle": "cycle_min_lr",
        "StepLR": "step_size",
    }
    for kind, key in missing.items():
        yield Malformed(key, {**BASE, "scheduler": {"type": kind, "params": {}}})
    for kind in ("Warmup", "", "LambdaLR", "ReduceLROnPlateau", "LRScheduler"):
        yield Malformed("scheduler.type", {**BASE, "scheduler": {"type": kind, "params": {}}})


def _contradictions() -> Iterator[Malformed]:
    zero = "zero_optimization"
    offload = f"{zero}.offload_optimizer"
    blocks: tuple[tuple[str, Mapping[str, Any]], ...] = (
        ("train_batch_size", {"train_batch_size": 5, "gradient_accumulation_steps": 2}),
        ("train_batch_size", {"train_batch_size": 8, "gradient_accumulation_steps": 3}),
        ("fp16.enabled", {"fp16": {"enabled": True}, "bf16": {"enabled": True}}),
        (
            "torch_autocast.dtype",
            {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "bf16": {"enabled": True}},
        ),
        (f"{zero}.zero_quantized_weights", {zero: {"stage": 2, "zero_quantized_weights": True}}),
        (f"{zero}.zeropp_loco_param", {zero: {"zeropp_loco_param": {}}}),
        (f"{zero}.mics_shard_size", {zero: {"mics_shard_size": 4}}),
        (f"{zero}.zenflow", {zero: {"zenflow": {"topk_ratio": 0.1}}}),
        (offload, {zero: {"offload_optimizer": {"device": "cpu", "super_offload": True}}}),
        (offload, {zero: {"offload_optimizer": {"device": "nvme"}}}),
        (
            f"{offload}.nvme_path",
            {zero: {"offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere/at/all"}}},
        ),
        (
            f"{zero}.offload_param.nvme_path",
            {zero: {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nowhere"}}},
        ),
        (offload, {zero: {"offload_optimizer": {"ratio": 0.5}}}),
        (offload, {zero: {"offload_optimizer": {"device": "cpu", "ratio": "auto"}}}),
        ("bf16.bf16_optimizer_states", {"bf16": {"enabled": True, "bf16_optimizer_states": True}}),
        ("bf16.bf16_master_weights_and_grads", {"bf16": {"bf16_master_weights_and_grads": True}}),
        ("sparse_gradients", {"sparse_gradients": True}),
        ("amp", {"amp": {"enabled": True}}),
    )
    for key, block in blocks:
        yield Malformed(key, {**BASE, **block})
    for key in ("sparse_gradients", "dump_state", "wall_clock_breakdown", "memory_breakdown"):
        for value in (2, "x", NAN):
            yield Malformed(key, {**BASE, key: value}, key != "sparse_gradients" or value == "x")
    yield Malformed("train_batch_size", {}, is_for_deepspeed=True)
    yield Malformed("keys must be strings", {**BASE, 3: 4}, is_for_deepspeed=True)  # type: ignore[dict-item]
    nested: Any = 1
    for _ in range(100_000):
        nested = {"a": nested}
    for deep in (nested, {"a": _cycle()}):
        yield Malformed("nested more than", {**BASE, "zero_optimization": deep})


def _cycle() -> dict[str, Any]:
    block: dict[str, Any] = {}
    block["again"] = block
    return block


def _texts() -> Iterator[Malformed]:
    """Yield what is no JSON, or more than JSON."""
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
    for text in (b"", b" ", b"{", b"[]", b"[1, 2]", b"{" + base, b"{" + base + b'} {"a": 1}'):
        yield Malformed("", text)
    for text in (b"null", b"3", b'"x"', b"true", b"\x00", b"{\xff\xfe}", b'{"a": "\xc3"}'):
        yield Malformed("", text)
    yield Malformed("", b'\xff\xfe{\x00"\x00a\x00"\x00', is_for_deepspeed=True)
    yield Malformed("", b"\xef\xbb\xbf{" + base + b"}", is_for_deepspeed=False)
    for text in (b"{'a': 1}", b'{"a": 1,}', b"{a: 1}", b'{"a": 1} // x'):  # Hjson, as DeepSpeed has
        yield Malformed("", text, is_for_deepspeed=False)


def write(config: Mapping[str, Any] | bytes, folder: Path) -> Mapping[str, Any] | Path:
    """Return what a reader is given: a mapping, or the path of a file with those bytes."""
    if isinstance(config, Mapping):
        return config
    path = folder / "zero.json"
    path.write_bytes(config)
    return path
