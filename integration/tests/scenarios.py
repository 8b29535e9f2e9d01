"""Runs on delayed ranks that edit, load, accumulate and evaluate, where kept values may go wrong.

Threads sleep at random before and within every job of a queue and before every wait, on each rank
differently. A `Scenario` is what is done between ``build()`` and the last step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zero_comm
import zero_core
from zero_core.testing import Case, SimulatedRanks, batch, make_model

WIDTH = 33
"""Of the model: even the shards of its gradients are worth quantizing."""
RANKS, PER_NODE = 4, 2
DTYPES = ("fp32", "bf16")

Scenario = Callable[[zero_core.Engine, Path], list[float]]


class Delayed:
    """Native collectives whose threads fall behind now and then; what they carry is untouched."""

    def __init__(self, native: Any, chance: random.Random) -> None:
        self._native = native
        self._chance = chance
        self.rank, self.world_size = native.rank, native.world_size
        self.reduces_in_place = native.reduces_in_place

    def _fall_behind(self) -> None:
        luck = self._chance.random()
        time.sleep(0.0 if luck < 0.6 else 0.001 if luck < 0.95 else 0.01)

    def subgroup(self, ranks: Sequence[int]) -> Delayed:
        return Delayed(self._native.subgroup(ranks), self._chance)

    def coded(self, codec: Any) -> Delayed:
        return Delayed(self._native.coded(codec), self._chance)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._native.zeros(numel, dtype, device)

    def all_gather(self, out: Tensor, shard: Tensor, **options: Any) -> Slow:
        return self._started(self._native.all_gather, out, shard, kind=Slow, **options)

    def reduce_scatter(self, out: Tensor, full: Tensor, **options: Any) -> Slow:
        start = self._native.reduce_scatter
        return self._started(start, out, full, kind=SlowReduction, **options)

    def all_to_all(self, out: Tensor, parts: Tensor, **options: Any) -> Slow:
        return self._started(self._native.all_to_all, out, parts, kind=Slow, **options)

    def launch(self, job: Callable[[], None], *, is_reduction: bool) -> Slow:
        def late() -> None:
            self._fall_behind()
            job()
            self._fall_behind()

        kind = SlowReduction if is_reduction else Slow
        return kind(self._native.launch(late, is_reduction=is_reduction), self._fall_behind)

    def _started(
        self, start: Callable[..., Any], *args: Any, kind: type[Slow], **options: Any
    ) -> Slow:
        self._fall_behind()
        return kind(start(*args, **options), self._fall_behind)


class Slow:
    """A work that is waited for late."""

    def __init__(self, work: Any, fall_behind: Callable[[], None]) -> None:
        self._work = work
        self._fall_behind = fall_behind

    def wait(self) -> None:
        self._fall_behind()
        self._work.wait()


class SlowReduction(Slow):
    """A reduction that is waited for late. What it offers is named: isinstance asks the class."""

    @property
    def contributions(self) -> Sequence[Tensor]:
        found: Sequence[Tensor] = self._work.contributions
        return found

    def acknowledge(self) -> Any:
        return self._work.acknowledge()


def _delayed_collectives(native: Any, *, rank: int, **options: Any) -> Any:
    delayed = Delayed(native, random.Random(rank))
    return zero_comm.create_collectives(delayed, rank=rank, **options)


def build(
    ranks: SimulatedRanks | None,
    dtype: str,
    zero: Mapping[str, Any],
    *,
    stage: int = 3,
    width: int = WIDTH,
    **top: Any,
) -> zero_core.Engine:
    """Build an engine whose collectives fall behind, if it has any of zero-comm's."""
    config = Case(stage=stage, dtype=dtype, zero=zero, top=top).config()
    collectives = _delayed_collectives if zero else None
    return zero_core.build(make_model(width), config, collectives=collectives, process_group=ranks)


def micro_step(engine: zero_core.Engine, step: int, micro: int = 0) -> float:
    """Train one micro-step. Returns its loss."""
    loss = engine(**batch(step, micro, engine.rank))["loss"]
    engine.backward(loss)
    engine.step()
    return loss.item()


@torch.no_grad()
def evaluate(engine: zero_core.Engine, step: int) -> float:
    """Return the loss of a batch in evaluation."""
    engine.eval()
    loss = engine(**batch(step, 7, engine.rank))["loss"].item()
    engine.train()
    return loss


# What is done between build() and the last step. Each returns all losses it saw.


def _trains(engine: zero_core.Engine, folder: Path) -> list[float]:
    """Branches differ between ranks; so do the parameters without a gradient."""
    return [micro_step(engine, step) for step in range(7)]


def _accumulates(engine: zero_core.Engine, folder: Path) -> list[float]:
    losses = []
    for step in range(3):
        for micro in range(3):
            with engine.no_sync() if step == 1 and micro < 2 else nullcontext():
                loss = engine(**batch(step, micro, engine.rank))["loss"]
                engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def _evaluates_in_between(engine: zero_core.Engine, folder: Path) -> list[float]:
    """Before the first step, between micro-steps, between forward and backward, and at the end."""
    losses = [evaluate(engine, 0), evaluate(engine, 1)]
    for step in range(3):
        for micro in range(2):
            loss = engine(**batch(step, micro, engine.rank))["loss"]
            engine.backward(loss)
            losses.append(evaluate(engine, step))
            engine.step()
            losses += [loss.item(), evaluate(engine, step)]
    with torch.inference_mode():
        losses.append(engine(**batch(5, 0, engine.rank))["loss"].item())
    return [*losses, micro_step(engine, 6), micro_step(engine, 6, 1), evaluate(engine, 6)]


def _is_edited(engine: zero_core.Engine, folder: Path) -> list[float]:
    """By the module's parameters and by the states' names, frozen ones as well."""
    losses = [micro_step(engine, 0), evaluate(engine, 0)]
    with engine.gathered(modifier_rank=3) as model, torch.no_grad():
        if engine.rank == 3:
            model.embed.weight[3:20] *= 1.5
            model.blocks[1].up.bias.fill_(0.25)
            model.frozen[0].down.weight.add_(0.125)
    losses += [evaluate(engine, 1), micro_step(engine, 1), evaluate(engine, 1)]
    for name in ("blocks.0.up.weight", "frozen.0.side.weight"):
        engine.states.set_full(name, engine.states.get_full(name) * 0.5)
        losses.append(evaluate(engine, 2))
    return [*losses, micro_step(engine, 2), micro_step(engine, 3)]


def _loads(engine: zero_core.Engine, folder: Path) -> list[float]:
    """Earlier weights come back under later versions."""
    losses = [micro_step(engine, 0)]
    engine.save_checkpoint(folder)
    losses += [micro_step(engine, 1), micro_step(engine, 2), evaluate(engine, 2)]
    engine.load_checkpoint(folder)
    return [*losses, evaluate(engine, 2), micro_step(engine, 1), micro_step(engine, 2)]


def _starts_from_a_file(engine: zero_core.Engine, folder: Path) -> list[float]:
    losses = [evaluate(engine, 0)]  # something is kept
    zero_core.load_pretrained(engine, folder.parent / OTHER_WEIGHTS)
    return [*losses, evaluate(engine, 0), micro_step(engine, 0), micro_step(engine, 1)]


OTHER_WEIGHTS = "model.safetensors"


SCENARIOS: dict[str, tuple[Scenario, dict[str, Any]]] = {
    "trains": (_trains, {}),
    "recomputes": (_trains, {"activation_checkpointing": {}}),
    "accumulates": (_accumulates, {"gradient_accumulation_steps": 3}),
    "evaluates": (_evaluates_in_between, {"gradient_accumulation_steps": 2}),
    "edited": (_is_edited, {}),
    "loads": (_loads, {}),
    "starts from a file": (_starts_from_a_file, {}),
}


def outcome(
    ranks: SimulatedRanks | None,
    name: str,
    zero: Mapping[str, Any],
    dtype: str,
    folder: Path,
    **options: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the final values of a scenario; ``options`` are those of `build`."""
    scenario, top = SCENARIOS[name]
    folder.mkdir(exist_ok=True)
    engine = build(ranks, dtype, zero, **top, **options)
    losses = scenario(engine, folder)
    values = engine.full_state_dict(dtype=torch.float32)
    with engine.gathered() as model:  # the rounded copies, besides the master weights
        values |= {f"gathered {n}": p.detach().clone() for n, p in model.named_parameters()}
    engine.close()
    return losses, values
