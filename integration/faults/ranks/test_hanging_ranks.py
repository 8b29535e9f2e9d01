"""After a fault of one rank, all others end in time and name that rank, but no healthy one."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import zero_core
from faults.harness import Program
from zero_core.testing import Case, batch, make_model, make_tower, run_alone, spawn, train

WIDTH = 16
ENDED_WITHIN_S = 4.0


def _config(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "name_waits_within_s": 2.0,
        "collective_timeout_s": ENDED_WITHIN_S,
    }


def _round(engine: zero_core.Engine, folder: Path) -> None:
    """Train, save, export and synchronize, as programs do."""
    train(engine, [torch.ones(2, WIDTH)] * 3)
    engine.save_checkpoint(folder / "checkpoints", "newest")
    engine.full_state_dict()
    engine.sharded_state.control.barrier()


EXCHANGES: dict[str, Any] = {
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder / "more"),
    "load_checkpoint": lambda engine, folder: engine.load_checkpoint(folder / "checkpoints"),
    "full_state_dict": lambda engine, _: engine.full_state_dict(),
    "export_safetensors": lambda engine, folder: engine.export_safetensors(folder / "exported"),
    "step": lambda engine, _: train(engine, [torch.ones(2, WIDTH)]),
    "clip_grad_norm_": lambda engine, _: (
        engine.backward(engine(torch.ones(2, WIDTH))),
        engine.clip_grad_norm_(1.0),
    ),
    "unwrap": lambda engine, _: engine.unwrap(),
    "gathered": lambda engine, _: engine.gathered(modifier_rank=0).__enter__(),
    "publish": lambda engine, _: (engine.keep_small_params(), engine.publish()),
}


def _lose_peer(rank: int, world_size: int, folder: str, exchange: str, stage: int) -> None:
    engine = zero_core.build(make_tower(width=WIDTH), _config(stage))
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
    # At stage 1 `publish` sends nothing, because the step has already launched its gathers.
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


@pytest.mark.parametrize(
    ("stopped", "store", "cause"),
    [
        ("1", {}, "no sign of life of rank 1"),
        (
            *("0", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
            "rank 0 of the job (it hosts the store of the process group at ",
        ),
    ],
)
def test_torchrun_names_a_rank_that_stops(stopped, store, cause, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    with Program(*launcher, _program(tmp_path), STOPPED=stopped, **store) as run:
        assert run.end() == 1
        said = run.output
    summary = said[said.index("Root Cause") :]
    assert f"CollectiveError: rank {1 - int(stopped)}: " in summary, summary
    assert cause in summary
    assert store or "(its process is stopped), last seen in" in said


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
        train(zero_core.build(make_model(), Case(stage, zero=zero).config()), [batch(0, 0, rank)])

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


NUM_FAULTS = 300
AT_ONCE = 4
"""Launches that run at the same time."""
LIMIT_S = 10.0
"""Maximum seconds from the fault to the error of every other rank."""
START_S = 120.0
NUM_STARTS = 3
"""Maximum starts per fault. Under load a rank may exceed `ENDED_WITHIN_S` before training."""
LEAVES_AFTER_S = 1.0
"""Seconds for a last heartbeat, which says that the rank gave up."""

OF_THE_PROCESS = {
    "is stopped": signal.SIGSTOP,
    "is killed": signal.SIGKILL,
    "is ended by SIGTERM": signal.SIGTERM,
}
"""Signals, sent at any moment."""
OF_THE_PROGRAM = {  # with a pattern of the error messages of other ranks
    "leaves": "has ended",
    "raises an error in a forward": "no more data",
    # The message has the second form if heartbeats stop under high load.
    "sleeps in a forward": "has been in|last seen in",
    "sleeps between two steps": "has been in|last seen in",
    "takes another branch": "",
}
OF_THE_VALUES = {
    "has another learning rate": "lr",
    "has other betas": "betas",
    "has frozen a parameter": "blocks.1.0.bias",
    "has a buffer more": "more",
}
"""Faults that only the consistency check of each step detects, with a part of its message."""
FAULTS = (*OF_THE_PROCESS, *OF_THE_PROGRAM, *OF_THE_VALUES)
WORK = ("steps", "saves", "evaluates", "clips")


@dataclass(frozen=True)
class Drawn:
    """A training and the fault that happens to one of its ranks."""

    fault: str
    world_size: int
    victim: int
    stage: int
    offload: bool
    work: str
    at_step: int
    after_s: float

    @classmethod
    def of(cls, number: int) -> Drawn:
        draw = random.Random(number)
        world_size = draw.choice((2, 3, 4))
        fault = FAULTS[number % len(FAULTS)]
        stages = (2, 3) if fault == "takes another branch" else (0, 1, 2, 3)
        return cls(
            fault,
            world_size,
            victim=draw.randrange(world_size),
            stage=draw.choice(stages),
            offload=draw.random() < 0.3,
            work=draw.choice(WORK),
            at_step=draw.randint(2, 10),
            after_s=draw.uniform(0.0, 0.3),
        )

    def config(self) -> dict[str, Any]:
        zero = {"offload_optimizer": {"device": "cpu"}} if self.offload else {}
        clipping = 1.0 if self.work == "clips" else 0.0
        return {
            **_config(self.stage, **zero),
            "gradient_clipping": clipping,
            "broadcast_buffers": True,
        }


def _rank(rank: int, drawn: Drawn, folder: str) -> None:
    root = Path(folder)
    (root / f"pid-{rank}").write_text(str(os.getpid()))
    store = dist.FileStore(str(root / "store"), drawn.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=drawn.world_size)
    model = make_tower(depth=3, width=WIDTH)
    model.register_buffer("seen", torch.zeros(1))
    engine = zero_core.build(model, drawn.config())
    steps = _steps(engine, drawn, root)
    next(steps)
    dist.barrier()
    if rank == drawn.victim and drawn.fault in OF_THE_PROCESS:
        threading.Thread(target=_signal_itself, args=(drawn, root), daemon=True).start()
    try:
        for number in steps:
            if rank == drawn.victim and number == drawn.at_step:
                _suffer(engine, model, drawn.fault, root)
    except zero_core.ZeroError as error:
        said = {"at": time.time(), "kind": type(error).__name__, "text": str(error)}
        (root / f"found-{rank}").write_text(json.dumps(said), encoding="utf-8")
        time.sleep(LEAVES_AFTER_S)
        os._exit(0)


def _steps(engine: zero_core.Engine, drawn: Drawn, root: Path) -> Iterator[int]:
    """Train endlessly, with the work that programs do between steps."""
    number = 0
    while True:
        train(engine, [torch.ones(2, WIDTH)])
        number += 1
        yield number
        if drawn.work == "saves" and number % 3 == 0:
            engine.save_checkpoint(root / "checkpoints", "newest")
        if drawn.work == "evaluates" and number % 2 == 0:
            with torch.no_grad():
                engine(torch.ones(2, WIDTH))
            engine.full_state_dict()


def _note(root: Path) -> None:
    (root / "moment").write_text(repr(time.time()), encoding="utf-8")


def _signal_itself(drawn: Drawn, root: Path) -> None:
    time.sleep(drawn.after_s)
    _note(root)
    os.kill(os.getpid(), OF_THE_PROCESS[drawn.fault])


def _suffer(engine: zero_core.Engine, model: nn.Module, fault: str, root: Path) -> None:
    if fault in OF_THE_PROCESS:
        return
    _note(root)
    group = engine.optimizer.param_groups[0]
    block = model.get_submodule("blocks.1")

    def fail(*_: object) -> None:
        raise ValueError("no more data")

    match fault:
        case "leaves":
            os._exit(0)
        case "raises an error in a forward":
            block.register_forward_pre_hook(fail)
        case "sleeps in a forward":
            block.register_forward_pre_hook(lambda *_: time.sleep(START_S))
        case "sleeps between two steps":
            time.sleep(START_S)
        case "takes another branch":
            engine.full_state_dict()
        case "has another learning rate":
            group["lr"] *= 1 + 1e-9
        case "has other betas":
            group["betas"] = (0.9, 0.998)
        case "has frozen a parameter":
            block.get_parameter("0.bias").requires_grad_(False)
        case "has a buffer more":
            model.register_buffer("more", torch.ones(1))


def _fault(number: int) -> list[str]:
    """Run one fault. Return the violated expectations."""
    drawn = Drawn.of(number)
    what = f"{number} {asdict(drawn)}"
    for _ in range(NUM_STARTS):
        wrong = _launch(drawn)
        if wrong is not None:
            return [f"{what}: {one}" for one in wrong]
    return [f"{what}: it did not begin to train"]


def _launch(drawn: Drawn) -> list[str] | None:
    """Start a fault's ranks. Return the violated expectations, or None if no training began."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(drawn.world_size) as started:
        root = Path(folder)
        ranks = [started.submit(_run, r, drawn, folder) for r in range(drawn.world_size)]
        others = [r for r in range(drawn.world_size) if r != drawn.victim]
        limit = time.monotonic() + START_S
        while not (root / "moment").exists() and time.monotonic() < limit:
            if all(process.done() for process in ranks):
                return None
            time.sleep(0.02)
        wait([ranks[r] for r in others], timeout=LIMIT_S + LEAVES_AFTER_S + 5.0)
        for rank, process in enumerate(ranks):
            if not process.done():
                with suppress(ProcessLookupError):  # the process has ended
                    os.kill(int((root / f"pid-{rank}").read_text()), signal.SIGKILL)
        wait(ranks)
        return list(_wrong(drawn, root, others)) if (root / "moment").exists() else None


def _run(rank: int, drawn: Drawn, folder: str) -> None:
    with suppress(
        ProcessExitedException, ProcessRaisedException
    ):  # the victim fails as intended, and other ranks report in files
        run_alone(_rank, rank, drawn, folder)


def _wrong(drawn: Drawn, root: Path, others: list[int]) -> Iterator[str]:
    moment = float((root / "moment").read_text(encoding="utf-8"))
    for rank in others:
        file = root / f"found-{rank}"
        if not file.exists():
            yield f"rank {rank} has not ended"
            continue
        found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        text, own = str(found["text"]), f"rank {rank}: "
        if found["at"] - moment > LIMIT_S:
            yield f"rank {rank} ended after {found['at'] - moment:.1f} s"
        if drawn.fault in OF_THE_VALUES:
            is_named = OF_THE_VALUES[drawn.fault] in text and f"rank {drawn.victim}" in text
            if found["kind"] != "RankMismatchError" or not is_named:
                yield f"rank {rank} said {found['kind']}: {text}"
        elif not re.search(rf"ranks? (\d, )*{drawn.victim}\b", text.removeprefix(own)):
            yield f"rank {rank} did not name it: {text}"
        elif not re.search(OF_THE_PROGRAM.get(drawn.fault, ""), text):
            yield f"rank {rank} said nothing of it: {text}"
        elif "unit" not in text and "control exchange" not in text and "statistics" not in text:
            yield f"rank {rank} did not say where: {text}"


def test_all_other_ranks_end_in_time_and_name_it():
    with ThreadPoolExecutor(AT_ONCE) as launches:
        wrong = list(launches.map(_fault, range(NUM_FAULTS)))
    assert not any(wrong), "\n".join(line for found in wrong for line in found)
