"""One row of figures per job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zero_comm.backend import Backend
from zero_comm.reference import TorchBackend
from zero_engine.bench.comm_cuda.jobs import Job
from zero_engine.bench.comm_cuda.settings import BAR, BAR_NUMEL, Settings
from zero_engine.bench.comm_cuda.timing import Stopwatch, medians_s

__all__ = ["WrongResultError", "measure"]


class WrongResultError(RuntimeError):
    """The backend gave other bytes or values than the host: its speed is of no interest."""


def measure(
    job: Job,
    backend: Backend,
    settings: Settings,
    stopwatch: Stopwatch,
    device: torch.device,
) -> dict[str, Any]:
    """Check, then time, ``backend``, plain torch and a copy of as many bytes.

    Raises:
        WrongResultError: a result differs from the host's.
    """
    backends: dict[str, Backend] = {"torch": TorchBackend(), backend.name: backend}
    is_equal = {name: _is_right(job, contender) for name, contender in backends.items()}
    if not is_equal[backend.name]:
        raise WrongResultError(
            f"{job.name}: the {backend.name} backend on {device} gives another result than torch "
            "on the host: run packages/zero-comm/tests/test_quantizer_on_accelerator.py there"
        )
    source = torch.zeros(job.moved_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    contenders: dict[str, Callable[[], None]] = {
        "copy": lambda: _discard(target.copy_(source)),
        **{name: _runner(job, contender) for name, contender in backends.items()},
    }
    times = medians_s(contenders, stopwatch, rounds=settings.rounds, calls=settings.calls)
    return {
        "operation": job.operation,
        "kind": job.kind,
        "dtype": job.dtype,
        "numel": job.numel,
        "moved_bytes": job.moved_bytes,
        "backend": backend.name,
        "is_equal_to_host": is_equal,
        "median_s": times,
        **_figures(times, job, backend.name, device),
    }


def _figures(
    times: dict[str, float], job: Job, name: str, device: torch.device
) -> dict[str, float | bool | None]:
    """Bandwidths, and how they compare; null on a CPU, whose times say nothing of a GPU."""
    if device.type == "cpu":
        keys = ("bytes_per_s", "copy_bytes_per_s", "share", "times_torch", "is_met")
        return dict.fromkeys(keys)
    share = times["copy"] / times[name]
    return {
        "bytes_per_s": job.moved_bytes / times[name],
        "copy_bytes_per_s": job.moved_bytes / times["copy"],
        "share": share,
        "times_torch": times["torch"] / times[name],
        "is_met": share >= BAR if job.numel >= BAR_NUMEL else None,
    }


def _is_right(job: Job, backend: Backend) -> bool:
    job.spoil()
    job.run(backend)
    return job.is_right()


def _runner(job: Job, backend: Backend) -> Callable[[], None]:
    return lambda: job.run(backend)


def _discard(_: object) -> None:
    """The tensor that was copied to."""
