"""Configuration, its Hjson reader, and launcher options compared with the installed DeepSpeed's."""

from __future__ import annotations

import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import deepspeed.launcher.runner as theirs
import hjson
import pytest
from deepspeed.runtime.config import DeepSpeedConfig as Theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from torch.distributed.run import get_args_parser

from zero_core.errors import ConfigError
from zero_engine.deepspeed.config.deepspeed_config import DeepSpeedConfig
from zero_engine.deepspeed.config.hjson import parse_hjson
from zero_engine.script.run import Hosts, add_options, filtered, read_host_file

NOT_SERVED = {
    *("autotuning_config", "compile_config", "data_efficiency_config", "datastates_config"),
    *("expert_parallel_config", "hybrid_engine", "pipeline", "tensor_parallel_config"),
    *("weight_quantization_config", "seq_parallel_communication_data_type", "checkpoint_config"),
}
"""Attributes that this engine refuses, or that have no effect in either library."""

FULL: dict[str, Any] = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}, "legacy_fusion": True},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "disable_allgather": True,
    "gradient_clipping": 0.5,
    "wall_clock_breakdown": True,
    "data_types": {"grad_accum_dtype": "fp32", "buffer_dtype": "bf16"},
    "checkpoint": {"tag_validation": "Fail", "load_universal": True},
    "activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 3},
    "aio": {"queue_depth": 16},
    "comms_logger": {"enabled": True, "verbose": True},
    "flops_profiler": {"enabled": True, "profile_step": 3},
    "csv_monitor": {"enabled": True, "job_name": "j"},
    "zero_optimization": {"stage": 2},
}


def _plain(value: Any) -> Any:
    """Convert an object and the objects in its fields to plain dicts and lists."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    elif not isinstance(value, dict | list | tuple | str) and hasattr(value, "__dict__"):
        value = vars(value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("given", [{"train_batch_size": 1}, FULL])
def test_attributes_are_those_of_deepspeed(given: dict[str, Any]) -> None:
    expected = vars(Theirs(dict(given)))
    ours = DeepSpeedConfig(dict(given))
    # These attributes have zero-core's types.
    blocks = {"zero_config", "float16_config", "bfloat16_config"}
    names = {n for n in expected if not n.startswith("_")} - NOT_SERVED - blocks
    for name in sorted(names):
        found, wanted = _plain(getattr(ours, name)), _plain(expected[name])
        if isinstance(found, dict) and isinstance(wanted, dict):
            found = {key: found[key] for key in wanted}
        assert found == wanted, (name, found, wanted)


LINES = st.lists(
    st.sampled_from(["a slots=2", "b  slots=3 x", "c\tslots=1", "# a", "", "b", "c slots=", "d 4"])
)
PARTS = st.sampled_from(["a", "b", "c", "d", "a:0", "a:1,0", "b:2,2", "b:3", "c:0", "d:0"])
FILTERS = st.one_of(st.just(""), st.lists(PARTS, min_size=1, max_size=3).map("@".join))


def test_every_option_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        theirs.parse_args(["--help"])
    options = re.findall(r"^ +(-.*?)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    names = {
        name for line in options for name in re.findall(r"(?:^|(?<=[ ,]))--?[a-zA-Z][\w-]*", line)
    }
    parser = get_args_parser()
    add_options(parser)
    assert {"--num_gpus", "-H", "--bind_core_list"} <= names
    names.remove("--no_local_rank")  # `zero_engine.script.run` handles this option itself
    assert names <= {name for action in parser._actions for name in action.option_strings}


@settings(deadline=None)
@given(LINES, FILTERS, FILTERS)
def test_the_same_slots_are_chosen(lines: list[str], include: str, exclude: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".hosts") as file:
        file.write("\n".join(lines))
        file.flush()
        ours: Hosts | None
        try:
            ours = filtered(read_host_file(Path(file.name)), include=include, exclude=exclude)
        except ConfigError:
            ours = None
    try:
        pool = theirs._parse_hostfile(lines)
        expected = dict(theirs.parse_inclusion_exclusion(pool, include, exclude))
    except ValueError:
        expected = {}
    assert (ours or {}) == {host: tuple(slots) for host, slots in expected.items()}


PIECES = st.sampled_from(
    [
        *("{", "}", "[", "]", ",", ":", "\n", " ", "# x\n", "// y\n", "/* z\n */", "a", "b", "'c'"),
        *('"d"', "1", "-2.5", "5e8", "01", "true", "false", "null", "cpu", "'''x\n y'''"),
        *('"q\\n\\u00e4"', "'it\\'s \"'", "a: 1\n", "b: {", '"e": ', "x y", "http://h", "- 3"),
        *("12345678901234567890", "1E40", "-0", "0.1", '"\\ud83d\\ude00/*"', '"": ', '"\\/": '),
    ]
)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("duplicate")
    return dict(pairs)


def _theirs(text: str) -> Any:
    try:
        found = hjson.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, IndexError):
        return None
    return found if isinstance(found, dict) else None


def _ours(text: str) -> Any:
    try:
        return parse_hjson(text, "text")
    except ConfigError:
        return None


@settings(deadline=None, max_examples=1000)
@given(st.lists(PIECES, max_size=14).map("".join).map(lambda inner: f"{{{inner}}}"))
def test_pieces_of_hjson_in_any_order(text: str) -> None:
    found = _ours(text)
    with suppress(OverflowError):  # for a number beyond fp64, which JSON reads as infinite
        assert found == _theirs(text)
