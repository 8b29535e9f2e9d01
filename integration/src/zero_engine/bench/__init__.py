"""Old commands of the benchmarks, which are in ``integration/benchmarks`` of the repository now."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path

__all__ = ["run"]

PROGRAM = Path("integration", "benchmarks", "run.py")
"""Relative to the root of a checkout."""


def run(*arguments: str) -> None:
    """Run a checkout's program with ``arguments`` first.

    The checkout is the one that this package or the working directory is in. Without one it exits
    with a message, as the benchmarks are not in the wheel.
    """
    command = " ".join((f"python {PROGRAM}", *arguments))
    warnings.warn(
        f"zero_engine.bench will be removed: use {command!r}", DeprecationWarning, stacklevel=2
    )
    here = Path.cwd()
    folders = (*Path(__file__).resolve().parents, here, *here.parents)
    found = next((path for f in folders if (path := f / PROGRAM).exists()), None)
    if found is None:
        sys.exit(
            f"the benchmarks are not part of the installed package, and there is no {PROGRAM} in "
            f"{here} or above it: clone the repository and run {command!r} in it"
        )
    sys.argv = [str(found), *arguments, *sys.argv[1:]]
    runpy.run_path(str(found), run_name="__main__")
