"""Stand-ins for the parts of DeepSpeed that are not served.

A script may import such a part and never use it, so importing works. The first use (a call, a
subclass, an attribute, a comparison) raises one error that says what to do.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from zero_engine.deepspeed.errors import Unserved

__all__ = ["RefusedModule", "names_by_module", "reason_to_refuse", "refuse_other_names"]

PIPELINE = "there is no pipeline parallelism here; stage 3 with offload_param holds large models"
EXPERTS = "there is no expert parallelism here; a model's own experts are sharded at stage 3"
INFERENCE = "this engine trains; serve the saved model with an inference library"
TENSOR = "there is no tensor parallelism here; use zero_optimization stage 3"
SEQUENCE = "there is no sequence parallelism here; use activation checkpointing"
COMPRESSION = "there is no compression of models here"
TUNING = "there is no autotuner here; 'zero-engine plan' says what fits"
KERNELS = "DeepSpeed's own kernels are not served; use torch's modules"
DATA = "DeepSpeed's data pipeline is not served; use a torch DataLoader"
LAMB = (
    "its step depends on the norm of whole parameters, and the engine updates slices: use "
    "FusedAdam or FusedLion"
)
CHECKPOINT = "checkpoints load at any stage and number of ranks; see deepspeed.utils.zero_to_fp32"
TILED = "use torch.nn.Linear: stage 3 gathers a block at a time"
INNER = "it is an inner part of DeepSpeed, which works differently here"

REASONS = {
    **dict.fromkeys(
        ("pipe", "runtime.pipe", "PipelineEngine", "PipelineModule", "LayerSpec", "TiedLayerSpec"),
        PIPELINE,
    ),
    "moe": EXPERTS,
    **dict.fromkeys(
        (
            *("inference", "model_implementations", "ops.transformer", "runtime.hybrid_engine"),
            *("runtime.hybrid_engine_graph", "runtime.rollout", "init_inference"),
            *("default_inference_config", "InferenceEngine", "DeepSpeedInferenceConfig"),
            *("DeepSpeedHybridEngine", "replace_transformer_layer", "revert_transformer_layer"),
            *("DeepSpeedTransformerLayer", "DeepSpeedTransformerConfig"),
        ),
        INFERENCE,
    ),
    **dict.fromkeys(("module_inject", "runtime.tensor_parallel", "runtime.domino"), TENSOR),
    **dict.fromkeys(("tp_model_init", "set_autotp_mode"), TENSOR),
    **dict.fromkeys(("sequence", "runtime.sequence_parallel"), SEQUENCE),
    **dict.fromkeys(("compression", "linear", "runtime.weight_quantizer"), COMPRESSION),
    "autotuning": TUNING,
    **dict.fromkeys(
        (
            *("ops.aio", "ops.compile", "ops.deepspeed4science", "ops.fp_quantizer", "ops.gds"),
            *("ops.quantizer", "ops.random_ltd", "ops.triton_ops", "ops.pin_memory"),
        ),
        KERNELS,
    ),
    "runtime.data_pipeline": DATA,
    "ops.lamb": LAMB,
    **dict.fromkeys(
        (
            *("checkpoint.DeepSpeedCheckpoint", "checkpoint.ZeROCheckpoint"),
            "checkpoint.enable_universal_checkpoint",
        ),
        CHECKPOINT,
    ),
    **dict.fromkeys(("runtime.zero.TiledLinear", "runtime.zero.TiledLinearReturnBias"), TILED),
    "DeepSpeedConfig": "read the JSON file, or ask the engine's methods",
    **dict.fromkeys(
        (
            *("compat", "compile", "constants", "datastates", "env_report", "git_version_info"),
            *("git_version_info_installed", "io", "nvme", "profiling"),
            *("accelerator", "checkpoint", "comm", "launcher", "monitor", "ops", "runtime"),
            "utils",
        ),
        INNER,
    ),
}
"""DeepSpeed's modules (with all that is below them) and top-level names, and why they are refused.

A module that `zero_engine.deepspeed` has is served, wherever it stands here.
"""


class RefusedModule(ModuleType):
    """A module of DeepSpeed that is not served: every name in it is an `Unserved`."""

    def __init__(self, name: str, served_name: str, reason: str) -> None:
        super().__init__(name, f"deepspeed.{served_name} is not served: {reason}")
        self._served_name = served_name
        self._reason = reason

    def __getattr__(self, name: str) -> Unserved:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return _unserved(f"{self._served_name}.{name}", self._reason)

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse assignments, which nothing here would read."""
        is_imports = name.startswith("_") or isinstance(value, ModuleType)
        if not is_imports:
            _unserved(f"{self._served_name}.{name}", self._reason)()
        super().__setattr__(name, value)


def reason_to_refuse(name: str) -> str | None:
    """Return why ``deepspeed.NAME`` is refused, None if DeepSpeed has no such name."""
    while name:
        if name in REASONS:
            return REASONS[name]
        name = name.rpartition(".")[0]
    return None


def refuse_other_names(module: str, path: str) -> None:
    """Give ``zero_engine.deepspeed.MODULE`` DeepSpeed's public names that it lacks, as `Unserved`.

    Args:
        module: without "zero_engine.deepspeed."; "" is that package.
        path: the path of DeepSpeed's module, without "deepspeed.".
    """
    full_name = f"zero_engine.deepspeed.{module}".removesuffix(".")

    def find(name: str) -> Unserved:
        if name not in names_by_module()[path]:
            raise AttributeError(f"module {full_name!r} has no attribute {name!r}")
        dotted = f"{path}.{name}".removeprefix(".")
        return _unserved(dotted, reason_to_refuse(dotted) or INNER)

    vars(sys.modules[full_name])["__getattr__"] = find


@cache
def names_by_module() -> dict[str, frozenset[str]]:
    """Return the public names of DeepSpeed 0.19.8 by module, for the modules that are served.

    ``tests/deepspeed_names.py`` writes the table.
    """
    path = Path(__file__).parent / "deepspeed_names.json"
    table: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    return {module: frozenset(names) for module, names in table.items()}


def _unserved(name: str, reason: str) -> Unserved:
    return Unserved(name, reason, could_be_ours=reason == INNER)
