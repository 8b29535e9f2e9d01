"""Holds the Triton backend against plain torch, in Triton's interpreter.

Started as ``python triton_program.py`` with ``TRITON_INTERPRET=1``, which triton reads as it is
imported. Prints a JSON object: per format, the number of cases and what differed.
"""

import json
import warnings

import torch
from quantizer_cases import (
    all_bytes,
    cases,
    differences,
    extreme_blocks,
    formats,
    group_differences,
    long_cases,
    name_of,
    value_differences,
)

from zero_comm import BlockFormat
from zero_comm.quantizer.triton_backend import BACKEND, LARGEST_BLOCK_SIZE

CPU = torch.device("cpu")


def main() -> None:
    """Run all cases."""
    torch.set_num_threads(1)
    # NumPy, which interprets, warns of NaN and of overflow, which are meant here.
    warnings.simplefilter("ignore", RuntimeWarning)
    found: dict[str, dict[str, object]] = {
        name_of(fmt): {"cases": 0, "wrong": []} for fmt in formats()
    }

    def add(fmt: BlockFormat, wrong: list[str]) -> None:
        entry = found[name_of(fmt)]
        entry["cases"] += 1
        entry["wrong"] += wrong

    for case in (*cases(), *long_cases()):
        add(case.fmt, differences(case, BACKEND, CPU))
    for fmt in formats():
        if fmt.block_size == 128:
            add(fmt, value_differences(*all_bytes(fmt), BACKEND, CPU))
            add(fmt, value_differences(*extreme_blocks(fmt), BACKEND, CPU))
        # Each group costs half a second here. Their offsets and seeds are the same arithmetic for
        # all formats; so each kind has them once, with rotation or without.
        is_chosen = fmt.kind.startswith("e") or not fmt.is_symmetric
        if is_chosen and fmt.block_size == (64 if fmt.kind in ("int4", "e5m2") else 128):
            add(fmt, group_differences(fmt, BACKEND, CPU))
    touch_nothing(BlockFormat("int8", 256))
    try:
        fmt = BlockFormat("int8", 2 * LARGEST_BLOCK_SIZE)
        BACKEND.encode(
            torch.ones(1, 1), torch.zeros(1, fmt.nbytes(1), dtype=torch.uint8), fmt, None
        )
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    print(json.dumps({"formats": found, "refusal": refusal}))


def touch_nothing(fmt: BlockFormat) -> None:
    """Rows of no elements, and no rows, are no reason to start a kernel."""
    for x in (torch.empty(2, 0), torch.empty(0, 5)):
        rows = torch.empty(len(x), fmt.nbytes(x.shape[1]), dtype=torch.uint8)
        BACKEND.encode(x, rows, fmt, None)
        BACKEND.decode(rows, x, fmt)
    BACKEND.decode_sum(torch.empty(2, 0, dtype=torch.uint8), torch.empty(0), fmt)


if __name__ == "__main__":
    main()
