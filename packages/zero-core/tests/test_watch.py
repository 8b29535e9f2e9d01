"""Diagnosis of ranks that wait for each other, in virtual time."""

import json
import logging
import random
import threading
import time

import pytest
from support.board import Board

from zero_core.comm import watch as watches
from zero_core.comm.place import OUTSIDE, Place
from zero_core.comm.watch import Watch
from zero_core.core.extension import EndedStep
from zero_core.extensions.heartbeat import HeartbeatFile
from zero_core.testing import Case, make_tower, rows, train

WITHIN_S = 10.0
FORWARD = [f"forward of unit {u} (blocks.{u - 1})" for u in range(1, 5)]


class _Ranks:
    """Ranks that follow a script. Each collective ends when all ranks have entered it."""

    def __init__(self, size, *, within_s=WITHIN_S):
        self.now = 0.0
        self.table = {}
        self.silent = set()
        """Ranks whose process is stopped."""
        self.places = [Place() for _ in range(size)]
        self.watches = []
        self.boards = []
        for rank, place in enumerate(self.places):
            self.boards.append(board := Board(self.table, rank))
            watch = Watch(board, place, rank=rank, world_size=size, within_s=within_s)
            watch.tick(0.0)
            self.watches.append(watch)

    def tick(self, until):
        step = self.watches[0].interval_s
        while self.now + step <= until:
            self.now += step
            for rank, watch in enumerate(self.watches):
                if rank not in self.silent:
                    watch.tick(self.now)

    def run(self, stages):
        """Run stages: each rank's activity, next wait, and seconds until that wait."""
        for stage in stages:
            start = self.now
            for place, (doing, _, _) in zip(self.places, stage, strict=True):
                place.num_steps += doing == "step()"
                place.enter(doing)
            order = sorted(range(len(stage)), key=lambda rank: stage[rank][2])
            for rank in order:
                self.tick(start + stage[rank][2])
                self.places[rank].begin_wait(stage[rank][1])
            for place in self.places:
                place.end_wait()
            self.now = max(self.now, start + max(s for _, _, s in stage) - 1e-9)


class _Stalled:
    """A store whose `check` blocks, as on a suspended host, until ``has_resumed``, then raises."""

    def __init__(self):
        self.has_resumed = threading.Event()

    def set(self, key, beat):
        pass

    def check(self, keys):
        self.has_resumed.wait()
        raise RuntimeError("it has ended")


@pytest.fixture(autouse=True)
def far(monkeypatch):
    """Hide the ranks' processes from each other, as on different hosts."""
    monkeypatch.setattr(watches, "process_state", lambda pid: "")


def healthy(num_steps, size):
    """Yield stages of healthy training for `_Ranks.run`.

    Rank 1 compiles in the first step and is slow in some later ones. Rank 0 writes checkpoints.
    """
    chance = random.Random(1)
    for step in range(num_steps):
        for number, doing in enumerate(FORWARD):
            compiled = 50.0 if step == 0 else 0.0  # seconds of compilation on rank 1
            wait = f"all_gather of unit {number + 1}"
            yield [(doing, wait, compiled * (r == 1) + chance.random() / 9) for r in range(size)]
            # Four times in each unit, the other ranks wait 6 s for rank 1.
            for _ in range(4 if step % 1000 == 7 else 0):
                wait = f"all_gather of unit {number}"
                yield [(doing, wait, 6.0 if rank == 1 else 0.1) for rank in range(size)]
        if step % 500 == 499:  # all ranks save, and rank 0 writes for 50 s
            seconds = [50.0, *[1.0] * (size - 1)]
            yield [("save_checkpoint()", "control exchange", each) for each in seconds]
        yield [("step()", "sum of the step's statistics", chance.random() / 9)] * size


def test_no_line_is_logged_in_healthy_steps(caplog):
    ranks = _Ranks(3)
    ranks.run(healthy(2000, 3))
    assert ranks.now > 1000.0
    assert not caplog.records


def _hang(ranks, act):
    ranks.run(healthy(5, len(ranks.places)))
    for place in ranks.places:
        place.enter(FORWARD[1])
        place.begin_wait("all_gather of unit 3 (blocks.2)")
    ranks.tick(ranks.now + 1.0)
    act(ranks)
    for rank, place in enumerate(ranks.places):
        if rank != 1:
            place.begin_wait("all_gather of unit 4 (blocks.3)")
    ranks.tick(ranks.now + WITHIN_S)


def _stop(ranks):
    ranks.silent.add(1)


def _turn(ranks):
    ranks.places[1].begin_wait("reduce_scatter of unit 2 (blocks.1)")


def _goes(doing):
    def act(ranks):
        ranks.places[1].end_wait()
        ranks.places[1].enter(doing)

    return act


_CAUSES = {
    _stop: ["no sign of life of rank 1 for", "last seen in forward of unit 2 (blocks.1) of step"],
    _turn: [
        "branches. They wait: rank",
        "name the module that holds them in zero_optimization.leaf_module",
        "rank 1 in reduce_scatter of unit 2 (blocks.1) of step 6",
    ],
    _goes(FORWARD[2]): ["rank 1 has been in forward of unit 3 (blocks.2) of step 6 for"],
    _goes(OUTSIDE): ["rank 1 has been in the program outside of the engine, after s"],
}


@pytest.mark.parametrize(("act", "said"), _CAUSES.items())
def test_each_rank_that_waits_names_the_cause_once_in_time(act, said, caplog):
    ranks = _Ranks(3)
    _hang(ranks, act)
    waiting = [0, 1, 2] if act is _turn else [0, 2]
    for rank in waiting:
        (record,) = [r for r in caplog.records if r.getMessage().startswith(f"rank {rank}: ")]
        assert record.levelno == (logging.ERROR if act in (_stop, _turn) else logging.WARNING)
        assert all(text in record.getMessage() for text in said)
    ranks.tick(ranks.now + 100.0)
    assert len(caplog.records) == len(waiting)


class _Device:
    """`DeviceWaits` of one collective, which the test sets."""

    limit_s = 30.0
    current = None

    def oldest(self):
        return self.current


@pytest.mark.parametrize(
    ("way", "begin", "times"),
    [
        ("hangs", 1, range(40)),
        ("ends late", 1, range(40)),  # ends while this rank sends its last heartbeat
        ("of the host", 99, range(40)),  # a wait of the host, which ends while its cause is sought
        ("begins after a pause", 41, (0, 1, 41)),  # the process pauses
        ("paused", 1, (0, 1, 2, 42)),
    ],
)
def test_only_a_collective_that_hangs_on_the_device_ends_the_process(
    way, begin, times, monkeypatch
):
    aborts, device, board, place = [], _Device(), Board({}, 0), Place()
    monkeypatch.setattr(watches, "_LAST_REPORT_S", 0.0)
    monkeypatch.setattr(watches.os, "abort", lambda: aborts.append(now))
    watch = Watch(board, place, rank=0, world_size=2, within_s=WITHIN_S, device_waits=device)
    if way == "ends late":
        board.flush = lambda limit_s: setattr(device, "current", None)
    if way == "of the host":
        place.begin_wait("control exchange")
        board.take = lambda: (now == 33 and place.end_wait()) or {}
    start = time.monotonic()
    for now in times:
        if now == begin:
            device.current = "all_gather of unit 1", object()
        watch.tick(start + now)
    assert bool(aborts) == (way == "hangs")
    assert json.loads(board.table[0])[6] == (way == "hangs")  # `Beat.has_given_up`


def test_a_rank_that_gave_up_is_not_the_cause():
    ranks = _Ranks(3, within_s=0.0)
    ranks.watches[1].note_cause("the forward of unit 1 (blocks.0) raised ArithmeticError: NaN")
    assert "rank 1: the forward of unit 1" in ranks.watches[2].explain()
    ranks.watches[1].note_cause("")
    ranks.watches[1].close("its engine was closed")
    assert ranks.watches[0].explain() == "rank 1: its engine was closed"


def test_a_store_that_does_not_answer_is_named_and_blocks_neither_thread(caplog):
    store, place = _Stalled(), Place()
    board = watches.ThreadedBoard(store, "rank 0 of the job", ["first", "second"], rank=1)
    watch = Watch(board, place, rank=1, world_size=2, within_s=2.0)
    place.begin_wait("all_gather of unit 1")
    watch.tick(begin := time.monotonic())
    watch.tick(begin + 1.0)
    assert watch.explain().startswith("rank 0 of the job has not answered for ")
    assert not caplog.records
    watch.tick(begin + 10.0)
    (record,) = caplog.records
    assert "all_gather of unit 1 has not ended for 10.0 s: rank 0 of the job has" in record.message
    store.has_resumed.set()
    board.flush(60.0)
    assert board.is_lost


def test_a_beat_of_another_version_is_logged_once_and_the_others_are_read(caplog):
    ranks = _Ranks(3)
    ranks.silent.add(0)
    for strange in ('["a", 1]', "{", "null", "[1, 2, 3, 4, 5, 6, 7, 8, 9]"):
        ranks.table[0] = strange
        _hang(ranks, _stop)
        assert sum("cannot be read" in r.message for r in caplog.records) <= 2
    assert any("rank 2: " in r.message and "rank 1 for" in r.message for r in caplog.records)


@pytest.mark.parametrize("size", [9, 18])
def test_reads_are_bounded_and_a_rank_that_stops_is_named_in_time(size, caplog, monkeypatch):
    monkeypatch.setattr(watches, "_WINDOW", 8)
    ranks = _Ranks(size)
    for place in ranks.places:
        place.begin_wait("all_gather of unit 3")
    ranks.silent.add(size // 2)
    ranks.tick(ranks.now + WITHIN_S)
    text = f"no sign of life of rank {size // 2} for"
    assert [text in record.message for record in caplog.records] == [True] * 8
    before = [board.num_read for board in ranks.boards]
    assert max(before) <= 9 * 8  # 8 times, a rank reads its own entry and 8 other ones
    ranks.tick(ranks.now + 20 * WITHIN_S)
    more = [board.num_read - num for board, num in zip(ranks.boards, before, strict=True)]
    assert max(more) <= 9 * 60
    assert len(caplog.records) == size - 1


def test_heartbeat_file_has_the_last_step(tmp_path, monkeypatch):
    path = tmp_path / "heartbeat"
    monkeypatch.setenv("ZERO_HEARTBEAT_FILE", str(path))
    for local_rank in ("1", "0"):
        assert not path.exists()  # only the node's first rank writes the file
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        for file in HeartbeatFile.wanted(rank=8):
            file.stepped(EndedStep(3, "", [], 1, {}))
    assert json.loads(path.read_text())["rank"] == 8
    engine = Case().build(model=make_tower(1))
    train(engine, [rows(0, 0), rows(1, 0)])
    engine.close()
    assert json.loads(path.read_text())["step"] == 1  # written at most once a second
