"""Runs functions of a test file on real gloo ranks, each of which is a forked process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

# Imported here, in the forkserver, because the first optimizer would import it on every rank.
import torch._dynamo
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from zero_comm import quantized_nbytes

Outcomes = dict[str, Any]
# A scenario gets the rank and the number of ranks, and returns tensors and builtins.
Scenario = Callable[[int, int], Outcomes]
# Modules that the forkserver imports. It cannot import modules of this folder.
PRELOADED = ["hypothesis", "pytest", "torch._dynamo", "torch.distributed.fsdp", "zero_comm"]
SHAPES = ((1, 1), (2, 2), (3, 1), (4, 2))  # ranks, ranks per node
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def outcomes_of(
    scenarios: tuple[Scenario, ...], world_size: int, ranks_per_node: int
) -> list[Outcomes]:
    """Return each rank's outcomes by scenario name. Equal arguments run only once."""
    outcomes = _outcomes_or_error(scenarios, world_size, ranks_per_node)
    if isinstance(outcomes, Exception):
        raise outcomes
    return outcomes


@cache
def _outcomes_or_error(
    scenarios: tuple[Scenario, ...], world_size: int, ranks_per_node: int
) -> list[Outcomes] | Exception:
    try:
        with tempfile.TemporaryDirectory() as folder:
            start_ranks(_run, (world_size, ranks_per_node, folder, scenarios), world_size)
            paths = [f"{folder}/rank{rank}.pt" for rank in range(world_size)]
            return [torch.load(path, weights_only=True) for path in paths]
    except Exception as error:  # the cache keeps a failure, so that it happens only once
        return error


def start_ranks(program: Callable[..., None], arguments: tuple[Any, ...], world_size: int) -> None:
    """Run ``program(rank, *arguments)`` in forked processes, and wait for all of them."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        program, arguments, world_size, start_method="forkserver"
    )


def _run(
    rank: int, world_size: int, ranks_per_node: int, folder: str, scenarios: tuple[Scenario, ...]
) -> None:
    gc.freeze()  # garbage collections then skip the forkserver's imports
    warnings.simplefilter("error")
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(ranks_per_node)}
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    outcomes = {scenario.__name__: scenario(rank, world_size) for scenario in scenarios}
    torch.save(outcomes, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def values_of(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values that ``rank`` contributes. They are equal in every process."""
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def message(numel: int, kind: str) -> int:
    return 32 + quantized_nbytes(numel, kind)


@contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    """Count the bytes that torch's collectives send from this rank to other ranks and nodes."""
    sent: dict[str, list[int]] = {}
    kept = {name: getattr(dist, name) for name in _NAMES if hasattr(dist, name)}
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])

    def count(name: str) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            group = kwargs["group"]
            ranks, rank = range(dist.get_world_size(group)), dist.get_rank(group)
            given = kwargs["input"] if "input" in kwargs else args[1]
            each = [given.nbytes if name in _GATHERS else given.nbytes // len(ranks)] * len(ranks)
            if len(args) > 3 and args[3]:  # split sizes of an all-to-all, in bytes
                each = args[3]
            totals = sent.setdefault(_NAMES[name], [0, 0])
            totals[0] += sum(each[peer] for peer in ranks if peer != rank)
            totals[1] += sum(each[peer] for peer in ranks if peer // per_node != rank // per_node)
            return kept[name](*args, **kwargs)

        return counting

    for name in kept:
        setattr(dist, name, count(name))
    try:
        yield sent
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


_GATHERS = ("all_gather_single", "all_gather_into_tensor")
_NAMES = {
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
}
