"""DeepSpeed's interface, served by this engine.

``zero-engine run`` serves this package under the name ``deepspeed``, with submodules at DeepSpeed's
paths. Use of a name that is not served raises `NotServedError`.
"""

from zero_engine.deepspeed import accelerator as accelerator
from zero_engine.deepspeed import checkpoint as checkpoint
from zero_engine.deepspeed import checkpointing as checkpointing
from zero_engine.deepspeed import comm as comm
from zero_engine.deepspeed import launcher as launcher
from zero_engine.deepspeed import monitor as monitor
from zero_engine.deepspeed import ops as ops
from zero_engine.deepspeed import utils as utils
from zero_engine.deepspeed import zero as zero
from zero_engine.deepspeed.accelerator import get_accelerator as get_accelerator
from zero_engine.deepspeed.comm import init_distributed as init_distributed
from zero_engine.deepspeed.config.deepspeed_config import DeepSpeedConfig as DeepSpeedConfig
from zero_engine.deepspeed.dataloader import DeepSpeedDataLoader as DeepSpeedDataLoader
from zero_engine.deepspeed.engine.engine import DeepSpeedEngine as DeepSpeedEngine
from zero_engine.deepspeed.engine.optimizer import DeepSpeedOptimizer as DeepSpeedOptimizer
from zero_engine.deepspeed.errors import NotServedError as NotServedError
from zero_engine.deepspeed.initialize import DeepSpeedConfigError as DeepSpeedConfigError
from zero_engine.deepspeed.initialize import add_config_arguments as add_config_arguments
from zero_engine.deepspeed.initialize import initialize as initialize
from zero_engine.deepspeed.served import VERSION as __version__
from zero_engine.deepspeed.served import serve as _serve
from zero_engine.deepspeed.utils.logging import log_dist as log_dist
from zero_engine.deepspeed.utils.logging import logger as logger
from zero_engine.deepspeed.utils.usage import OnDevice as OnDevice

version = __version__
__version_major__, __version_minor__, __version_patch__ = (int(x) for x in version.split("."))
git_hash = __git_hash__ = "zero-engine"
git_branch = __git_branch__ = "zero-engine"

_serve()
