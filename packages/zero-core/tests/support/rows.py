"""Rows of the equality table on threads or, with torch's CUDA build, on devices over NCCL."""

from __future__ import annotations

import dataclasses
import re
import zlib
from pathlib import Path

import torch

from support import fake_cuda
from zero_core.comm.groups import Ranks
from zero_core.comm.topology import find_ranks
from zero_core.testing import equal, simulate, spawn
from zero_core.testing.equal import Row, Variant

TWO_KERNELS = re.compile(
    "ratio|border that moves|budget|names on the host|first half|all in files|NAdam"
    "|4-bit messages, updates in backward"
)
"""Variants that update some elements on the device, where another kernel rounds differently.

They are compared only with a run under other delays: bit by bit, or within a tolerance if the
border between the elements of host and device moves.
"""


def check(row: Row, variant: Variant, folder: Path) -> None:
    """Compare a row's variant with its base bit by bit, except as in `TWO_KERNELS`.

    On devices, jobs are delayed at random, and the base is also compared with a run on the CPU.
    """
    if not torch.version.cuda:
        equal.check(row, variant, folder)
        return
    (folder / "cpu").mkdir()
    given = (row, variant, folder)
    if not TWO_KERNELS.search(row.variant):
        simulate(_run_on_cpu, row.ranks, *given, ranks_per_node=row.per_node)
    spawn(_run_on_devices, row.ranks, *given, ranks_per_node=row.per_node, backend="nccl")


def _run_on_cpu(ranks: Ranks, row: Row, variant: Variant, folder: Path) -> None:
    trace = equal.run_side(ranks, row, equal.base_of(variant), folder / "plain")
    torch.save(vars(trace), folder / "cpu" / f"{ranks.rank}.pt")


def _run_on_devices(rank: int, world_size: int, row: Row, variant: Variant, folder: Path) -> None:
    torch.accelerator.set_device_index(rank)  # the simulated nodes share one host
    ranks = find_ranks(None, None)
    assert ranks.device == torch.device("cuda", rank)

    def delay(turn: int) -> None:
        seed = zlib.crc32(f"{row} {rank} {turn}".encode())
        fake_cuda.set_delays(seed=seed, copy_s=1e-3, kernel_s=2e-5)

    # The fake device delays collectives, so the variant's own ``collectives`` are not needed.
    further = {k: v for k, v in variant.further.items() if k != "collectives"}
    variant = dataclasses.replace(variant, further=further)
    has_two = TWO_KERNELS.search(row.variant) is not None
    delay(0)
    plain = equal.run_side(
        ranks, row, variant if has_two else equal.base_of(variant), folder / "plain"
    )
    # Across nodes, accelerators sum gradients in another order than CPUs.
    if not has_two and (row.ranks == row.per_node or row.per_node == 1):
        on_cpu = equal.Trace(**torch.load(folder / "cpu" / f"{rank}.pt"))
        for name in plain.values.keys() - on_cpu.values.keys():
            # If all steps were skipped, only accelerators have optimizer states. They are zeros.
            on_cpu.values[name] = torch.zeros_like(plain.values[name])
        equal.compare(ranks, row, plain, on_cpu)
    delay(1)
    found = equal.run_side(ranks, row, variant, folder / "variant")
    if "border that moves" in row.variant:  # it moves at different steps in each run
        torch.testing.assert_close(found.values, plain.values, rtol=2e-2, atol=1e-3)
    else:
        equal.compare(ranks, row, found, plain)
