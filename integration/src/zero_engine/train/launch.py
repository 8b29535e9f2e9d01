"""Start of the train program on every rank of this machine, with torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.run import parse_args

from zero_core import check_config
from zero_core.checkpoint import newest_step
from zero_core.errors import ConfigError
from zero_engine.launch.torchrun import local_address_only, pass_on_warnings, run_ranks
from zero_engine.machine import available_cores
from zero_engine.terminal import count
from zero_engine.train.data import check_length, read_text
from zero_engine.train.options import Start
from zero_engine.train.run_lock import RunLock, longest_wait_s
from zero_engine.train.settings import (
    RunFolder,
    engine_config,
    fill_auto,
    fresh_run,
    read_resolved,
    resumed_run,
)

CPU_RANKS = 2
MAX_CPU_RANKS = 256


def default_ranks() -> int:
    return torch.cuda.device_count() or CPU_RANKS


def rank_environment(num_ranks: int) -> dict[str, str]:
    return {
        # Without the limit, every rank starts a thread per core.
        "OMP_NUM_THREADS": str(max(1, available_cores() // num_ranks)),
        **local_address_only(),
        # Makes cuBLAS deterministic, so that a resumed run repeats the same bits.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def check_request(options: Mapping[str, Any], start: Start, num_ranks: int | None) -> int:
    """Check the request before ranks are started. Returns the number of ranks to start."""
    num_gpus = torch.cuda.device_count()
    if num_ranks is not None and 0 < num_gpus < num_ranks:
        raise ConfigError(f"--ranks {num_ranks}: this machine has {num_gpus} GPUs, one per rank")
    if num_ranks is not None and num_ranks > max(num_gpus, MAX_CPU_RANKS):
        raise ConfigError(f"--ranks {num_ranks}: at most {MAX_CPU_RANKS} processes are started")
    folder = RunFolder.of(options)
    lock = RunLock(folder)
    if folder.has_run:
        lock.acquire(wait_s=longest_wait_s(start))
        lock.release()
    if start is Start.RESUME or (start is Start.AUTO and folder.has_run and folder.has_checkpoint):
        settings = resumed_run(options)
        is_changed = options.get("export") or options.get("sample_tokens")
        has_ended = folder.loss_plot.is_file() and newest_step(folder.checkpoint) == settings.steps
        if has_ended and not is_changed:
            print(f"all {settings.steps} steps were taken before: --steps moves the end")
            sys.exit(0)
        saved = read_resolved(folder)
        config, before = saved["config"], int(saved["world_size"])
        num_ranks = num_ranks or before
        if num_ranks != before and not config.get("world_size_invariant"):
            print(
                f"the run had {before} ranks and goes on with {num_ranks}: other samples make a "
                "step, so the numbers will differ from those of an uninterrupted run",
                file=sys.stderr,
            )
    else:
        num_ranks = num_ranks or default_ranks()
        settings = fresh_run(options, start)
        config = engine_config(settings.config, is_accelerated=num_gpus > 0)
        if settings.data is not None:
            check_length(read_text(settings.data), settings.context)
    checked = check_config(fill_auto(config, settings.steps), world_size=num_ranks)
    if checked.optimizer is None:
        raise ConfigError(
            "--config names no optimizer: add 'optimizer': {'type': 'AdamW', 'params': {'lr': ...}}"
        )
    lock.acquire(wait_s=longest_wait_s(start))  # fails if the folder cannot be made
    lock.release()
    where = f"{count(num_ranks, 'rank')} on the {'GPUs' if num_gpus else 'CPU'}"
    print(f"zero-engine train: starting {where}", file=sys.stderr)
    return num_ranks


def launch(arguments: Sequence[str], *, num_ranks: int, max_restarts: int = 0) -> int:
    """Run ``zero-engine ARGUMENTS`` on all ranks, with restarts. Returns `run_ranks`' exit code."""
    for name, value in rank_environment(num_ranks).items():
        os.environ.setdefault(name, value)
    pass_on_warnings()
    options = [f"--nproc-per-node={num_ranks}", f"--max-restarts={max_restarts}"]
    command = ["--standalone", *options, "-m", "zero_engine", *arguments]
    return run_ranks(parse_args(command))  # type: ignore[no-untyped-call]
