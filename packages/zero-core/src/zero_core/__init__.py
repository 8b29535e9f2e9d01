"""ZeRO stages 0 to 3 for PyTorch on one code path; see README.md and docs/how-it-works.md."""

from zero_core.build import build
from zero_core.config import Config, load_config
from zero_core.deferred import deferred_init
from zero_core.ending import give_back
from zero_core.engine import Engine
from zero_core.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CollectiveError,
    ConfigError,
    MissingPartError,
    RankMismatchError,
    ZeroError,
)
from zero_core.layout import Layout
from zero_core.lion import Lion
from zero_core.owners import engine_of
from zero_core.plan import plan
from zero_core.plan_result import Plan
from zero_core.pretrained import Loaded, load_pretrained

__all__ = [
    "CheckpointCorruptError",
    "CheckpointError",
    "CollectiveError",
    "Config",
    "ConfigError",
    "Engine",
    "Layout",
    "Lion",
    "Loaded",
    "MissingPartError",
    "Plan",
    "RankMismatchError",
    "ZeroError",
    "build",
    "deferred_init",
    "engine_of",
    "give_back",
    "load_config",
    "load_pretrained",
    "plan",
]

__version__ = "0.1.0"
