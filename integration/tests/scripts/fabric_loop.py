"""The training loop of Fabric's documentation: ``fabric_loop.py STAGE FOLDER``."""

import json
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy
from torch import nn

stage, folder = int(sys.argv[1]), Path(sys.argv[2])
fabric = Fabric(accelerator="cpu", devices=2, strategy=DeepSpeedStrategy(stage=stage))
fabric.launch()
torch.manual_seed(3)
model = nn.Sequential(*[nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3)])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = fabric.setup(model, optimizer)
losses = []


def train(steps: int) -> None:
    generator = torch.Generator().manual_seed(fabric.global_rank)
    for _ in range(steps):
        loss = model(torch.randn(4, 9, generator=generator)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())


train(3)
state = {"model": model, "optimizer": optimizer}
fabric.save(folder / "checkpoint", state)
train(2)
fabric.load(folder / "checkpoint", state)
train(2)
(folder / f"{fabric.global_rank}.json").write_text(json.dumps(losses))
