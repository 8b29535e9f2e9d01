"""DeepSpeed configurations from any source, which `read` interprets like DeepSpeed."""

from __future__ import annotations

import base64
import gc
import json
import logging
from typing import Any

import pytest
import torch
from torch import nn

from zero_core.config import load_config
from zero_core.errors import ConfigError
from zero_engine import deepspeed
from zero_engine.deepspeed.config.hjson import parse_hjson
from zero_engine.deepspeed.config.reader import Settings, read
from zero_engine.deepspeed.initialize import apply, describe
from zero_engine.deepspeed.utils.logging import log_dist, logger, set_log_level_from_string

BASE = {"train_batch_size": 4}


def _core(**keys) -> dict:
    return read({**BASE, "zero_optimization": keys}).core


def _zero(**keys) -> dict:
    return _core(**keys)["zero_optimization"]


def _notes(settings: Settings) -> dict[str, str]:
    return {note.path: note.text for note in settings.notes}


def _told(**more: Any) -> str:
    settings = read({**BASE, **more})
    return describe(settings, load_config(settings.core, world_size=1), 1)


def test_a_configuration_comes_as_a_dict_a_text_base64_or_a_file_as_people_write_it(tmp_path):
    config = {**BASE, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}
    text = json.dumps(config)
    path = tmp_path / "ds.json"
    path.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    found = [read(source) for source in (config, path, str(path), text, encoded)]
    assert found[0].raw is config
    assert all(one.core == found[0].core and one.raw == config for one in found)
    assert found[0].core["zero_optimization"]["stage"] == 2
    path = tmp_path / "ds.json"
    path.write_text(
        '{ // as of Monday\n "train_batch_size": 4 # ranks * 2\n'
        ' /* not\n yet */ "wandb": {"enabled": false, "project": "a // b, }",\n}\n"fp16": {},}'
    )
    settings = read(path)
    assert settings.core["train_batch_size"] == 4
    assert settings.monitors.wandb.project == "a // b, }"


@pytest.mark.parametrize(
    "text", ['{"a": 1e1, "b": 4.0, "c": 0.5, "d": 1e10}', "{a: 1e1\nb: 4.0\nc: 0.5\nd: 1e10}"]
)
def test_whole_numbers_are_integers_as_in_hjson(text):
    pytest.importorskip("hjson", reason="an optional package")
    found = parse_hjson(text, "it")
    assert [repr(value) for value in found.values()] == ["10", "4", "0.5", "10000000000.0"]


def test_hjson_is_read_by_the_package_of_deepspeed():
    pytest.importorskip("hjson", reason="an optional package")
    text = "{a: 1 # one\n'b': two words, {}[]\nc: 5e8}"
    assert parse_hjson(text, "it") == {"a": 1, "b": "two words, {}[]", "c": 5e8}
    for wrong in ("{,}", '{"a": [ ,]}', "{a: 5e999}"):
        with pytest.raises(ConfigError, match="it is neither JSON nor Hjson"):
            parse_hjson(wrong, "it")


def test_texts_are_read_as_what_they_stand_for():
    offload = {"device": "cpu", "pin_memory": 1, "ratio": "0.5"}
    zero = {"stage": "3", "reduce_bucket_size": "500000000", "overlap_comm": "True"}
    texts = {
        "train_batch_size": "4",
        "gradient_allreduce_op": "SUM",
        "zero_optimization": {**zero, "offload_optimizer": offload},
        "fp16": {"enabled": "0", "loss_scale_window": "7", "auto_cast": "1"},
        "bf16": {"enabled": "true", "check_grad_overflow": "false"},
        "wall_clock_breakdown": "true",
        "sparse_gradients": "false",
    }
    found = read(texts)
    core = load_config(found.core, world_size=1)
    zero = core.zero_optimization
    assert (core.train_batch_size, core.gradient_allreduce_op) == (4, "sum")
    assert (zero.stage, zero.reduce_bucket_size) == (3, 500_000_000)
    assert (zero.offload_optimizer.pin_memory, zero.offload_optimizer.ratio) == (True, 0.5)
    assert (core.fp16.enabled, core.fp16.loss_scale_window) == (False, 7)
    assert (core.bf16.enabled, core.check_grad_overflow) == (True, False)
    assert (found.fp16_auto_cast, found.wall_clock_breakdown) == (True, True)
    old = {"train_batch_size": 4, "zero_optimization": {"stage": 2, "cpu_offload": "true"}}
    assert read(old).core["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("nowhere.json", "neither a file"),
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ('{\n  "a": 1, // one\n  "b" 2\n}', "line 3"),
        ('{"a": ', "is n(ot|either) JSON.*line 1 column"),
        (base64.urlsafe_b64encode(b"[1]").decode(), "expected an object"),
        ({**BASE, "wandb": {"enabled": True, "projekt": "x"}}, "wandb.projekt: unknown key"),
        ({**BASE, "wandb": True}, "wandb: expected a block"),
        ({**BASE, "dump_state": 2}, "dump_state: expected true or false"),
        ({**BASE, "log_level": "loud"}, "log_level: expected one of DEBUG"),
        ({**BASE, "bf16": {}, "bfloat16": {}}, "are the same key"),
        (
            {**BASE, "zero_optimization": {"cpu_offload": True, "offload_optimizer": {}}},
            "say the same",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_is_wrong(source, match):
    with pytest.raises(ConfigError, match=match):
        read(source)


def test_defaults_are_those_of_deepspeed():
    core = read(BASE).core
    assert core["gradient_clipping"] == 1.0
    assert core["broadcast_buffers"] is False
    assert read({**BASE, "gradient_clipping": 0}).core["gradient_clipping"] == 0
    norm_1 = read({**BASE, "gradient_clipping": True})
    assert load_config(norm_1.core, world_size=1).gradient_clipping == 1.0
    assert "gradient_clipping" in _notes(norm_1)
    load_config(_core(mics_hierarchical_params_gather=False), world_size=1)
    own = read({**BASE, "activation_checkpointing": {"cpu_checkpointing": True}})
    assert own.cpu_checkpointing
    assert load_config(own.core, world_size=1).activation_checkpointing is None
    lion = read({**BASE, "optimizer": {"type": "Lion", "params": {"weight_decay": 0.1}}}).core
    assert lion["optimizer"]["params"] == {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1}
    resolved = load_config({**core, "bf16": {"enabled": True}}, world_size=1)
    assert (resolved.compute_dtype, resolved.buffer_dtype) == (torch.bfloat16, None)


def test_auto_that_nobody_filled_in_is_the_default_and_is_told():
    settings = read(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": 3,
            "gradient_clipping": "auto",
            "fp16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.8, 0.9]}},
            "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": None},
        }
    )
    assert settings.core["gradient_clipping"] == 1.0
    assert settings.core["optimizer"]["params"] == {"betas": [0.8, 0.9]}
    assert settings.core["zero_optimization"] == {"stage": 3}
    assert load_config(settings.core, world_size=2).train_batch_size == 6
    assert {k for k, v in _notes(settings).items() if "the default holds" in v} == {
        "train_batch_size",
        "gradient_clipping",
        "fp16.enabled",
        "optimizer.params.lr",
        "zero_optimization.reduce_bucket_size",
    }


def test_old_names_and_forms_become_todays():
    assert _zero(stage=3, cpu_offload=True, cpu_offload_use_pin_memory=False) == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }
    assert _zero(stage=3, cpu_offload_param=True)["offload_param"] == {"device": "cpu"}
    assert _zero(stage=2, cpu_offload=False) == {"stage": 2}
    assert _zero(max_live_parameters=1e9) == {"stage3_max_live_parameters": 1e9}
    assert _zero(stage3_gather_fp16_weights_on_model_save=True) == {
        "stage3_gather_16bit_weights_on_model_save": True
    }
    assert _zero(zero_hpz_partition_size=0) == {"zero_hpz_partition_size": 1}
    for given, stage in ((True, 1), (False, 0)):
        core = read({**BASE, "zero_optimization": given}).core
        assert core.get("zero_optimization", {}).get("stage", 0) == stage
    # The ratio "auto" is this project's extension of DeepSpeed's config.
    automatic = {"device": "cpu", "ratio": "auto"}
    assert _zero(stage=2, offload_optimizer=automatic)["offload_optimizer"] == automatic
    both = {"max_live_parameters": 1, "stage3_max_live_parameters": 2}
    with pytest.raises(ConfigError, match="are the same key"):
        _zero(**both)


def test_key_without_effect_beside_another_one_is_told():
    off = _told(bf16={"enabled": False, "check_grad_overflow": False})
    assert "  bf16.check_grad_overflow = false: used with bf16.enabled only" in off
    on = _told(bf16={"enabled": True, "check_grad_overflow": False})
    assert "bf16.check_grad_overflow" not in on
    assert "  check_grad_overflow = false" in on
    logged = {"enabled": True, "prof_ops": ["all_gather_into_tensor", "broadcst"]}
    names = 'prof_ops = ["all_gather_into_tensor", "broadcst"]: prof_all is true'
    assert names in _told(comms_logger=logged)
    unknown = 'comms_logger.prof_ops = ["broadcst"]: no collective of the engine\'s'
    assert unknown in _told(comms_logger={**logged, "prof_all": False})


def test_unknown_keys_and_misspelt_words_are_told_or_refused() -> None:
    settings = read({**BASE, "_comment": "x", "gradient_cliping": 2.0, "aio": {"depth": 8}})
    told = _notes(settings)
    assert set(told) == {"_comment", "gradient_cliping", "aio.depth"}
    assert "did you mean 'gradient_clipping'?" in told["gradient_cliping"]
    with pytest.raises(ConfigError, match="did you mean 'stage'"):
        load_config(_core(stag=1), world_size=1)
    misspelt = read({"optimizer": {"type": "SGD", "param": {"lr": 0.1}}})
    (text,) = _notes(misspelt).values()
    assert "expected type and params" in text
    block = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "cubic"}}
    settings = read({**BASE, "scheduler": block})
    assert list(_notes(settings)) == ["scheduler.params.warmup_type"]
    # DeepSpeed uses "log" for an unknown type too.
    assert settings.core["scheduler"]["params"] == {"warmup_num_steps": 4, "warmup_type": "log"}
    with pytest.raises(ConfigError, match="'OneBitAdam' is not served: removed from DeepSpeed"):
        read({"optimizer": {"type": "OneBitAdam"}})
    with pytest.raises(ConfigError, match="needs Adam or AdamW, found 'SGD'"):
        read({"optimizer": {"type": "SGD", "params": {"fp32_optimizer_states": False}}})


def test_the_configuration_in_effect_is_told_once_with_what_has_no_effect(capsys):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": 3, "overlap_comm": False, "param_persistence_threshold": 1},
        "vocabulary_size": 7,
    }
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config)
    told = capsys.readouterr().err
    assert told.count("configuration in effect") == 1
    assert "batch: 6 samples a step = 2 a rank and micro-step * 3 micro-steps * 1 rank" in told
    for line in (
        "zero_optimization.stage = 3",
        "zero_optimization.stage3_param_persistence_threshold = 1\n",  # it has an effect
        'optimizer.params = {"lr": 0.5}',
        "gradient_clipping = 1.0",
        "vocabulary_size = 7: DeepSpeed only warns",
        "overlap_comm = false: communication always overlaps",
    ):
        assert line in told
    assert "fp16" not in told
    dumped = describe(read({**config, "dump_state": True}), engine.core.config, 1)
    assert '"initial_scale_power": 16' in dumped


def test_what_is_asked_of_the_process_is_done(loggers):
    try:
        apply(read({**BASE, "log_level": "error", "disable_python_gc": True}))
        assert not gc.isenabled()
        assert {logging.getLogger(name).level for name in loggers} == {logging.ERROR}
    finally:
        gc.enable()


@pytest.mark.parametrize("asked", [{"log_level": "info"}, {"steps_per_print": 1}])
def test_what_loggers_are_asked_to_tell_is_on_stdout_once(asked, loggers, capsys):
    apply(read({**BASE, **asked}))
    is_info = "log_level" in asked
    logging.getLogger("zero_core.optim.train_state").info("the step")
    log_dist("of one rank", ranks=[0])
    logger.warning("of a script")
    told = capsys.readouterr().out
    assert told.count("the step") == 1
    assert told.count("of one rank") == is_info
    assert told.count("of a script") == 1
    assert "[WARNING] [test_deepspeed_config.py:" in told


def test_level_of_the_configuration_or_by_name_holds_whichever_is_last(loggers, capsys):
    set_log_level_from_string("warning")
    logger.info("too low")
    set_log_level_from_string("info")
    logger.info("high enough")
    for _ in range(2):
        logger.warning_once("a warning of this test")
        logger.log_dist_once("a line of this test", ranks=[0])
    set_log_level_from_string("error")
    apply(read({**BASE, "log_level": "info"}))
    logger.info("asked for")
    told = capsys.readouterr().out
    assert "too low" not in told
    for text in ("high enough", "a warning of this test", "a line of this test", "asked for"):
        assert told.count(text) == 1


def test_missing_nvme_folder_is_made_as_by_deepspeed(tmp_path):
    folder = tmp_path / "local" / "nvme"
    block = {"device": "nvme", "nvme_path": str(folder)}
    apply(read({**BASE, "zero_optimization": {"stage": 3, "offload_optimizer": block}}))
    assert folder.is_dir()
