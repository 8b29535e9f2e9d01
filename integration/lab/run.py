"""Starts an experiment from a checkout: ``python integration/lab/run.py NAME --help``."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    # The folder of the packages `lab` and `benchmarks`.
    folder = Path(__file__).resolve().parents[1]
    sys.path[0] = str(folder)
    sys.path.append(str(folder.parent / "packages/zero-core/tests"))  # for `support.fake_cuda`
    runpy.run_module("lab", run_name="__main__", alter_sys=True)
