"""DeepSpeed's JSON configuration, typed."""

from zero_core.config.blocks import DTYPES as DTYPES
from zero_core.config.blocks import UNNEEDED as UNNEEDED
from zero_core.config.blocks import WIDE_DTYPES as WIDE_DTYPES
from zero_core.config.blocks import ActivationCheckpointingConfig as ActivationCheckpointingConfig
from zero_core.config.blocks import Bf16Config as Bf16Config
from zero_core.config.blocks import Config as Config
from zero_core.config.blocks import DataTypesConfig as DataTypesConfig
from zero_core.config.blocks import Fp16Config as Fp16Config
from zero_core.config.blocks import LeafModuleConfig as LeafModuleConfig
from zero_core.config.blocks import LocoConfig as LocoConfig
from zero_core.config.blocks import MemoryCheckpointConfig as MemoryCheckpointConfig
from zero_core.config.blocks import ModulesConfig as ModulesConfig
from zero_core.config.blocks import OffloadOptimizerConfig as OffloadOptimizerConfig
from zero_core.config.blocks import OffloadParamConfig as OffloadParamConfig
from zero_core.config.blocks import OptimizerConfig as OptimizerConfig
from zero_core.config.blocks import SchedulerConfig as SchedulerConfig
from zero_core.config.blocks import TiledComputeConfig as TiledComputeConfig
from zero_core.config.blocks import ZeroConfig as ZeroConfig
from zero_core.config.blocks import master_dtype as master_dtype
from zero_core.config.schema import load_config as load_config
from zero_core.config.schema import load_effective as load_effective
