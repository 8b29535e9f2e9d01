"""``zero-engine plan``: what a run will take, as tables, JSON and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config

import zero_core
from zero_core.errors import ConfigError
from zero_engine import machine
from zero_engine.train.settings import AUTO, RunSettings, engine_config

GB = 10**9


def parse_bytes(text: str, option: str) -> int:
    """Bytes of ``text``, the value of ``option``: see `machine.parse_bytes`.

    Raises:
        ConfigError: it is no size, or not positive.
    """
    found = machine.parse_bytes(text)
    if not found:
        raise ConfigError(f"--{option} {text}: expected a size such as 24GB or 22.5GiB")
    return found


def read_model(path: str | None, sizes: dict[str, Any]) -> Any:
    """Return the Hugging Face configuration of ``--model``, or a GPT-2's of the given sizes.

    Args:
        path: a ``config.json``, or the folder that holds it.
        sizes: fields of `transformers.GPT2Config`, where there is no path.

    Raises:
        ConfigError: the file cannot be read or holds no configuration.
    """
    if path is None:
        return GPT2Config(**sizes)
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {path}: cannot be read: {error}") from None
    if not isinstance(content, dict) or "model_type" not in content:
        raise ConfigError(f"--model {path}: expected a Hugging Face config.json with 'model_type'")
    return content


def make_plan(
    model: Any,
    config: str | None,
    *,
    ranks: int,
    ranks_per_node: int | None,
    device_memory: str | None,
    host_memory: str | None,
    tokens: int | None,
    is_on_cpu: bool,
) -> zero_core.Plan:
    """Plan ``model`` with the configuration at ``config``, or with the default one.

    Args:
        model: a Hugging Face configuration.
        config: a path.
        ranks: data-parallel ranks.
        ranks_per_node: see `zero_core.plan`.
        device_memory: of one device, as `parse_bytes` reads it.
        host_memory: of one node, likewise.
        tokens: per sample; with them, activations are traced.
        is_on_cpu: whether the ranks compute on the host.

    Raises:
        ConfigError: an option or a file is wrong.
    """
    settings = _without_auto(engine_config(RunSettings(config=config)))
    limits = {"device-memory": device_memory, "host-memory": host_memory}
    device, host = (None if v is None else parse_bytes(v, k) for k, v in limits.items())
    inputs = None
    if tokens is not None:
        resolved = zero_core.load_config(settings, world_size=ranks)
        shape = (resolved.train_micro_batch_size_per_gpu, tokens)
        ids = torch.zeros(shape, dtype=torch.int64, device="meta")
        inputs = {"input_ids": ids, "labels": ids}
    return zero_core.plan(
        model,
        settings,
        ranks,
        device_memory=device,
        host_memory=host,
        ranks_per_node=ranks_per_node,
        example_inputs=inputs,
        device_type="cpu" if is_on_cpu else "accelerator",
    )


def _without_auto(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration without a schedule that the run's length completes."""
    if AUTO in json.dumps(config.get("scheduler", {})):
        return {key: value for key, value in config.items() if key != "scheduler"}
    return config


def show_plan(plan: zero_core.Plan, console: Console) -> None:
    for part in plan.tables():
        table = Table(title=part.title)
        for number, heading in enumerate(part.headings):
            table.add_column(heading, justify="right" if number else "left")
        for row in part.rows:
            table.add_row(*row)
        console.print(table)
    console.print(plan.advice)


def write_plan(plan: zero_core.Plan, json_path: str | None, png_path: str | None) -> None:
    """Write the plan to the files that were named.

    Raises:
        ConfigError: one of them cannot be written.
    """
    try:
        if json_path is not None:
            Path(json_path).write_text(plan.to_json() + "\n", encoding="utf-8")
        if png_path is not None:
            draw_plan(plan, Path(png_path))
    except OSError as error:
        raise ConfigError(f"the plan cannot be written: {error}") from None


def draw_plan(plan: zero_core.Plan, path: Path) -> None:
    """Bars of device and host memory per rank, stacked by kind, as a PNG at ``path``."""
    axes = Figure(figsize=(7, 5), layout="constrained").add_subplot()
    places = {"device": plan.memory.device, "host": plan.memory.host}
    kinds = dict.fromkeys(kind for place in places.values() for kind in place)
    bottoms = [0.0, 0.0]
    for kind in kinds:
        heights = [place.get(kind, 0) / GB for place in places.values()]
        axes.bar(list(places), heights, bottom=bottoms, label=kind, width=0.6)
        bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
    if plan.device_memory is not None:
        limit = plan.device_memory / GB
        axes.plot([-0.4, 0.4], [limit, limit], "k--", label="device memory")
    axes.set_ylabel("memory per rank (GB)")
    axes.set_title(f"{plan.configured}, {plan.world_size} ranks")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.savefig(path, dpi=120)
