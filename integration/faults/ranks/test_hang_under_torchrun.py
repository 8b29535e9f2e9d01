"""A rank stops under torchrun, or where it hosts the store: the others' errors name it."""

from __future__ import annotations

import os
import socket
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
stopped = int(os.environ["STOPPED"])
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
        if number == 2 and dist.get_rank() == stopped and engine.global_steps == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        x = block(x)
    return x.square().mean()

model.forward = forward
engine = zero_core.build(model, config)
while True:
    engine.backward(engine(torch.ones(2, 8)))
    engine.step()
"""


def _run_by_torchrun(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node=2", program],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_torchrun_says_who_stopped(tmp_path: Path) -> None:
    done = _run_by_torchrun(tmp_path, STOPPED="1")
    assert done.returncode == 1
    assert "no sign of life of rank 1" in done.stderr
    assert "(its process is stopped), last seen in" in done.stderr
    summary = done.stderr[done.stderr.index("Root Cause") :]
    assert "CollectiveError: rank 0: " in summary, summary
    assert "no sign of life of rank 1" in summary


def test_torchrun_names_a_rank_that_stops_and_hosts_the_store(tmp_path: Path) -> None:
    done = _run_by_torchrun(tmp_path, STOPPED="0", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert done.returncode == 1
    summary = done.stderr[done.stderr.index("Root Cause") :]
    assert "CollectiveError: rank 1: " in summary, summary
    assert "rank 0 of the job (it hosts the store of the process group at " in summary


def test_a_rank_that_stops_and_hosts_the_store_is_named_without_a_launcher(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, program],
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables, "RANK": rank, "STOPPED": "0"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        _, said = ranks[1].communicate(timeout=200)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[1].returncode == 1
    found = "rank 0 of the job (it hosts the store of the process group at 127.0.0.1:"
    logged, raised = said.index(found), said.rindex(found)
    assert logged < said.index("Traceback") < raised
    assert "has not answered for" in said[raised:]
