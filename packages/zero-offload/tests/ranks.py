"""Gloo ranks on one machine, and the loop and the model that the tests on ranks train."""

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

# The first torch optimizer imports it. Imported while a process group exists, it keeps the group
# alive past destroy_process_group, whose threads may then abort the process at exit.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

RATIOS = (0.0, 0.3, 1.0)
WORLD_SIZES = (1, 3)
TIMEOUT_S = 300.0
PRELOADED = [
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "zero_offload",
]
"""Modules that the server imports once for all ranks."""


class _Rank:
    """A process that runs one job after another, so that torch is imported once for all tests."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()


_POOL: list[_Rank] = []


def spawn(worker: Callable[..., None], world_size: int, *args: Any) -> None:
    """Run ``worker(rank, world_size, *args)`` on gloo ranks and raise if one of them does.

    The ranks meet over a file. ``worker`` is a module-level function.
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
                for rank_process in _POOL:  # the others may wait for it for ever
                    rank_process.process.terminate()
                _POOL.clear()
                raise AssertionError("\n".join(failed))


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # the collector need not look at what the server has imported
    while True:
        rank, worker, world_size, store, args = pipe.recv()
        try:
            _run_rank(rank, worker, world_size, store, args)
        except BaseException:
            pipe.send(traceback.format_exc())
        else:
            pipe.send("")


def _run_rank(
    rank: int, worker: Callable[..., None], world_size: int, store: str, args: tuple[Any, ...]
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        worker(rank, world_size, *args)
    finally:
        gc.collect()  # an object that still holds the group would end its threads only at exit
        dist.destroy_process_group()


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Sizes that divide by no world size; the last layer leaves ranks without an element."""
    torch.manual_seed(5)
    layers = [nn.Linear(7, 13), nn.GELU(), nn.LayerNorm(13), nn.Linear(13, 5), nn.Linear(5, 1)]
    return nn.Sequential(*layers).to(dtype)


def shard(
    model: nn.Sequential, *, is_mixed: bool = False, mesh: DeviceMesh | None = None
) -> nn.Sequential:
    """FSDP2, a unit per layer with weights; ``is_mixed``: computed in bf16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if is_mixed else None)
    for module in (model[0], model[3], model[4], model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for matrices, none for vectors."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def loop(
    model: nn.Module,
    optimizer: optim.Optimizer,
    rank: int,
    steps: range = range(5),
    max_norm: float = 0.0,
) -> list[float]:
    """Losses and gradient norms of a few steps with a schedule, on this rank's own batches."""
    schedule = optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    found: list[float] = []
    for step in steps:
        data = torch.randn(6, 7, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        loss = model(data.to(next(model.parameters()).dtype)).float().square().mean()
        loss.backward()
        if max_norm:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            found.append(whole(norm).item())
        optimizer.step()
        schedule.step()
        found.append(loss.item())
    return found


def whole(tensor: Tensor) -> Tensor:
    """All elements of a tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights(model: nn.Module) -> Tensor:
    """All weights in one row."""
    return torch.cat([whole(p.detach()).flatten().float() for p in model.parameters()])
