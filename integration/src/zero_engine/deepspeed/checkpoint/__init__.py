"""``deepspeed.checkpoint``: what of it scripts use."""

from zero_engine.deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from zero_engine.deepspeed.errors import Unserved
from zero_engine.script.refusal import refuse_other_names

__all__ = [
    "DeepSpeedCheckpoint",
    "ZeROCheckpoint",
    "clone_tensors_for_torch_save",
    "enable_universal_checkpoint",
]

_INSTEAD = "checkpoints load at any stage and number of ranks; see deepspeed.utils.zero_to_fp32"
DeepSpeedCheckpoint = Unserved("checkpoint.DeepSpeedCheckpoint", _INSTEAD)
ZeROCheckpoint = Unserved("checkpoint.ZeROCheckpoint", _INSTEAD)
enable_universal_checkpoint = Unserved("checkpoint.enable_universal_checkpoint", _INSTEAD)

refuse_other_names(__name__)
