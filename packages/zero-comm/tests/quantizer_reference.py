"""The buffer of [Note: the quantized buffer] by its definition: one block at a time, no tricks."""

import torch
from torch import Tensor

ALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TOP_LEVEL = {8: 127, 4: 7}
BFLOAT16_MAX = torch.finfo(torch.bfloat16).max


def block_step(block: Tensor, bits: int) -> Tensor:
    """The fp32 step of one block, a 0-dim tensor."""
    values = block.float()
    if not values.isfinite().all():
        return torch.tensor(float("nan"))
    top = 65280.0 if block.dtype == torch.float16 else BFLOAT16_MAX
    largest = values.abs().max().clamp(2.0**-100, top)
    return largest.bfloat16().float() / TOP_LEVEL[bits]


def steps_per_element(x: Tensor, bits: int, block_size: int) -> Tensor:
    """The step that applies to each element of 1-D ``x``, fp32."""
    steps = [block_step(b, bits).expand(len(b)) for b in torch.split(x, block_size) if len(b)]
    return torch.cat(steps) if steps else torch.empty(0)


def reference_buffer(x: Tensor, bits: int, block_size: int) -> Tensor:
    """The bytes that quantizing finite 1-D ``x`` must give."""
    codes, maxima = [], []
    for block in torch.split(x, block_size):
        if not len(block):
            continue
        padded = torch.zeros(block_size)
        padded[: len(block)] = block.float()
        step = block_step(block, bits)
        code = (padded * (1 / step)).round().to(torch.int8)
        if bits == 4:
            half = block_size // 2
            code = code[:half] + 16 * code[half:]
        codes.append(code.view(torch.uint8))
        top = step * TOP_LEVEL[bits]
        maxima.append(top.bfloat16().view(1).view(torch.uint8))
    data = torch.cat([*codes, *maxima, torch.empty(0, dtype=torch.uint8)])
    return torch.cat([data, torch.zeros(-len(data) % 16, dtype=torch.uint8)])
