"""zero-comm: collectives that send fewer bytes, after ZeRO++ (Wang et al., arXiv 2306.10209).

The package works alone (`quantize`, `dequantize`, `quantized_all_gather`,
`quantized_reduce_scatter`), with torch's DistributedDataParallel (`ddp_comm_hook`) and FSDP2
(`zero_comm.fsdp2.apply`), and as a plug-in of a sharded-training engine (`create_collectives`,
registered as an entry point).
"""

import importlib
from importlib.metadata import version as _version
from types import ModuleType

from zero_comm.collectives.feedback import LocoSettings
from zero_comm.collectives.quantized import create_collectives
from zero_comm.ddp_hook import ddp_comm_hook
from zero_comm.functional import quantized_all_gather, quantized_reduce_scatter
from zero_comm.lossless.codec import (
    apply_difference,
    decode_values,
    encode_difference,
    encode_values,
)
from zero_comm.quantizer.backend import backend, warn_without_kernels
from zero_comm.quantizer.block_format import DEFAULT_BLOCK_SIZE, BlockFormat, quantized_nbytes
from zero_comm.quantizer.message import CorruptMessageError
from zero_comm.quantizer.quantize import (
    QUANTIZABLE_DTYPES,
    dequantize,
    dequantize_rows,
    dequantize_sum,
    quantize,
    quantize_rows,
)
from zero_comm.transport.torch_collectives import TorchCollectives

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "QUANTIZABLE_DTYPES",
    "BlockFormat",
    "CorruptMessageError",
    "LocoSettings",
    "TorchCollectives",
    "__version__",
    "apply_difference",
    "backend",
    "create_collectives",
    "ddp_comm_hook",
    "decode_values",
    "dequantize",
    "dequantize_rows",
    "dequantize_sum",
    "encode_difference",
    "encode_values",
    "quantize",
    "quantize_rows",
    "quantized_all_gather",
    "quantized_nbytes",
    "quantized_reduce_scatter",
]

__version__ = _version("zero-comm")

warn_without_kernels()


def __getattr__(name: str) -> ModuleType:
    """Import `zero_comm.fsdp2` on first use, because it imports torch's FSDP2, which is slow."""
    if name != "fsdp2":
        raise AttributeError(f"module 'zero_comm' has no attribute {name!r}")
    return importlib.import_module("zero_comm.fsdp2")
