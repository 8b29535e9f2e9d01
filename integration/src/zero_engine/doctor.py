"""Report of installed packages, of the machine, and of cures for missing parts."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.table import Table
from rich.text import Text

from zero_core.adapters import install_command
from zero_engine.machine import available_cores, locked_memory_limit_bytes, memory_limit_bytes

State = Literal["ok", "note", "missing"]

PACKAGES = {
    "zero-core": "zero_core",
    "zero-offload": "zero_offload",
    "zero-comm": "zero_comm",
    "cpu-adam": "cpu_adam",
}
LIBRARIES = {
    "torch": "torch",
    "safetensors": "safetensors",
}
OPTIONAL = {
    "transformers": "zero-engine train and plan, and Hugging Face's Trainer",
    "tokenizers": "zero-engine train",
    "filelock": "zero-engine train",
    "matplotlib": "zero-engine train, and the pictures of plans",
    "tensorboard": "zero-engine train",
    "jinja2": "zero-engine report",
    "vl-convert-python": "zero-engine report",
    "accelerate": "scripts of Hugging Face's Trainer",
    "lightning": "Lightning's strategies",
}
"""Libraries that few need, with what for."""
ENTRY_POINTS = {
    "zero_core.collectives": "zero-comm",
    "zero_core.state_tiers": "zero-offload",
    "zero_core.param_tiers": "zero-offload",
    "zero_core.adam_kernels": "cpu-adam",
}
GIB = 2**30
_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    topic: str
    name: str
    value: str
    state: State = "ok"
    advice: str = ""
    """What to do; empty where nothing needs doing."""


def examine() -> list[Finding]:
    """Everything that the report shows, in order. Never raises for what is missing."""
    return [*_packages(), *_entry_points(), *_backends(), *_machine()]


def as_table(findings: list[Finding]) -> Table:
    table = Table(title="zero-engine doctor")
    for heading in ("", "what"):
        table.add_column(heading, no_wrap=True)
    for heading in ("found", "to do"):
        table.add_column(heading, overflow="fold")
    colours = {"ok": "green", "note": "yellow", "missing": "red"}
    topic = ""
    for finding in findings:
        if topic and finding.topic != topic:
            table.add_section()
        shown = finding.topic if finding.topic != topic else ""
        topic = finding.topic
        value = Text(finding.value, style=colours[finding.state])
        table.add_row(shown, finding.name, value, Text(finding.advice))
    return table


def _packages() -> Iterator[Finding]:
    yield Finding("installed", "python", platform.python_version())
    for distribution, module in {**PACKAGES, **LIBRARIES}.items():
        yield _installed(distribution, module)
    for distribution, user in OPTIONAL.items():
        try:
            yield Finding("installed", distribution, importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            cure = f"{install_command(distribution)}, for {user}"
            yield Finding("installed", distribution, "not installed", "note", cure)


def _installed(distribution: str, module: str) -> Finding:
    """Whether a distribution is there and its module can be imported."""
    cure = install_command(distribution)
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return Finding("installed", distribution, "not installed", "missing", cure)
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken installation may raise anything, and is a finding
        value = f"{version}, but: {type(error).__name__}: {error}"
        return Finding(
            "installed",
            distribution,
            value,
            "missing",
            install_command(distribution, "--force-reinstall", "--no-deps"),
        )
    return Finding("installed", distribution, version)


def _entry_points() -> Iterator[Finding]:
    for group, provider in ENTRY_POINTS.items():
        points = importlib.metadata.entry_points(group=group)
        found = ", ".join(f"{point.name} = {point.value}" for point in points)
        if found:
            yield Finding("entry points", group, found)
        else:
            yield Finding("entry points", group, "none", "missing", f"pip install {provider}")


def _backends() -> Iterator[Finding]:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding("compute", "GPU", f"{', '.join(names)} (CUDA {torch.version.cuda})")
    elif torch.version.cuda is None:
        advice = "none needed without a GPU; else install torch built for CUDA"
        yield Finding("compute", "GPU", "torch is built without CUDA", "note", advice)
    else:
        advice = "none needed without a GPU; else check the driver with nvidia-smi"
        yield Finding("compute", "GPU", f"none found (CUDA {torch.version.cuda})", "note", advice)
    yield from _device_of_ranks()
    yield _cpu_adam()
    yield _comm_kernels()
    yield _backend("gloo", is_there=dist.is_available() and dist.is_gloo_available())
    yield _backend("nccl", is_there=dist.is_available() and dist.is_nccl_available())


def _device_of_ranks() -> Iterator[Finding]:
    """Report which device a rank takes, where there are several."""
    count = torch.accelerator.device_count()
    if count > 1:
        value = f"{count} devices: each rank takes the one of its LOCAL_RANK"
        advice = "none under torchrun; else set_device_index() or init_process_group(device_id=...)"
        yield Finding("compute", "device of a rank", value, "note", advice)
    if count and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        value = "1: all streams share a hardware queue, nothing overlaps"
        yield Finding(
            "compute", "CUDA_DEVICE_MAX_CONNECTIONS", value, "note", "unset it, or set it to 8"
        )


def _backend(name: str, *, is_there: bool) -> Finding:
    if is_there:
        return Finding("compute", name, "available")
    if name == "nccl" and not torch.cuda.is_available():
        return Finding("compute", name, "not in this torch", "note", "none needed without a GPU")
    return Finding("compute", name, "not in this torch", "missing", "pip install torch")


def _cpu_adam() -> Finding:
    try:
        cpu_adam: Any = importlib.import_module("cpu_adam")
        active = cpu_adam.active_isa()
        others = [isa for isa in cpu_adam.available_isas() if isa != active]
    except Exception as error:  # told in the line above: the package is missing or broken
        return Finding("compute", "CPU Adam", f"unknown ({type(error).__name__})", "missing")
    return Finding("compute", "CPU Adam", f"{active} (also here: {', '.join(others) or 'none'})")


def _comm_kernels() -> Finding:
    try:
        backend = str(importlib.import_module("zero_comm").backend())
    except ValueError as error:  # ZERO_COMM_BACKEND asks for what is not there
        return Finding("compute", "CPU quantizer", "unknown", "missing", str(error))
    except Exception as error:  # told in the line above: the package is missing or broken
        return Finding("compute", "CPU quantizer", f"unknown ({type(error).__name__})", "missing")
    if backend != "torch":
        return Finding("compute", "CPU quantizer", backend)
    advice = "unset ZERO_COMM_BACKEND, or install a C++ compiler and then zero-comm again"
    return Finding("compute", "CPU quantizer", "plain torch, which is slower", "note", advice)


def _machine() -> Iterator[Finding]:
    yield Finding("machine", "system", f"{platform.system()} {platform.machine()}")
    yield Finding("machine", "cores", str(available_cores()))
    memory = memory_limit_bytes()
    yield Finding("machine", "memory", "unknown" if memory is None else f"{memory / GIB:.1f} GiB")
    yield _lockable()
    yield from _numa()
    yield _allocator()
    yield Finding("machine", "executable", sys.executable)


def _lockable() -> Finding:
    """Report ``ulimit -l``, and its effect on ``offload_optimizer.pin_memory``."""
    limit = locked_memory_limit_bytes()
    shown = "unlimited" if limit is None else f"{limit / GIB:.3g} GiB"
    if not torch.cuda.is_available():
        return Finding("machine", "lockable memory", f"{shown}; pin_memory pins for a GPU only")
    if limit is None:
        return Finding("machine", "lockable memory", shown)
    # CUDA pins by itself; the limit counts for mlock, which NCCL over InfiniBand uses.
    advice = "ulimit -l unlimited, for NCCL over InfiniBand"
    value = f"{shown}; pin_memory is not limited by it: CUDA pins by itself"
    return Finding("machine", "lockable memory", value, "note", advice)


def _allocator() -> Finding:
    """Report torch's settings of device memory, and the one against fragmentation."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the old name of torch 2.8
    asked = next((os.environ[name] for name in names if name in os.environ), "")
    value = asked or "torch's defaults"
    if "expandable_segments:true" in asked.replace(" ", "").lower():
        return Finding("machine", "device allocator", value)
    state: State = "note" if torch.cuda.is_available() else "ok"
    advice = f"on a GPU: {names[0]}=expandable_segments:True, so that activations of several sizes "
    return Finding("machine", "device allocator", value, state, advice + "leave no holes")


def _numa() -> Iterator[Finding]:
    """Report the machine's NUMA nodes and, with several, how ranks are bound to them."""
    lists = sorted(_NODES.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    try:
        nodes = [f"{path.parent.name[4:]}: CPUs {path.read_text().strip()}" for path in lists]
    except OSError as error:
        yield Finding("machine", "NUMA nodes", f"not readable: {error}", "note")
        return
    value = "; ".join(nodes) or "the system lists none"
    if len(nodes) < 2:
        yield Finding("machine", "NUMA nodes", value)
        return
    advice = "start ranks with torchrun --numa-binding=node, to keep each beside its device"
    yield Finding("machine", "NUMA nodes", value, "note", advice)
