"""Compare torch's AdamW and CPUAdam on one CPU training loop, in alternating steps.

``python benchmarks/alone.py [--width 1024] [--rounds 11]`` needs only torch and cpu-adam. It prints
medians over all rounds of milliseconds per step (forward, backward and update) and per update, and
bytes of optimizer state. Ratios are relative to torch's fused AdamW.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from cpu_adam import CPUAdam

FUSED = "torch AdamW, fused"
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    FUSED: lambda params: AdamW(params, lr=1e-3, weight_decay=0.01, fused=True),
    "torch AdamW": lambda params: AdamW(params, lr=1e-3, weight_decay=0.01, fused=False),
    "CPUAdam": lambda params: CPUAdam(params, lr=1e-3, weight_decay=0.01),
    "CPUAdam, 8 bits": lambda params: CPUAdam(
        params, lr=1e-3, weight_decay=0.01, state_dtype="int8"
    ),
}


class Contender:
    """A model, its optimizer, and the measured times."""

    def __init__(self, make: Callable[[Iterable[Tensor]], Optimizer], width: int) -> None:
        torch.manual_seed(0)  # equal initial weights for every contender
        layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())]
        self.model = nn.Sequential(*layers, nn.Linear(width, width))
        self.optimizer = make(self.model.parameters())
        self.step_ms: list[float] = []
        self.update_ms: list[float] = []

    def train(self, inputs: Tensor) -> float:
        start = time.perf_counter()
        loss = (self.model(inputs) - inputs).square().mean()
        loss.backward()
        middle = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        stop = time.perf_counter()
        self.step_ms.append((stop - start) * 1e3)
        self.update_ms.append((stop - middle) * 1e3)
        return loss.item()

    def state_bytes(self) -> int:
        states = (state.values() for state in self.optimizer.state.values())
        return sum(value.nbytes for values in states for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    contenders = {name: Contender(make, args.width) for name, make in OPTIMIZERS.items()}
    inputs = torch.randn(args.batch, args.width)
    for one in contenders.values():  # warm up: creates the optimizer states
        one.train(inputs)
        one.step_ms, one.update_ms = [], []
    losses = {}
    for _ in range(args.rounds):
        for name, one in contenders.items():
            losses[name] = one.train(inputs)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("| optimizer | step (ms) | to fused | update (ms) | to fused | state (bytes) | loss |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    fused = contenders[FUSED]
    for name, one in contenders.items():
        step, update = median(one.step_ms), median(one.update_ms)
        step_ratio, update_ratio = step / median(fused.step_ms), update / median(fused.update_ms)
        times = f"{step:.2f} | {step_ratio:.2f} | {update:.2f} | {update_ratio:.2f}"
        print(f"| {name} | {times} | {one.state_bytes():,} | {losses[name]:.5f} |")


if __name__ == "__main__":
    main()
