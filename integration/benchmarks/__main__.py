"""The command line: a benchmark's name, then its own options."""

from __future__ import annotations

import importlib
import sys

import typer

PROGRAM = "python integration/benchmarks/run.py"
EXPERIMENTS = {
    "engine": "step time and memory beside DDP, FSDP2 and DeepSpeed",
    "offload": "optimizer state in host memory and in files, beside DeepSpeed's ZeRO-Offload",
    "schedule": "length of a step with offload in virtual time",
    "practicality": "steps without offload over steps with it, in virtual time; peers' schedules",
    "late": "random delays on an accelerator made of threads; results must be the CPU's",
    "plan": "predicted time and memory of 24 configurations, and the choice against a search",
    "memory": "memory and start-up against formula and plan",
    "seq2seq": "a T5 under a memory cap: largest batch, time to train and to evaluate with beams",
    "checkpoint": "saves at once and beside training, beside torch.distributed.checkpoint",
    "copies": "steps with copies of all states in memory, beside steps without",
    "patches": "steps with a log of changed weights, beside steps without; size of a patch",
    "diagnose": "ten spoilt configurations: is the cause named, and its gain right?",
    "comm": "ZeRO++ over a slow link between two network namespaces; needs root",
    "comm_convergence": "the loss of a small GPT with quantized communication; hours",
    "differences": "lossless differences of weights: codecs, and bytes over whole runs",
    "cpu_adam": "one optimizer step on host memory, beside other libraries' kernels",
    "cpu_adam_convergence": "the loss of a GPT-2 with 8- and 16-bit optimizer states",
    "gpu": "one accelerator, part by part: correct, and how fast",
    "offload_cuda": "optimizer state off one accelerator: speed, bounds of a step, capacity",
    "comm_cuda": "the quantizer's Triton kernels against the bandwidth of a copy",
    "document": "the results of `gpu` as Markdown",
}
MODULES = {
    "comm": "comm.race",
    "copies": "in_turn.copies",
    "differences": "differences.program",
    "gpu": "gpu.program",
    "document": "gpu.program",
    "offload_cuda": "gpu.offload",
    "patches": "in_turn.patches",
    "plan": "plan.program",
    "practicality": "schedule.practicality",
    "schedule": "schedule.program",
}
"""Of `benchmarks.experiments`, where an experiment is in a folder."""


def command(name: str) -> typer.Typer:
    """Return the program of an experiment, which alone is imported."""
    module = importlib.import_module(f"benchmarks.experiments.{MODULES.get(name, name)}")
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    if name == "document":
        app.command()(module.print_document)
    else:
        app.command(help=module.__doc__)(module.main)
    return app


def main() -> None:
    """Run the experiment that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in EXPERIMENTS:
        listed = "\n".join(f"  {known:22}{about}" for known, about in EXPERIMENTS.items())
        print(f"usage: {PROGRAM} NAME [OPTIONS], or NAME --help\n\n{listed}")
        sys.exit(0 if name == "--help" else f"no benchmark is named {name!r}")
    command(name)(sys.argv[2:], prog_name=f"{PROGRAM} {name}")


if __name__ == "__main__":
    main()
