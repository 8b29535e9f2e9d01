"""zero-comm: collectives that send fewer bytes, after ZeRO++ (Wang et al., arXiv 2306.10209).

Usable alone (`quantize`, `dequantize`, `quantized_all_gather`, `quantized_reduce_scatter`), from
torch's DistributedDataParallel (`ddp_comm_hook`) and FSDP2 (`zero_comm.fsdp2.apply`), and as a part
of an engine that asks for quantized weights or gradients or secondary shards
(`create_collectives`, announced by an entry point).
"""

import importlib
from types import ModuleType

from zero_comm.backend import backend
from zero_comm.block_format import DEFAULT_BLOCK_SIZE, BlockFormat, quantized_nbytes
from zero_comm.collectives import create_collectives
from zero_comm.ddp_hook import ddp_comm_hook
from zero_comm.feedback import LocoSettings
from zero_comm.functional import quantized_all_gather, quantized_reduce_scatter
from zero_comm.message import CorruptMessageError
from zero_comm.quantizer import (
    QUANTIZABLE_DTYPES,
    dequantize,
    dequantize_rows,
    dequantize_sum,
    quantize,
    quantize_rows,
)
from zero_comm.torch_collectives import TorchCollectives

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "QUANTIZABLE_DTYPES",
    "BlockFormat",
    "CorruptMessageError",
    "LocoSettings",
    "TorchCollectives",
    "backend",
    "create_collectives",
    "ddp_comm_hook",
    "dequantize",
    "dequantize_rows",
    "dequantize_sum",
    "quantize",
    "quantize_rows",
    "quantized_all_gather",
    "quantized_nbytes",
    "quantized_reduce_scatter",
]


def __getattr__(name: str) -> ModuleType:
    """`zero_comm.fsdp2`, when it is first used: torch's FSDP2 takes seconds to import."""
    if name != "fsdp2":
        raise AttributeError(f"module 'zero_comm' has no attribute {name!r}")
    return importlib.import_module("zero_comm.fsdp2")
