"""ZeRO stages 0 to 3 for PyTorch on one code path."""

from zero_core.build import build
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
from zero_core.init.deferred import deferred_init
from zero_core.layout.arithmetic import Layout
from zero_core.optim.lion import Lion
from zero_core.plan.planner import plan
from zero_core.plan.result import Plan
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

__version__ = "0.1.0"
