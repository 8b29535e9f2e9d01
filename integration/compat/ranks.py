"""Ranks of one side of a comparison, started once by its launcher, and the programs they run."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.harness.ranks import CPU_ALONE, LOOPBACK, RankError, own_environment

HERE = Path(__file__).parent
START_LIMIT_S = 300.0
GRACE_S = 5.0
"""How long the other ranks may take to end when one has failed."""
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b.*)")


class Ranks:
    """Ranks that a launcher has started.

    Args:
        launcher: words after the interpreter's that start ranks, e.g. ``-m zero_engine run``.
        num_ranks: of this machine.

    Raises:
        RankError: they did not start.
    """

    def __init__(self, launcher: Sequence[str], num_ranks: int, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "launcher.log"
        with socket.create_server(("127.0.0.1", 0), backlog=num_ranks) as server:
            port = str(server.getsockname()[1])
            command = [*launcher, f"--nproc-per-node={num_ranks}", str(HERE / "serve.py")]
            with self._log.open("wb") as log:
                self._launcher = subprocess.Popen(
                    [sys.executable, *command],
                    env={**environment(), "COMPAT_PORT": port},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            end = time.monotonic() + START_LIMIT_S
            ranks: dict[int, socket.socket] = {}
            try:
                ranks.update(self._accept(server, end) for _ in range(num_ranks))
            except BaseException:  # nobody has this object yet, to close it
                self._ranks = list(ranks.values())
                self.close()
                raise
        self._ranks = [ranks[rank] for rank in range(num_ranks)]

    def run(
        self, program: Sequence[str], variables: Mapping[str, str], folder: Path, limit_s: float
    ) -> None:
        """Run ``measured.py PROGRAM`` on all ranks; their output goes to files in ``folder``.

        Raises:
            RankError: a rank failed, or took longer. The message is the first error of a rank.
        """
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            # The launcher's store has the keys of the program before.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            **variables,
        }
        request = {"program": list(program), "variables": shared, "folder": str(folder)}
        for rank in self._ranks:
            rank.sendall(json.dumps(request).encode() + b"\n")
        children = [_answer(rank)["child"] for rank in self._ranks]
        try:
            codes, is_late = self._codes(children, limit_s)
        except BaseException:  # Ctrl-C, too: a server waits for its child
            _end(children)
            raise
        if any(codes):
            logs = [folder / f"{rank}.log" for rank in range(len(codes))]
            raise RankError(*_why(logs, codes, limit_s if is_late else None))

    def close(self) -> None:
        """End the ranks and their launcher."""
        for rank in self._ranks:
            rank.close()
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(timeout=GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._launcher.pid, signal.SIGKILL)
        self._launcher.wait()

    def _accept(self, server: socket.socket, end: float) -> tuple[int, socket.socket]:
        while not select.select([server], [], [], 1.0)[0]:
            if self._launcher.poll() is not None or time.monotonic() > end:
                said = self._log.read_text(encoding="utf-8", errors="replace")
                raise RankError("the launcher started no ranks", said)
        connection, _ = server.accept()
        return _answer(connection)["rank"], connection

    def _codes(self, children: Sequence[int], limit_s: float) -> tuple[list[int], bool]:
        """Return all exit codes and whether the time was over; ends the ranks that wait on."""
        end = time.monotonic() + limit_s
        codes: dict[int, int] = {}
        is_late = False
        while len(codes) < len(self._ranks):
            waiting = [rank for rank in range(len(self._ranks)) if rank not in codes]
            left_s = max(0.0, end - time.monotonic())
            ready, _, _ = select.select([self._ranks[rank] for rank in waiting], [], [], left_s)
            if not ready:
                is_late = not any(codes.values())
                _end([children[rank] for rank in waiting])
                end = time.monotonic() + START_LIMIT_S
            for rank in waiting:
                if self._ranks[rank] in ready:
                    codes[rank] = _answer(self._ranks[rank])["code"]
                    if codes[rank]:
                        end = min(end, time.monotonic() + GRACE_S)
        return [codes[rank] for rank in range(len(children))], is_late


def _end(children: Sequence[int]) -> None:
    """Kill what the ranks have forked, with their own children."""
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def _answer(rank: socket.socket) -> dict[str, int]:
    """Read one line and no more: `select` knows nothing of what a buffer holds."""
    line = b""
    while not line.endswith(b"\n"):
        byte = rank.recv(1)
        if not byte:
            raise RankError("a rank's server ended", "")
        line += byte
    answer: dict[str, int] = json.loads(line)
    return answer


def environment() -> dict[str, str]:
    """Variables of programs on the CPU, one thread per rank, offline, on the loopback."""
    own = own_environment()
    paths = [str(HERE), own["PYTHONPATH"]]
    return {
        **own,
        **CPU_ALONE,
        "PYTHONPATH": os.pathsep.join(paths),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "TOKENIZERS_PARALLELISM": "false",
    }


def free_port() -> int:
    """Return a port that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def first_error(log: str) -> str:
    """Return the message of the first exception that ended a program, from its output."""
    lines = log.splitlines()
    found = [match.group(1) for line in lines if (match := _ERROR.match(line))]
    return (found or [line for line in lines if line.strip()][-1:] or ["no output"])[0][:300]


def _why(logs: Sequence[Path], codes: Sequence[int], limit_s: float | None) -> tuple[str, str]:
    said = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
    if limit_s is not None:
        return f"not over after {limit_s:.0f} s", "\n".join(said)
    failed = [text for text, code in zip(said, codes, strict=True) if code > 0] or said
    return first_error(failed[0]), "\n".join(said)
