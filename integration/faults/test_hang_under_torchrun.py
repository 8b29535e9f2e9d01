"""A rank stops under torchrun: torchrun's summary says which one, in which unit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, signal
import torch
import torch.distributed as dist
from torch import nn
import zero_core

dist.init_process_group("gloo")
model = nn.Module()
model.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "name_waits_within_s": 2.0,
    "collective_timeout_s": 4.0,
}

def forward(x):
    for number, block in enumerate(model.blocks):
        if number == 2 and dist.get_rank() == 1 and engine.global_steps == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        x = block(x)
    return x.square().mean()

model.forward = forward
engine = zero_core.build(model, config)
while True:
    engine.backward(engine(torch.ones(2, 8)))
    engine.step()
"""


def test_torchrun_says_who_stopped(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node=2", program],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1
    assert "no sign of life of rank 1" in done.stderr
    assert "(its process is stopped), last seen in" in done.stderr
    summary = done.stderr[done.stderr.index("Root Cause") :]
    assert "CollectiveError: rank 0: " in summary, summary
    assert "no sign of life of rank 1" in summary
