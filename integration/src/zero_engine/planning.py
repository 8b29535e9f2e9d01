"""``zero-engine plan``: what a run will take, as tables, JSON and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.models.gpt2 import GPT2Config

import zero_core
from zero_core.config.schema import parse_json, read_config_text
from zero_core.errors import ConfigError
from zero_engine import machine
from zero_engine.train.settings import AUTO, RunSettings, engine_config

GB = 10**9
MAX_RANKS = 2**20
_LARGEST = {"layers": 10_000, "width": 2**20, "heads": 2**20, "vocab": 2**31, "tokens": 2**24}
"""Options of the GPT-2, all at least 1, and the largest number that each may be."""


def parse_bytes(text: str, option: str) -> int:
    """Bytes of ``text``, the value of ``option``: see `machine.parse_bytes`.

    Raises:
        ConfigError: it is no size, or not positive.
    """
    found = machine.parse_bytes(text)
    if not found:
        raise ConfigError(f"--{option} {text}: expected a size such as 24GB or 22.5GiB")
    return found


def read_model(path: str | None, tokens: int | None, sizes: dict[str, int]) -> Any:
    """Return the Hugging Face configuration of ``--model``, or a GPT-2's of the given sizes.

    Args:
        path: a ``config.json``, or the folder that holds it.
        tokens: ``--tokens``, per sample.
        sizes: ``--layers``, ``--width``, ``--heads`` and ``--vocab``, where there is no path.

    Raises:
        ConfigError: a size is out of range, or the file cannot be read or holds no configuration.
    """
    given = sizes if path is None else {}
    for name, value in (given if tokens is None else {**given, "tokens": tokens}).items():
        if not 1 <= value <= _LARGEST[name]:
            raise ConfigError(f"--{name} {value}: must be from 1 to {_LARGEST[name]}")
    if path is None:
        if sizes["width"] % sizes["heads"]:
            raise ConfigError(
                f"--width {sizes['width']} must be a multiple of --heads {sizes['heads']}"
            )
        return GPT2Config(
            n_layer=sizes["layers"],
            n_embd=sizes["width"],
            n_head=sizes["heads"],
            vocab_size=sizes["vocab"],
            n_positions=max(1024, tokens or 0),
        )
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    content = parse_json(read_config_text(file, "--model"), f"--model {path}")
    if not isinstance(content.get("model_type"), str):
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
    if not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(f"--ranks {ranks}: must be from 1 to {MAX_RANKS}")
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
    except (OSError, ValueError) as error:  # ValueError: a picture of an unknown format
        raise ConfigError(f"the plan cannot be written: {error}") from None


def draw_plan(plan: zero_core.Plan, path: Path) -> None:
    """Bars of device and host memory per rank, stacked by kind, as a PNG at ``path``."""
    from matplotlib.figure import Figure  # seconds, and few ask for a picture

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
