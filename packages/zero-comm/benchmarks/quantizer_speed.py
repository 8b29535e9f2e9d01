"""Prints the quantizer's speed on this machine's CPU, for every backend and for a plain copy.

Rates are bytes of the unquantized tensor per second, for quantizing, dequantizing, and the two in
sequence. With one thread the time is the thread's processor time, which excludes other programs.
With several threads it is wall-clock time. Backends alternate within a repetition, so the machine's
load affects all backends alike. The table has medians.

Usage: python quantizer_speed.py [--threads 1] [--numel 67108864] [--repetitions 5] [--json FILE]
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import zero_comm
from zero_comm import BlockFormat

CASES = (
    (torch.bfloat16, BlockFormat.make("int8")),
    (torch.bfloat16, BlockFormat.make("int4")),
    (torch.float32, BlockFormat.make("int8")),
    (torch.float32, BlockFormat.make("int4")),
    (torch.float16, BlockFormat.make("int8")),
    (torch.bfloat16, BlockFormat("int4", 128, has_rotation=True)),
    (torch.bfloat16, BlockFormat.make("e4m3")),
    (torch.bfloat16, BlockFormat("int8", 256, is_symmetric=False)),
)
NUM_ROWS = 4  # rows that the "sum" action adds
LIMIT = 5.0  # GB/s per core for quantizing and dequantizing bf16 as int8
LIMIT_RATIO = 4.0  # required speed-up over plain torch

Row = dict[str, object]


def seconds(run: Callable[[], object]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run()
    return clock() - start


def backends() -> list[str]:
    """Return the backends available for CPU tensors."""
    return ["torch", "native"] if zero_comm.backend() == "native" else ["torch"]


def actions(x: torch.Tensor, fmt: BlockFormat, seed: int | None) -> dict[str, Callable[[], object]]:
    """Return the actions to measure, by name. All of them use memory that was touched before."""
    numel = x.numel()
    back, packed = torch.empty_like(x), zero_comm.quantize(x, fmt, seed=seed)
    part = numel // NUM_ROWS
    rows = torch.empty(NUM_ROWS, zero_comm.quantized_nbytes(part, fmt), dtype=torch.uint8)
    zero_comm.quantize_rows(x, fmt, rows)
    total = torch.zeros(part)
    return {
        "quantize": lambda: zero_comm.quantize(x, fmt, seed=seed, out=packed),
        "dequantize": lambda: zero_comm.dequantize(packed, numel, fmt, dtype=x.dtype, out=back),
        "sum": lambda: zero_comm.dequantize_sum(rows, part, fmt, total),
        "copy": lambda: back.copy_(x),
    }


def measure(
    dtype: torch.dtype, fmt: BlockFormat, numel: int, repetitions: int, seed: int | None
) -> list[Row]:
    """Return the rates of every action on every backend, as rows of the table."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    todo = actions(x, fmt, seed)
    times: dict[tuple[str, str], list[float]] = {}
    for repetition in range(repetitions + 1):
        for name in backends():
            os.environ["ZERO_COMM_BACKEND"] = name
            for action, run in todo.items():
                taken = seconds(run)
                if repetition:  # repetition 0 is a warm-up
                    times.setdefault((name, action), []).append(taken)
    del os.environ["ZERO_COMM_BACKEND"]
    return [row_of(name, dtype, fmt, seed, x.nbytes, times) for name in backends()]


def row_of(
    name: str,
    dtype: torch.dtype,
    fmt: BlockFormat,
    seed: int | None,
    nbytes: int,
    times: dict[tuple[str, str], list[float]],
) -> Row:
    def rate(backend: str, *names: str) -> float:
        taken = [sum(parts) for parts in zip(*(times[backend, n] for n in names), strict=True)]
        return float(nbytes / statistics.median(taken) / 1e9)

    both = rate(name, "quantize", "dequantize")
    return {
        "dtype": str(dtype)[6:],
        "format": describe(fmt, seed),
        "backend": name,
        "quantize": rate(name, "quantize"),
        "dequantize": rate(name, "dequantize"),
        "both": both,
        "ratio": both / rate("torch", "quantize", "dequantize"),
        "sum": rate(name, "sum"),
        "copy": rate(name, "copy"),
    }


def describe(fmt: BlockFormat, seed: int | None) -> str:
    words = [fmt.kind, str(fmt.block_size)]
    words += [] if fmt.is_symmetric else ["asymmetric"]
    words += ["rotated"] if fmt.has_rotation else []
    return " ".join(words + (["stochastic"] if seed is not None else []))


def line(row: Row) -> str:
    names = ("quantize", "dequantize", "both", "ratio", "sum", "copy")
    numbers = "".join(f"{row[name]:>11.2f}" for name in names)
    return f"{row['dtype']:>9}  {row['format']:<20} {row['backend']:>7}{numbers}"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed of the block quantizer on the CPU.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--numel", type=int, default=1 << 26)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--cases", type=int, default=len(CASES) + 1, help="only the first N")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(given)


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    print(f"{options.numel} elements, {options.threads} threads, load {os.getloadavg()[0]:.1f}")
    print("GB/s of unquantized bytes; ratio: both, against torch; medians")
    names = ("quantize", "dequantize", "both", "ratio", f"sum of {NUM_ROWS}", "copy")
    print(f"{'dtype':>9}  {'format':<20} {'backend':>7}" + "".join(f"{name:>11}" for name in names))
    cases = [(dtype, fmt, None) for dtype, fmt in CASES]
    rows: list[Row] = []
    for dtype, fmt, seed in [*cases, (*CASES[1], 1)][: options.cases]:
        for row in measure(dtype, fmt, options.numel, options.repetitions, seed):
            rows.append(row)
            print(line(row), flush=True)
    print(f"wanted: bfloat16 int8, native: both >= {LIMIT} per core, ratio >= {LIMIT_RATIO}")
    if options.json is not None:
        report = {"threads": options.threads, "numel": options.numel, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
