"""Ranks on one machine: processes forked from a server that has imported torch once.

`PeakMemory` and `OwnPeakMemory` measure the memory of a process as counted by Linux.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch

# Import torch._dynamo before a process group exists. Otherwise the first torch optimizer imports
# it, and the module keeps the group alive after destroy_process_group (torch 2.13). The group's
# threads may then abort the process at exit.
import torch._dynamo
import torch.distributed as dist
import torch.multiprocessing as mp

from zero_core._libc import release_free_pages
from zero_core.comm.groups import Ranks
from zero_core.comm.topology import find_ranks

# Modules that ranks of tests import. The oracle imports most of them.
_PRELOADED = [__name__, "zero_core.testing.oracle", "pytest", "hypothesis"]
_LIMIT = timedelta(minutes=5)
"""Longest wait of one rank for another."""


def preload(*modules: str) -> None:
    """Make the fork server import ``modules``, which saves each forked rank the import.

    Call it before the first `spawn`. A module that the server cannot import is imported later by
    the ranks that need it.
    """
    _PRELOADED.extend(modules)


def spawn(
    worker: Callable[..., None],
    world_size: int,
    *args: Any,
    ranks_per_node: int | None = None,
    backend: str = "gloo",
) -> None:
    """Run ``worker(rank, world_size, *args)`` on ranks, and raise if a rank raises.

    ``worker`` must be a module-level function. Ranks are forked from a server that has already
    imported torch, and connect through a file store. ``ranks_per_node`` sets torchrun's environment
    variables for nodes of that size. A ``backend`` such as "cpu:gloo,cuda:gloo" lets all ranks
    share one accelerator. With "nccl" each rank has its own, and LOCAL_RANK is the rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        given = (worker, world_size, store, ranks_per_node, backend, args)
        _fork(_run_rank, given, world_size)


def run_on_processes(
    program: Callable[..., object], world_size: int, *args: Any, ranks_per_node: int | None = None
) -> None:
    """Run ``program(ranks, *args)`` as `simulate` does, but on gloo ranks."""
    spawn(_run_program, world_size, program, *args, ranks_per_node=ranks_per_node)


def _run_program(rank: int, world_size: int, program: Callable[..., object], *args: Any) -> None:
    program(find_ranks(None, None), *args)


def run_alone(worker: Callable[..., None], *args: Any) -> None:
    """Run ``worker(*args)`` in one process forked as by `spawn`, without a process group."""
    _fork(_run_alone, (worker, args), 1)


def _fork(function: Callable[..., None], args: tuple[Any, ...], number: int) -> None:
    multiprocessing.set_forkserver_preload(_PRELOADED)
    mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        function, args, number, start_method="forkserver"
    )


def on_processes(
    world_size: int | None = None,
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Run a test on gloo ranks. Its first argument is the rank's `Ranks`.

    ``world_size`` is as in `on_ranks`. The test's other arguments are pickled.
    """

    def decorate(test: Callable[..., object]) -> Callable[..., None]:
        def run(size: int, arguments: dict[str, Any]) -> None:
            run_on_processes(_run_test, size, test.__module__, test.__name__, arguments)

        return of_size(test, world_size, run)

    return decorate


def alone(test: Callable[..., object]) -> Callable[..., None]:
    """Run a test in a separate process, as `run_alone` does. Its arguments are pickled."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        run_alone(_run_test, None, test.__module__, test.__name__, arguments)

    return run


def of_size(
    test: Callable[..., object], world_size: int | None, run: Callable[[int, dict[str, Any]], None]
) -> Callable[..., None]:
    """Return ``test`` without its first parameter, as a function that calls ``run``.

    ``world_size`` is the number of ranks. None: the test is parametrized by "world_size".
    """
    signature = inspect.signature(test)
    further = list(signature.parameters.values())[1:]
    if world_size is None:
        further.append(inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(test)
    def run_test(**arguments: Any) -> None:
        run(arguments.pop("world_size") if world_size is None else world_size, arguments)

    vars(run_test)["__signature__"] = signature.replace(parameters=further)
    return run_test


def _run_test(ranks: Ranks | None, module: str, name: str, arguments: dict[str, Any]) -> None:
    """Run the original of a decorated test, which a forked process finds by name."""
    test = vars(importlib.import_module(module))[name].__wrapped__
    test(*[ranks] * (ranks is not None), **arguments)


def _prepare() -> None:
    faulthandler.enable()  # print a traceback if a signal kills the rank
    gc.freeze()  # exempt the server's imports from collections, which saves 0.2 s each
    torch.set_num_threads(1)


def _run_alone(index: int, worker: Callable[..., None], args: tuple[Any, ...]) -> None:
    _prepare()
    worker(*args)


def _run_rank(
    rank: int,
    worker: Callable[..., None],
    world_size: int,
    store: str,
    ranks_per_node: int | None,
    backend: str,
    args: tuple[Any, ...],
) -> None:
    _prepare()
    per_host = world_size if backend == "nccl" else ranks_per_node or world_size
    os.environ["LOCAL_RANK"] = str(rank % per_host)
    if ranks_per_node:
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    # When one rank fails, torch terminates the others, which then print a traceback.
    faulthandler.register(signal.SIGTERM, chain=True)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=_LIMIT
    )
    try:
        worker(rank, world_size, *args)
    finally:
        gc.collect()  # garbage could keep the group and its threads alive until exit
        dist.destroy_process_group()


class PeakMemory:
    """Context that measures how far this process's resident memory rises above its start."""

    nbytes: int  # the rise, set at exit from the context

    def __enter__(self) -> PeakMemory:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the peak, VmHWM
        self._before = _read("VmRSS")
        return self

    def __exit__(self, *error: Any) -> None:
        self.nbytes = _read("VmHWM") - self._before


class OwnPeakMemory:
    """Context that measures the rise of this process's memory without file mappings.

    Samples anonymous and shared memory every millisecond.
    """

    nbytes: int  # the rise, set at exit from the context

    def __enter__(self) -> OwnPeakMemory:
        gc.collect()  # memory freed later would hide a rise
        release_free_pages()
        self._before = self._highest = _read_own()
        self._has_ended = Event()
        self._watcher = Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._has_ended.set()
        self._watcher.join()
        self.nbytes = max(self._highest, _read_own()) - self._before

    def _watch(self) -> None:
        while not self._has_ended.wait(0.001):
            self._highest = max(self._highest, _read_own())


def _read_own() -> int:
    return _read("RssAnon") + _read("RssShmem")


def _read(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024
