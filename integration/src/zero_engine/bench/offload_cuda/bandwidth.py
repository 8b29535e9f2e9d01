"""What the bus and the host's memory carry, measured in a fresh process.

Started as ``python -m zero_engine.bench.offload_cuda.bandwidth NUMEL STORE RANK RESULT``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from zero_engine.bench.offload_cuda.jobs import find_device

__all__ = ["host_bytes_per_s", "pinned_copy_bytes_per_s"]

REPEATS = 8
TRIAD_BYTES = 12
"""An element of the triad: one fp32 read and written, one read."""


def host_bytes_per_s(numel: int) -> float:
    """Bandwidth of a triad ``a += s * b`` over ``numel`` fp32 elements each, all threads.

    In place, so that every line that is written was read before, as in an optimizer's step: the
    processor fetches none that is not counted.
    """
    a, b = torch.ones(numel), torch.ones(numel)
    return numel * TRIAD_BYTES / _best_s(lambda: a.add_(b, alpha=1e-6))


def pinned_copy_bytes_per_s(num_bytes: int, device: torch.device) -> dict[str, float]:
    """Bandwidth of copies between pinned host memory and the device: ``d2h`` and ``h2d``."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def timed(target: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            torch.accelerator.synchronize(device)

        return num_bytes / _best_s(copy)

    return {"d2h": timed(host, there), "h2d": timed(there, host)}


def _best_s(run: Callable[[], object]) -> float:
    """The fastest of several calls after one that is not timed."""
    run()
    times = []
    for _ in range(REPEATS):
        started_at = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_at)
    return min(times)


def main() -> None:
    """Read the command line, measure, write the result."""
    numel, _, _, result = sys.argv[1:]
    device = find_device()
    copies = None if device.type == "cpu" else pinned_copy_bytes_per_s(4 * int(numel), device)
    found = {"host": host_bytes_per_s(int(numel)), "pinned": copies}
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
