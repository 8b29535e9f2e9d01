"""Asynchronous checkpoint saves: contents, overlap with training, and failures."""

import logging
import multiprocessing
import os
import shutil
import signal
import threading
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.full_disk import files_up_to

from zero_core import CheckpointError, CollectiveError
from zero_core.checkpoint import save
from zero_core.checkpoint.files import read_weights
from zero_core.comm import groups
from zero_core.comm.groups import StoreExchange
from zero_core.sharded import snapshot
from zero_core.testing.oracle import Case, run_engine
from zero_core.testing.ranks import run_on_processes
from zero_core.testing.simulated import GatedRanks, SimulatedRanks, on_ranks, simulate
from zero_core.testing.training import assert_same, train_steps


def _build(ranks, stage, **keys):
    return Case(stage, top=keys).build(ranks)


def _gated(ranks):
    return GatedRanks(**vars(ranks))


_MOMENTUM = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
_WHOLE = {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}


@pytest.mark.parametrize(
    ("stage", "world_size", "keys"),
    [
        (0, 2, {}),
        (1, 3, {"bf16": {"enabled": True}}),
        (2, 2, _MOMENTUM),
        (3, 1, {}),
        (3, 3, {}),
        (3, 2, _WHOLE),
    ],
)
def test_an_overtaken_save_has_the_bytes_of_one_at_once(
    tmp_path, monkeypatch, stage, world_size, keys
):
    def program(ranks):
        gated = _gated(ranks)
        engine = _build(gated, stage, **keys)
        train_steps(engine, 0, 3)
        pending = engine.async_save(tmp_path / "beside", client_state={"epoch": 7})
        train_steps(engine, 3, 5)  # changes the states while the gate blocks every write
        assert not pending.done()
        gated.gate.set()
        assert pending.result() == tmp_path / "beside" / "step-3"
        engine.close()
        straight = _build(ranks, stage, **keys)
        train_steps(straight, 0, 3)
        straight.save_checkpoint(tmp_path / "at-once", client_state={"epoch": 7})
        straight.close()

    monkeypatch.setattr(snapshot, "BLOCK_NUMEL", 37)
    simulate(program, world_size)
    at_once = sorted((tmp_path / "at-once" / "step-3").iterdir())
    assert len(at_once) > 3
    for file in at_once:
        assert (tmp_path / "beside" / "step-3" / file.name).read_bytes() == file.read_bytes()
    assert (tmp_path / "beside" / "latest").read_text() == "step-3"


@on_ranks(2)
def test_a_second_save_waits_or_is_refused_and_loads_wait(ranks, tmp_path):
    gated = _gated(ranks)
    engine = _build(gated, 2)
    train_steps(engine, 0, 1)
    first = engine.async_save(tmp_path)
    with pytest.raises(CheckpointError, match="save of step-1 is under way"):
        engine.async_save(tmp_path, "other", on_pending="refuse")
    assert not first.done()
    threading.Timer(0.05, gated.gate.set).start()
    second = engine.async_save(tmp_path, "other")
    assert first.done()
    engine.load_checkpoint(tmp_path, "step-1")
    assert second.done()
    train_steps(engine, 1, 2)
    gated.gate.clear()
    third = engine.async_save(tmp_path)
    threading.Timer(0.05, gated.gate.set).start()
    with engine.gathered(modifier_rank=0):  # shows the memory of frozen values
        assert third.done()
    engine.async_save(tmp_path, "last")
    engine.close()
    assert (tmp_path / "last" / "manifest.json").exists()


def test_copies_are_bounded_if_asked_except_of_whole_states(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "BLOCK_NUMEL", 64)

    def save(ranks, limit, **keys):
        gated = _gated(ranks)
        engine = _build(gated, 1, **keys)
        train_steps(engine, 0, 1)
        pending = engine.async_save(tmp_path / str(limit), max_copy_bytes=limit)
        if limit is None:
            train_steps(engine, 1, 2)
        gated.gate.set()
        train_steps(engine, 1, 3)  # waits until the save has copied these states
        pending.result()
        engine.close()
        return pending.peak_bytes

    def program(ranks):
        assert save(ranks, 1024) <= 1024 < save(ranks, None)
        assert save(ranks, 1, **_WHOLE) > 1

    simulate(program, 1)


def test_copies_of_float64_states_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "BLOCK_NUMEL", 64)

    def program(ranks):
        gated = _gated(ranks)
        engine = Case(1).build(gated, torch.nn.Linear(16, 32).double())

        def step():
            engine.backward(engine(torch.ones(2, 16, dtype=torch.float64)).square().mean())
            engine.step()

        step()
        pending = engine.async_save(tmp_path, max_copy_bytes=2560)
        threading.Timer(0.1, gated.gate.set).start()  # step() waits for the save
        step()
        pending.result()
        assert 0 < pending.peak_bytes <= 2560

    simulate(program, 1)


def test_one_core_writes(tmp_path, monkeypatch):
    write, before, found = save.write_file, torch.get_num_threads(), set()
    monkeypatch.setattr(
        save, "write_file", lambda *args: found.add(torch.get_num_threads()) or write(*args)
    )
    torch.set_num_threads(2)
    try:
        Case(1).build().async_save(tmp_path).result()
    finally:
        torch.set_num_threads(before)
    assert found == {1}


def test_what_has_not_changed_is_linked_not_written(tmp_path):
    def program(ranks):
        engine = _build(ranks, 3)
        train_steps(engine, 0, 2)
        engine.save_checkpoint(tmp_path, "a")
        engine.async_save(tmp_path, "b").result()
        train_steps(engine, 2, 3)
        engine.async_save(tmp_path, "c").result()  # frozen values and buffers are unchanged
        with torch.no_grad():
            name = "frozen.0.up.weight"
            engine.states.set_full(name, engine.states.get_full(name) + 1.0)
        engine.save_checkpoint(tmp_path, "d")
        engine.close()

    simulate(program, 2)
    inodes = {
        tag: {file.name: file.stat().st_ino for file in (tmp_path / tag).iterdir()}
        for tag in "abcd"
    }

    def new(one, other):
        files = inodes[one].keys()
        return {name.split("-")[0] for name in files if inodes[one][name] != inodes[other][name]}

    states = {"master_weight", "exp_avg", "exp_avg_sq"}
    assert new("a", "b") == {"manifest.json", "rng"}
    assert new("b", "c") == {"manifest.json", "rng", *states}
    assert new("c", "d") == {"manifest.json", "rng", "value"}
    for tag in "abc":
        shutil.rmtree(tmp_path / tag)
    simulate(lambda ranks: _build(ranks, 3).load_checkpoint(tmp_path, "d"), 1)


@dataclass(frozen=True)
class _Losing(SimulatedRanks):
    """Ranks whose exchange fails on rank 1 after every rank has written its files."""

    def exchange_beside(self, watch):
        exchange = super().exchange_beside(watch)
        gather = exchange.gather_bytes

        def gather_bytes(data):
            rows = gather(data)
            if self.rank == 1 and exchange.place.doing == "checkpoint: finish":
                raise CollectiveError("rank 1: no answer in time")
            return rows

        exchange.gather_bytes = gather_bytes
        return exchange


@on_ranks(2, timeout_s=20.0)
def test_an_exchange_that_fails_on_one_rank_is_an_error_of_all_at_the_next_save(ranks, tmp_path):
    engine = _build(_Losing(**vars(ranks)), 2)
    train_steps(engine, 0, 1)
    engine.async_save(tmp_path)
    with pytest.raises(CheckpointError, match=r"prepare failed on rank 1: .*no answer in time"):
        engine.save_checkpoint(tmp_path, "other")
    assert engine.save_checkpoint(tmp_path, "other") == tmp_path / "other"
    engine.close()


def test_a_disk_that_is_full_from_then_on_is_an_error_on_all_ranks_and_changes_nothing(tmp_path):
    message = r"write failed on rank 0: .*could not be .*make room"
    meeting = threading.Barrier(2, timeout=60)

    @contextmanager
    def full_disk(rank):
        meeting.wait()
        with files_up_to(2000) if rank == 0 else nullcontext():
            meeting.wait()
            yield
            meeting.wait()

    def program(ranks):
        gated = _gated(ranks)

        def fill(pending):
            with full_disk(ranks.rank):
                gated.gate.set()
                wait([pending])
                gated.gate.clear()

        engine = _build(gated, 3)
        train_steps(engine, 0, 1)
        engine.save_checkpoint(tmp_path)

        pending = engine.async_save(tmp_path)
        train_steps(engine, 1, 2)
        fill(pending)
        with pytest.raises(CheckpointError, match=message):
            pending.result()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]
        assert (tmp_path / "latest").read_text() == "step-1"

        pending = engine.async_save(tmp_path)
        fill(pending)
        if ranks.rank == 0:
            # Although rank 0 has read the exception here, the next save raises it on every rank.
            pending.exception()
        with pytest.raises(CheckpointError, match=message):
            engine.async_save(tmp_path)
        train_steps(engine, 2, 3)
        gated.gate.set()
        assert engine.async_save(tmp_path).result() == tmp_path / "step-3"
        gated.gate.clear()

        fill(engine.async_save(tmp_path, "last"))
        weights = engine.full_state_dict()
        with pytest.raises(CheckpointError, match=message):
            engine.close()
        return weights

    weights, _ = simulate(program, 2)
    expected, _ = simulate(lambda ranks: run_engine(Case(3), ranks.rank, 3, process_group=ranks), 2)
    assert_same({name: weights[name] for name in expected.values}, expected.values)
    for weight in read_weights(tmp_path):
        assert torch.equal(weight.value, weights[weight.names[0]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-3"]


def _exchange_after_a_failure(ranks):
    control = ranks.connect()
    exchange = StoreExchange(ranks, "a save beside training")
    exchange.longest_wait_s = 0.0
    longest, groups._LEAVE_S = groups._LEAVE_S, 0.01  # rank 0 soon stops waiting for rank 1
    if ranks.rank == 1:
        with pytest.raises(CollectiveError, match=r"no answer of ranks \[0\]"):
            exchange.gather_bytes(b"late")
    control.barrier()
    if ranks.rank == 0:
        exchange.gather_bytes(b"late")
    exchange.leave()
    control.barrier()
    groups._LEAVE_S, hidden, groups.suppress = longest, groups.suppress, nullcontext
    assert exchange.gather_bytes(str(ranks.rank).encode()) == [b"0", b"1"]
    exchange.leave()
    groups.suppress = hidden


def _run_in_process(ranks, folder):
    _exchange_after_a_failure(ranks)
    engine = Case(stage=2).build(ranks)
    train_steps(engine, 0, 1)
    for step in (1, 2):
        pending = engine.async_save(folder)
        train_steps(engine, step, step + 1)
    assert pending.result() == Path(folder) / "step-2"
    assert engine.load_checkpoint(folder)[0] == Path(folder) / "step-2"
    engine.async_save(folder, "last")  # the process ends while the save may be pending


def test_the_threads_of_processes_agree_through_the_store(tmp_path):
    run_on_processes(_run_in_process, 2, str(tmp_path))
    assert (tmp_path / "latest").read_text() == "last"


def _be_killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def _end_beside_a_dead_rank(rank, folder):
    logging.basicConfig(filename=folder / f"log-{rank}")
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    engine = Case(stage=2).build()
    train_steps(engine, 0, 1)
    engine.save_checkpoint(folder / "saved")
    train_steps(engine, 1, 2)
    if rank == 1:
        save.write_file = _be_killed  # rank 1 dies while rank 0 waits for its files
    engine.async_save(folder / "saved")
    # Rank 0 returns here. Its interpreter waits for the saving thread.


def test_a_rank_that_is_killed_in_a_save_keeps_no_other_from_ending(tmp_path):
    start = multiprocessing.get_context("forkserver").Process
    processes = [start(target=_end_beside_a_dead_rank, args=(rank, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)  # the process group's own timeout is 30 minutes
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL]
    said = (tmp_path / "log-0").read_text()
    assert "rank 0: the save of step-2 failed" in said
    assert "the process of rank 1 has ended" in said
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["latest", "step-1"]
    assert (tmp_path / "saved" / "latest").read_text() == "step-1"
