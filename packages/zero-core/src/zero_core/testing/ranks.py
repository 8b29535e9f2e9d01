"""Ranks on one machine: processes forked from a server that has imported torch once.

`PeakMemory` and `OwnPeakMemory` measure the memory of one, as the kernel counts it (Linux).
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

# The first torch optimizer imports it. Imported while a process group exists, it keeps the group
# alive past destroy_process_group (torch 2.13), whose threads may then abort the process at exit.
import torch._dynamo
import torch.distributed as dist
import torch.multiprocessing as mp

from zero_core._libc import release_free_pages
from zero_core.comm.groups import Ranks
from zero_core.comm.topology import find_ranks

# All that a rank of a test takes: the oracle imports most of it, test files the rest.
_PRELOADED = [__name__, "zero_core.testing.oracle", "pytest", "hypothesis"]
_LIMIT = timedelta(minutes=5)
"""Longest wait of one rank for another."""


def preload(*modules: str) -> None:
    """Have the server that ranks are forked from import ``modules`` once, by name.

    Before the first `spawn` of a process: it saves every rank the import. One that cannot be
    imported is left to those that ask for it.
    """
    _PRELOADED.extend(modules)


def spawn(
    worker: Callable[..., None],
    world_size: int,
    *args: Any,
    ranks_per_node: int | None = None,
    backend: str = "gloo",
) -> None:
    """Run ``worker(rank, world_size, *args)`` on gloo ranks and raise if one of them does.

    ``worker`` is a module-level function. The ranks meet over a file, not a port. They are forked
    from a server that has imported torch once and run nothing, which saves seconds per call.
    With ``ranks_per_node`` the engine takes so many of them for a node, as torchrun would tell it.
    With ``backend="cpu:gloo,cuda:gloo"``, say, they compute on one accelerator, which they share.
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
    """Run ``worker(*args)`` in one process forked as `spawn`'s are, without a process group."""
    _fork(_run_alone, (worker, args), 1)


def _fork(function: Callable[..., None], args: tuple[Any, ...], number: int) -> None:
    multiprocessing.set_forkserver_preload(_PRELOADED)
    mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        function, args, number, start_method="forkserver"
    )


def on_processes(
    world_size: int | None = None,
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Run a test on gloo ranks, each of which is its first argument once.

    ``world_size``: as of `on_ranks`. The test's other arguments are pickled.
    """

    def decorate(test: Callable[..., object]) -> Callable[..., None]:
        def run(size: int, arguments: dict[str, Any]) -> None:
            run_on_processes(_run_test, size, test.__module__, test.__name__, arguments)

        return of_size(test, world_size, run)

    return decorate


def alone(test: Callable[..., object]) -> Callable[..., None]:
    """Run a test in one process, as `run_alone` does. Its arguments are pickled."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        run_alone(_run_test, None, test.__module__, test.__name__, arguments)

    return run


def of_size(
    test: Callable[..., object], world_size: int | None, run: Callable[[int, dict[str, Any]], None]
) -> Callable[..., None]:
    """Return a test without its first argument, which ``run`` makes.

    ``world_size``: number of ranks; None: the test is parametrized by "world_size".
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
    """Run what a decorator of this file has wrapped. Processes find it by name."""
    test = vars(importlib.import_module(module))[name].__wrapped__
    test(*[ranks] * (ranks is not None), **arguments)


def _prepare() -> None:
    faulthandler.enable()  # a rank that dies of a signal says where
    gc.freeze()  # the collector need not look at what the server has imported (0.2 s each time)
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
    os.environ["LOCAL_RANK"] = str(rank % (ranks_per_node or world_size))
    if ranks_per_node is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    # When one rank fails, torch ends the others: each shows where it was.
    faulthandler.register(signal.SIGTERM, chain=True)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=_LIMIT
    )
    try:
        worker(rank, world_size, *args)
    finally:
        gc.collect()  # whoever still holds the group would end its threads only at exit
        dist.destroy_process_group()


class PeakMemory:
    """Context that measures how far this process's resident memory rises above its start."""

    nbytes: int  # the rise, known when the context has ended

    def __enter__(self) -> PeakMemory:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts from here
        self._before = _read("VmRSS")
        return self

    def __exit__(self, *error: Any) -> None:
        self.nbytes = _read("VmHWM") - self._before


class OwnPeakMemory:
    """Context that measures how far the memory rises that this process has for itself.

    Unlike `PeakMemory` it leaves out the files that the process maps. It reads every millisecond.
    """

    nbytes: int  # the rise, known when the context has ended

    def __enter__(self) -> OwnPeakMemory:
        gc.collect()  # what is freed meanwhile would make room
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
