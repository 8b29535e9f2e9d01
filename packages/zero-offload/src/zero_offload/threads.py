"""Threads of the host: pools of them, and their number for optimizer kernels."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class Threads(ThreadPoolExecutor):
    """Thread pool that refuses jobs in a process that was forked after the first job."""

    _pid: int | None = None

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        pid, self._pid = os.getpid(), self._pid or os.getpid()
        if pid != self._pid:
            raise RuntimeError(
                f"process {pid} was forked after process {self._pid} had started its threads for "
                f"offloaded state, which a fork does not copy: make the optimizer, engine or tier "
                f"in the child process"
            )
        return super().submit(fn, *args, **kwargs)


def num_kernel_threads() -> int:
    """Return the number of threads for a host kernel: torch's number if it is above 1.

    Otherwise return `share_under_torchrun`, as torchrun sets ``OMP_NUM_THREADS`` to 1 by default.
    """
    number = torch.get_num_threads()
    return number if number > 1 else share_under_torchrun()


@functools.cache
def share_under_torchrun() -> int:
    """Return this rank's share of torchrun's CPU cores.

    The cores that the torchrun process may use are divided equally among its ranks. A rank that is
    bound to fewer cores (``torchrun --numa-binding``, numactl) uses at most that many. The result
    is 1 if torchrun did not start several ranks with ``OMP_NUM_THREADS=1``, and on macOS.
    """
    found = os.environ
    is_torchruns = "TORCHELASTIC_RUN_ID" in found and found.get("OMP_NUM_THREADS") == "1"
    num_ranks = int(found.get("LOCAL_WORLD_SIZE", "1"))
    if not is_torchruns or num_ranks == 1 or not hasattr(os, "sched_getaffinity"):
        return 1
    num_own = len(os.sched_getaffinity(0))
    num_torchruns = len(os.sched_getaffinity(os.getppid()))
    share = max(1, min(num_own, num_torchruns // num_ranks))
    if share > 1:
        _log.warning(
            "OMP_NUM_THREADS is 1, as torchrun sets it: the host's optimizer kernel takes %d "
            "threads, as torchrun has %d cores for %d ranks and this rank may run on %d. Set "
            "OMP_NUM_THREADS before torchrun, or call torch.set_num_threads(), to choose another "
            "number (above 1)",
            share,
            num_torchruns,
            num_ranks,
            num_own,
        )
    return share
