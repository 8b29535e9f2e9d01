"""``zero-engine plan``: memory, traffic and time of a run, as tables, JSON and a picture."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.gpt2 import GPT2Config

import zero_core
from zero_core.config import parse_json, read_config_text
from zero_core.errors import ConfigError
from zero_core.footprint import ranks_of_node
from zero_engine import planning
from zero_engine.calibration.machine import (
    KeptRates,
    device_calibration,
    device_memory,
    kept_rates,
    read_calibration,
)
from zero_engine.machine import parse_bytes
from zero_engine.planning import Calibration, TimedPlan
from zero_engine.terminal import count
from zero_engine.train.settings import AUTO, engine_config

GB = 10**9
MAX_RANKS = 2**20
USUAL_TOKENS = 1024
_LARGEST = {"layers": 10_000, "width": 2**20, "heads": 2**20, "vocab": 2**31, "tokens": 2**24}


@dataclass(frozen=True)
class PlanRequest:
    """Options of ``zero-engine plan``. ``sizes`` are a GPT-2's, ``tokens`` are ``--seq-length``."""

    model: str | None
    sizes: Mapping[str, int]
    size: str | None = None
    tokens: int | None = None
    batch_size: int | None = None
    micro_batch_size: int | None = None
    config: str | None = None
    ranks: int = 1
    ranks_per_node: int | None = None
    device_memory: str | None = None
    host_memory: str | None = None
    rates: str | None = None
    no_rates: bool = False
    device: str | None = None
    allow_rounding: bool = False
    nvme_path: str | None = None
    fit: str | None = None
    on_cpu: bool = False

    def make(self) -> TimedPlan:
        model = self._model
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ConfigError(f"--world-size {self.ranks}: must be from 1 to {MAX_RANKS}")
        calibration, tokens = self._calibration, self._traced_tokens
        settings = self.settings()
        limits = {"--device-memory": self.device_memory, "--host-memory": self.host_memory}
        device, host = (None if v is None else parse_bytes(v, k) for k, v in limits.items())
        if device is None and self.device is not None:
            device = device_memory(self.device)
        inputs = None
        if tokens is not None:
            resolved = zero_core.load_config(settings, world_size=self.ranks)
            shape = (resolved.train_micro_batch_size_per_gpu, tokens)
            ids = torch.zeros(shape, dtype=torch.int64, device="meta")
            inputs = {"input_ids": ids, "labels": ids}
        return planning.plan(
            model,
            settings,
            self.ranks,
            device_memory=device,
            host_memory=host,
            ranks_per_node=self.ranks_per_node,
            example_inputs=inputs,
            device_type="cpu" if self._is_on_cpu else "accelerator",
            calibration=calibration,
            allow_rounding=self.allow_rounding,
            nvme_path=self.nvme_path,
        )

    @property
    def said(self) -> str:
        if self._kept is None:
            return ""
        if self._kept.calibration is None or self.tokens is not None:
            return self._kept.said
        if self._traced_tokens is None:
            return "no times: MODEL is not known as a causal language model: give --seq-length"
        return f"{self._kept.said}, for {self._traced_tokens} tokens a sample (--seq-length)"

    def settings(self) -> dict[str, Any]:
        found = engine_config(self.config, is_accelerated=not self._is_on_cpu)
        # A run fills "auto" values of its schedule from its number of steps. A plan has none.
        if AUTO in json.dumps(found.get("scheduler", {})):
            del found["scheduler"]
        given = {
            "train_batch_size": ("batch-size", self.batch_size),
            "train_micro_batch_size_per_gpu": ("micro-batch-size", self.micro_batch_size),
        }
        for option, number in given.values():
            if number is not None and number < 1:
                raise ConfigError(f"--{option} {number}: must be at least 1")
        if self.batch_size is None and self.micro_batch_size is None:
            return found
        for key in (*given, "gradient_accumulation_steps"):
            found.pop(key, None)
        return found | {key: number for key, (_, number) in given.items() if number is not None}

    def write_fit(self, plan: TimedPlan) -> str:
        """Write the best choice to ``--fit``, if both exist. Returns a line about it, or ""."""
        if self.fit is None or plan.best is None:
            return ""
        written = engine_config(self.config, is_accelerated=not self._is_on_cpu)
        schedule = {key: written[key] for key in ("scheduler",) if key in written}
        content = json.dumps(plan.best.apply(self.settings() | schedule), indent=2)
        try:
            Path(self.fit).write_text(content + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--fit {self.fit}: {error.strerror}") from None
        return f"{plan.best} is written to {self.fit}"

    @cached_property
    def _kept(self) -> KeptRates | None:
        if self.no_rates or self.rates is not None or self.device is not None:
            return None
        found = kept_rates()
        of_cpu = found.calibration is not None and found.calibration.rates[0].cores is not None
        if of_cpu and self.device_memory is not None:
            return KeptRates(None, "no times: the kept rates are a CPU's, without --device-memory")
        if found.calibration is not None and not of_cpu and self.on_cpu:
            return KeptRates(None, "no times: the kept rates are an accelerator's, without --cpu")
        return found

    @cached_property
    def _calibration(self) -> Calibration | None:
        given = {
            "--rates": self.rates,
            "--device": self.device,
            "--no-rates": self.no_rates or None,
        }
        named = [option for option, value in given.items() if value is not None]
        if len(named) > 1:
            raise ConfigError(f"{' and '.join(named)} exclude each other")
        if self._kept is not None:
            return self._kept.calibration
        if self.no_rates:
            return None
        if self.device is not None:
            device_memory(self.device)  # refuses unknown names
        if self.tokens is None:
            raise ConfigError("times need the tokens of a sample: give --seq-length")
        if self.rates is not None:
            return read_calibration(self.rates)
        per_node = ranks_of_node(self.ranks, self.ranks_per_node or None)
        return device_calibration(str(self.device), per_node)

    @cached_property
    def _is_on_cpu(self) -> bool:
        found = None if self.device is not None else self._calibration
        return self.on_cpu or (found is not None and found.rates[0].cores is not None)

    @cached_property
    def _model(self) -> Any:
        path, tokens, sizes = self.model, self.tokens, self.sizes
        if self.size is not None:
            if path is not None:
                raise ConfigError(f"--size {self.size} and MODEL {path!r} exclude each other")
            sizes = {**sizes, **_sizes_of(self.size, sizes["vocab"])}
        given = sizes if path is None else {}
        for name, value in (given if tokens is None else {**given, "tokens": tokens}).items():
            if not 1 <= value <= _LARGEST[name]:
                option = "seq-length" if name == "tokens" else name
                raise ConfigError(f"--{option} {value}: must be from 1 to {_LARGEST[name]}")
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
        if not file.exists():
            raise ConfigError(
                f"cannot read MODEL {path!r}: no file {file}. Give a local config.json, as "
                "'hf download ID config.json' writes it, or the size of a GPT-2 as --size 7b"
            )
        content = parse_json(read_config_text(file, "MODEL"), f"MODEL {path}")
        if not isinstance(content.get("model_type"), str):
            raise ConfigError(
                f"MODEL {path}: expected a Hugging Face config.json with 'model_type'"
            )
        return content

    @cached_property
    def _traced_tokens(self) -> int | None:
        if self.tokens is not None or self._calibration is None:
            return self.tokens
        model = self._model
        config = model if isinstance(model, Mapping) else model.to_dict()
        if config["model_type"] not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return None
        most = config.get("max_position_embeddings", config.get("n_positions", USUAL_TOKENS))
        return min(int(most), USUAL_TOKENS)


def _sizes_of(size: str, vocab: int) -> dict[str, int]:
    """Return sizes of a GPT-2 of about ``size`` parameters, whose width is about 128 * blocks."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([kmb])", size.strip().lower())
    numel = float(match[1]) * 1000 ** (1 + "kmb".index(match[2])) if match else 0.0
    if not 1e5 <= numel <= 1e15:
        raise ConfigError(f"--size {size}: expected parameters, such as 350m or 7b")
    width = max(64, 64 * round((numel * 128 / 12) ** (1 / 3) / 64))
    layers = max(1, round((numel - vocab * width) / (12 * width * width)))
    return {"layers": layers, "width": width, "heads": width // 64}


def show_plan(plan: TimedPlan, settings: Mapping[str, Any], console: Console, rows: int) -> None:
    """Print ``plan`` of the configuration ``settings``, with ``rows`` choices and marked ones."""
    kinds = [k for k in ("bf16", "fp16") if settings.get(k, {}).get("enabled")]
    facts = [f"{plan.num_parameters:,} parameters", *(kinds or ["fp32"])]
    facts += [
        f"micro-batch {plan.configured.micro_batch}",
        count(plan.world_size, "rank") + plan.headline,
    ]
    console.print(", ".join(facts), markup=False, highlight=False)
    for part in plan.tables(rows):
        table = Table(title=part.title)
        for number, heading in enumerate(part.headings):
            table.add_column(heading, justify="right" if number else "left", overflow="fold")
        for row in part.rows:
            table.add_row(*row)
        console.print(table)
    console.print(plan.advice.replace("(nvme_path)", "(--nvme-path)"))
    for reason in plan.reasons:
        console.print(f"- {reason}.", markup=False, highlight=False)


def write_plan(plan: TimedPlan, json_path: str | None, png_path: str | None) -> None:
    try:
        if json_path is not None:
            Path(json_path).write_text(plan.to_json() + "\n", encoding="utf-8")
        if png_path is not None:
            draw_plan(plan, Path(png_path))
    except (OSError, ValueError) as error:  # ValueError: unknown picture format
        raise ConfigError(f"the plan cannot be written: {error}") from None


def draw_plan(plan: TimedPlan, path: Path) -> None:
    # matplotlib takes seconds to import, and few plans draw a picture.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
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
    figure.savefig(path, dpi=120)
