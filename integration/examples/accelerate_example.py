"""Unchanged script for Accelerate and DeepSpeed. It does not need the package deepspeed.

zero-engine run accelerate launch --config_file integration/examples/accelerate.yaml \
    integration/examples/accelerate_example.py
"""

import argparse
import inspect

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, CONTEXT = 128, 8


def make_model():
    first = [nn.Embedding(256, WIDTH // CONTEXT), nn.Flatten(), nn.Linear(WIDTH, WIDTH)]
    blocks = [nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    return nn.Sequential(*first, *blocks, nn.Linear(WIDTH, 256))


def main():
    accelerator = Accelerator()
    torch.manual_seed(0)
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    windows = TensorDataset(text.unfold(0, CONTEXT + 1, 1)[: 128 * 64])
    model = make_model()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=5e-3),
        DataLoader(windows, batch_size=64, shuffle=True),
    )
    assert accelerator.distributed_type == DistributedType.DEEPSPEED
    losses = []
    for (window,) in loader:
        loss = nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert last < first - 1.0, f"the loss went from {first:.2f} to {last:.2f}"
    accelerator.print(f"loss {first:.2f} -> {last:.2f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
