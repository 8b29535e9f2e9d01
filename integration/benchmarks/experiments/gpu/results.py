"""The file of a run, ``gpu.json``.

``{"parts": {name: {"measured": ..., "rows": ...}}}``. Each part has its own date, machine and
commit, as parts of one file may be of several runs: a run replaces the parts that it measures and
keeps the others.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.harness.ranks import Row
from benchmarks.harness.report import write_report
from benchmarks.harness.rounds import measured, version
from zero_engine.machine import memory_limit_bytes, processor_name

PACKAGES = (
    *("torch", "triton", "deepspeed", "numpy"),
    *("zero-core", "zero-offload", "zero-comm", "cpu-adam", "zero-engine"),
)
COMMIT_VARIABLE = "ZERO_ENGINE_COMMIT"
"""Of the commit that is measured, where the sources lie outside a repository."""


class Results:
    """The parts so far, on disk after every part."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if ``folder`` has a ``gpu.json`` that is not one of this program."""
        self._folder = folder
        self._json = folder / "gpu.json"
        self.parts: dict[str, Row] = _read(self._json) if self._json.exists() else {}

    def refuse_dry_run(self, names: Iterable[str]) -> None:
        """Raises ValueError if one of the parts has figures of an accelerator."""
        kept = [n for n in names if n in self.parts and not self.parts[n]["measured"]["is_dry_run"]]
        if kept:
            raise ValueError(
                f"{self._json} has figures of an accelerator for {', '.join(kept)}, and a dry run "
                "would replace them; give another --out"
            )

    def add(self, name: str, found: Row, about: Row) -> bool:
        """Write the result of a part, in place of an earlier one.

        Returns:
            Whether it was written: a part without figures leaves those of an earlier run.
        """
        if measured(self.parts.get(name, {}).get("rows", {})) and not measured(found["rows"]):
            return False
        self.parts[name] = {"measured": dict(about), **found}
        write_report(self._folder, "gpu", {"parts": self.parts})
        return True


def provenance(device: torch.device, *, is_dry_run: bool) -> Row:
    """Return date, machine, commit and versions, for the file.

    Raises:
        ValueError: the commit is unknown, and figures of an accelerator need one.
    """
    commit = _commit()
    if commit is None and not is_dry_run:
        raise ValueError(
            f"the sources lie in no repository: set {COMMIT_VARIABLE} to the commit measured"
        )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "is_dry_run": is_dry_run,
        "device": "CPU" if device.type == "cpu" else _from_driver("name"),
        "driver": None if device.type == "cpu" else _from_driver("driver_version"),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "host_bytes": memory_limit_bytes(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def _read(path: Path) -> dict[str, Row]:
    try:
        parts = json.loads(path.read_text(encoding="utf-8"))["parts"]
        return {name: dict(part) for name, part in parts.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a result of this program, and would be overwritten: {error!r}; move it "
            "away, or give another --out"
        ) from error


def _commit() -> str | None:
    """Return the commit of the sources, marked where they differ, or None without a repository."""
    given = os.environ.get(COMMIT_VARIABLE)
    return given or _output("git", "describe", "--always", "--abbrev=12", "--dirty")


def _from_driver(what: str) -> str | None:
    """Return a property of the first device from NVIDIA's tool, or None without it.

    torch would take memory on the device for it, as long as the whole program runs.
    """
    said = _output("nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader")
    return None if said is None else said.split("\n")[0].strip()


def _output(*command: str) -> str | None:
    """Return what a command prints, or None where it is missing or fails."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
