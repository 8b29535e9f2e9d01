"""Starts a benchmark from a checkout: ``python integration/benchmarks/run.py NAME --help``."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the folder of the package `benchmarks`
    runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
