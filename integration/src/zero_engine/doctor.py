"""Report of installed packages and of the machine, with advice on missing parts."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import re
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
_Row = tuple[str, str] | tuple[str, str, State] | tuple[str, str, State, str]
"""Fields of a `Finding` after its topic."""

PACKAGES = {
    name: name.replace("-", "_")
    for name in ("zero-core", "zero-offload", "zero-comm", "cpu-adam", "torch", "safetensors")
}
OPTIONAL = {
    "transformers": "zero-engine train and plan, and Hugging Face's Trainer",
    "tokenizers": "zero-engine train",
    "filelock": "zero-engine train",
    "greenlet": "the vertical schedule of micro-batches",
    "matplotlib": "zero-engine train, and the pictures of plans",
    "tensorboard": "zero-engine train",
    "jinja2": "zero-engine report",
    "vl-convert-python": "zero-engine report",
    "accelerate": "scripts of Hugging Face's Trainer",
    "lightning": "Lightning's strategies",
}
ENTRY_POINTS = {
    "zero_core.collectives": "zero-comm",
    "zero_core.state_tiers": "zero-offload",
    "zero_core.param_tiers": "zero-offload",
    "zero_core.adam_kernels": "cpu-adam",
}
GIB = 2**30
_NODES = Path("/sys/devices/system/node")
_DRIVER = Path("/proc/driver/nvidia/version")
_RELEASES = Path(__file__).with_name("torch_releases.json")
"""Tested torch releases, builds and Pythons, written by ``integration/compat/releases.py``."""


@dataclass(frozen=True)
class Finding:
    """A line of the report. ``advice`` is what to do about a missing part."""

    topic: str
    name: str
    value: str
    state: State = "ok"
    advice: str = ""


def examine() -> list[Finding]:
    """Return all findings, in the order of the report. Never raises for a missing part."""
    topics = {
        "installed": _packages(),
        "entry points": _entry_points(),
        "compute": _backends(),
        "machine": _machine(),
    }
    return [Finding(topic, *row) for topic, rows in topics.items() for row in rows]


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


def _packages() -> Iterator[_Row]:
    yield "python", platform.python_version()
    yield _release()
    for name in (*PACKAGES, *OPTIONAL):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            cure = install_command(name)
            if name in OPTIONAL:
                yield name, "not installed", "note", f"{cure}, for {OPTIONAL[name]}"
            else:
                yield name, "not installed", "missing", cure
            continue
        try:
            if name in PACKAGES:
                importlib.import_module(PACKAGES[name])
        except Exception as error:  # a broken installation may raise anything
            cure = install_command(name, "--force-reinstall", "--no-deps")
            yield name, f"{version}, but: {type(error).__name__}: {error}", "missing", cure
        else:
            yield name, version


def _release() -> _Row:
    release, _, build = torch.__version__.partition("+")
    python, minor = ".".join(platform.python_version_tuple()[:2]), release.rpartition(".")[0]
    shown = f"torch {release}, {build or 'default build'}, Python {python}"
    if _DRIVER.exists():
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text(encoding="utf-8"))
        shown += f", driver {found.group() if found else 'unknown'}"
    for name, builds in json.loads(_RELEASES.read_text(encoding="utf-8"))["torch"].items():
        cell = builds.get(build or builds["default"], {}).get(python, {})
        if "run" in cell and name.startswith(f"{minor}."):
            run = cell["run"]
            said = f"torch {name} {'passed' if run['passed'] else 'failed'} tests on {run['date']}"
            return "release", f"{shown}: {said}", "ok" if run["passed"] else "note"
    return "release", f"{shown}: not tested together", "note", "see docs/install.md"


def _entry_points() -> Iterator[_Row]:
    for group, provider in ENTRY_POINTS.items():
        points = importlib.metadata.entry_points(group=group)
        if found := ", ".join(f"{point.name} = {point.value}" for point in points):
            yield group, found
        else:
            yield group, "none", "missing", install_command(provider)


def _backends() -> Iterator[_Row]:
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield "GPU", f"{', '.join(names)} (CUDA {torch.version.cuda})"
    elif torch.version.cuda is None:
        advice = "none needed without a GPU; else install torch built for CUDA"
        yield "GPU", "torch is built without CUDA", "note", advice
    else:
        advice = "none needed without a GPU; else check the driver with nvidia-smi"
        yield "GPU", f"none found (CUDA {torch.version.cuda})", "note", advice
    count = torch.accelerator.device_count()
    if count > 1:
        value = f"{count} devices: each rank takes the one of its local rank"
        advice = "none under torchrun, srun or mpirun; else torch.accelerator.set_device_index() "
        advice += "or init_process_group(device_id=...)"
        yield "device of a rank", value, "note", advice
    if count and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        value = "1: all streams share a hardware queue, nothing overlaps"
        yield "CUDA_DEVICE_MAX_CONNECTIONS", value, "note", "unset it, or set it to 8"
    yield _cpu_adam()
    yield _comm_kernels()
    is_there = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
    }
    for name, is_available in is_there.items():
        if is_available:
            yield name, "available"
        elif name == "nccl" and not has_gpu:
            yield name, "not in this torch", "note", "none needed without a GPU"
        else:
            yield name, "not in this torch", "missing", "pip install torch"


def _cpu_adam() -> _Row:
    try:
        cpu_adam: Any = importlib.import_module("cpu_adam")
        active = cpu_adam.active_isa()
        others = [isa for isa in cpu_adam.available_isas() if isa != active]
    except Exception as error:  # `_packages` reports why the import fails
        return "CPU Adam", f"unknown ({type(error).__name__})", "missing"
    return "CPU Adam", f"{active} (also here: {', '.join(others) or 'none'})"


def _comm_kernels() -> _Row:
    try:
        backend = str(importlib.import_module("zero_comm").backend())
    except ValueError as error:  # ZERO_COMM_BACKEND names a missing backend
        return "CPU quantizer", "unknown", "missing", str(error)
    except Exception as error:  # `_packages` reports why the import fails
        return "CPU quantizer", f"unknown ({type(error).__name__})", "missing"
    if backend != "torch":
        return "CPU quantizer", backend
    advice = "unset ZERO_COMM_BACKEND, or install a C++ compiler and then zero-comm again"
    return "CPU quantizer", "plain torch, which is slower", "note", advice


def _machine() -> Iterator[_Row]:
    yield "system", f"{platform.system()} {platform.machine()}"
    yield "cores", str(available_cores())
    memory = memory_limit_bytes()
    yield "memory", "unknown" if memory is None else f"{memory / GIB:.1f} GiB"
    has_gpu, limit = torch.cuda.is_available(), locked_memory_limit_bytes()
    shown = "unlimited" if limit is None else f"{limit / GIB:.3g} GiB"
    if not has_gpu:
        yield "lockable memory", f"{shown}; pin_memory pins for a GPU only"
    elif limit is None:
        yield "lockable memory", shown
    else:
        # The limit applies to mlock, which NCCL over InfiniBand uses. CUDA's pinning ignores it.
        advice = "ulimit -l unlimited, for NCCL over InfiniBand"
        value = f"{shown}; pin_memory is not limited by it: CUDA pins by itself"
        yield "lockable memory", value, "note", advice
    yield _numa()
    # torch 2.8 has only the old name, PYTORCH_CUDA_ALLOC_CONF.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    asked = next((os.environ[name] for name in names if name in os.environ), "")
    value = asked or "torch's defaults"
    if "expandable_segments:true" in asked.replace(" ", "").lower():
        yield "device allocator", value
    else:
        advice = f"on a GPU: {names[0]}=expandable_segments:True, so that activations of several "
        advice += "sizes leave no holes"
        yield "device allocator", value, "note" if has_gpu else "ok", advice
    yield "executable", sys.executable


def _numa() -> _Row:
    lists = sorted(_NODES.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    try:
        nodes = [f"{path.parent.name[4:]}: CPUs {path.read_text().strip()}" for path in lists]
    except OSError as error:
        return "NUMA nodes", f"not readable: {error}", "note"
    value = "; ".join(nodes) or "the system lists none"
    if len(nodes) < 2:
        return "NUMA nodes", value
    advice = "start ranks with torchrun --numa-binding=node, to keep each beside its device"
    return "NUMA nodes", value, "note", advice
