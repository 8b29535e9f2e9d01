"""What ``deepspeed.zero`` is."""

from zero_engine.deepspeed.errors import Unserved
from zero_engine.deepspeed.runtime.zero.external import (
    register_external_parameter,
    unregister_external_parameter,
)
from zero_engine.deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    unwrap_model_for_generation,
)
from zero_engine.script.refusal import refuse_other_names

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]

_TILED = "use torch.nn.Linear: stage 3 gathers a block at a time"
TiledLinear = Unserved("zero.TiledLinear", _TILED)
TiledLinearReturnBias = Unserved("zero.TiledLinearReturnBias", _TILED)

refuse_other_names(__name__)
