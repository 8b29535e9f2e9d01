"""DeepSpeed's interface, served by this engine.

``zero-engine run`` serves this package under the name ``deepspeed``, with submodules at DeepSpeed's
paths. Use of a name that is not served raises `NotServedError`.
"""

from zero_engine.deepspeed import (
    accelerator,
    checkpoint,
    checkpointing,
    comm,
    launcher,
    monitor,
    ops,
    utils,
    zero,
)
from zero_engine.deepspeed.accelerator import get_accelerator
from zero_engine.deepspeed.comm import init_distributed
from zero_engine.deepspeed.config.deepspeed_config import DeepSpeedConfig
from zero_engine.deepspeed.dataloader import DeepSpeedDataLoader
from zero_engine.deepspeed.engine.engine import DeepSpeedEngine
from zero_engine.deepspeed.engine.optimizer import DeepSpeedOptimizer
from zero_engine.deepspeed.errors import NotServedError
from zero_engine.deepspeed.initialize import DeepSpeedConfigError, add_config_arguments, initialize
from zero_engine.deepspeed.served import VERSION, serve
from zero_engine.deepspeed.utils.logging import log_dist, logger
from zero_engine.deepspeed.utils.usage import OnDevice

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "NotServedError",
    "OnDevice",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "launcher",
    "log_dist",
    "logger",
    "monitor",
    "ops",
    "utils",
    "zero",
]

version = __version__ = VERSION
__version_major__, __version_minor__, __version_patch__ = (int(x) for x in version.split("."))
git_hash = __git_hash__ = "zero-engine"
git_branch = __git_branch__ = "zero-engine"

serve()
