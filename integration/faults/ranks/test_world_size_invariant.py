"""With ``world_size_invariant`` a run has the same bits on 1, 2, 4 and 8 ranks, killed or not.

The grid combines stages 0 to 3 with optimizer states on the device, half or all on the host, and on
NVMe. Each combination uses one of the variants. A run has 50 steps of a model with dropout. The
reference is a run on one rank, which zero-core's test_world_size_invariant.py compares with plain
torch.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing import ProcessExitedException

import zero_core
from faults.harness import complete
from zero_core import Engine
from zero_core.testing import spawn, training

STEPS, MICRO_BATCHES, MICRO_BATCH, WIDTH = 50, 8, 2, 40
WORLDS = (2, 4, 8)
OFFLOADS = ("none", "half", "cpu", "nvme")
_ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "clipped": {"gradient_clipping": 0.3},
    "bf16": {"bf16": {"enabled": True}, "gradient_clipping": 0.3},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}},
}
Grid = list[tuple[int, str, str]]
"""Stage, offload and variant of each run."""


class Net(nn.Module):
    """Small language model with dropout, and with a layer that some micro-batches skip."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 3 * WIDTH + 1, dropout=0.1, batch_first=True)
            for _ in range(2)
        )
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 31)

    def forward(self, ids: Tensor, *, has_extra: bool) -> Tensor:
        """Return the loss of predicting each symbol. ids: int64, [batch, 9]."""
        x = self.embed(ids[:, :-1])
        for block in self.blocks:
            x = block(x)
        if has_extra:
            x = x + self.extra(x)
        logits = self.head(x).float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, ids[:, 1:].flatten())


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int, number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * step + number)
    ids = torch.randint(0, 31, (MICRO_BATCH, 9), generator=generator)
    return {"ids": ids, "has_extra": number % 3 == 1}


def config(stage: int, offload: str, variant: str, folder: Path) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if offload != "none":
        device = "nvme" if offload == "nvme" else "cpu"
        zero["offload_optimizer"] = {"device": device, "ratio": 0.5 if offload == "half" else 1.0}
    if offload == "nvme":
        zero["offload_optimizer"]["nvme_path"] = str(folder)
    return {
        "train_batch_size": MICRO_BATCHES * MICRO_BATCH,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "world_size_invariant": True,
        "seed": 7,
        "optimizer": _ADAMW,
        "zero_optimization": zero,
        **VARIANTS[variant],
    }


def take_step(engine: Engine) -> Tensor:
    numbers = range(engine.rank, MICRO_BATCHES, engine.world_size)
    step = engine.global_steps
    return torch.tensor(training.train(engine, [batch(step, number) for number in numbers]))


def write_bits(
    engine: Engine, losses: list[Tensor], norms: list[float], path: Path, rank: int
) -> None:
    """Write losses by micro-batch, norms, values and moments. Every rank must call it."""
    found = engine.full_state_dict(dtype=torch.float32)
    named = [n for n, p in engine.module.named_parameters() if p.requires_grad]
    for name, key in itertools.product(named, ("exp_avg", "exp_avg_sq")):
        found[f"{key} of {name}"] = engine.states.get_full(name, key)
    mine = torch.stack(losses)
    gathered = engine.sharded_state.control.gather_on_device(mine.flatten())
    if rank == 0:
        by_rank = gathered.view(engine.world_size, *mine.shape)
        found["losses"] = by_rank.permute(1, 2, 0).reshape(len(losses), -1)
        found["norms"] = torch.tensor(norms, dtype=torch.float64)
        found["skipped"] = torch.tensor(engine.skipped_steps)
        save_file({k: v.contiguous().clone() for k, v in found.items()}, path)


def run_grid(rank: int, world_size: int, grid: Grid, folder: Path) -> None:
    for index, (stage, offload, variant) in enumerate(grid):
        engine = zero_core.build(make_net(), config(stage, offload, variant, folder))
        losses, norms = [], []
        for _ in range(STEPS):
            losses.append(take_step(engine))
            norms.append(engine.get_global_grad_norm() or 0.0)
        write_bits(engine, losses, norms, folder / f"{index}-{world_size}.safetensors", rank)
        engine.close()


def count_differing_bits(path: Path, reference: Path) -> int:
    one, other = load_file(path), load_file(reference)
    assert one.keys() == other.keys()
    raw = [[values[name].view(-1).view(torch.uint8) for name in one] for values in (one, other)]
    return sum(int(a.ne(b).sum()) for a, b in zip(*raw, strict=True))


def grid() -> Grid:
    names, points = list(VARIANTS), itertools.product(range(4), OFFLOADS)
    return [(*point, names[(number + number // 4) % 4]) for number, point in enumerate(points)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for world_size in (1, *WORLDS):
        spawn(run_grid, world_size, grid(), folder)
    return folder


@pytest.mark.parametrize("world_size", WORLDS)
def test_no_bit_differs_from_one_rank_at(world_size: int, runs: Path) -> None:
    counts = {
        case: count_differing_bits(
            runs / f"{index}-{world_size}.safetensors", runs / f"{index}-1.safetensors"
        )
        for index, case in enumerate(grid())
    }
    print(f"{world_size} ranks: {sum(counts.values())} differing bytes in {len(counts)} runs")
    assert not any(counts.values()), counts


def train_until_killed(
    rank: int, world_size: int, folder: Path, until: int, is_last: bool, stage: int
) -> None:
    """Train from the latest checkpoint. Unless ``is_last``, rank 0 is killed in step ``until``.

    A checkpoint is saved after every third step. Later steps are lost when the ranks die.
    """
    engine = zero_core.build(make_net(), config(stage, "half", "clipped", folder))
    if (folder / "checkpoint").exists():
        engine.load_checkpoint(folder / "checkpoint")
    losses, norms = [torch.zeros(MICRO_BATCHES // world_size)], [0.0]
    while engine.global_steps < until:
        if engine.global_steps == until - 1 and not is_last and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        losses.append(take_step(engine))
        norms.append(engine.get_global_grad_norm() or 0.0)
        if engine.global_steps % 3 == 0:
            engine.save_checkpoint(folder / "checkpoint")
    write_bits(engine, losses[-1:], norms[-1:], folder / f"end-{world_size}.safetensors", rank)
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_killed_on_4_then_2_then_1_rank_ends_on_4_as_if_nothing_had_been(stage, tmp_path):
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    alone.mkdir()
    killed.mkdir()
    spawn(train_until_killed, 1, alone, 30, True, stage)
    for world_size, until in [(4, 8), (2, 14), (1, 20)]:
        with pytest.raises(ProcessExitedException, match="SIGKILL"):
            spawn(train_until_killed, world_size, killed, until, False, stage)
    spawn(train_until_killed, 4, killed, 30, True, stage)
    assert count_differing_bits(killed / "end-4.safetensors", alone / "end-1.safetensors") == 0


def train(output: Path, config: Path, ranks: int, steps: int, *more: str) -> None:
    sizes = ["--layers=1", "--width=32", "--heads=2", "--context=16", "--vocab=300"]
    times = ["--eval-every=100", "--eval-windows=8", f"--steps={steps}", f"--ranks={ranks}"]
    given = [*sizes, f"--config={config}", *times, f"--data={__file__}"] if not more else times[2:]
    complete("-m", "zero_engine", "train", f"--output={output}", *given, *more)


def logged(output: Path) -> list[tuple[int, float, float]]:
    rows = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "grad_norm" in row]


def test_the_train_program_logs_and_exports_the_same_when_it_moves_between_ranks(tmp_path):
    given = {**config(2, "none", "clipped", tmp_path), "gradient_clipping": 0.5}
    (tmp_path / "zero.json").write_text(json.dumps(given))
    train(tmp_path / "alone", tmp_path / "zero.json", 1, 9)
    train(tmp_path / "moved", tmp_path / "zero.json", 4, 3)
    train(tmp_path / "moved", tmp_path / "zero.json", 2, 6, "--resume")
    train(tmp_path / "moved", tmp_path / "zero.json", 1, 9, "--resume")
    assert logged(tmp_path / "moved") == logged(tmp_path / "alone")
    moved, alone = (tmp_path / run / "hf/model.safetensors" for run in ("moved", "alone"))
    assert count_differing_bits(moved, alone) == 0
