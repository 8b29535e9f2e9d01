"""What a script gets that asks for DeepSpeed: the same names, over this engine.

``zero-engine run`` serves this package as ``deepspeed``; it can be imported by its own name too.
Submodules lie where they lie there. What isn't served raises `NotServedError` at its first use.
"""

from __future__ import annotations

from zero_engine.deepspeed import (
    accelerator,
    checkpoint,
    checkpointing,
    comm,
    monitor,
    ops,
    runtime,
    utils,
)
from zero_engine.deepspeed.accelerator import get_accelerator
from zero_engine.deepspeed.arguments import add_config_arguments
from zero_engine.deepspeed.construction import initialize
from zero_engine.deepspeed.distributed import init_distributed
from zero_engine.deepspeed.engine import DeepSpeedEngine
from zero_engine.deepspeed.errors import NotServedError, Unserved
from zero_engine.deepspeed.optimizer import DeepSpeedOptimizer
from zero_engine.deepspeed.runtime import zero
from zero_engine.deepspeed.runtime.config import DeepSpeedConfigError
from zero_engine.deepspeed.runtime.dataloader import DeepSpeedDataLoader
from zero_engine.deepspeed.utils import OnDevice, log_dist, logger
from zero_engine.script.refusal import refuse_other_names, refused_name

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "DeepSpeedHybridEngine",
    "DeepSpeedInferenceConfig",
    "DeepSpeedOptimizer",
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "InferenceEngine",
    "NotServedError",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "default_inference_config",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "log_dist",
    "logger",
    "monitor",
    "ops",
    "replace_transformer_layer",
    "runtime",
    "set_autotp_mode",
    "tp_model_init",
    "utils",
    "zero",
]

__version__ = "0.19.8"
"""The release whose interface this is."""
version = __version__
__version_major__, __version_minor__, __version_patch__ = (int(x) for x in version.split("."))
git_hash = __git_hash__ = "zero-engine"
git_branch = __git_branch__ = "zero-engine"

# Scripts import these at their top, and ask isinstance() of some; a use is refused.
init_inference = refused_name("init_inference")
InferenceEngine = refused_name("InferenceEngine")
DeepSpeedInferenceConfig = refused_name("DeepSpeedInferenceConfig")
default_inference_config = refused_name("default_inference_config")
replace_transformer_layer = refused_name("replace_transformer_layer")
PipelineEngine = refused_name("PipelineEngine")
PipelineModule = refused_name("PipelineModule")
tp_model_init = refused_name("tp_model_init")
set_autotp_mode = refused_name("set_autotp_mode")
DeepSpeedHybridEngine = refused_name("DeepSpeedHybridEngine")
DeepSpeedTransformerLayer = refused_name("DeepSpeedTransformerLayer")
DeepSpeedTransformerConfig = refused_name("DeepSpeedTransformerConfig")
DeepSpeedConfig = Unserved("DeepSpeedConfig", "read the JSON file, or ask the engine's methods")

refuse_other_names(__name__)
