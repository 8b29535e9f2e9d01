"""docs/deepspeed-config.md lists every config key, and its statements are true."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import CAPTURED, environment, run_program
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tests.support.deepspeed_names import deepspeeds_folder
from zero_core.config import UNNEEDED as UNNEEDED_BY_CORE
from zero_core.config import Config, load_config
from zero_core.errors import ConfigError
from zero_core.optim.factory import make_optimizer
from zero_core.optim.muon import tag_matrices
from zero_core.schedules import SCHEDULERS, make_scheduler
from zero_engine.deepspeed.config.reader import HONOURED, REFUSED, UNNEEDED, Settings, read
from zero_engine.deepspeed.initialize import describe
from zero_engine.deepspeed.served import reason_to_refuse

TABLE = Path(__file__).parents[2] / "docs" / "deepspeed-config.md"
BARE = {"train_batch_size": 4}
OPTIMIZER, SCHEDULER = {"type": "AdamW"}, {"type": "WarmupLR"}


class Row(NamedTuple):
    key: str
    default: str
    here: str
    why: str


class Type(NamedTuple):
    name: str
    here: str


def _types(block: str) -> list[Type]:
    _, _, table = TABLE.read_text().partition(f"| `{block}.type` | here |")
    rows = re.findall(ROW, table.partition("\n\n")[0], re.MULTILINE)
    return [Type(name, here) for names, here, _ in rows for name in re.findall(r"\w+", names)]


ROW = r"^\| (`.*?`) \| (honoured|unneeded|refused) \| (?:(.*) )?\|$"
KEY = r"`([a-z_0-9.]+)(?:=(.*?))?`"  # without names of classes, which begin with a capital
ROWS = [
    Row(key, default or "-", here, why)
    for keys, here, why in re.findall(ROW, TABLE.read_text(), re.MULTILINE)
    for key, default in re.findall(KEY, keys)
]
TYPES = {block: _types(block) for block in ("optimizer", "scheduler")}

# Example values for keys whose non-default value cannot be guessed.
EXAMPLES: dict[str, Any] = {
    "log_level": "error",
    "steps_per_print": 5,
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization.offload_optimizer": {"device": "cpu"},
    "zero_optimization.offload_param": {"device": "cpu"},
    "zero_optimization.cpu_offload": True,
    "zero_optimization.cpu_offload_param": True,
    "zero_optimization.cpu_offload_use_pin_memory": False,
    "zero_optimization.zeropp_loco_param": {"err_beta": 0.5},
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_optimizer.ratio": 0.5,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": 0.5,
    "zero_optimization.offload_optimizer.parameters": ["*.weight"],
    "zero_optimization.offload_optimizer.device_budget": 1000,
    "zero_optimization.offload_optimizer.pin_memory_bytes": 1000,
    "zero_optimization.offload_optimizer.update_in_backward": False,
    "zero_optimization.offload_optimizer.undo_buffer_size": 1000,
    "zero_optimization.offload_param.device": "cpu",
    "bfloat16": {"enabled": True},
    "data_types.buffer_dtype": "bf16",
    "data_types.param_dtype": "bf16",
    "torch_autocast.dtype": "fp16",
    "torch_autocast.lower_precision_safe_modules": ["torch.nn.modules.linear.Linear"],
    "optimizer.params": {"lr": 0.5},
    "scheduler.params": {"warmup_num_steps": 7},
    "checkpoint.tag_validation": "Fail",
    "comms_logger.prof_ops": ["all_gather_into_tensor"],
    "comet.mode": "create",
    "comet.online": False,
    "seed": 3,
    "broadcast_buffers": True,
    "collective_timeout_s": 60.0,
    "memory_checkpoint.copies": 0,
    "weight_patches.max_bytes": 2**28,
}
ON_HOST = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
NVME = {"device": "nvme", "nvme_path": "/nvme"}
# Settings that a key requires, by the key or by its longest matching prefix.
BESIDE: dict[str, dict[str, Any]] = {
    "zero_optimization.stage": {},
    "zero_optimization.": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    "zero_optimization.offload_param": {"zero_optimization": {"stage": 3}},
    "zero_optimization.offload_param.device": {"zero_optimization": {"stage": 3}},
    "zero_optimization.offload_param.": {"zero_optimization": {"stage": 3, "offload_param": NVME}},
    "zero_optimization.cpu_offload_param": {"zero_optimization": {"stage": 3}},
    "zero_optimization.cpu_offload_use_pin_memory": {"zero_optimization": {"cpu_offload": True}},
    "zero_optimization.offload_optimizer.": {"zero_optimization": {"offload_optimizer": NVME}},
    "zero_optimization.offload_optimizer.device": {},
    "zero_optimization.zeropp_loco_param": {
        "zero_optimization": {"zero_quantized_gradients": True}
    },
    "fp16.": {"fp16": {"enabled": True}},
    "fp16.enabled": {},
    "fp16.hysteresis": {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "bf16.": {"bf16": {"enabled": True}},
    "bf16.enabled": {},
    "bf16.bf16_master_weights_and_grads": ON_HOST,
    "bf16.bf16_optimizer_states": {
        **ON_HOST,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
    },
    "fp16.fp16_master_weights_and_grads": {**ON_HOST, "bf16": {}, "fp16": {"enabled": True}},
    "optimizer.params.fp32_optimizer_states": {
        **ON_HOST,
        "bf16": {"enabled": True},
        "optimizer": OPTIMIZER,
    },
    "data_types.param_dtype": {"bf16": {"enabled": True}},
    "optimizer.": {"optimizer": OPTIMIZER},
    "scheduler.params": {"optimizer": OPTIMIZER, "scheduler": SCHEDULER},
    "scheduler.type": {"optimizer": OPTIMIZER},
    "step_records.": {"step_records": {"folder": "runs/mine"}},
}
# Blocks outside zero-core's config, whose keys are all reported, except for secrets.
OUTSIDE = {key.partition(".")[0] for key in HONOURED}
# Keys whose value is checked but changes nothing, each with a value that is refused.
CHECKED_ONLY = {"data_types.param_dtype": "fp16"}


def _example(row: Row) -> Any:
    """Return a value other than the default, from `EXAMPLES` or derived from the key's type."""
    if row.key in EXAMPLES:
        return EXAMPLES[row.key]
    default = None if row.default == "-" else json.loads(row.default)
    field = _field(row.key)
    if field is not None:
        if row.default == "-" and isinstance(field.default, bool | int | float | str):
            default = field.default
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        choices = [one for kind in kinds for one in getattr(kind, "__args__", ())]
        others = [one for one in choices if isinstance(one, str) and one != default]
        if others:
            return others[-1]
        if default is None and {bool, int, float} & set(kinds):
            return bool in kinds or 4
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default - 1 if default > 10**15 else default + 1
    return "something" if isinstance(default, str) or default is None else {"enabled": True}


def _field(key: str) -> FieldInfo | None:
    block, found = Config, None
    for name in key.split("."):
        found = block.model_fields.get(name) if block else None
        block = next(iter(_blocks(found)), None) if found else None
    return found


def _blocks(field: FieldInfo) -> list[type[BaseModel]]:
    kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
    return [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]


def _beside(key: str) -> dict[str, Any]:
    blocks = [f"{key[: end.start()]}." for end in re.finditer(r"\.", key)]
    fits = [one for one in (key, *blocks) if one in BESIDE]
    found = {**BARE, **(BESIDE[max(fits, key=len)] if fits else {})}
    return json.loads(json.dumps(found))


def _with(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(config))
    *parents, name = key.split(".")
    block = config
    for parent in parents:
        block = block.setdefault(parent, {})
    block[name] = value
    return config


def _resolved(config: dict[str, Any]) -> tuple[Settings, Config]:
    settings = read(config)
    return settings, load_config(settings.core, world_size=1)


def _effect(config: dict[str, Any]) -> object:
    settings, core = _resolved(config)
    return dataclasses.replace(settings, raw={}, core={}, notes=()), core


def _of(here: str) -> list[Any]:
    return [pytest.param(row, id=row.key) for row in ROWS if row.here == here]


@pytest.mark.parametrize("row", _of("honoured"))
def test_an_honoured_key_changes_the_configuration_in_effect(row):
    beside = _beside(row.key)
    given = _with(beside, row.key, _example(row))
    if row.key in CHECKED_ONLY:
        assert _effect(given) == _effect(beside)
        with pytest.raises(ConfigError, match=re.escape(row.key)):
            _effect(_with(beside, row.key, CHECKED_ONLY[row.key]))
        return
    assert _effect(given) != _effect(beside)
    settings, core = _resolved(given)
    told = describe(settings, core, 1)
    assert told.count(f"  {row.key} = ") <= 1, told
    if row.key.partition(".")[0] in OUTSIDE:
        assert (f"\n  {row.key}" in told) != row.key.endswith("api_key"), told


@pytest.mark.parametrize("row", _of("unneeded"))
def test_an_unneeded_key_is_told_with_the_reason(row):
    value = _example(row)
    settings, core = _resolved(_with(_beside(row.key), row.key, value))
    told = describe(settings, core, 1)
    assert f"{row.key} = {json.dumps(value)}: {row.why}\n" in f"{told}\n"


@pytest.mark.parametrize("row", _of("refused"))
def test_a_refused_key_raises_and_its_default_passes(row):
    beside = _beside(row.key)
    with pytest.raises(ConfigError) as caught:
        _resolved(_with(beside, row.key, _example(row)))
    assert row.key in str(caught.value)
    if row.key in REFUSED:
        assert row.why in str(caught.value)
    default = None if row.default == "-" else json.loads(row.default)
    _resolved(_with(beside, row.key, default))


def _optimizer(name: str) -> torch.optim.Optimizer:
    core = read({**BARE, "optimizer": {"type": name}}).core
    config = load_config(core, world_size=1).optimizer
    assert config is not None
    model = torch.nn.Linear(2, 2)
    tag_matrices(model.named_parameters())
    return make_optimizer(config, list(model.parameters()))


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TYPES["optimizer"]])
def test_an_optimizer_of_the_table_is_made_or_refused_by_name(row):
    if row.here == "honoured":
        expected = "AdamW" if row.name == "Adam" else row.name
        assert type(_optimizer(row.name)).__name__ == expected
    else:
        with pytest.raises(ConfigError, match=f"optimizer.type = '{row.name}'"):
            _optimizer(row.name)


NEEDED = {
    "WarmupDecayLR": {"total_num_steps": 9},
    "WarmupCosineLR": {"total_num_steps": 9},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 9},
    "CosineAnnealingLR": {"T_max": 9},
    "StepLR": {"step_size": 3},
}


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TYPES["scheduler"]])
def test_a_schedule_of_the_table_is_made_or_refused_by_name(row):
    optimizer = _optimizer("AdamW")
    if row.here == "honoured":
        made = make_scheduler(optimizer, row.name, NEEDED.get(row.name, {}))
        assert type(made).__name__ == row.name
    else:
        with pytest.raises(ConfigError, match=f"scheduler.type = '{row.name}'"):
            make_scheduler(optimizer, row.name, {})


def _fields(model: type[BaseModel], path: str = "") -> set[str]:
    found = set()
    for name, field in model.model_fields.items():
        inner = _blocks(field)
        found.add(f"{path}{name}")
        if inner and name != "zeropp_loco_param":
            found.remove(f"{path}{name}")
            found |= _fields(inner[0], f"{path}{name}.")
    return found


def test_every_key_that_is_read_has_one_row():
    keys = [row.key for row in ROWS]
    assert all(TYPES.values())
    assert len(keys) == len(set(keys))
    named = {row.name for row in TYPES["scheduler"]}
    assert {*SCHEDULERS, "OneCycle", "LRRangeTest"} <= named
    known = {*_fields(Config), *UNNEEDED, *UNNEEDED_BY_CORE, *REFUSED}
    known |= {key for key in HONOURED if not any(k.startswith(f"{key}.") for k in keys)}
    assert known <= set(keys), known - set(keys)


FOLDER = deepspeeds_folder() or Path()
HERE = Path(__file__).parent
SCRIPT = HERE / "scripts" / "deepspeed_loop.py"
EXACT = ("counts", "facts", "loaded", "missing", "rates", "tag")
beside = pytest.mark.skipif(deepspeeds_folder() is None, reason="DeepSpeed is not installed")


def _run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**environment(), "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"},
        **CAPTURED,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _flat(value: Any) -> list[Any]:
    return [x for inner in value for x in _flat(inner)] if isinstance(value, list) else [value]


@beside
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_script_sees_the_same_training(stage: int, tmp_path: Path) -> None:
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    words = [str(SCRIPT), str(stage), "fp32"]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    _run(*launcher, *words, str(tmp_path / "theirs"))
    run_program("run", "--nproc-per-node=2", *words, str(tmp_path / "ours"))
    theirs, ours = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("theirs", "ours")
    )
    assert ours.keys() == theirs.keys()
    for key, expected in theirs.items():
        if key in EXACT:
            assert ours[key] == expected, key
        else:
            assert _flat(ours[key]) == pytest.approx(_flat(expected), rel=1e-5, abs=1e-7), key


@beside
def test_rates_momenta_and_arguments_of_schedules_have_the_same_bits_at_every_step() -> None:
    program = str(HERE / "support" / "deepspeed_curves.py")
    theirs, ours = (
        json.loads(_run(program, module))  # JSON preserves every bit of a float
        for module in ("deepspeed.runtime.lr_schedules", "zero_engine.deepspeed.lr_schedules")
    )
    assert ours["tuning"] == theirs["tuning"]
    for mine, expected in zip(ours["curves"], theirs["curves"], strict=True):
        assert mine == expected
    rates = {row[1][0] for curve in theirs["curves"] for row in curve[1:]}
    assert len(rates) > 150


@beside
def test_every_key_has_a_row_and_its_default() -> None:
    printed = _run(str(HERE / "support" / "deepspeed_keys.py"))
    (line,) = (line for line in printed.splitlines() if line.startswith("KEYS "))
    found = json.loads(line.removeprefix("KEYS "))
    rows = {row.key: row for row in ROWS}
    blocks = {".".join(key.split(".")[: i + 1]) for key in rows for i in range(key.count("."))}
    asked = set(found["asked"]) | set(found["models"])
    assert asked <= rows.keys() | blocks, asked - rows.keys() - blocks
    for key, default in found["models"].items():
        if key in rows and rows[key].default != "-":
            assert json.loads(rows[key].default) == default, key
    assert set(found["optimizers"]) <= {row.name.lower() for row in TYPES["optimizer"]}
    assert set(found["schedules"]) <= {row.name for row in TYPES["scheduler"]}
    ours = {key for key, row in rows.items() if row.default != "-"}
    of_models = {key for key in ours if key.rpartition(".")[0] in {"fp16", "wandb", "comet"}}
    assert of_models <= set(found["models"]), "a row's key is gone from DeepSpeed"


@beside
def test_every_module_is_served_or_refused() -> None:
    modules = [
        ".".join(path.relative_to(FOLDER).with_suffix("").parts).removesuffix(".__init__")
        for path in FOLDER.rglob("*.py")
    ]
    missing = [name for name in modules if name != "__init__" and reason_to_refuse(name) is None]
    assert not missing
