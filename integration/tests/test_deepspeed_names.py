"""Public names of DeepSpeed's modules: all can be imported, and some raise on use."""

from __future__ import annotations

import importlib
import inspect
import itertools
from typing import Optional, Union

import pytest

from tests.support.deepspeed_names import deepspeeds_folder, public_names
from zero_engine import deepspeed
from zero_engine.deepspeed.errors import NotServedError, Unserved

FOLDER = deepspeeds_folder()
LISTED = {
    "": "DeepSpeedEngine PipelineModule dist get_accelerator init_inference tp_model_init",
    "checkpoint": "DeepSpeedCheckpoint get_model_3d_descriptor merge_state model_3d_desc",
    "comm": "ProcessGroup all_reduce cdb comms_logger get_rank timers timed_op",
    "runtime.config": "ADAM_OPTIMIZER ADAM_W_MODE DeepSpeedConfig",
    "runtime.zero": "DeepSpeedZeRoOffload Init ZeroParamStatus register_external_parameter",
    "utils": "OnDevice get_numactl_cmd link_hp_params logger mpu safe_get_full_grad",
    "utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint get_optim_files",
}
"""Some public names of DeepSpeed, for environments without DeepSpeed."""
NAMES = {name: names.split() for name, names in LISTED.items()}
NAMES |= {} if FOLDER is None else public_names(FOLDER)


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


def test_private_name_that_is_not_there_is_an_attribute_error() -> None:
    for name in ("", "runtime.zero", "utils.groups", "utils.zero_to_fp32"):
        with pytest.raises(AttributeError, match="has no attribute '_nonsense'"):
            _module(name)._nonsense  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    "line",
    [
        "from zero_engine.deepspeed.ops.op_builder.builder import OpBuilder, CUDAOpBuilder",
        "from zero_engine.deepspeed.runtime.config import ADAM_OPTIMIZER, LION_OPTIMIZER\n"
        "assert (ADAM_OPTIMIZER, LION_OPTIMIZER) == ('adam', 'lion')",
        "from zero_engine.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer as Optimizer\n"
        "assert Optimizer is __import__('zero_engine').deepspeed.DeepSpeedOptimizer",
        "from zero_engine.deepspeed.ops.aio import AsyncIOBuilder; AsyncIOBuilder.NAME",
        "from zero_engine.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum\n"
        "assert OffloadDeviceEnum.cpu == 'cpu'",
        "from zero_engine import deepspeed\n"
        "assert deepspeed.zero.offload_config.OffloadDeviceEnum.cpu == 'cpu'",
        "from zero_engine.deepspeed.zero.tiling import TiledLinear\n"
        "assert TiledLinear is __import__('zero_engine').deepspeed.zero.tiling.TiledLinear",
        "from zero_engine.deepspeed.engine import DeepSpeedEngine; DeepSpeedEngine.forward",
        "from zero_engine.deepspeed.checkpointing import CheckpointFunction",
        "from zero_engine.deepspeed.checkpointing import get_cuda_rng_tracker\n"
        "with get_cuda_rng_tracker().fork(name='any') as found: assert found is None",
        "from zero_engine.deepspeed.utils import groups, zero_to_fp32; zero_to_fp32.main",
        "from zero_engine.deepspeed.runtime.zero import stage3; isinstance(stage3, object)\n"
        "Optimizer = stage3.DeepSpeedZeroOptimizer_Stage3",
        "from zero_engine.deepspeed.zero import *\nassert not {'Any', 'load'} & {*globals()}",
        "from zero_engine.deepspeed import utils; assert len(utils.__all__) == 28",
        "import sys; [hasattr(m, 'spam') for n, m in sys.modules.items() if 'zero_engine.' in n]",
        "from zero_engine.deepspeed.utils.nvtx import *; instrument_w_nvtx(print)",
        "from zero_engine.deepspeed.runtime.lr_schedules import *; assert WARMUP_LR == 'WarmupLR'",
    ],
)
def test_scripts_line_of_imports_works(line: str) -> None:
    exec(line, {})


_WARMUPS = ["lr_range_test", "1cycle", "warmupLR", "warmupCosineLR"]
_LEAF_CLASSES = "model leaf_module_classes raise_if_not_found"
_FUNCTIONS = {
    **{
        f"utils.tensor_fragment.safe_{do}_{part}_{what}": " ".join(
            ["param", *["value"] * (do == "set"), *["optim_state_key"] * (what[0] == "o")]
        )
        for do, part, what in itertools.product(
            ("get", "set"), ("full", "local"), ("fp32_param", "grad", "optimizer_state")
        )
    },
    **{f"runtime.lr_schedules.override_{kind}_params": "args params" for kind in _WARMUPS},
    "utils.z3_leaf_module.set_z3_leaf_modules": _LEAF_CLASSES,
    "utils.z3_leaf_module.unset_z3_leaf_modules": _LEAF_CLASSES,
    "utils.z3_leaf_module.set_z3_leaf_modules_by_name": (
        "model module_names flag raise_if_not_found"
    ),
    "monitor.config.get_monitor_config": "param_dict",
}


@pytest.mark.parametrize("path", _FUNCTIONS)
def test_function_has_its_own_name_and_deepspeeds_parameters(path: str) -> None:
    module, _, name = path.rpartition(".")
    function = getattr(_module(module), name)
    assert inspect.isfunction(function)
    assert (function.__name__, function.__qualname__) == (name, name)
    assert " ".join(inspect.signature(function).parameters) == _FUNCTIONS[path]
    assert function.__doc__


def test_class_that_is_not_served_may_be_looked_at_and_annotated_but_not_subclassed() -> None:
    lines = "from zero_engine.deepspeed.runtime.zero import DeepSpeedZeRoOffload as Base"
    with pytest.raises(NotServedError, match=r"runtime\.zero\.DeepSpeedZeRoOffload"):
        exec(f"{lines}\nclass Mine(Base): pass", {})
    found = deepspeed.PipelineModule
    assert found is not None
    assert not isinstance(3, found)
    assert not issubclass(dict, found)
    assert "deepspeed.PipelineModule" in repr(found)
    assert (found | None) == (None | found) == Optional[found] == Union[None, found]  # noqa: UP007, UP045
    assert found in (int, found)


CONSTANT = "from zero_engine.deepspeed.runtime.config import ADAM_W_MODE as constant\n"
LOWERCASE = "from zero_engine.deepspeed.comm import cdb as constant\n"
STAGE_3 = """
from zero_engine.deepspeed.served import INNER, RefusedModule
stage3 = RefusedModule("stage3", "runtime.zero.stage3", INNER)
Optimizer = stage3.DeepSpeedZeroOptimizer_Stage3
"""


_USES = ["constant == 'adam'", "'adam' != constant", "not constant", "f'{constant}'", "[*constant]"]
_USES += ["'adam' in constant", "constant + 1", "constant['a']", "constant < 2"]


@pytest.mark.parametrize(
    "use",
    [
        *(f"{CONSTANT}{use}" for use in _USES),
        *(f"{LOWERCASE}{use}" for use in (*_USES, "isinstance(3, constant)")),
        f"{STAGE_3}Optimizer.step = print",
        f"{STAGE_3}stage3.DeepSpeedZeroOptimizer_Stage3 = dict",
        f"{STAGE_3}isinstance(3, Optimizer)",
        f"{STAGE_3}issubclass(dict, (int, Optimizer))",
        f"{STAGE_3}dict == Optimizer",
    ],
)
def test_any_use_of_a_name_that_is_not_served_is_refused(use: str) -> None:
    with pytest.raises(NotServedError, match=r"(ADAM_W_MODE|comm\.cdb|_Stage3) is not served"):
        exec(use, {})


def test_mics_is_refused_with_what_took_its_place() -> None:
    from zero_engine.deepspeed.runtime.zero import MiCS_Init as Inner

    from zero_engine.deepspeed.zero import MiCS_Init

    for name in (MiCS_Init, Inner):
        with pytest.raises(AttributeError, match=r"removed MiCS.*zero_hpz_partition_size"):
            name(config_dict_or_path={})
