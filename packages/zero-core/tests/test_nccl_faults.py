"""Whatever happens to a rank under NCCL, the others end in time and say where and for whom."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import zero_core
from zero_core.testing import Case, make_tower, run_alone
from zero_core.testing.training import train

TIMEOUT_S = 6.0
LIMIT_S = TIMEOUT_S + 6.0
"""Most seconds from the fault to the end of the other ranks."""
FAULTS = ("is stopped", "is killed", "is late", "calls another collective", "sends another size")
MOMENTS = ("in a forward", "in a backward", "between two steps")


class Drawn(NamedTuple):
    fault: str
    world_size: int
    victim: int
    stage: int
    at_step: int
    moment: str

    @classmethod
    def of(cls, number: int) -> Drawn:
        draw, size = random.Random(number), 2 + number // len(FAULTS) % 2
        drawn = draw.randrange(size), draw.randrange(4), draw.randint(1, 4), draw.choice(MOMENTS)
        return cls(FAULTS[number % len(FAULTS)], size, *drawn)


def _suffer(fault: str, engine: zero_core.Engine) -> None:
    control, values = engine.sharded_state.control, torch.ones(3, device="cuda")
    match fault:
        case "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "is late":
            time.sleep(10 * LIMIT_S)
        case "calls another collective":
            control.gather(values)
        case "sends another size":  # instead of the statistics of the step
            control.sum(values)


def _rank(rank: int, drawn: Drawn, folder: Path) -> None:
    os.dup2(os.open(folder / f"said-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    logging.basicConfig()
    torch.accelerator.set_device_index(rank)
    store = dist.FileStore(str(folder / "store"), drawn.world_size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=drawn.world_size)
    model, is_due = make_tower(), [False]
    config = {"name_waits_within_s": 2.0, "collective_timeout_s": TIMEOUT_S}
    engine = zero_core.build(model, {**Case(drawn.stage).config(), **config})

    def act(*_: object) -> None:
        if is_due[0]:
            is_due[0] = False
            (folder / "moment").write_text(repr(time.time()))
            _suffer(drawn.fault, engine)

    block = model.get_submodule("blocks.1")
    if drawn.moment == "in a forward":
        block.register_forward_pre_hook(act)
    elif drawn.moment == "in a backward":
        block.register_forward_hook(lambda _, __, out: out.register_hook(lambda _: act()) and None)
    for step in range(10_000):
        is_due[0] = rank == drawn.victim and step == drawn.at_step
        if drawn.moment == "between two steps":
            act()
        train(engine, [torch.ones(2, 7, device="cuda")])


def _run(rank: int, drawn: Drawn, folder: Path) -> None:
    with suppress(ProcessExitedException):
        try:
            run_alone(_rank, rank, drawn, folder)
        except ProcessRaisedException as error:
            with (folder / f"said-{rank}").open("a") as file:
                file.write(str(error))
    (folder / f"end-{rank}").write_text(repr(time.time()))


@pytest.mark.cuda
@pytest.mark.parametrize("number", range(20))
def test_all_other_ranks_end_in_time_and_name_it(number: int, tmp_path: Path) -> None:
    drawn = Drawn.of(number)
    others = [r for r in range(drawn.world_size) if r != drawn.victim]
    with ThreadPoolExecutor(drawn.world_size) as started:
        ranks = [started.submit(_run, r, drawn, tmp_path) for r in range(drawn.world_size)]
        wait([ranks[r] for r in others], timeout=120)
        for rank, process in enumerate(ranks):
            if not process.done():
                os.kill(int((tmp_path / f"pid-{rank}").read_text()), signal.SIGKILL)
    said = {rank: (tmp_path / f"said-{rank}").read_text() for rank in others}
    assert (tmp_path / "moment").exists(), said
    moment = float((tmp_path / "moment").read_text())
    for rank in others:
        what = (drawn, rank, said[rank])
        assert float((tmp_path / f"end-{rank}").read_text()) - moment < LIMIT_S, what
        error = re.search(rf"(CRITICAL.*|CollectiveError: )(rank {rank}: .*)", said[rank])
        assert error is not None, what
        assert re.search("of unit|control exchange|statistics", error[2]), what
        assert re.search(rf"ranks? (\d, )*{drawn.victim}\b", error[2][8:]), what
