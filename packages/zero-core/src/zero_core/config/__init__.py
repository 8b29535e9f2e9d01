"""DeepSpeed's JSON configuration, typed. Loading a configuration needs no torch."""

from typing import TYPE_CHECKING

from zero_core._lazy import lazy_names
from zero_core.config.blocks import (
    LARGEST,
    UNNEEDED,
    ActivationCheckpointingConfig,
    Bf16Config,
    Config,
    DataTypesConfig,
    Fp16Config,
    LeafModuleConfig,
    LocoConfig,
    MemoryCheckpointConfig,
    ModulesConfig,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    OptimizerConfig,
    SchedulerConfig,
    TiledComputeConfig,
    ZeroConfig,
    as_kind,
    as_whole,
    block_of,
)
from zero_core.config.rules import find_unneeded
from zero_core.config.schema import (
    MAX_DEPTH,
    SCHEMA_FILE,
    as_typed,
    check_plain,
    explain,
    load_config,
    load_effective,
    parse_json,
    read_config_text,
    shown,
    without_nulls,
)

if TYPE_CHECKING:
    from zero_core.config.dtypes import DTYPES, WIDE_DTYPES, master_dtype

__all__ = [
    "DTYPES",
    "LARGEST",
    "MAX_DEPTH",
    "SCHEMA_FILE",
    "UNNEEDED",
    "WIDE_DTYPES",
    "ActivationCheckpointingConfig",
    "Bf16Config",
    "Config",
    "DataTypesConfig",
    "Fp16Config",
    "LeafModuleConfig",
    "LocoConfig",
    "MemoryCheckpointConfig",
    "ModulesConfig",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "TiledComputeConfig",
    "ZeroConfig",
    "as_kind",
    "as_typed",
    "as_whole",
    "block_of",
    "check_plain",
    "explain",
    "find_unneeded",
    "load_config",
    "load_effective",
    "master_dtype",
    "parse_json",
    "read_config_text",
    "shown",
    "without_nulls",
]

__getattr__ = lazy_names(__name__, {"dtypes": "DTYPES WIDE_DTYPES master_dtype"})
