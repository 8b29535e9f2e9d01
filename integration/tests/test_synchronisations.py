"""A step with offload, and one of the training program, make the host wait for the device once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import zero_core
from zero_core.testing import Case, late_device, run_alone, simulate
from zero_core.testing.models import seeded
from zero_engine.train.program import take_step

WIDTH, NUM_STEPS = 16, 4
CPU = {"device": "cpu"}
BLOCKS: list[dict[str, Any]] = [
    {"stage": 2, "offload_optimizer": CPU},
    {"stage": 2, "offload_optimizer": {**CPU, "ratio": 0.6}},
    {"stage": 3, "offload_param": CPU},
    {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x).relu()
        return SimpleNamespace(loss=x.float().square().mean())


class Corpus:
    """Batches of random numbers, alike on every rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def batch(self, index: int, **_: int) -> Tensor:
        numbers = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(index))
        return numbers.to(self._device)  # before the step that is counted


def config(block: dict[str, Any], dtype: str, micro_steps: int, clipping: float) -> dict[str, Any]:
    zero = {**block, "stage3_param_persistence_threshold": 0}
    return Case(block["stage"], dtype, micro_steps, clipping, zero=zero).config()


def train(ranks: Any, settings: dict[str, Any]) -> tuple[list[list[str]], list[Tensor]]:
    """Return where the caller's thread waited in each step, and the values after all."""
    with seeded(0):
        model = Net()
    engine = zero_core.build(model, settings, process_group=ranks)
    corpus, waits = Corpus(ranks.device), []
    batches = [[corpus.batch(i) for i in range(engine.gradient_accumulation_steps)]] * NUM_STEPS
    for batch in batches:
        if ranks.device.type == "late":
            late_device.reset_counters(with_stacks=True)
        for inputs in batch:
            engine.backward(engine(inputs).loss)
            engine.step()
        if ranks.device.type == "late":
            stacks = late_device.counters(ranks.device.index).stacks
            waits.append([stack for _, stack in stacks if "engine.py" in stack])
    values = list(engine.full_state_dict(dtype=torch.float32).values())
    engine.close()
    return waits, values


def _train_with_offload() -> None:
    late_device.load()
    for block in BLOCKS:
        for dtype, micro_steps, clipping in (("fp32", 1, 0.0), ("bf16", 2, 0.1), ("bf16", 1, 0.1)):
            settings = config(block, dtype, micro_steps, clipping)
            ((_, expected),) = simulate(train, 1, settings)
            late_device.set_delays(seed=micro_steps, kernel_s=2e-5, copy_s=2e-3)
            ((waits, found),) = simulate(train, 1, settings, device="late")
            assert all(len(stacks) <= 1 for stacks in waits), (settings, waits)
            for mine, on_cpu in zip(found, expected, strict=True):
                assert torch.equal(mine, on_cpu), settings


def test_a_step_with_offload_waits_once_and_has_the_bits_of_the_cpu() -> None:
    run_alone(_train_with_offload)


def _take_steps(ranks: Any) -> list[int]:
    engine = zero_core.build(Net(), config({"stage": 0}, "bf16", 3, 1.0), process_group=ranks)
    corpus: Any = Corpus(torch.device("cpu"))
    counts = []
    for step in range(NUM_STEPS):
        late_device.reset_counters(with_stacks=True)
        take_step(engine, corpus, step)
        kinds = [kind for kind, _ in late_device.counters(ranks.device.index).stacks]
        counts.append(len(kinds) - kinds.count("copy"))  # without the uploads of batches
    engine.close()
    return counts


def _run_the_program() -> None:
    late_device.load()
    ((counts),) = simulate(_take_steps, 1, device="late")
    assert max(counts) <= 1, counts


def test_the_training_program_reads_no_loss_within_a_step() -> None:
    run_alone(_run_the_program)
