"""What a script gets that asks for DeepSpeed: the same names, over this engine.

``zero-engine run`` serves this package as ``deepspeed``; it can be imported by its own name too.
Submodules lie where they lie there. What isn't served raises `NotServedError` at its first use.
"""

from __future__ import annotations

from zero_engine.deepspeed import checkpoint, checkpointing, runtime, utils
from zero_engine.deepspeed.arguments import add_config_arguments
from zero_engine.deepspeed.construction import initialize
from zero_engine.deepspeed.distributed import init_distributed
from zero_engine.deepspeed.engine import DeepSpeedEngine
from zero_engine.deepspeed.errors import NotServedError, Unserved
from zero_engine.deepspeed.optimizer import DeepSpeedOptimizer
from zero_engine.deepspeed.runtime import zero
from zero_engine.deepspeed.runtime.dataloader import DeepSpeedDataLoader
from zero_engine.deepspeed.utils import OnDevice, log_dist, logger

__all__ = [
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
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "default_inference_config",
    "init_distributed",
    "init_inference",
    "initialize",
    "log_dist",
    "logger",
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

_INFERENCE = "serve the exported model with another library"
init_inference = Unserved("init_inference", _INFERENCE)
InferenceEngine = Unserved("InferenceEngine", _INFERENCE)
DeepSpeedInferenceConfig = Unserved("DeepSpeedInferenceConfig", _INFERENCE)
default_inference_config = Unserved("default_inference_config", _INFERENCE)
replace_transformer_layer = Unserved("replace_transformer_layer", _INFERENCE)

_PARALLEL = "only data parallelism is served: use ZeRO stage 3 for models that do not fit"
PipelineEngine = Unserved("PipelineEngine", _PARALLEL)
PipelineModule = Unserved("PipelineModule", _PARALLEL)
tp_model_init = Unserved("tp_model_init", _PARALLEL)
set_autotp_mode = Unserved("set_autotp_mode", _PARALLEL)

DeepSpeedHybridEngine = Unserved("DeepSpeedHybridEngine", "train with DeepSpeedEngine")
DeepSpeedTransformerLayer = Unserved("DeepSpeedTransformerLayer", "use torch.compile")
DeepSpeedTransformerConfig = Unserved("DeepSpeedTransformerConfig", "use torch.compile")
