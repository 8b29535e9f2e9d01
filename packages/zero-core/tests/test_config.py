"""Config resolution, error messages and the JSON Schema."""

import copy
import json
import math
import subprocess
import sys
from contextlib import nullcontext

import pydantic
import pytest
import torch
from jsonschema import Draft202012Validator

import zero_core
from zero_core import ConfigError, build, check_config, load_config
from zero_core.config import UNNEEDED, ActivationCheckpointingConfig, Config, load_effective
from zero_core.config.blocks import OPTIMIZER_PARAMS, SCHEDULER_PARAMS, block_of
from zero_core.config.json_schema import SCHEMA_FILE, make_schema, schema_text

SMALL = {"train_micro_batch_size_per_gpu": 2}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "fp16"}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def refused(config, match, world_size=2):
    with pytest.raises(ConfigError, match=match):
        load_config(config, world_size=world_size)


@pytest.mark.parametrize(
    ("total", "micro", "steps", "expected"),
    [
        (24, None, None, (24, 12, 1)),
        (None, 4, None, (8, 4, 1)),
        (None, 4, 3, (24, 4, 3)),
        (24, None, 3, (24, 4, 3)),
        (24, 4, None, (24, 4, 3)),
    ],
)
def test_the_batch_triple_is_derived(total, micro, steps, expected):
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = zip(keys, (total, micro, steps), strict=True)
    config = load_config({key: value for key, value in given if value}, world_size=2)
    assert tuple(getattr(config, key) for key in keys) == expected


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "train_batch_size or train_micro_batch_size_per_gpu must be given"),
        ({"gradient_accumulation_steps": 2}, "must be given"),
        ({"train_batch_size": 7}, "does not multiply out"),
        ({**SMALL, "train_batch_size": 8, "gradient_accumulation_steps": 3}, "multiply out"),
        ({"train_batch_size": 0}, "whole number >= 1, found 0"),
        ({"train_batch_size": "8.5"}, "whole number >= 1, found '8.5'"),
        ({"train_batch_size": True}, "whole number >= 1, found True"),
        ({"train_batch_size": "auto"}, "auto"),
    ],
)
def test_a_batch_triple_that_does_not_fit_is_refused(given, match):
    refused(given, match)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"bf16": {"enabled": true, "enabled": false}}', "duplicate key 'enabled'"),
        (None, "cannot read the configuration"),
        ("{", "is not JSON"),
        ('{"a": 1,}', "is not JSON: .*trailing comma"),
        ("[]", "expected a JSON object"),
    ],
)
def test_wrong_file_is_refused(tmp_path, text, match):
    path = tmp_path / "zero.json"
    if text is not None:
        path.write_text(text)
    refused(path, match)
    refused('{"bf16": {}}', "is JSON text: give json.loads")
    refused(("a",), "is of type tuple: expected a mapping")


def offload(stage=0, **block):
    block = {"device": "cpu", **block}
    return {"zero_optimization": {"stage": stage, "offload_optimizer": block}}


def quantized(stage=3, **keys):
    return {"zero_optimization": {"stage": stage, **keys}}


@pytest.mark.parametrize(
    ("block", "match"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "only one of them"),
        ({**AUTOCAST, "bf16": {"enabled": True}}, "is fp16 and the weights are bf16"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ({"bf16": True}, r'bf16: expected a block, as \{"enabled": ...\}, found True'),
        ({"gradient_cliping": 1.0}, "did you mean 'gradient_clipping'"),
        ({"zero_optimization": {"stages": 3}}, "did you mean 'stage'"),
        ({"stage": 3}, "did you mean 'zero_optimization.stage'"),
        ({"offload_optimizer": {}}, "did you mean 'zero_optimization.offload_optimizer'"),
        ({"learning_rate": 3}, "did you mean 'optimizer.params.lr'"),
        ({"optimizer": {"type": "AdamW", "lr": 3}}, "did you mean 'optimizer.params.lr'"),
        (offload(path="x"), "did you mean 'nvme_path'"),
        (offload(devise="cpu"), "offload_optimizer.devise: unknown key; did you mean 'device'"),
        (offload(1, host_share="first", parameters=["a.*"]), "host_share says at which end"),
        (offload(1, host_share="first", device="none", ratio=None), "host_share says at which"),
        ({"name_waits_within_s": 1e-3}, "name_waits_within_s.*expected 0, or at least 0.5"),
        (offload(ratio=1.5), "zero_optimization.offload_optimizer.ratio"),
        (offload(device="nvme"), "needs .*nvme_path"),
        (offload(device="none", ratio=0.5), "needs device 'cpu'"),
        (offload(device="none", parameters=["*"]), "parameters needs device 'cpu'"),
        (offload(device="none", device_budget=1), "device_budget needs device 'cpu'"),
        (offload(ratio=0.5, parameters=["*"]), "ratio and parameters each say"),
        (offload(ratio="auto", device_budget=7), "ratio and device_budget each say"),
        (offload(parameters=["*"], device_budget=7), "parameters and device_budget each say"),
        (offload(ratio="fast"), 'ratio: .*a number from 0 to 1, or "auto"'),
        (offload(ratio=True), 'ratio: .*a number from 0 to 1, or "auto"'),
        (offload(ratio="auto"), "needs stage 1 or more"),
        (offload(parameters="*"), "parameters: .*a list of patterns"),
        (offload(parameters=[]), "parameters: .*a list of patterns"),
        (offload(device_budget=-1), "offload_optimizer.device_budget"),
        (offload(pin_memory="auto"), 'pin_memory: "auto" is filled in'),
        (quantized(0, offload_param={"device": "cpu"}), "needs stage 3"),
        (quantized(3, offload_param={"device": "nvme"}), "needs nvme_path"),
        *(
            (
                quantized(2, **{f"zero_{key}": 2 if "size" in key else True}),
                f"{key}.* needs stage 3",
            )
            for key in ("quantized_weights", "quantized_nontrainable_weights", "hpz_partition_size")
        ),
        (quantized(zero_hpz_partition_size=4), "= 4 must divide the number of ranks, 2"),
        (quantized(zero_hpz_partition_size=0), "zero_hpz_partition_size"),
        (quantized(zero_hpz_partition_size="rank"), "zero_hpz_partition_size.*'rank'"),
        (quantized(2, zero_hpz_partition_size="node"), "= 'node' needs stage 3, found 2"),
        (quantized(zero_quantized_weights_format="int6"), "'int8', 'int4', .*'int4_difference'"),
        (quantized(zero_quantized_weight_format="int4"), "did you mean 'zero_quantized_weights_f"),
        (quantized(zero_quantized_gradients_between_nodes="int4_difference"), "found 'int4_diff"),
        (quantized(zero_quantized_gradients_hadamard=2), "hadamard"),
        (quantized(zeropp_loco_param={}), "needs zero_quantized_gradients, whose error"),
        (quantized(zeropp_loco_param={"err_beta": 1.5}), "zeropp_loco_param.err_beta"),
        (quantized(zeropp_loco_param={"reset_T": 0}), "zeropp_loco_param.reset_T"),
        (quantized(zeropp_loco_param={"reset_t": 9}), "did you mean 'reset_T'"),
        ({"activation_checkpointing": {"profile": True}}, "profile is not served"),
        ({"activation_checkpointing": {"synchronize_checkpoint_boundary": True}}, "not served"),
        ({"activation_checkpointing": {"cpu_checkpoint": True}}, "cpu_checkpointing"),
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown = True is not served"),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler"),
        ({"gradient_clipping": -1.0}, "gradient_clipping"),
        ({"data_types": {"buffer_dtype": "fp8"}}, r"data_types\.buffer_dtype: .*found 'fp8'"),
        ({"check_replicas_every": 2, **quantized()}, "check_replicas_every needs zero_opt"),
        (quantized(leaf_module={"names": [3]}), r"leaf_module.names: .*list of strings"),
        *(
            ({"world_size_invariant": True, **block}, match)
            for block, match in (
                ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
                (quantized(zero_quantized_weights=True), "zero_quantized_w"),
                (offload(1, ratio="auto"), "ratio 'auto'"),
                (offload(state_dtype="int8"), "state_dtype 'int8'"),
            )
        ),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "bf16.enabled = true"),
        ({"bf16": {"check_grad_overflow": 2}}, "bf16.check_grad_overflow: .* boolean, found 2"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "states = true"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "optimizer_states needs"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "moments in fp16"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": -1}}}, "params.lr: Input should"),
    ],
)
def test_what_is_wrong_or_not_served_is_refused_by_name(block, match):
    refused({**SMALL, **block}, match)


def _with_default(config, path):
    model, block = Config, config
    *parents, name = path.split(".")
    for key in parents:
        default = model.model_fields[key].default
        model = ActivationCheckpointingConfig if default is None else type(default)
        block = block.setdefault(key, {})
    default = model.model_fields[name].default
    others = {"overlap_comm": True, "leaf_module": {}, "number_checkpoints": 4}
    block[name] = others.get(name, default)


def test_every_unneeded_key_exists_and_is_told(caplog):
    config = {**SMALL, "zero_optimization": {"stage": 2}}
    for path in UNNEEDED:
        _with_default(config, path)
    with caplog.at_level("INFO", logger="zero_core"):
        load_config(config, world_size=1)
    told = " ".join(caplog.messages)
    for path in UNNEEDED:
        assert path in told, path


THRESHOLDS = {"stage3_param_persistence_threshold": 5, "stage3_model_persistence_threshold": 6}
ON_NVME = {"buffer_count": 2, "buffer_size": 8, "max_in_cpu": 9, "nvme_path": "/nvme"}
STATES_ON_NVME = {"nvme_path": "/nvme", "buffer_count": 3}
ALWAYS = {"pipeline_read": True, "fast_init": False}
OF_WEIGHTS = {"zero_quantized_weights_format": "e4m3"}
OF_GRADIENTS = {
    "zero_quantized_gradients_within_node": "int8",
    "zero_quantized_gradients_between_nodes": "int4",
    "zero_quantized_gradients_hadamard": True,
    "zero_quantized_stochastic_rounding": False,
}
QUANTIZED = {**OF_WEIGHTS, **OF_GRADIENTS, "zero_quantized_checksum": True}


def _resting(device):
    return {**THRESHOLDS, "offload_param": {"pin_memory": True, **ON_NVME, "device": device}}


@pytest.mark.parametrize(
    ("zero", "logged"),
    [
        (_resting("none"), {*THRESHOLDS, "pin_memory", *ON_NVME}),
        (_resting("cpu"), {*ON_NVME}),
        (_resting("nvme"), set()),
        (
            {"offload_optimizer": {"device": "cpu", **STATES_ON_NVME, **ALWAYS}},
            {*STATES_ON_NVME, *ALWAYS},
        ),
        ({"offload_optimizer": {"device": "nvme", **STATES_ON_NVME, **ALWAYS}}, {*ALWAYS}),
        (QUANTIZED, {*QUANTIZED}),
        ({**QUANTIZED, "zero_quantized_gradients": True}, {*OF_WEIGHTS}),
        ({**QUANTIZED, "zero_quantized_weights": True}, {*OF_GRADIENTS}),
        ({**QUANTIZED, "zero_quantized_nontrainable_weights": True}, {*OF_GRADIENTS}),
        ({**QUANTIZED, "zero_quantized_weights": True, "zero_quantized_gradients": True}, set()),
        (
            {"zero_quantized_weights": True, "zero_quantized_nontrainable_weights": True},
            {"zero_quantized_nontrainable_weights"},
        ),
    ],
)
def test_keys_are_logged_where_they_have_no_effect(caplog, zero, logged):
    with caplog.at_level("INFO", logger="zero_core"):
        load_config({**SMALL, "zero_optimization": {"stage": 3, **zero}}, world_size=1)
    assert {text.split(" = ")[0].rpartition(".")[2] for text in caplog.messages} == logged


@pytest.mark.parametrize(
    ("stage", "keys", "world_size"),
    [
        *((stage, {"zero_quantized_gradients": True}, 3) for stage in range(4)),
        *((3, {"zero_hpz_partition_size": size}, 6) for size in (1, 2, 3, 6)),
        (3, {"zero_hpz_partition_size": 4}, 1),
        # axolotl's config files contain zeros here, which DeepSpeed accepts.
        *((3, {f"{kind}_size": 0}, 1) for kind in ("sub_group", "reduce_bucket")),
        (3, {"allgather_bucket_size": 0}, 1),
    ],
)
def test_values_that_are_served_are_kept(stage, keys, world_size):
    zero = load_config({**SMALL, **quantized(stage, **keys)}, world_size=world_size)
    assert {key: getattr(zero.zero_optimization, key) for key in keys} == keys


@pytest.mark.parametrize(("per_node", "expected"), [(2, 2), (6, 1), (1, 1)])
def test_a_partition_may_be_the_ranks_of_a_node(per_node, expected):
    block = quantized(zero_hpz_partition_size="node")
    config = load_config({**SMALL, **block}, world_size=6)
    zero = config.on_nodes(per_node, 6).zero_optimization
    assert zero.zero_hpz_partition_size == expected


def test_the_resolved_configuration_spells_out_every_default_and_loads_again():
    config = load_config({**SMALL, "zero_optimization": {"stage": 3}}, world_size=2)
    text = config.model_dump_json()
    dumped = json.loads(text)
    assert dumped["zero_optimization"]["offload_optimizer"]["ratio"] == 1.0
    assert load_effective(dumped) == config
    scaled = {**SMALL, **AUTOCAST, "fp16": {"enabled": True, "loss_scale": 8}}
    assert load_config(scaled, world_size=1).loss_scaling.loss_scale == 8
    with pytest.raises(ConfigError, match="found 'three'"):
        load_effective({**dumped, "zero_optimization": {"stage": "three"}})


def test_what_the_host_updates_is_said_once():
    for block, expected in (
        ({"ratio": "auto"}, ("auto", None, None)),
        ({"ratio": 0}, (0.0, None, None)),
        ({"parameters": ["a.*", "b"]}, (None, ("a.*", "b"), None)),
        ({"device_budget": 10**9}, (None, None, 10**9)),
        ({"device_budget": None, "parameters": None}, (1.0, None, None)),
        ({"device_budget": 10**9, "host_share": "first"}, (None, None, 10**9)),
    ):
        config = load_config({**SMALL, **offload(stage=1, **block)}, world_size=1)
        found = config.zero_optimization.offload_optimizer
        assert (found.ratio, found.parameters, found.device_budget) == expected
        text = config.model_dump_json()
        assert Config.model_validate_json(text) == config
        assert load_config(json.loads(text), world_size=1) == config
    null = {**SMALL, "zero_optimization": {"offload_optimizer": None}}
    found = load_config(null, world_size=1).zero_optimization.offload_optimizer
    assert (found.device, found.host_share) == ("none", "last")


@pytest.mark.parametrize("is_bf16", [True, False])
def test_check_grad_overflow_is_taken_from_deepspeeds_place_where_it_has_an_effect(caplog, is_bf16):
    config = {**SMALL, "bf16": {"enabled": is_bf16, "check_grad_overflow": False}}
    before = copy.deepcopy(config)
    with caplog.at_level("INFO", "zero_core"):
        assert load_config(config, world_size=1).check_grad_overflow is not is_bf16
    assert ("bf16.check_grad_overflow = False has no effect" in caplog.text) is not is_bf16
    assert config == before


def test_whole_floats_are_whole_numbers():
    # Common config files contain 5e8 and 1e9.
    zero = {"stage": 3, "reduce_bucket_size": 5e8, "offload_param": {"max_in_cpu": 1e9}}
    given = {"train_micro_batch_size_per_gpu": 2.0, "zero_optimization": zero}
    config = load_config({**given, "gradient_clipping": 1.0}, world_size=1)
    zero = config.zero_optimization
    found = [config.train_batch_size, zero.reduce_bucket_size, zero.offload_param.max_in_cpu]
    assert [repr(number) for number in found] == ["2", "500000000", "1000000000"]
    assert repr(config.gradient_clipping) == "1.0"
    for value in (1.5, float("inf"), "5e8", True):
        refused({**SMALL, "zero_optimization": {"reduce_bucket_size": value}}, "reduce_bucket_size")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("key", ["momentum", "growth_rate"])
def test_settings_of_an_optimizer_are_finite_but_for_limits_of_its_own(key, value):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0][key] = value
    is_limit = key == "growth_rate" and value == math.inf  # Prodigy's default for growth_rate
    refusal = pytest.raises(ConfigError, match=rf"param_groups\[0\]\['{key}'\] of SGD")
    with nullcontext() if is_limit else refusal:
        build(model, SMALL, optimizer=optimizer).close()


@pytest.mark.parametrize(
    ("block", "match"),
    [
        (
            {"optimizer": {"type": "Adamm"}},
            "optimizer.type = 'Adamm' is not served; did you mean 'adam'",
        ),
        ({"optimizer": {"type": "DeepSpeedCPUAdam"}}, "; did you mean 'adam'"),
        ({"optimizer": {"type": "FusedLion"}}, "; did you mean 'lion'"),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "rho": 1}}},
            "optimizer.params.rho: unknown",
        ),
        ({**SGD, "scheduler": {"type": "WarmupDecayLR"}}, "scheduler.params: .*total_num_steps"),
        ({**SGD, "scheduler": {"type": "WarmupLR", "params": {"warm": 1}}}, "warm: unknown key"),
        ({**SGD, "scheduler": {"type": "Nope"}}, "scheduler.type = 'Nope'"),
    ],
)
def test_an_optimizer_or_scheduler_that_does_not_fit_is_refused_before_and_by_the_ranks(
    block, match
):
    load_config({**SMALL, **block}, world_size=2)  # build() may receive another optimizer
    with pytest.raises(ConfigError, match=match):
        check_config({**SMALL, **block}, world_size=2)
    with pytest.raises(ConfigError, match=match):
        build(torch.nn.Linear(3, 2), {**SMALL, **block})


def test_folder_and_packages_are_looked_for_before_ranks_start(tmp_path):
    block = offload(device="nvme", nvme_path=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"nvme_path = .* no such folder|zero-offload"):
        check_config({**SMALL, **block}, world_size=2)


@pytest.mark.parametrize(
    ("key", "kind"),
    [("overlap_comm", bool), ("reduce_bucket_size", int), ("stage", int), ("ratio", float)],
)
@pytest.mark.parametrize("value", [1, 0, 2, "true", "False", "on", "2", " 7 ", "0.5", "5e8", "x"])
def test_texts_are_taken_as_by_pydantic_which_reads_deepspeeds_keys(key, kind, value):
    try:
        expected = pydantic.TypeAdapter(kind).validate_python(value)
        load_config({**SMALL, **_zero_with(key, expected)}, world_size=1)
    except (pydantic.ValidationError, ConfigError):
        with pytest.raises(ConfigError, match=key):
            load_config({**SMALL, **_zero_with(key, value)}, world_size=1)
        return
    written = _zero_with(key, value)
    before = copy.deepcopy(written)
    zero = load_config({**SMALL, **written}, world_size=1).zero_optimization
    found = zero.offload_optimizer.ratio if key == "ratio" else getattr(zero, key)
    assert (found, type(found)) == (expected, kind)
    assert written == before


def _zero_with(key, value):
    if key == "ratio":
        offloaded = {"device": "cpu", key: value}
        return {"zero_optimization": {"stage": "2", "offload_optimizer": offloaded}}
    return {"zero_optimization": {key: value}}


BATCH = {"train_micro_batch_size_per_gpu": 1}
RESOLVED = {"train_batch_size": 1, "gradient_accumulation_steps": 1, **BATCH}
VALUES = (True, 0, 1, 0.5, -1, 200, "auto", "cpu", "fp32", "float16", [], ["a"], [0.1, 0.2], {})
REQUIRED = {
    "optimizer": {"type": "Adam"},
    "scheduler": {"type": "WarmupLR"},
    "step_records": {"folder": "records"},
}
# Keys whose validators are stricter than the JSON Schema.
LOOSER = {
    "zero_optimization.offload_optimizer.parameters",  # a list must not be empty
    "name_waits_within_s",  # 0, or at least 0.5
    "torch_autocast.dtype",  # only names of fp16 and bf16
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


def test_a_file_may_name_its_schema_and_further_keys_of_deepspeed_that_ask_for_nothing(schema):
    config = {"$schema": "./zero.schema.json", **BATCH, "tensorboard": {"enabled": False}}
    config |= {"wall_clock_breakdown": False, "flops_profiler": {"enabled": False}}
    assert schema.is_valid(config)
    assert load_config(config, world_size=1) == load_config(BATCH, world_size=1)


def test_a_configuration_is_read_without_torch():
    reads = (
        "zero_core.load_config({'train_batch_size': 4, 'bf16': {'enabled': True}}, world_size=2)"
    )
    found = [sys.executable, "-c", f"import sys, zero_core; {reads}; print('torch' in sys.modules)"]
    assert subprocess.run(found, capture_output=True, text=True, check=True).stdout == "False\n"


def test_every_documented_name_is_there():
    modules = "adapters checkpoint config errors footprint protocols records schedules testing"
    for module in (zero_core, *(getattr(zero_core, name) for name in modules.split())):
        for name in getattr(module, "__all__", ()):
            assert getattr(module, name) is not None
