"""The JSON Schema of the configuration, as another library reads it, agrees with the loader."""

import copy

import pydantic
import pytest
from jsonschema import Draft202012Validator

from zero_core.config import Config, load_config
from zero_core.config.blocks import block_of
from zero_core.config.json_schema import SCHEMA_FILE, make_schema, schema_text
from zero_core.config.params import OPTIMIZER_PARAMS, SCHEDULER_PARAMS

BATCH = {"train_micro_batch_size_per_gpu": 1}
RESOLVED = {"train_batch_size": 1, "gradient_accumulation_steps": 1, **BATCH}
VALUES = (True, 0, 1, 0.5, -1, 200, "auto", "cpu", "fp32", "float16", [], ["a"], [0.1, 0.2], {})
REQUIRED = {
    "optimizer": {"type": "Adam"},
    "scheduler": {"type": "WarmupLR"},
    "step_records": {"folder": "records"},
}
# Validators look at the values of these more closely than a schema does.
LOOSER = {
    "zero_optimization.offload_optimizer.parameters",  # a list must not be empty
    "name_waits_within_s",  # 0, or at least 0.5
    "torch_autocast.dtype",  # several names of two dtypes
}


@pytest.fixture(scope="module")
def schema():
    made = make_schema()
    Draft202012Validator.check_schema(made)
    return Draft202012Validator(made)


def _keys(block, path=()):
    for name, key in block.model_fields.items():
        inner = block_of(key)
        if inner is None:
            yield (*path, name)
        else:
            yield from _keys(inner, (*path, name))


KEYS = (
    *(path for path in _keys(Config) if path[-1] != "params"),
    *(("optimizer", "params", key) for key in OPTIMIZER_PARAMS.model_fields),
    *(("scheduler", "params", key) for key in SCHEDULER_PARAMS.model_fields),
)


def _config_with(path, value):
    config = copy.deepcopy(RESOLVED)
    block = config
    for key in path[:-1]:
        block = block.setdefault(key, dict(REQUIRED.get(key, {})))
    block[path[-1]] = value
    return config


def _has_its_type(config):
    try:
        Config.model_validate(config)
    except pydantic.ValidationError:
        return False
    return True


def test_file_of_the_wheel_is_the_schema_of_the_source():
    hint = "run python -m zero_core.config.json_schema"
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), hint


def test_values_of_every_key_are_accepted_where_the_loader_takes_them(schema):
    differences = set()
    for path in KEYS:
        for value in VALUES:
            config = _config_with(path, value)
            is_taken = _has_its_type(config)
            assert schema.is_valid(config) or not is_taken, (path, value)
            # A list with one value in it stands for the value.
            if schema.is_valid(config) and not is_taken and path[-2:-1] != ("params",):
                differences.add(".".join(path))
        assert schema.is_valid(_config_with(path, None)), path
    assert differences <= LOOSER


@pytest.mark.parametrize(
    "config",
    [
        {**BATCH, "zero_optimisation": {"stage": 1}},
        {**BATCH, "zero_optimization": {"stages": 1}},
        {**BATCH, "zero_optimization": {"stage": "3"}},
        {**BATCH, "fp16": {"initial_scale_power": 128}},
        {**BATCH, "optimizer": {"type": "AdamW", "params": {"lr": -1}}},
        {"gradient_accumulation_steps": 2},
    ],
)
def test_mistakes_are_marked(config, schema):
    assert not schema.is_valid(config)


def test_a_file_may_name_its_schema(schema):
    config = {"$schema": "./zero.schema.json", **BATCH, "tensorboard": {"enabled": False}}
    assert schema.is_valid(config)
    assert load_config(config, world_size=1).train_batch_size == 1
