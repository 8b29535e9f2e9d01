"""Train one model on the CPU with `torch.optim.AdamW` and with `OffloadedOptimizer`, in turns.

    python packages/zero-offload/benchmarks/alone.py

Both use torch's fused update. The model is in bf16. With AdamW the loop keeps fp32 master weights
itself. On a CPU the bytes of the device are host memory too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import zero_offload

SETTINGS = {"lr": 1e-4, "fused": True}


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to(torch.bfloat16)


def plain(model: nn.Module) -> tuple[Callable[[], None], Callable[[], tuple[int, int]]]:
    """Return a step function of AdamW on fp32 master weights, and its state bytes by memory."""
    params = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in params]
    optimizer = torch.optim.AdamW(masters, **SETTINGS)

    def step() -> None:
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None, "backward has run"
            master.grad = param.grad.float()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)

    def state_bytes() -> tuple[int, int]:
        kept = [*masters, *(v for entry in optimizer.state.values() for v in entry.values())]
        return sum(tensor.nbytes for tensor in kept), 0

    return step, state_bytes


def offloaded(model: nn.Module) -> tuple[Callable[[], None], Callable[[], tuple[int, int]]]:
    """Return the same functions for `OffloadedOptimizer` with all state on the host."""
    optimizer = zero_offload.OffloadedOptimizer(torch.optim.AdamW, model.parameters(), **SETTINGS)

    def state_bytes() -> tuple[int, int]:
        parts = {part.is_host: part.tier for part in optimizer.tier.report()}
        found = [parts[is_host].host_bytes if is_host in parts else 0 for is_host in (False, True)]
        return found[0], found[1]

    return optimizer.step, state_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30)
    asked = parser.parse_args()
    models = {name: make_model(asked.width) for name in ("AdamW", "OffloadedOptimizer")}
    makers = (plain, offloaded)
    sides = [make(model) for make, model in zip(makers, models.values(), strict=True)]
    batch = torch.randn(64, asked.width, dtype=torch.bfloat16)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(asked.steps + 3):
        for (name, model), (step, _) in zip(models.items(), sides, strict=True):
            started = time.perf_counter()
            loss: Tensor = model(batch).float().square().mean()
            loss.backward()
            step()
            model.zero_grad()
            seconds[name].append(time.perf_counter() - started)
    # without three warm-up steps
    medians = [statistics.median(taken[3:]) for taken in seconds.values()]
    for name, median, (_, state_bytes) in zip(models, medians, sides, strict=True):
        on_device, on_host = state_bytes()
        print(
            f"{name:20} {median:.4f} s/step, {on_device} bytes on the device, {on_host} on the host"
        )
    print(f"ratio {medians[1] / medians[0]:.3f}, torch {torch.__version__}")


main()
