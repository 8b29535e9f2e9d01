"""Parameters, gradients and a training loop, the same for every optimizer under test."""

from __future__ import annotations

import torch


def make_params(sizes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def set_grads(params, step, dtype=None):
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator) * 10.0 ** (step % 5 - 3)
        param.grad = grad.to(dtype or param.dtype)


def train(optimizer, params, num_steps=10):
    for step in range(num_steps):
        set_grads(params, step)
        optimizer.step()
