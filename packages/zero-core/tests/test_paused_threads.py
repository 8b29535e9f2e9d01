"""A forward that pauses keeps no buffers of the library that multiplies matrices."""

from __future__ import annotations

import platform
import subprocess
import sys
from threading import Event, Thread

import pytest
import torch

from zero_core._libc import free_matrix_buffers

_PROGRAM = """
import resource, sys, threading
from pathlib import Path
import torch
from zero_core._libc import share_arenas
from zero_core.vertical.turns import Turns

torch.set_num_threads(1)
share_arenas()
x, weight = torch.randn(32, 512), torch.randn(2048, 512)
product = torch.empty(32, 2048)

class OneTurn(Turns):
    def compute(self):
        torch.mm(x, weight.T, out=product)
        self.pause()

class Thread(OneTurn):
    def pause(self):
        self._paused.release()
        self._go.acquire()

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

kind = {"turns": OneTurn, "threads": Thread}[sys.argv[1]]
turns = [kind(f"{n}", torch.device("cpu")) for n in range(17)]
turns[0].advance()
before = resident()
for one in turns[1:]:
    one.advance()
print((resident() - before) / 16 / 2**20)
for one in turns:
    one.advance()
"""


def _resident_mib(kind: str) -> float:
    command = [sys.executable, "-c", _PROGRAM, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return float(done.stdout)


# Torch's own builds for x86-64 have it linked in: so has the one that CI tests with.
needs_mkl = pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="torch's MKL on Linux"
)


@needs_mkl
def test_a_paused_forward_keeps_no_buffers_of_mkl() -> None:
    assert _resident_mib("threads") > 2
    assert _resident_mib("turns") < 1


@needs_mkl
def test_products_are_right_while_another_thread_frees_buffers() -> None:
    x, weight = torch.randn(128, 512), torch.randn(512, 512)
    expected, is_done = x @ weight, Event()

    def free() -> None:
        while not is_done.wait(1e-4):
            free_matrix_buffers()

    thread = Thread(target=free)
    thread.start()
    try:
        assert all(torch.equal(x @ weight, expected) for _ in range(300))
    finally:
        is_done.set()
        thread.join()
