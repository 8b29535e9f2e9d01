"""Threads that start after `share_arenas` allocate from the arenas that there are."""

import os
import platform
import re
import subprocess
import sys

import pytest

_PROGRAM = """
import ctypes, sys, threading
from zero_core._libc import share_arenas

if sys.argv[1] == "shared":
    share_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
gate = threading.Barrier(9)

def work():
    libc.free(libc.malloc(5000))
    gate.wait()  # all run at once
    gate.wait()

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
gate.wait()
libc.malloc_stats()  # an "Arena N:" of each, on stderr
gate.wait()
"""


def _num_arenas(*words, **environment):
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", _PROGRAM, *words]
    ended = subprocess.run(
        command,
        env={**plain, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return len(re.findall(r"^Arena \d+:", ended.stderr, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's arenas")
def test_new_threads_share_the_arenas_unless_the_user_has_set_them():
    plain = _num_arenas("plain")
    assert _num_arenas("shared") <= plain - 6
    assert _num_arenas("shared", MALLOC_ARENA_MAX="16") == plain
    assert _num_arenas("shared", GLIBC_TUNABLES="glibc.malloc.arena_max=16") == plain
