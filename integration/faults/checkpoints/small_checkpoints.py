"""Engines with small checkpoints, and a digest of all state that loading sets."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import zero_core
from zero_core.checkpoint.manifest import MANIFEST, seal
from zero_core.testing import Case, SimulatedRanks, batch, make_model

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def build(
    stage: int, *, is_offloaded: bool = False, process_group: SimulatedRanks | None = None
) -> zero_core.Engine:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    config = Case(stage, top={"scheduler": scheduler}).config()
    if is_offloaded:
        config["zero_optimization"] |= OFFLOAD
    return zero_core.build(make_model(), config, process_group=process_group)


def train(engine: zero_core.Engine, steps: int) -> None:
    for step in range(steps):
        engine.backward(engine(**batch(step, 0, engine.rank))["loss"])
        engine.step()


def rewrite(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit the manifest with ``change`` and recompute the manifest's digest."""
    content = json.loads(place.joinpath(MANIFEST).read_bytes())
    change(content)
    place.joinpath(MANIFEST).write_bytes(seal(content))


def digest(engine: zero_core.Engine) -> str:
    """Return a digest of this rank's weights, optimizer states, buffers, groups and counters."""
    found = hashlib.sha256()
    state = engine.sharded_state

    def add(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        else:
            found.update(repr(value).encode())

    for segment in state.layout.segments:
        add(state.own_state(segment.index))
        if segment.is_trainable:
            for name in ("exp_avg", "exp_avg_sq"):
                add(state.own_state(segment.index, name))
    for index in range(len(state.pieces)):
        add(sorted(state.tier.read_scalars(index).items()))
    for name, buffer in sorted(state.buffers().items()):
        add(name)
        add(buffer)
    for group in engine.optimizer.param_groups:
        add(sorted((k, repr(v)) for k, v in group.items() if k != "params"))
    assert engine.lr_scheduler is not None
    add(sorted(engine.lr_scheduler.state_dict().items()))
    add((engine.global_steps, engine.skipped_steps, engine.micro_steps, random.getstate()))
    add(torch.get_rng_state())
    return found.hexdigest()
