"""The same tiny training under three kinds of checkpoints: this project's, torch's and DeepSpeed's.

Each side is a rank's part of it, made where a process group is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 96
RATE = 1e-2


class Side(Protocol):
    """A training whose state can be saved, loaded and digested. Every rank calls each method."""

    def train(self) -> None:
        """Take a step."""

    def save(self, folder: Path, tag: str) -> None:
        """Save a checkpoint called ``tag``, and make it the newest of ``folder``."""

    def load(self, folder: Path, tag: str) -> None:
        """Load the newest checkpoint. ``tag`` says which one that is to those that do not know."""

    def digest(self) -> str:
        """Return a digest of this rank's weights, moments, counters and the user's own state."""


class Zero:
    """Checkpoints of zero-core."""

    def __init__(self) -> None:
        import zero_core

        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": RATE}},
            "zero_optimization": {"stage": 2},
        }
        self._engine = zero_core.build(_net(), config)
        self._epoch = 0

    def train(self) -> None:
        self._engine.backward(_loss(self._engine))
        self._engine.step()
        self._epoch += 1

    def save(self, folder: Path, tag: str) -> None:
        self._engine.save_checkpoint(folder, tag, {"epoch": self._epoch})

    def load(self, folder: Path, tag: str) -> None:
        _, state = self._engine.load_checkpoint(folder)
        self._epoch = state["epoch"]

    def digest(self) -> str:
        engine = self._engine
        groups = [
            {k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups
        ]
        names = [name for name, _ in engine.module.named_parameters()]
        moments = [
            engine.states.get_full(name, key) for name in names for key in ("exp_avg", "exp_avg_sq")
        ]
        values = engine.full_state_dict()
        return _digest([values, moments, groups, engine.global_steps, self._epoch])


class Torch:
    """torch.distributed.checkpoint with FSDP2: weights, optimizer and a number, as its tutorial."""

    def __init__(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self._net = _net()
        fully_shard(self._net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=RATE)
        self._epoch = 0

    def train(self) -> None:
        _loss(self._net).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._epoch += 1

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        net, optimizer = get_state_dict(self._net, self._optimizer)
        return {"net": net, "optimizer": optimizer, "epoch": self._epoch}

    def save(self, folder: Path, tag: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=folder / tag)

    def load(self, folder: Path, tag: str) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=folder / tag)
        set_state_dict(
            self._net,
            self._optimizer,
            model_state_dict=state["net"],
            optim_state_dict=state["optimizer"],
        )
        self._epoch = state["epoch"]

    def digest(self) -> str:
        return _digest([self._net.state_dict(), self._optimizer.state_dict(), self._epoch])


class DeepSpeed:
    """Checkpoints of DeepSpeed at stage 2."""

    def __init__(self) -> None:
        import deepspeed

        net = _net()
        self._engine, *_ = deepspeed.initialize(
            model=net,
            model_parameters=list(net.parameters()),
            config={
                "train_micro_batch_size_per_gpu": 4,
                "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
                "zero_optimization": {"stage": 2},
            },
        )
        self._epoch = 0

    def train(self) -> None:
        self._engine.backward(_loss(self._engine))
        self._engine.step()
        self._epoch += 1

    def save(self, folder: Path, tag: str) -> None:
        self._engine.save_checkpoint(str(folder), tag, {"epoch": self._epoch})

    def load(self, folder: Path, tag: str) -> None:
        path, state = self._engine.load_checkpoint(str(folder))
        if path is None:  # how it says that there is nothing to load
            raise FileNotFoundError(f"{folder} has nothing to load")
        self._epoch = state["epoch"]

    def digest(self) -> str:
        optimizer = self._engine.optimizer
        return _digest(
            [
                self._engine.module.state_dict(),
                optimizer.single_partition_of_fp32_groups,
                optimizer.optimizer.state_dict(),
                self._engine.global_steps,
                self._epoch,
            ]
        )


SIDES: Mapping[str, type[Side]] = {
    "zero-core": Zero,
    "torch.distributed.checkpoint": Torch,
    "DeepSpeed": DeepSpeed,
}


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _loss(net: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    loss: torch.Tensor = net(torch.randn(4, WIDTH, generator=generator)).square().mean()
    return loss


def _digest(state: object) -> str:
    found = hashlib.sha256()
    for part in _parts(state):
        found.update(part)
    return found.hexdigest()


def _parts(state: object) -> Iterable[bytes]:
    if isinstance(state, torch.Tensor):
        local = state.to_local() if hasattr(state, "to_local") else state  # foreign: a DTensor's
        yield local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(state, Mapping):
        for key in sorted(state, key=str):
            yield str(key).encode()
            yield from _parts(state[key])
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _parts(value)
    else:
        yield repr(state).encode()
