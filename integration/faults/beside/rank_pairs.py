"""Two ranks of a side, which are told what to do and may hang, die or disagree."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from checkpoint_sides import SIDES, Side

RANKS = 2
START_LIMIT_S = 120.0
HANGS_AFTER_S = 15.0
LEAVES_ALONE_S = 1.0
"""How long a rank may take when another one has failed: a launcher would end it."""
MEMORY = 1 << 36
_FORK = multiprocessing.get_context("fork")


class Answer(NamedTuple):
    """What a rank did: the digest of its state, and the error if there was one."""

    digest: str
    error: str = ""


class RankPair:
    """Ranks of one side, started again when they do not answer."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(RANKS):
            ours, theirs = _FORK.Pipe()
            arguments = (self._name, rank, f"{self._folder.name}/store", theirs)
            process = _FORK.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        started = self._wait({}, START_LIMIT_S)
        assert None not in started, Path(self._folder.name, "log").read_text()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def restart(self) -> None:
        self.close()
        self._start()

    def ask(self, verb: str, *arguments: Any) -> list[Answer | None]:
        """Return each rank's answer: None if it has died, or has not answered in time.

        If a rank has none, both are started anew.
        """
        answers: dict[int, Answer | None] = {}
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((verb, *arguments))
            except OSError:
                answers[rank] = None
        result = self._wait(answers, HANGS_AFTER_S)
        if None in result:
            self.restart()
        return result

    def _wait(self, answers: dict[int, Answer | None], limit_s: float) -> list[Answer | None]:
        """Return each rank's answer, of which some are known."""
        limit = time.monotonic() + limit_s
        while len(answers) < RANKS and time.monotonic() < limit:
            left = {self._pipes[r]: r for r in range(RANKS) if r not in answers}
            for pipe in wait(left, timeout=0.2):
                assert isinstance(pipe, Connection)
                try:
                    answers[left[pipe]] = pipe.recv()
                except (EOFError, OSError):
                    answers[left[pipe]] = None
                if (found := answers[left[pipe]]) is None or found.error:
                    limit = min(limit, time.monotonic() + LEAVES_ALONE_S)
        return [answers.get(rank) for rank in range(RANKS)]


def _serve(name: str, rank: int, store: str, pipe: Connection) -> None:
    """Do what is asked for until the end of the pipe."""
    log = os.open(Path(store).with_name("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    side = SIDES[name]()
    side.train()
    pipe.send(Answer(side.digest()))
    while True:
        try:
            verb, *arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        error = ""
        try:
            _DO[verb](side, *arguments)
        except BaseException as raised:  # torch's CheckpointException is no Exception
            error = f"{type(raised).__name__}: {raised}"
        pipe.send(Answer(side.digest() if verb != "save_within" else "", error))


def _train(side: Side) -> None:
    side.train()


def _save(side: Side, folder: Path, tag: str) -> None:
    side.save(folder, tag)


def _load(side: Side, folder: Path, tag: str) -> None:
    side.load(folder, tag)


def _save_within(side: Side, folder: Path, tag: str, nbytes: int, is_killed: bool) -> None:
    """Save where no file may be longer: the rank is killed then, or the write fails."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if is_killed else signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, most))
    try:
        side.save(folder, tag)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


_DO = {"train": _train, "save": _save, "load": _load, "save_within": _save_within}
