"""Compiles ``device.cpp`` against the installed torch, once per user and version."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")
_COMPILERS = ("g++", "clang++", "c++")
# torch's wheels define NDEBUG, and torch's headers differ without it.
_FLAGS = ("-std=c++20", "-O1", "-DNDEBUG", "-g0", "-fPIC", "-shared", "-w")


def built_library() -> Path:
    """Return the path of the compiled device. Compiles it on first use (30 s).

    The library is cached in ``$XDG_CACHE_HOME/zero_core`` (default ``~/.cache/zero_core``) under a
    hash of source, flags and versions. Environments with the same torch share it.
    """
    parts = [SOURCE.read_text(), *_FLAGS, torch.__version__, sys.version, platform.machine()]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zero_core"
    library = cache / f"late_device_{key}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"late_device_{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes wait for the library here
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [
            _compiler(),
            *_FLAGS,
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            f"-I{root / 'include'}",
            f"-I{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
            str(SOURCE),
            "-o",
            str(made),
            f"-L{root / 'lib'}",
            "-ltorch_cpu",
            "-lc10",
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(
                f"the late device does not compile with torch {torch.__version__}: "
                f"{' '.join(command)}\n{result.stderr[-4000:]}"
            )
        made.replace(library)  # atomic, so no process loads a partial file


def _compiler() -> str:
    for name in (os.environ.get("CXX"), *_COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise RuntimeError(
        "the late device is compiled at its first use and needs a C++20 compiler: found none of "
        f"$CXX, {', '.join(_COMPILERS)}. Install g++, or set CXX to a compiler."
    )
