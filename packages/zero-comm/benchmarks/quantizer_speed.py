"""Prints how fast the quantizer is on this machine's CPU, next to a copy of the same tensor.

Rates are bytes of the unquantized tensor per second, the best of a few repetitions.
Usage: python quantizer_speed.py [threads, default 1] [elements, default 16777216]
"""

import sys
import time
from collections.abc import Callable

import torch

import zero_comm


def best_s(run: Callable[[], object], repetitions: int = 5) -> float:
    """Seconds of the fastest of a few runs, after one to warm up."""
    run()
    best = float("inf")
    for _ in range(repetitions):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def report(dtype: torch.dtype, bits: int, numel: int) -> str:
    """One line of the table: sizes and rates of one dtype and code width."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    back, packed = torch.empty_like(x), zero_comm.quantize(x, bits=bits)
    copy_s = best_s(lambda: back.copy_(x))
    quantize_s = best_s(lambda: zero_comm.quantize(x, bits=bits, out=packed))
    dequantize_s = best_s(
        lambda: zero_comm.dequantize(packed, numel, dtype=dtype, bits=bits, out=back)
    )
    rates = (f"{x.nbytes / s / 1e9:10.1f}" for s in (quantize_s, dequantize_s, copy_s))
    return f"{str(dtype)[6:]:>9} {bits:>4} {x.nbytes / packed.nbytes:>8.3f} {''.join(rates)}"


def main() -> None:
    """Print the table."""
    threads, numel = (int(a) for a in (*sys.argv[1:], *("1", str(1 << 24))[len(sys.argv) - 1 :]))
    torch.set_num_threads(threads)
    print(f"{numel} elements, {threads} threads; GB/s of unquantized bytes")
    print(f"{'dtype':>9} {'bits':>4} {'ratio':>8} {'quantize':>9} {'dequant':>9} {'copy':>9}")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for bits in (8, 4):
            print(report(dtype, bits, numel))


if __name__ == "__main__":
    main()
