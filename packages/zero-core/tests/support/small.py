from __future__ import annotations

import torch
from torch import nn

import zero_core


def build_small(stage: int = 2) -> zero_core.Engine:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
    }
    return zero_core.build(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), config)


def train_small(engine: zero_core.Engine) -> None:
    engine.backward(engine(torch.ones(2, 3)).square().mean())
    engine.step()
