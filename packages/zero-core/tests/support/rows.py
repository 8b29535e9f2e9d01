"""Rows of the equality table on threads or, with the fake CUDA, on devices over NCCL."""

from __future__ import annotations

import dataclasses
import os
import re
import zlib
from pathlib import Path

import torch

from support import fake_cuda
from support.fake_cuda import triton_jobs
from zero_core.comm.groups import Ranks
from zero_core.comm.topology import find_ranks
from zero_core.testing import equal, simulate, spawn
from zero_core.testing.equal import Row, Variant

IS_ON_DEVICES = torch.cuda.is_available() and any(Path(torch.__path__[0]).glob("lib/libfake_*"))
TWO_KERNELS = re.compile(
    r"\bratio\b|border that moves|budget|names on the host|first half|all in files|NAdam"
    "|4-bit messages, updates in backward"
)
"""Variants that update some elements with another kernel than their base.

Devices use torch's kernel, the host cpu-adam's (for NAdam: torch's loop). So the variant's results
are only close to the base's. They must not depend on delays, unless the border moves.
"""


def check(row: Row, variant: Variant, folder: Path, seed: int = 0) -> None:
    """Compare both sides of a row, bit by bit except for `TWO_KERNELS`.

    On devices, jobs are delayed at random, and rows with `_has_cpu_bits` are compared with the CPU.
    The variant's collectives run one at a time, so that ranks with different orders hang.
    """
    if not IS_ON_DEVICES:
        equal.check(row, variant, folder)
        return
    given = (row, variant, folder)
    if _has_cpu_bits(row):
        simulate(_run_on_cpu, row.ranks, *given, ranks_per_node=row.per_node)
    spawn(_run_on_devices, row.ranks, *given, seed, ranks_per_node=row.per_node, backend="nccl")


def _has_cpu_bits(row: Row) -> bool:
    """Whether devices sum in the CPU's order: not with several nodes of several ranks each."""
    return row.ranks == row.per_node or row.per_node == 1


def _run_on_cpu(ranks: Ranks, row: Row, variant: Variant, folder: Path) -> None:
    trace = equal.run_side(ranks, row, equal.base_of(variant), folder / "plain")
    torch.save(vars(trace), folder / f"cpu {ranks.rank}.pt")


def _run_on_devices(
    rank: int, world_size: int, row: Row, variant: Variant, folder: Path, seed: int
) -> None:
    torch.accelerator.set_device_index(rank)  # all simulated nodes are on one host
    ranks = find_ranks(None, None)
    assert ranks.device == torch.device("cuda", rank)
    if os.environ.get("TRITON_INTERPRET") == "1":  # otherwise, torch's operators replace Triton
        triton_jobs.install()

    def run(side: Variant, name: str) -> equal.Trace:
        of_run = zlib.crc32(f"{row} {rank} {name} {seed}".encode())
        fake_cuda.set_delays(seed=of_run, copy_s=1e-3, kernel_s=2e-5)
        fake_cuda.set_one_collective_at_a_time(name != "plain")
        return equal.run_side(ranks, row, side, folder / name)

    plain = run(equal.base_of(variant), "plain")
    has_two = TWO_KERNELS.search(row.variant) is not None
    if _has_cpu_bits(row):
        on_cpu = equal.Trace(**torch.load(folder / f"cpu {rank}.pt"))
        for name in plain.values.keys() - on_cpu.values.keys():
            # If all steps are skipped, states exist only on accelerators, as zeros.
            on_cpu.values[name] = torch.zeros_like(plain.values[name])
        (_compare_nearly if "NAdam" in row.variant else equal.compare)(ranks, row, plain, on_cpu)
    # Leave out collectives with delays, because the fake device already delays collectives.
    further = {k: v for k, v in variant.further.items() if k != "collectives"}
    variant = dataclasses.replace(variant, further=further)
    found = run(variant, "variant")
    (_compare_nearly if has_two else equal.compare)(ranks, row, found, plain)
    if has_two and "border that moves" not in row.variant:  # its moves differ between runs
        equal.compare(ranks, row, run(variant, "again"), found)


def _compare_nearly(ranks: Ranks, row: Row, found: equal.Trace, plain: equal.Trace) -> None:
    assert found.num_skipped == plain.num_skipped, row
    torch.testing.assert_close(found.values, plain.values, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(found.losses, plain.losses, rtol=2e-2, atol=2e-3)
