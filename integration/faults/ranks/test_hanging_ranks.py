"""The launcher and every exchange name a rank that stops or ends, and no healthy rank."""

from __future__ import annotations

import gc
import os
import runpy
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_core
from faults.harness import Program
from zero_core.testing import Case, batch, make_model, make_tower, spawn

WIDTH = 16
NAMED_WITHIN_S, ENDED_WITHIN_S = 2.0, 4.0


def _build(stage: int) -> zero_core.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "name_waits_within_s": NAMED_WITHIN_S,
        "collective_timeout_s": ENDED_WITHIN_S,
    }
    return zero_core.build(make_tower(width=WIDTH), config)


def _step(engine: zero_core.Engine) -> None:
    engine.backward(engine(torch.ones(2, WIDTH)))
    engine.step()


def _round(engine: zero_core.Engine, folder: Path) -> None:
    """Train, save, export and synchronize, as programs do."""
    for _ in range(3):
        _step(engine)
    engine.save_checkpoint(folder / "checkpoints", "newest")
    engine.full_state_dict()
    engine.sharded_state.control.barrier()


EXCHANGES: dict[str, Any] = {
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder / "more"),
    "load_checkpoint": lambda engine, folder: engine.load_checkpoint(folder / "checkpoints"),
    "full_state_dict": lambda engine, _: engine.full_state_dict(),
    "export_safetensors": lambda engine, folder: engine.export_safetensors(folder / "exported"),
    "step": lambda engine, _: _step(engine),
    "clip_grad_norm_": lambda engine, _: (
        engine.backward(engine(torch.ones(2, WIDTH))),
        engine.clip_grad_norm_(1.0),
    ),
    "unwrap": lambda engine, _: engine.unwrap(),
    "gathered": lambda engine, _: engine.gathered(modifier_rank=0).__enter__(),
    "publish": lambda engine, _: (engine.keep_small_params(), engine.publish()),
}


def _lose_peer(rank: int, world_size: int, folder: str, exchange: str, stage: int) -> None:
    engine = _build(stage)
    _round(engine, Path(folder))
    if rank == 1:
        os._exit(0)
    try:
        EXCHANGES[exchange](engine, Path(folder))
    except zero_core.ZeroError as error:
        Path(folder, "found").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)


@pytest.mark.parametrize(
    ("exchange", "stage"),
    # At stage 1 the step has already launched what `publish` sends.
    [(e, stage) for e in EXCHANGES for stage in (1, 3) if (e, stage) != ("publish", 1)],
)
def test_every_exchange_with_a_rank_that_died_raises_an_error_that_names_it(
    exchange: str, stage: int, tmp_path: Path
) -> None:
    spawn(_lose_peer, 2, str(tmp_path), exchange, stage)
    found = (tmp_path / "found").read_text()
    assert found.startswith("CollectiveError: rank 0: ")
    assert "the process of rank 1 has ended" in found


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


def _program(folder: Path) -> str:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    return str(program)


def _torchrun(folder: Path, **variables: str) -> tuple[str, str]:
    """Run a launch that fails. Return its output and the output from "Root Cause" on."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    with Program(*launcher, _program(folder), **variables) as run:
        assert run.end() == 1
        said = run.output
    return said, said[said.index("Root Cause") :]


def test_torchrun_says_who_stopped(tmp_path: Path) -> None:
    said, summary = _torchrun(tmp_path, STOPPED="1")
    assert "no sign of life of rank 1" in said
    assert "(its process is stopped), last seen in" in said
    assert "CollectiveError: rank 0: " in summary, summary
    assert "no sign of life of rank 1" in summary


def test_torchrun_names_a_rank_that_stops_and_hosts_the_store(tmp_path: Path) -> None:
    _, summary = _torchrun(tmp_path, STOPPED="0", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert "CollectiveError: rank 1: " in summary, summary
    assert "rank 0 of the job (it hosts the store of the process group at " in summary


def test_a_rank_that_stops_and_hosts_the_store_is_named_without_a_launcher(tmp_path: Path) -> None:
    program = _program(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "STOPPED": "0"}
    with Program(program, RANK="0", **job), Program(program, RANK="1", **job) as last:
        assert last.end() == 1
        said = last.output
    found = "rank 0 of the job (it hosts the store of the process group at 127.0.0.1:"
    logged, raised = said.index(found), said.rindex(found)
    assert logged < said.index("Traceback") < raised
    assert "has not answered for" in said[raised:]


WATCH = Path(__file__).parents[3] / "packages" / "zero-core" / "tests" / "test_watch.py"


def test_no_rank_is_named_in_a_hundred_thousand_healthy_steps(caplog, monkeypatch):
    monkeypatch.syspath_prepend(WATCH.parent)
    watch = runpy.run_path(str(WATCH))
    ranks = watch["_Ranks"](3)
    ranks.run(watch["healthy"](100_000, 3))
    assert ranks.now > 50_000.0
    assert caplog.records == []


def _held() -> tuple[int, int, int]:
    """Return the numbers of descriptors and threads and the bytes of tensors in this process."""
    gc.collect()
    tensors = (t for t in gc.get_objects() if issubclass(type(t), torch.Tensor))
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    # The heartbeat thread ends only with its next beat.
    is_watched = any(t.name == "zero_core watch" for t in threading.enumerate())
    threads = len(os.listdir("/proc/self/task")) - is_watched
    return len(os.listdir("/proc/self/fd")), threads, sum(sizes.values())


def _drop(rank: int, world_size: int, stage: int, is_on_host: bool) -> None:
    zero = {"offload_optimizer": {"device": "cpu"}} if is_on_host else {}

    def use() -> None:
        engine = zero_core.build(make_model(), Case(stage, zero=zero).config())
        engine.backward(engine(**batch(0, 0, rank))["loss"])
        engine.step()

    for _ in range(2):
        use()
    before = _held()
    for _ in range(20):
        use()
    deadline = time.monotonic() + 30.0
    # Stopped threads need a moment to end.
    while any(now > then for now, then in zip(_held(), before, strict=True)):
        assert time.monotonic() < deadline, f"held {_held()}, {before} before"
        time.sleep(0.1)


@pytest.mark.parametrize("is_on_host", [False, True], ids=["on the device", "offloaded"])
@pytest.mark.parametrize("stage", range(4))
def test_twenty_engines_that_are_dropped_leave_nothing(stage: int, is_on_host: bool) -> None:
    if is_on_host and not stage:
        pytest.skip("offload_optimizer needs stage 1 or more")
    spawn(_drop, 2, stage, is_on_host)
