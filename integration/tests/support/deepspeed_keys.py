"""Print as JSON every config key that the installed DeepSpeed reads."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import deepspeed.monitor.config as monitor
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.runtime import precision_config
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
    "fp16": precision_config.DeepSpeedFP16Config,
    "bf16": precision_config.DeepSpeedBF16Config,
    "tensorboard": monitor.TensorBoardConfig,
    "csv_monitor": monitor.CSVConfig,
    "wandb": monitor.WandbConfig,
    "comet": monitor.CometConfig,
    "comms_logger": CommsLoggerConfig,
    "compile": CompileConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
}


# Blocks without a pydantic model. `Recorder` records the keys that DeepSpeed reads from them.
BLOCKS = (
    "activation_checkpointing",
    "aio",
    "checkpoint",
    "data_types",
    "flops_profiler",
    "optimizer",
    "scheduler",
)


class Recorder(dict):
    """A dict that records the path of every requested key."""

    asked: ClassVar[set[str]] = set()
    prefix = ""

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(f"{self.prefix}{key}")
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(f"{self.prefix}{key}")
        return super().__contains__(key)

    def keys(self) -> Any:
        return self


def block(name: str) -> Recorder:
    recorder = Recorder()
    recorder.prefix = f"{name}."
    return recorder


def of_models() -> dict[str, Any]:
    found = {}
    for path, model in MODELS.items():
        for name, field in model.model_fields.items():
            default = None if field.default_factory else field.default
            for key in {name, field.alias or name}:
                found[f"{path}.{key}"] = getattr(default, "value", default)
    return found


def main() -> None:
    DeepSpeedConfig(Recorder(train_batch_size=1, **{name: block(name) for name in BLOCKS}))
    result = {
        "models": of_models(),
        "asked": sorted(Recorder.asked),
        "optimizers": DEEPSPEED_OPTIMIZERS,
        "schedules": VALID_LR_SCHEDULES,
    }
    print("KEYS", json.dumps(result, default=str))


main()
