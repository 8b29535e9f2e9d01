"""Install the hook for deepspeed. Python runs this file at start, as its folder is on PYTHONPATH.

The file hides the environment's own ``sitecustomize``, and runs it afterwards.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def _install_hook() -> None:
    # A Python of another environment inherits PYTHONPATH, but may lack zero_engine.
    if importlib.util.find_spec("zero_engine") is not None:
        from zero_engine.script.hook import install

        install()


def _run_hidden() -> None:
    here = Path(__file__).resolve().parent
    others = [entry for entry in sys.path if Path(entry).resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_install_hook()
_run_hidden()
