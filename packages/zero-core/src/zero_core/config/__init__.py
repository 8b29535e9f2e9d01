"""DeepSpeed's JSON configuration, typed."""

from zero_core.config.blocks import (
    DTYPES,
    UNNEEDED,
    ActivationCheckpointingConfig,
    Bf16Config,
    Config,
    DataTypesConfig,
    Fp16Config,
    LeafModuleConfig,
    LocoConfig,
    ModulesConfig,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    OptimizerConfig,
    SchedulerConfig,
    TiledComputeConfig,
    ZeroConfig,
)
from zero_core.config.schema import load_config

__all__ = [
    "DTYPES",
    "UNNEEDED",
    "ActivationCheckpointingConfig",
    "Bf16Config",
    "Config",
    "DataTypesConfig",
    "Fp16Config",
    "LeafModuleConfig",
    "LocoConfig",
    "ModulesConfig",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "TiledComputeConfig",
    "ZeroConfig",
    "load_config",
]
