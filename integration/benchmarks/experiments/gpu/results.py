"""The files of a run: ``gpu.json`` and ``gpu.png``, and their tables as Markdown.

``{"parts": {name: {"measured": ..., "rows": ...}}}``. Each part has its own date, machine and
commit, as parts of one file may be of several runs: a run replaces the parts that it measures and
keeps the others.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.experiments.gpu.part import Part
from benchmarks.harness import rounds
from benchmarks.harness.ranks import write_json
from benchmarks.harness.report import markdown, reasons, save_panels
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
        """Write the result of a part, in place of an earlier one.

        Returns:
            Whether it was written: a part without figures leaves those of an earlier run.
        """
        if has_figures(self.parts.get(name)) and not has_figures(found):
            return False
        self.parts[name] = {"measured": dict(measured), **found}
        write_json(self._json, {"parts": self.parts})
        return True

    def draw(self, parts: Iterable[Part]) -> None:
        """Draw all parts that have rows with figures."""
        panels = []
        for part in parts:
            found = self.parts.get(part.name)
            if found is not None and has_figures(found):
                draw = lambda axes, p=part, f=found: p.draw(axes, f)  # noqa: E731
                panels.append((part.name, len(found["rows"]) + 3, draw))
        save_panels(self._folder / "gpu.png", panels)


def has_figures(found: Mapping[str, Any] | None) -> bool:
    """Return whether a part has a row that was measured."""
    return bool(rounds.measured((found or {}).get("rows", {})))


def provenance(device: torch.device, *, is_dry_run: bool) -> dict[str, Any]:
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
    """Return the commit of the sources, marked where they differ, or None without a repository."""
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


def _from_driver(what: str) -> str | None:
    """Return a property of the first device from NVIDIA's tool, or None without it.

    torch would take memory on the device for it, as long as the whole program runs.
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


def document(results: Results, parts: Iterable[Part]) -> str:
    """Return a section per measured part, with its provenance. Empty without results.

    Parts of a dry run are left out: their figures say nothing of an accelerator.
    """
    sections = []
    for part in parts:
        found = results.parts.get(part.name)
        if found is not None and not found["measured"]["is_dry_run"]:
            sections.append("\n".join(_section(part, found)))
    return "\n".join(sections)


def _section(part: Part, found: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {part.name}: {part.about}"
    yield ""
    yield _provenance(found["measured"])
    yield ""
    if has_figures(found):
        table = part.table(found)
        yield markdown(table)
        if table.caption:
            yield f"{table.caption}"
            yield ""
    yield from (f"- {line}" for line in reasons(found["rows"]))
    yield ""


def _provenance(measured: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in measured["versions"].items() if v)
    return (
        f"{measured['date'][:10]}, commit {measured['commit']}: {measured['device']}, driver "
        f"{measured['driver']}; {measured['cores']} cores of {measured['processor']}; {versions}."
    )
