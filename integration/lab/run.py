"""The experiments by name, from a checkout: ``python integration/lab/run.py NAME --help``."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    folder = Path(__file__).resolve().parents[1]  # where the packages lie
    sys.path[0] = str(folder)
    sys.path.append(str(folder.parent / "packages/zero-core/tests"))  # whose support has a device
    runpy.run_module("lab", run_name="__main__", alter_sys=True)
