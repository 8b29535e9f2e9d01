"""Every public name of DeepSpeed's served modules can be imported; what isn't served says so."""

from __future__ import annotations

import importlib
import json

import pytest
from deepspeed_names import TABLE, deepspeeds_folder, public_names

from zero_engine.deepspeed.errors import NotServedError, Unserved

NAMES: dict[str, list[str]] = json.loads(TABLE.read_text(encoding="utf-8"))


def _module(name: str) -> object:
    return importlib.import_module(f"zero_engine.deepspeed.{name}".removesuffix("."))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there_or_refused_at_its_first_use(name: str) -> None:
    module = _module(name)
    for inner in NAMES[name]:
        found = getattr(module, inner)
        if isinstance(found, Unserved):
            with pytest.raises(NotServedError, match=rf"\b{inner} is not served by zero-engine; "):
                found()


def test_name_that_deepspeed_does_not_have_cannot_be_imported() -> None:
    for name in NAMES:
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
            _module(name).nonsense  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError):
        exec("from zero_engine.deepspeed.runtime.utils import nonsense", {})


@pytest.mark.parametrize(
    "line",
    [
        "from zero_engine.deepspeed.runtime.utils import get_global_norm",
        "from zero_engine.deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam",
        "from zero_engine.deepspeed.ops.adam.fused_adam import FusedAdam",
        "from zero_engine.deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion",
        "from zero_engine.deepspeed.ops.op_builder.builder import OpBuilder, CUDAOpBuilder",
        "from zero_engine.deepspeed.ops.op_builder import InferenceBuilder",
        "from zero_engine.deepspeed.runtime.zero import DeepSpeedZeRoOffload, TiledLinear",
        "from zero_engine.deepspeed.checkpointing import CheckpointFunction",
        "from zero_engine.deepspeed.utils import groups, get_full_hp_param",
        "from zero_engine.deepspeed.utils.groups import get_tensor_model_parallel_group",
    ],
)
def test_scripts_line_of_imports_works(line: str) -> None:
    exec(line, {})


def test_class_that_is_not_served_cannot_be_subclassed() -> None:
    lines = "from zero_engine.deepspeed.runtime.zero import DeepSpeedZeRoOffload as Base"
    with pytest.raises(NotServedError, match=r"runtime\.zero\.DeepSpeedZeRoOffload"):
        exec(f"{lines}\nclass Mine(Base): pass", {})


def test_table_has_the_names_of_deepspeed_itself() -> None:
    folder = deepspeeds_folder()
    if folder is None:
        pytest.skip("DeepSpeed is not installed")
    assert public_names(folder) == NAMES
