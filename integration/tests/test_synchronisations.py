"""A step of the training program makes the host wait for the device once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

import zero_core
from zero_core.testing import Case, Tower, late_device, rows, run_alone, simulate
from zero_engine.train.program import take_step

NUM_STEPS = 4


class Net(Tower):
    """A tower that is called as a language model of transformers."""

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(loss=super().forward(input_ids))


def _take_steps(ranks: Any) -> list[int]:
    engine = zero_core.build(Net(), Case(0, "bf16", 3, 1.0).config(), process_group=ranks)
    corpus: Any = SimpleNamespace(batch=lambda index, **_: rows(index, 0))
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
