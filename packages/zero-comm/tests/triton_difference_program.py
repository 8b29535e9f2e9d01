"""Holds the Triton codec of lossless differences against plain torch, in Triton's interpreter.

Started as ``python triton_difference_program.py`` with ``TRITON_INTERPRET=1``, which triton reads
as it is imported. Prints a JSON object: what differed, and what was seen.
"""

import json

import torch
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
from hypothesis import given, settings

from zero_comm.differences.triton_codec import CODEC

CPU = torch.device("cpu")


@settings(max_examples=40, deadline=None, database=None)
@given(pairs)
def hold_against_torch(both: Pair) -> None:
    """Any two tensors."""
    assert wrong_of(*both, CODEC, CPU) == []


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
        for numel, count in ((300, 20), (2100, 8)):
            for share in (0.05, 0.5):
                old, new = pair(numel, dtype, share, 7, numel)
                difference = encoded(REFERENCE, old, new)
                for other in damaged(difference, numel, count, numel):
                    wrong_of_damaged += wrong_verdicts(other, old, CODEC, CPU)
                    num_damaged += 1
                    num_refused += not decoded(REFERENCE, other, old)[0]
    hold_against_torch()
    found = {"modes": modes, "wrong": wrong, "wrong_of_damaged": wrong_of_damaged}
    print(json.dumps({**found, "damaged": num_damaged, "refused": num_refused}))


if __name__ == "__main__":
    main()
