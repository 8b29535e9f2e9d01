"""Rows of the equality table on threads or, with torch's CUDA build, on devices over NCCL."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path

import torch

from support import fake_cuda
from zero_core.comm.groups import Ranks
from zero_core.comm.topology import find_ranks
from zero_core.testing import equal, simulate, spawn
from zero_core.testing.equal import Row, Variant


def check(row: Row, variant: Variant, folder: Path) -> None:
    """Compare both sides of a row bit by bit.

    On devices, jobs are delayed at random and the base has the bits of the CPU's run, too.
    """
    if not torch.version.cuda:
        equal.check(row, variant, folder)
        return
    (folder / "cpu").mkdir()
    given = (row, variant, folder)
    simulate(_run_on_cpu, row.ranks, *given, ranks_per_node=row.per_node)
    spawn(_run_on_devices, row.ranks, *given, ranks_per_node=row.per_node, backend="nccl")


def _run_on_cpu(ranks: Ranks, row: Row, variant: Variant, folder: Path) -> None:
    trace = equal.run_side(ranks, row, equal.base_of(variant), folder / "plain")
    torch.save(vars(trace), folder / "cpu" / f"{ranks.rank}.pt")


def _run_on_devices(
    rank: int, world_size: int, row: Row, variant: Variant, folder: Path
) -> None:
    torch.accelerator.set_device_index(rank)  # of one host, whatever the number of nodes
    ranks = find_ranks(None, None)
    fake_cuda.set_delays(seed=zlib.crc32(f"{row} {rank}".encode()), copy_s=1e-3, kernel_s=2e-5)
    assert ranks.device == torch.device("cuda", rank)
    plain = equal.run_side(ranks, row, equal.base_of(variant), folder / "plain")
    # Sums of gradients across nodes have another order on accelerators (decision 112).
    if row.ranks == row.per_node or row.per_node == 1:
        on_cpu = equal.Trace(**torch.load(folder / "cpu" / f"{rank}.pt"))
        for name in plain.values.keys() - on_cpu.values.keys():
            # Accelerators have states before the first step that is not skipped.
            on_cpu.values[name] = torch.zeros_like(plain.values[name])
        equal.compare(ranks, row, plain, on_cpu)
    # The device delays collectives by itself.
    further = {k: v for k, v in variant.further.items() if k != "collectives"}
    variant = dataclasses.replace(variant, further=further)
    found = equal.run_side(ranks, row, variant, folder / "variant")
    equal.compare(ranks, row, found, plain)
