"""Block quantizer: buffer format, backends for each device, and checked messages."""

from zero_comm.quantizer.quantize import (
    QUANTIZABLE_DTYPES,
    dequantize,
    dequantize_rows,
    dequantize_sum,
    quantize,
    quantize_rows,
)

__all__ = [
    "QUANTIZABLE_DTYPES",
    "dequantize",
    "dequantize_rows",
    "dequantize_sum",
    "quantize",
    "quantize_rows",
]
