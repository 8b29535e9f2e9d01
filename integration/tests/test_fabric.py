"""Lightning's Fabric with its own strategy ``deepspeed_stage_3``, under ``zero-engine run``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from script_server import run_script
from torch import nn

pytest.importorskip("lightning")

SCRIPT = Path(__file__).parent / "scripts" / "fabric_loop.py"
RANKS = 2


def _plain(steps: int) -> list[list[float]]:
    """Return the losses of each rank's batches, trained by plain torch in one process."""
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generators = [torch.Generator().manual_seed(rank) for rank in range(RANKS)]
    by_step = []
    for step in range(steps):
        if step == 3:  # the script draws from the beginning again
            generators = [torch.Generator().manual_seed(rank) for rank in range(RANKS)]
        batches = (torch.randn(4, 9, generator=generator) for generator in generators)
        losses = [model(batch).square().mean() for batch in batches]
        torch.stack([loss / RANKS for loss in losses]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        by_step.append([loss.item() for loss in losses])
    return [list(of_rank) for of_rank in zip(*by_step, strict=True)]


def test_fabrics_loop_trains_saves_and_loads(tmp_path: Path) -> None:
    run_script(SCRIPT, "3", str(tmp_path), ranks=RANKS)
    for rank, expected in enumerate(_plain(5)):
        losses = json.loads((tmp_path / f"{rank}.json").read_text())
        assert losses[:5] == pytest.approx(expected, rel=1e-5)
        assert losses[5:] == losses[3:5]  # once more from the checkpoint
