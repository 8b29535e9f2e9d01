"""The files of a run: ``gpu.json`` and ``gpu.png``.

``{"parts": {name: {"measured": ..., "rows": ...}}}``. Each part says when, where and of which
commit it was measured, as parts of one file may come from several runs: a run replaces the parts
that it measures and keeps the others.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from zero_engine.bench.gpu.part import Part
from zero_engine.machine import memory_limit_bytes, processor_name

__all__ = ["Results", "has_figures", "provenance"]

PACKAGES = (
    *("torch", "triton", "deepspeed", "numpy"),
    *("zero-core", "zero-offload", "zero-comm", "cpu-adam", "zero-engine"),
)
COMMIT_VARIABLE = "ZERO_ENGINE_COMMIT"
"""Of the commit that is measured, where the sources lie outside a repository."""


class Results:
    """What was found so far, on disk after every part."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if ``folder`` has a ``gpu.json`` that is not one of this program."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.parts: dict[str, dict[str, Any]] = {}
        if self._json.exists():
            self.parts = _read(self._json)

    @property
    def _json(self) -> Path:
        return self._folder / "gpu.json"

    def refuse_dry_run(self, names: Iterable[str]) -> None:
        """Raises ValueError if one of the parts has figures of an accelerator."""
        kept = [n for n in names if n in self.parts and not self.parts[n]["measured"]["is_dry_run"]]
        if kept:
            raise ValueError(
                f"{self._json} has figures of an accelerator for {', '.join(kept)}, and a dry run "
                "would replace them; give another --out"
            )

    def add(self, name: str, found: Mapping[str, Any], measured: Mapping[str, Any]) -> bool:
        """Write what a part found, in place of what the file says of it.

        Returns:
            Whether it was written: a part that found no figures leaves those of an earlier run.
        """
        if has_figures(self.parts.get(name)) and not has_figures(found):
            return False
        self.parts[name] = {"measured": dict(measured), **found}
        # In one step: a run that is ended here leaves the file of before, or this one.
        beside = self._json.with_suffix(".partial")
        beside.write_text(json.dumps({"parts": self.parts}, indent=2) + "\n", encoding="utf-8")
        beside.replace(self._json)
        return True

    def draw(self, parts: Iterable[Part]) -> None:
        """One picture of all parts that have rows with figures; none if there are none."""
        drawn = [part for part in parts if has_figures(self.parts.get(part.name))]
        if not drawn:
            return
        sizes = [len(self.parts[part.name]["rows"]) + 3 for part in drawn]
        figure = Figure(figsize=(10, 1 + 0.3 * sum(sizes)), layout="constrained")
        axes = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=sizes)[:, 0]
        for axis, part in zip(axes, drawn, strict=True):
            part.draw(axis, self.parts[part.name])
            axis.set_title(part.name)
        figure.savefig(self._folder / "gpu.png", dpi=100)


def has_figures(found: Mapping[str, Any] | None) -> bool:
    """Whether a part has a row that was measured."""
    rows = (found or {}).get("rows", {})
    return any(not {"failure", "skipped"} & set(row) for row in rows.values())


def provenance(device: torch.device, *, is_dry_run: bool) -> dict[str, Any]:
    """When, where and of what: plain values for the file.

    Raises:
        ValueError: nothing tells of which commit figures of an accelerator would be.
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
        "device": "CPU" if device.type == "cpu" else _told_by_driver("name"),
        "driver": None if device.type == "cpu" else _told_by_driver("driver_version"),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "host_bytes": memory_limit_bytes(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        parts = json.loads(path.read_text(encoding="utf-8"))["parts"]
        return {name: dict(part) for name, part in parts.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a result of this program, and would be overwritten: {error!r}; move it "
            "away, or give another --out"
        ) from error


def _commit() -> str | None:
    """The commit of the sources, marked where they differ from it; None outside a repository."""
    told = os.environ.get(COMMIT_VARIABLE)
    if told:
        return told
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _told_by_driver(what: str) -> str | None:
    """A property of the first device, from NVIDIA's tool; None where there is none.

    torch would tell the name too, but take memory on the device for it, for as long as the whole
    program runs.
    """
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split("\n")[0].strip()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
