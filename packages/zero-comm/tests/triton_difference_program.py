"""Holds the Triton codecs of differences and of values against plain torch, in the interpreter.

Started as ``python triton_difference_program.py`` with ``TRITON_INTERPRET=1``, which triton reads
as it is imported. Prints a JSON object: what differed, and what was seen.
"""

import json
from typing import Any

import torch
import value_cases
from difference_cases import (
    REFERENCE,
    all_modes,
    cases,
    damaged,
    decoded,
    encoded,
    modes_in,
    pair,
    wrong_of,
    wrong_verdicts,
)
from difference_strategies import Pair, pairs
from forced_backend import forced
from hypothesis import given, settings
from torch import Tensor

from zero_comm.differences.triton_codec import CODEC
from zero_comm.quantizer.checksum import checksum_of, checksums
from zero_comm.values.triton_codec import CODEC as VALUE_CODEC

CPU = torch.device("cpu")


@settings(max_examples=40, deadline=None, database=None)
@given(pairs)
def hold_against_torch(both: Pair) -> None:
    """Any two tensors."""
    assert wrong_of(*both, CODEC, CPU) == []


@settings(max_examples=40, deadline=None, database=None)
@given(value_cases.any_values())
def hold_values_against_torch(values: Tensor) -> None:
    """Any tensor."""
    assert value_cases.wrong_values(values, VALUE_CODEC, CPU) == []


def of_values() -> dict[str, Any]:
    """What differs in coded values."""
    wrong = [
        line
        for values in value_cases.value_cases()
        for line in value_cases.wrong_values(values, VALUE_CODEC, CPU)
    ]
    verdicts = []
    for dtype in (torch.bfloat16, torch.float32):
        for numel, count in ((300, 10), (2100, 4)):
            values = value_cases.values_of(numel, dtype, 4, 0.02, numel)
            buffer = value_cases.encoded_values(value_cases.REFERENCE, values)
            for other in damaged(buffer, numel, count, numel):
                verdicts += value_cases.wrong_value_verdicts(other, values, VALUE_CODEC, CPU)
    hold_values_against_torch()
    return {"wrong_values": wrong, "wrong_of_damaged_values": verdicts}


def wrong_checksums() -> list[int]:
    """Lengths in bytes whose checksum by the kernel is not that of plain torch; -1 for rows."""
    values = torch.arange(13_000, dtype=torch.int64).mul_(-7046029254386353131).view(torch.int16)
    found = []
    for numel in (0, 1, 4, 4095, 4096, 4097, 16_384, 20_003, 52_000):
        sums = []
        for name in ("torch", "triton"):
            with forced(name):
                sums.append(int(checksum_of(values[:numel])))
        if sums[0] != sums[1]:
            found.append(2 * numel)
    rows = values[: 3 * 8200].view(torch.uint8).view(3, -1)[:, :16_384]  # with gaps
    with forced("torch"):
        expected = checksums(rows)
    with forced("triton"):
        if not torch.equal(checksums(rows), expected):
            found.append(-1)
    return found


def main() -> None:
    """Run all cases."""
    torch.set_num_threads(1)
    modes = {}
    for dtype in (torch.bfloat16, torch.float32):
        old, new = all_modes(dtype)  # they are among the cases
        modes[dtype.itemsize] = sorted(modes_in(encoded(REFERENCE, old, new), old.numel()))
    wrong = [line for old, new in cases() for line in wrong_of(old, new, CODEC, CPU)]
    wrong_of_damaged, num_refused, num_damaged = [], 0, 0
    for dtype in (torch.bfloat16, torch.float32):
        for numel, count in ((300, 10), (2100, 4)):
            for share in (0.05, 0.5):
                old, new = pair(numel, dtype, share, 7, numel)
                difference = encoded(REFERENCE, old, new)
                for other in damaged(difference, numel, count, numel):
                    wrong_of_damaged += wrong_verdicts(other, old, CODEC, CPU)
                    num_damaged += 1
                    num_refused += not decoded(REFERENCE, other, old)[0]
    hold_against_torch()
    found = {"modes": modes, "wrong": wrong, "wrong_of_damaged": wrong_of_damaged}
    found |= {"damaged": num_damaged, "refused": num_refused}
    found["wrong_checksums"] = wrong_checksums()
    print(json.dumps({**found, **of_values()}))


if __name__ == "__main__":
    main()
