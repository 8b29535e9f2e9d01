"""Expected bytes of lossless messages: of differences from the learning rate, and of gradients.

A step of Adam moves each weight by about the learning rate ``lr``. How many bits that changes
depends on how far apart neighbouring numbers are, which is proportional to the weight. So the bits
of a difference are a function of ``lr * 2**p / std`` alone, where p is the precision of the dtype
in bits (8 for bf16, 11 for fp16, 24 for fp32) and std the standard deviation of the weights.

`_TYPICAL` is what differences take per weight for normal weights that move by 0.3 lr
times a normal number. It was made by encoding 2**21 weights. The first steps of Adam, which move
all weights by lr, take up to 2.5 times as much (recorded steps: the project's docs/benchmarks.md).
"""

from __future__ import annotations

import math
from typing import Final

import torch

from zero_comm.lossless.block_frame import BLOCK_NUMEL, descriptors_nbytes, num_blocks
from zero_comm.lossless.message import HEADER_NBYTES, message_nbytes
from zero_comm.lossless.value_format import fixed_nbytes

_STD: Final = 0.02  # of initial weights in most transformers
_FIRST_POWER, _POWER_STEP = -10, 2
# fmt: off
_TYPICAL: Final = (
    0.09, 0.14, 0.26, 0.59, 1.43, 2.21, 3.97, 6.53, 9.2, 12.3, 16.1, 16.5, 18.2, 24.3,
)
# fmt: on


def expected_difference_bits(dtype: torch.dtype, learning_rate: float) -> float:
    """Return the bits per weight, fp32, bf16 or fp16, that a step's difference should take."""
    if learning_rate <= 0.0:
        return 0.0625  # a descriptor of 16 bits per block
    precision = 1 - math.log2(torch.finfo(dtype).eps)
    power = math.log2(learning_rate / _STD) + precision
    place = min(max((power - _FIRST_POWER) / _POWER_STEP, 0.0), len(_TYPICAL) - 1.0)
    low = min(int(place), len(_TYPICAL) - 2)
    expected = _TYPICAL[low] + (place - low) * (_TYPICAL[low + 1] - _TYPICAL[low])
    return min(8.0 * dtype.itemsize, expected)


def expected_difference_nbytes(numel: int, dtype: torch.dtype, learning_rate: float) -> int:
    """Return the expected bytes of a message of differences of weights."""
    return HEADER_NBYTES + math.ceil(numel * expected_difference_bits(dtype, learning_rate) / 8)


def expected_gradient_nbytes(numel: int, itemsize: int) -> int:
    """Return the bytes of a message of bfloat16 or float32 gradients of a normal distribution.

    Of 256 of them the largest is between 2 and 4 standard deviations, so a code of 7 or more stands
    for less than 1/32 of one: 1 element in 40.
    """
    coded = fixed_nbytes(3, itemsize) + BLOCK_NUMEL // 40
    return message_nbytes(descriptors_nbytes(numel) + num_blocks(numel) * coded)
