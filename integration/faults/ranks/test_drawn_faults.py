"""Whatever happens to a rank at whatever moment, all others end in time and name the rank."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import zero_core
from zero_core.testing import run_alone, seeded

NUM_FAULTS = 300
AT_ONCE = 4
"""Launches that run at the same time."""
WIDTH = 16
NAMED_WITHIN_S, ENDED_WITHIN_S = 2.0, 4.0
LIMIT_S = 10.0
"""Most seconds from the fault to the error of every other rank."""
START_S = 120.0
NUM_STARTS = 3
"""Starts per fault. Under load a rank may exceed `ENDED_WITHIN_S` before training begins."""
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
    "has frozen a parameter": "blocks.1.bias",
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
        zero: dict[str, Any] = {"stage": self.stage}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "gradient_clipping": 1.0 if self.work == "clips" else 0.0,
            "broadcast_buffers": True,
            "name_waits_within_s": NAMED_WITHIN_S,
            "collective_timeout_s": ENDED_WITHIN_S,
        }


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded(3):
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("seen", torch.zeros(1))
        self.at_block_1: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == 1:
                self.at_block_1()
            x = torch.tanh(block(x))
        return x.square().mean()


def _rank(rank: int, drawn: Drawn, folder: str) -> None:
    root = Path(folder)
    (root / f"pid-{rank}").write_text(str(os.getpid()))
    store = dist.FileStore(str(root / "store"), drawn.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=drawn.world_size)
    model = _Net()
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
        engine.backward(engine(torch.ones(2, WIDTH)))
        engine.step()
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


def _suffer(engine: zero_core.Engine, model: _Net, fault: str, root: Path) -> None:
    if fault in OF_THE_PROCESS:
        return
    _note(root)
    group = engine.optimizer.param_groups[0]

    def fail() -> None:
        raise ValueError("no more data")

    match fault:
        case "leaves":
            os._exit(0)
        case "raises an error in a forward":
            model.at_block_1 = fail
        case "sleeps in a forward":
            model.at_block_1 = lambda: time.sleep(START_S)
        case "sleeps between two steps":
            time.sleep(START_S)
        case "takes another branch":
            engine.full_state_dict()
        case "has another learning rate":
            group["lr"] *= 1 + 1e-9
        case "has other betas":
            group["betas"] = (0.9, 0.998)
        case "has frozen a parameter":
            model.blocks[1].bias.requires_grad_(False)
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
    """Run one fault once. Return the violated expectations, or None if training did not begin."""
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
