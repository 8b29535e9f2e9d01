"""The program of each rank that calibrates: ``python -m zero_engine.calibration.rank FOLDER``."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zero_engine.calibration.operators import time_operators
from zero_engine.calibration.timing import Stopwatch
from zero_engine.calibration.training import (
    fit_operators,
    time_copies,
    time_engine,
    time_exchanges,
    time_files,
    time_updates,
)


def measure(
    device: torch.device, *, cores: int | None, disk: Path | None, is_link_alone: bool = False
) -> dict[str, Any]:
    """Return the rates of this rank, as a row of a calibration's JSON. Every rank calls it.

    Args:
        device: where it computes.
        cores: of the machine, where its ranks compute on them.
        disk: folder on the disk of NVMe offload; None: no file is timed.
        is_link_alone: time exchanges alone, for ranks of several nodes.
    """
    watch = Stopwatch(device)
    if not is_link_alone:
        time_operators(watch)
        fit_operators(watch)
        time_updates(watch)
        time_copies(watch)
        if disk is not None:
            time_files(watch, disk)
    time_exchanges(watch)
    threads = torch.get_num_threads()
    if not is_link_alone:
        time_engine(watch, threads, cores)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return {"ranks": ranks, "threads": threads, "cores": cores, "curves": watch.curves}


def merged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one row for all ranks: the mean of their seconds, point by point."""
    curves = {}
    for name, points in rows[0]["curves"].items():
        curves[name] = [
            (amount, sum(row["curves"][name][i][1] for row in rows) / len(rows))
            for i, (amount, _) in enumerate(points)
        ]
    return {**rows[0], "curves": curves}


def main() -> None:
    folder, cores, disk = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        assert found is not None
        device = torch.device(found.type, rank)
        torch.accelerator.set_device_index(rank)
    if size > 1:
        backend = "gloo"
        if device.type != "cpu":
            backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    row = measure(
        device,
        cores=int(cores) if device.type == "cpu" else None,
        disk=Path(disk) if disk else None,
    )
    (folder / f"rank{rank}.json").write_text(json.dumps(row), encoding="utf-8")
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
