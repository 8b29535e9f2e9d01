"""Ranks on one machine: processes forked from a server that has imported torch once."""

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

# Modules that the fork server imports, so that forked processes have them.
_PRELOADED = [__name__, "zero_core.testing.oracle", "pytest", "hypothesis"]
_LIMIT = timedelta(minutes=5)
"""Timeout of the process group's collectives."""


def preload(*modules: str) -> None:
    """Make the fork server import ``modules``, which saves each forked rank the import.

    Call it before the first `spawn` or `run_alone`, which starts the server. The server skips a
    module that it cannot import.
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

    ``worker`` must be a module-level function. Ranks are forked processes of one process group.
    ``ranks_per_node`` sets LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun does for nodes of that size.
    With the ``backend`` "cpu:gloo,cuda:gloo", ranks may share an accelerator. With "nccl",
    LOCAL_RANK is the rank, so that each rank uses another accelerator.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        given = (worker, world_size, store, ranks_per_node, backend, args)
        _fork(_run_rank, given, world_size)


def run_on_processes(
    program: Callable[..., object], world_size: int, *args: Any, ranks_per_node: int | None = None
) -> None:
    """Run ``program(ranks, *args)`` on gloo ranks, and raise if a rank raises."""
    spawn(_run_program, world_size, program, *args, ranks_per_node=ranks_per_node)


def _run_program(rank: int, world_size: int, program: Callable[..., object], *args: Any) -> None:
    program(find_ranks(None, None), *args)


def run_alone(worker: Callable[..., None], *args: Any) -> None:
    """Run ``worker(*args)`` in a forked process without a process group. Raise if it raises."""
    _fork(_run_alone, (worker, args), 1)


def _fork(function: Callable[..., None], args: tuple[Any, ...], number: int) -> None:
    multiprocessing.set_forkserver_preload(_PRELOADED)
    mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        function, args, number, start_method="forkserver"
    )


def on_processes(
    world_size: int | None = None,
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Make a test run on gloo ranks. Its first argument is the rank's `Ranks`.

    ``world_size`` is as in `of_size`. The test's other arguments are pickled.
    """

    def decorate(test: Callable[..., object]) -> Callable[..., None]:
        def run(size: int, arguments: dict[str, Any]) -> None:
            run_on_processes(_run_test, size, test.__module__, test.__name__, arguments)

        return of_size(test, world_size, run)

    return decorate


def alone(test: Callable[..., object]) -> Callable[..., None]:
    """Make a test run in a separate process, by `run_alone`. Its arguments are pickled."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        run_alone(_run_test, None, test.__module__, test.__name__, arguments)

    return run


def of_size(
    test: Callable[..., object], world_size: int | None, run: Callable[[int, dict[str, Any]], None]
) -> Callable[..., None]:
    """Return a test function that calls ``run(number of ranks, arguments)``.

    Its parameters are those of ``test`` but the first. If ``world_size`` is None, it also has the
    parameter "world_size", for the number of ranks.
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
    """Run the undecorated test ``name``, which is imported because it cannot be pickled."""
    test = vars(importlib.import_module(module))[name].__wrapped__
    test(*[ranks] * (ranks is not None), **arguments)


def _prepare() -> None:
    faulthandler.enable()  # print a traceback if a signal kills the rank
    gc.freeze()  # exempt the server's imports from garbage collection, to save time
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
    """Context that measures how far this process's resident memory rises, on Linux."""

    nbytes: int  # set at exit

    def __enter__(self) -> PeakMemory:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the peak, VmHWM
        self._before = _read("VmRSS")
        return self

    def __exit__(self, *error: Any) -> None:
        self.nbytes = _read("VmHWM") - self._before


class OwnPeakMemory:
    """Context that measures how far this process's anonymous and shared memory rises, on Linux.

    Samples it about every millisecond. File mappings do not count.
    """

    nbytes: int  # set at exit

    def __enter__(self) -> OwnPeakMemory:
        gc.collect()  # memory freed within the context would hide a rise
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
