"""ZeRO stages 0 to 3 for PyTorch on one code path.

Names other than errors are imported at their first use (PEP 562), because importing torch takes
seconds and `zero_core.config` and `zero_core.errors` do not need torch.
"""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from zero_core._lazy import lazy_names
from zero_core.errors import (
    AccumulationScheduleError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFailedError,
    CollectiveError,
    ConfigError,
    EvaluationOnlyError,
    MissingPartError,
    PatchGapError,
    RankMismatchError,
    UnusedParameterError,
    ZeroError,
)

if TYPE_CHECKING:
    from zero_core.building import build
    from zero_core.checkpoint.files import (
        export_checkpoint,
        inspect_checkpoint,
        prune_checkpoints,
        verify_checkpoint,
    )
    from zero_core.checkpoint.patches import WeightPatch, apply_patch
    from zero_core.checkpoint.whole_models import Loaded
    from zero_core.checkpointing import load_pretrained
    from zero_core.config import Config, load_config
    from zero_core.core.extension import EndedStep, Extension
    from zero_core.engine import Engine
    from zero_core.footprint.planner import plan
    from zero_core.footprint.result import Plan
    from zero_core.init.deferred import deferred_init
    from zero_core.layout.arithmetic import Layout
    from zero_core.optim.adam import Lion
    from zero_core.plugins import check_config
    from zero_core.quantization import quantize_blocks
    from zero_core.runtime.device_states import StatePart
    from zero_core.sharded_model import ShardedModel, engine_of

__all__ = [
    "AccumulationScheduleError",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointFailedError",
    "CollectiveError",
    "Config",
    "ConfigError",
    "EndedStep",
    "Engine",
    "EvaluationOnlyError",
    "Extension",
    "Layout",
    "Lion",
    "Loaded",
    "MissingPartError",
    "PatchGapError",
    "Plan",
    "RankMismatchError",
    "ShardedModel",
    "StatePart",
    "UnusedParameterError",
    "WeightPatch",
    "ZeroError",
    "apply_patch",
    "build",
    "check_config",
    "deferred_init",
    "engine_of",
    "export_checkpoint",
    "inspect_checkpoint",
    "load_config",
    "load_pretrained",
    "plan",
    "prune_checkpoints",
    "quantize_blocks",
    "verify_checkpoint",
]

__version__ = _version("zero-core")

_HOMES = {
    "": "adapters checkpoint config errors footprint protocols records schedules testing",
    "building": "build",
    "checkpoint.files": "export_checkpoint inspect_checkpoint prune_checkpoints verify_checkpoint",
    "checkpoint.patches": "WeightPatch apply_patch",
    "checkpoint.whole_models": "Loaded",
    "checkpointing": "load_pretrained",
    "config": "Config load_config",
    "core.extension": "EndedStep Extension",
    "engine": "Engine",
    "init.deferred": "deferred_init",
    "layout.arithmetic": "Layout",
    "optim.adam": "Lion",
    "footprint.planner": "plan",
    "footprint.result": "Plan",
    "plugins": "check_config",
    "quantization": "quantize_blocks",
    "runtime.device_states": "StatePart",
    "sharded_model": "ShardedModel engine_of",
}


def __dir__() -> list[str]:
    return [*__all__, *_HOMES[""].split()]


__getattr__ = lazy_names(__name__, _HOMES)
