"""Command line of the benchmarks: the name of a benchmark, then its options."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import NamedTuple

import typer

PROGRAM = "python integration/benchmarks/run.py"
EXPERIMENTS = {
    "engine": "step time and memory beside DDP, FSDP2 and DeepSpeed",
    "offload": "optimizer state in host memory and in files, beside DeepSpeed's ZeRO-Offload",
    "memory": "memory and start-up against formula and plan",
    "comm": "ZeRO++ over a slow link between two network namespaces; needs root",
    "cpu_adam": "one optimizer step on host memory, beside other libraries' kernels",
    "gpu": "one accelerator, part by part: correct, and how fast",
}
MODULES = {"comm": "comm.race", "gpu": "gpu.program"}
"""Modules of the experiments that are in folders, relative to `benchmarks.experiments`."""


class Experiments(NamedTuple):
    """Programs started by name, each a module of ``package``."""

    program: str
    package: str
    about: Mapping[str, str]
    modules: Mapping[str, str]

    def command(self, name: str) -> typer.Typer:
        module = importlib.import_module(f"{self.package}.{self.modules.get(name, name)}")
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(help=module.__doc__)(module.main)
        return app

    def run(self) -> None:
        """Run the experiment named by the first argument. ``--dry-run`` prints the help of all."""
        name = sys.argv[1] if len(sys.argv) > 1 else "--help"
        if name == "--dry-run":
            for known in self.about:
                self.command(known)(["--help"], standalone_mode=False)
            return
        if name not in self.about:
            listed = "\n".join(f"  {known:22}{about}" for known, about in self.about.items())
            print(f"usage: {self.program} NAME [OPTIONS], or NAME --help\n\n{listed}")
            sys.exit(0 if name == "--help" else f"no experiment is named {name!r}")
        self.command(name)(sys.argv[2:], prog_name=f"{self.program} {name}")


if __name__ == "__main__":
    Experiments(PROGRAM, "benchmarks.experiments", EXPERIMENTS, MODULES).run()
