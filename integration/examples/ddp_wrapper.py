"""Replacement of DistributedDataParallel built from zero-core's API, and comparison with DDP.

torchrun --nproc-per-node=2 integration/examples/ddp_wrapper.py
"""

import copy
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zero_core
from zero_core.checkpoint import list_checkpoints
from zero_core.footprint import format_bytes
from zero_core.records import StepRecord, read_records


class Wrapped(nn.Module):
    """Replacement of ``DistributedDataParallel(model)``."""

    def __init__(self, engine):
        super().__init__()
        self.engine = engine
        self.no_sync = engine.no_sync

    @property
    def module(self):
        return self.engine.module

    def forward(self, *args, **kwargs):
        return self.engine(*args, **kwargs)

    def state_dict(self):
        """Return the whole model's values without DDP's prefix "module.".

        Every rank must call it.
        """
        return self.engine.full_state_dict()

    def resume(self, folder):
        """Load the newest checkpoint in ``folder``, if there is one."""
        if list_checkpoints(Path(folder)):
            self.engine.load_checkpoint(folder)


class Stepper:
    """Replacement of the optimizer, with ``zero_grad``, ``step`` and ``param_groups``."""

    def __init__(self, engine):
        self._engine = engine
        self.param_groups = engine.optimizer.param_groups

    def zero_grad(self):
        """Do nothing, because the engine frees gradients in each step."""

    def step(self):
        self._engine.step()


def wrap(model, optimizer, *, stage=3, **config):
    """Return the replacements of a DDP loop's model and optimizer."""
    config |= {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    engine = zero_core.build(model, config, optimizer=optimizer)
    print(format_bytes(sum(engine.memory_report().values())), "on this rank")
    return Wrapped(engine), Stepper(engine)


def train(model, optimizer):
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()


def main(folder):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))
    ours = copy.deepcopy(plain)
    train(DistributedDataParallel(plain), torch.optim.AdamW(plain.parameters()))
    model, optimizer = wrap(
        ours, torch.optim.AdamW(ours.parameters()), step_records={"folder": folder}
    )
    train(model, optimizer)
    model.engine.save_checkpoint(folder)
    model.resume(folder)
    records = read_records(Path(folder) / f"steps-rank{dist.get_rank()}.jsonl")
    print(sum(isinstance(record, StepRecord) for record in records), "steps recorded")
    values, expected = model.state_dict(), plain.state_dict()
    assert all(torch.equal(values[name], expected[name]) for name in expected)
    print("the weights are DDP's, bit by bit")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    main(shared[0])
    dist.destroy_process_group()
