"""Calibrations: of this machine, measured in new processes, or of a device in ``devices.json``.

``zero-engine doctor --measure`` keeps the measured speeds ("rates") of this machine for the user in
``$XDG_CACHE_HOME/zero-engine/rates.json`` (default ``~/.cache``). The file holds a `Calibration`
and, under "machine", the `fingerprint` of the machine that was measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from zero_core.config import parse_json, read_config_text
from zero_core.errors import ConfigError, ZeroError
from zero_engine.calibration.rank import merged
from zero_engine.machine import accelerator_names, available_cores, processor_name
from zero_engine.planning.rates import FORMAT, Calibration, Curve, Rates

MEASURE = "measure this machine with zero-engine doctor --measure"
LIMIT_S = 300.0
MOST_RANKS = 8
EFFICIENCY = {"matmul": 0.6, "memory": 0.8, "link": 0.75, "host": 0.6}
"""Assumed shares of published peaks."""
BYTES_PER_UPDATE = 28
"""Bytes read and written per element by an Adam of fp32 states and 16-bit gradients and
parameters."""
LAUNCH_S, PASS_S, STEP_S = 6e-6, 150e-6, 1e-3
"""Assumed Python time per operator, per unit and pass, and per step."""
EXCHANGE_S = 20e-6
"""Assumed latency of a collective and of a copy over the bus."""


def measure_machine(ranks: Sequence[int] | None, disk: Path | None) -> Calibration:
    """Measure this machine with each number of ranks, by default those of `default_ranks`.

    ``disk`` is a folder on the disk for NVMe offload. If it is None, no file is timed.
    """
    cores = available_cores()
    devices = accelerator_names()
    counts = sorted(set(ranks or default_ranks(cores, len(devices))))
    name = devices[0] if devices else processor_name()
    rows = [_measure(count, cores, disk) for count in counts]
    source = f"measured on {date.today().isoformat()}, torch {torch.__version__}"
    found = {"format": FORMAT, "device": name, "source": source, "rates": rows}
    return Calibration.from_json(found, "what was measured")


def default_ranks(cores: int, devices: int) -> set[int]:
    """Return {1, ``devices``}. Without devices: {1, 2, ``cores``}, up to `MOST_RANKS` and cores."""
    return {1, devices} if devices else {1, min(2, cores), min(MOST_RANKS, cores)}


def measure_to(
    output: str, ranks: Sequence[int] | None, disk: str | None
) -> tuple[Calibration, Path]:
    """Measure this machine, write and `keep` the rates. Returns them and the kept path."""
    wrong = next((number for number in ranks or () if number < 1), None)
    if wrong is not None:
        raise ConfigError(f"--ranks {wrong}: must be at least 1")
    if disk is not None and not Path(disk).is_dir():
        raise ConfigError(f"--disk {disk}: not a folder")
    if not Path(output).resolve().parent.is_dir():
        raise ConfigError(f"--output {output}: its folder does not exist")
    found = measure_machine(ranks, None if disk is None else Path(disk))
    try:
        Path(output).write_text(found.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}") from None
    return found, keep(found, output)


def _measure(count: int, cores: int, disk: Path | None) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "zero_engine.calibration.rank", scratch, str(cores)]
        command.append("" if disk is None else str(disk))
        threads = str(max(1, cores // count))
        started = []
        for rank in range(count):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
            }
            with Path(scratch, f"log{rank}").open("wb") as log:
                process = subprocess.Popen(
                    command, env=environment, stdout=log, stderr=subprocess.STDOUT
                )
            started.append(process)
        try:
            failed = first_failed(started, LIMIT_S)
        except TimeoutError:
            raise ZeroError(f"measuring with {count} ranks took over {LIMIT_S:.0f} s") from None
        finally:
            for process in started:
                process.kill()
                process.wait()
        if failed is not None:
            said = Path(scratch, f"log{failed}").read_text(encoding="utf-8", errors="replace")
            last = said.strip().splitlines()[-1:] or ["no message"]
            raise ZeroError(f"measuring with {count} ranks: rank {failed} failed: {last[0]}")
        texts = [Path(scratch, f"rank{rank}.json").read_text("utf-8") for rank in range(count)]
    return merged([json.loads(text) for text in texts])


def first_failed(started: Sequence[subprocess.Popen[bytes]], limit_s: float) -> int | None:
    """Return the index of a failed process, or None. After ``limit_s`` seconds: TimeoutError."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        codes = [process.poll() for process in started]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None or None not in codes:
            return failed
        time.sleep(0.02)
    raise TimeoutError


def read_calibration(path: str) -> Calibration:
    name = f"--rates {path}"
    return Calibration.from_json(parse_json(read_config_text(Path(path), name), name), name)


def device_names() -> list[str]:
    return sorted(_table()["devices"])


def device_memory(name: str) -> int:
    return int(_device(name)[1]["memory_bytes"])


def device_calibration(name: str, ranks_per_node: int) -> Calibration:
    """Estimate the rates of a device in the table: published peaks times `EFFICIENCY`."""
    (key, peaks), host = _device(name), _table()["host"]
    memory = Curve.of_rate(peaks["memory_bytes_per_s"] * EFFICIENCY["memory"])
    curves = {
        f"matmul.{dtype}": Curve.of_rate(rate * EFFICIENCY["matmul"])
        for dtype, rate in peaks["operations_per_s"].items()
    }
    update = peaks["memory_bytes_per_s"] * EFFICIENCY["memory"] / BYTES_PER_UPDATE
    on_host = host["memory_bytes_per_s"] * EFFICIENCY["host"] / ranks_per_node / BYTES_PER_UPDATE
    bus = Curve.of_rate(peaks["bus_bytes_per_s"] * EFFICIENCY["link"], EXCHANGE_S)
    curves |= {
        "memory.float32": memory,
        "operator": Curve(((1.0, LAUNCH_S),)),
        "pass": Curve(((1.0, PASS_S),)),
        "step": Curve(((1.0, STEP_S),)),
        "update.device.float32": Curve.of_rate(update),
        "update.host.float32": Curve.of_rate(on_host),
        "copy.to_host": bus,
        "copy.to_device": bus,
        "file.read": Curve.of_rate(host["disk_read_bytes_per_s"] / ranks_per_node),
        "file.write": Curve.of_rate(host["disk_write_bytes_per_s"] / ranks_per_node),
    }
    ways = {
        "within": peaks["link_bytes_per_s"],
        "between": host["network_bytes_per_s"] / ranks_per_node,
    }
    for way, rate in ways.items():
        for verb in ("gather", "reduce", "agree"):
            curves[f"{verb}.{way}"] = Curve.of_rate(rate * EFFICIENCY["link"], EXCHANGE_S)
    source = f"{peaks['source']}; assumed: {EFFICIENCY} of the peaks, {host['source']}"
    return Calibration(key, source, (Rates(ranks_per_node, 1, None, curves),))


def _device(name: str) -> tuple[str, dict[str, Any]]:
    devices = _table()["devices"]
    known = {key.lower().replace(" ", ""): key for key in devices}
    key = known.get(name.lower().replace(" ", "").replace("-", ""))
    if key is None:
        raise ConfigError(f"--device {name}: known are {', '.join(device_names())}")
    return key, devices[key]


def _table() -> dict[str, Any]:
    text = files("zero_engine.calibration").joinpath("devices.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@dataclass(frozen=True)
class KeptRates:
    """Saved rates (None if missing, or of another machine or torch), and a line for the user."""

    calibration: Calibration | None
    said: str


def kept_path() -> Path:
    return Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "zero-engine/rates.json"
    )


def fingerprint() -> dict[str, object]:
    return {
        "processor": processor_name(),
        "cores": available_cores(),
        "accelerators": accelerator_names(),
        "torch": torch.__version__,
    }


def keep(found: Calibration, written_to: str) -> Path:
    path = kept_path()
    content = {**json.loads(found.to_json()), "machine": fingerprint()}
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(
            f"the rates are in {written_to}, but cannot be kept in {path}: {error.strerror}; give "
            f"--rates {written_to} to zero-engine plan, or set XDG_CACHE_HOME to a folder of yours"
        ) from None
    return path


def kept_rates() -> KeptRates:
    """Read the saved rates, which are used only if their machine's `fingerprint` is the same."""
    path = kept_path()
    if not path.exists():
        return KeptRates(None, f"no times: no rates are kept in {path}: {MEASURE}")
    name = f"the kept rates {path}"
    content = parse_json(read_config_text(path, name), name)
    was, now = content.get("machine"), fingerprint()
    if not isinstance(was, dict):
        raise ConfigError(f"{name} say nothing about their machine: {MEASURE}")
    differing = [key for key in now if was.get(key) != now[key]]
    if not differing:
        found = Calibration.from_json(content, name)
        return KeptRates(found, f"times by the rates kept in {path}, {found.source}")
    which = "another torch" if differing == ["torch"] else "another machine"
    changed = ", ".join(f"{key} {was.get(key)}, here {now[key]}" for key in differing)
    return KeptRates(
        None, f"no times: the rates kept in {path} are of {which} ({changed}): {MEASURE}"
    )
