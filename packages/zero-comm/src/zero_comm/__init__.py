"""zero-comm: collectives that send fewer bytes, after ZeRO++ (Wang et al., arXiv 2306.10209).

Usable alone (`quantize`, `dequantize`, `quantized_all_gather`) and as a part of an engine that
asks for quantized weights (`create_collectives`, announced by an entry point).
"""

from zero_comm.backend import backend
from zero_comm.block_format import DEFAULT_BLOCK_SIZE, BlockFormat, quantized_nbytes
from zero_comm.collectives import create_collectives
from zero_comm.functional import quantized_all_gather
from zero_comm.quantizer import (
    QUANTIZABLE_DTYPES,
    dequantize,
    dequantize_rows,
    dequantize_sum,
    quantize,
    quantize_rows,
)

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "QUANTIZABLE_DTYPES",
    "BlockFormat",
    "backend",
    "create_collectives",
    "dequantize",
    "dequantize_rows",
    "dequantize_sum",
    "quantize",
    "quantize_rows",
    "quantized_all_gather",
    "quantized_nbytes",
]
