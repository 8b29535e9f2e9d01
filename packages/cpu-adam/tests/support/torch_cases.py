"""Parameters, gradients and a training loop, equal for all optimizers under test."""

from __future__ import annotations

import io
from contextlib import contextmanager

import numpy as np
import pytest
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


def save(optimizer, params):
    buffer = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "params": params}, buffer)
    return buffer.getvalue()


def resume(saved, make_optimizer):
    """Load a checkpoint of `save` into new parameters and a new optimizer."""
    checkpoint = torch.load(io.BytesIO(saved), weights_only=True)
    params = [torch.nn.Parameter(param.detach()) for param in checkpoint["params"]]
    optimizer = make_optimizer(params)
    optimizer.load_state_dict(checkpoint["optimizer"])
    return params, optimizer


def assert_states_equal(optimizer, params, expected, expected_params):
    for param, other in zip(params, expected_params, strict=True):
        assert set(optimizer.state[param]) == set(expected.state[other])
        for name, value in expected.state[other].items():
            assert optimizer.state[param][name].dtype == value.dtype
            assert torch.equal(optimizer.state[param][name], value)


def bf16_bits(param):
    """View a bf16 tensor as unsigned integers, which represent bf16 in NumPy."""
    return param.detach().contiguous().view(torch.int16).numpy().view(np.uint16)


@contextmanager
def one_rank():
    """Yield the device mesh of a process group with this process only."""
    import torch.distributed as dist

    if not dist.is_available():
        pytest.skip("torch was built without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()
