"""Faults of one rank under NCCL: the other ranks name it in an error and end in time."""

import logging
import os
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

import zero_core
from zero_core.testing import Case, make_tower, run_alone, train

TIMEOUT_S = 6.0
LIMIT_S = 12.0
"""Longest permitted time in seconds from the fault to the end of the other ranks."""
FAULTS = {
    "is stopped": lambda control: os.kill(os.getpid(), signal.SIGSTOP),
    "is killed": lambda control: os.kill(os.getpid(), signal.SIGKILL),
    "is late": lambda control: time.sleep(10 * LIMIT_S),
    "calls another collective": lambda control: control.gather(torch.ones(3, device="cuda")),
    "sends another size": lambda control: control.sum(torch.ones(3, device="cuda")),
}
MOMENTS = ("in a forward", "in a backward", "between two steps")


def _rank(rank, size, victim, fault, moment, stage, at_step, folder):
    os.dup2(os.open(folder / f"said-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    logging.basicConfig()
    torch.accelerator.set_device_index(rank)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size)
    model, is_due = make_tower(), [False]
    config = {"name_waits_within_s": 2.0, "collective_timeout_s": TIMEOUT_S}
    engine = zero_core.build(model, {**Case(stage).config(), **config})

    def act(*_):
        if is_due[0]:
            is_due[0] = False
            (folder / "moment").write_text(repr(time.time()))
            FAULTS[fault](engine.sharded_state.control)

    block = model.get_submodule("blocks.1")
    if moment == "in a forward":
        block.register_forward_pre_hook(act)
    elif moment == "in a backward":
        block.register_forward_hook(lambda _, __, out: out.register_hook(act) and None)
    for step in range(10_000):
        is_due[0] = rank == victim and step == at_step
        if moment == "between two steps":
            act()
        train(engine, [torch.ones(2, 7, device="cuda")])


def _run(rank, *drawn, folder):
    with suppress(ProcessExitedException):
        run_alone(_rank, rank, *drawn, folder)
    (folder / f"end-{rank}").write_text(repr(time.time()))


@pytest.mark.cuda
@pytest.mark.parametrize(
    "number", [*range(5), *(pytest.param(n, marks=pytest.mark.slow) for n in range(5, 20))]
)
def test_all_other_ranks_end_in_time_and_name_it(number, tmp_path):
    draw, size = random.Random(number), 2 + number // len(FAULTS) % 2
    victim, fault = draw.randrange(size), list(FAULTS)[number % len(FAULTS)]
    drawn = size, victim, fault, draw.choice(MOMENTS), draw.randrange(4), draw.randint(1, 4)
    others = [r for r in range(size) if r != victim]
    with ThreadPoolExecutor(size) as started:
        ranks = [started.submit(_run, r, *drawn, folder=tmp_path) for r in range(size)]
        wait([ranks[r] for r in others], timeout=300)
        for rank in (r for r in range(size) if not ranks[r].done()):
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(int((tmp_path / f"pid-{rank}").read_text()), signal.SIGKILL)
    moment = float((tmp_path / "moment").read_text())
    for rank in others:
        said = (tmp_path / f"said-{rank}").read_text()
        error = re.search(rf"CRITICAL.*rank {rank}: (.*)", said)
        assert error is not None, (drawn, rank, said)
        assert re.search("of unit|control exchange|statistics", error[1]), (drawn, error)
        assert re.search(rf"ranks? (\d, )*{victim}\b", error[1]), (drawn, error)
        assert float((tmp_path / f"end-{rank}").read_text()) - moment < LIMIT_S, (drawn, rank)
