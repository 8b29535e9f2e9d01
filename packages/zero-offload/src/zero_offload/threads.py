"""Number of threads of the host's kernels."""

from __future__ import annotations

import functools
import logging
import os

import torch

_log = logging.getLogger(__name__)


def num_kernel_threads() -> int:
    """Return how many threads a kernel on the host takes: as many as torch, as a rule.

    torchrun sets ``OMP_NUM_THREADS`` to 1 where it starts several ranks and the user has set
    nothing, so torch has one thread. Then it is `share_under_torchrun`, and the log says so. The
    bits of a kernel's result do not depend on it; torch's own operators keep one thread.
    """
    number = torch.get_num_threads()
    return number if number > 1 else share_under_torchrun()


@functools.cache
def share_under_torchrun() -> int:
    """Return this rank's share of the cores that torchrun was given. 1 without torchrun.

    Ranks may be bound to cores of their own (``torchrun --numa-binding``, numactl), or several to
    the same. torchrun itself is bound to none of those, so the ranks share its cores equally, and
    no rank takes more than it may run on.
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
