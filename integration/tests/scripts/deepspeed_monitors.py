"""Three steps under DeepSpeed with monitors that write into FOLDER: FOLDER PORT."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn


def config(folder: str) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "zero_optimization": {"stage": 2},
        "wall_clock_breakdown": True,
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "csv"},
        "tensorboard": {"enabled": True, "output_path": folder, "job_name": "board"},
    }


def train(deepspeed, folder: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(folder)
    )
    for step in range(6):
        inputs = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(inputs).square().mean())
        engine.step()


if __name__ == "__main__":
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", DS_ACCELERATOR="cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
    import deepspeed

    train(deepspeed, sys.argv[1])
