"""Gloo ranks on one machine: processes that all tests share."""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

# The first torch optimizer imports this module. If a process group exists at that time, the module
# keeps it alive past destroy_process_group, and its threads may abort the process at exit.
import torch._dynamo
import torch.distributed as dist

TIMEOUT_S = 300.0
PRELOADED = [
    "hypothesis",
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "zero_offload",
]
"""Modules that the fork server imports once for all ranks."""


class _Rank:
    """Process that runs one job after another, so that torch is imported only once."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()


_POOL: list[_Rank] = []


def spawn(worker: Callable[..., None], world_size: int, *args: Any) -> None:
    """Run ``worker(rank, world_size, *args)`` on gloo ranks, and raise if a rank fails.

    ``worker`` must be a module-level function. The ranks use a file as store.
    """
    _POOL.extend(_Rank() for _ in range(world_size - len(_POOL)))
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        waiting = {}
        for rank in range(world_size):
            _POOL[rank].pipe.send((rank, worker, world_size, store, args))
            waiting[_POOL[rank].pipe] = rank
        while waiting:
            ready = wait(list(waiting), timeout=TIMEOUT_S)
            failed = [] if ready else [f"ranks {list(waiting.values())} hang"]
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                message = pipe.recv()  # type: ignore[union-attr]
                failed += [f"rank {rank}: {message}"] if message else []
            if failed:
                for rank_process in _POOL:  # the other ranks may hang
                    rank_process.process.terminate()
                _POOL.clear()
                raise AssertionError("\n".join(failed))


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # garbage collections then skip imported modules
    while True:
        rank, worker, world_size, store, args = pipe.recv()
        message, keys = "", {"rank": rank, "world_size": world_size}
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", **keys)
            worker(rank, world_size, *args)
        except BaseException:
            message = traceback.format_exc()
        gc.collect()  # Garbage may hold the group, whose threads would then run until exit.
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(message)
