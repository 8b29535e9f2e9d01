"""Plan of a run with a size: its memory and its files on this machine."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace

import torch

import zero_core
from zero_core.errors import ConfigError
from zero_core.footprint import format_bytes
from zero_engine.machine import memory_limit_bytes, used_bytes
from zero_engine.train.options import RunSettings
from zero_engine.train.program import build_model
from zero_engine.train.settings import (
    RunFolder,
    engine_config,
    fill_auto,
    nearest_folder,
)


@dataclass(frozen=True)
class Preview:
    """A plan of a run.

    Attributes:
        settings: of the run, with the place of its states.
        plan: bytes of the engine.
        process_bytes: what a rank takes before it has a model: Python, torch and transformers.
        limit_bytes: memory that the machine grants; None if that is unknown.
        disk_bytes: of files, at most: states, checkpoints (two at a time, one or none), the export.
        free_bytes: free space where they go.
    """

    settings: RunSettings
    plan: zero_core.Plan
    process_bytes: int
    limit_bytes: int | None
    disk_bytes: int
    free_bytes: int

    @property
    def rank_bytes(self) -> int:
        """Host memory of a rank: the engine's and the process's own."""
        memory, is_on_cpu = self.plan.memory, not torch.cuda.is_available()
        return self.process_bytes + memory.host_bytes + memory.device_bytes * is_on_cpu

    @property
    def is_fitting(self) -> bool:
        """Whether the ranks' memory is within the machine's."""
        needed = self.rank_bytes * self.plan.world_size
        return self.limit_bytes is None or needed <= self.limit_bytes

    def lines(self) -> list[str]:
        """Return the plan in words, a line each."""
        memory = self.plan.memory
        kinds = dict.fromkeys((*memory.device, *memory.host))
        found = [
            f"  {kind:<24}{format_bytes(memory.device.get(kind, 0) + memory.host.get(kind, 0))}"
            for kind in kinds
        ]
        limit = "unknown" if self.limit_bytes is None else format_bytes(self.limit_bytes)
        total = format_bytes(self.rank_bytes * self.plan.world_size)
        return [
            f"plan: {self.plan.num_parameters / 1e9:.2f} billion parameters, states in "
            f"{self.settings.states}, memory per rank:",
            *found,
            f"  {'the process itself':<24}{format_bytes(self.process_bytes)}",
            f"  {'in all':<24}{format_bytes(self.rank_bytes)}",
            f"{self.plan.world_size} ranks take {total} of {limit}; files take at most "
            f"{format_bytes(self.disk_bytes)} of {format_bytes(self.free_bytes)}",
        ]


def preview(settings: RunSettings, num_ranks: int) -> Preview:
    """Plan a run with a size. Its states go to memory, or to files where they do not fit there."""
    is_open = settings.states is None and settings.config is None
    last = _preview(replace(settings, states="memory") if is_open else settings, num_ranks)
    if is_open and not last.is_fitting:
        last = _preview(replace(settings, states="files"), num_ranks)
    if not last.is_fitting:
        raise ConfigError(
            f"--size {settings.size}: {num_ranks} ranks take "
            f"{format_bytes(last.rank_bytes * num_ranks)} of memory with states in "
            f"{last.settings.states}, and this machine has {format_bytes(last.limit_bytes or 0)}: "
            "choose a smaller size, or fewer --ranks"
        )
    if last.disk_bytes > last.free_bytes:
        raise ConfigError(
            f"--output {settings.output}: states and results take {format_bytes(last.disk_bytes)} "
            f"and {format_bytes(last.free_bytes)} are free: choose another folder, a smaller size, "
            "--no-export, or --no-save to do without checkpoints"
        )
    return last


def _preview(settings: RunSettings, num_ranks: int) -> Preview:
    config = fill_auto(engine_config(settings), settings.steps)
    with torch.device("meta"):
        model = build_model(settings, settings.vocab)
    # Else transformers looks for padding in inputs that have no values on the meta device.
    model.config.pad_token_id = None
    resolved = zero_core.load_config(config, world_size=num_ranks)
    shape = (resolved.train_micro_batch_size_per_gpu, settings.context)
    ids = torch.zeros(shape, dtype=torch.int64, device="meta")
    limit = memory_limit_bytes()
    plan = zero_core.plan(
        model,
        config,
        num_ranks,
        host_memory=limit,
        example_inputs={"input_ids": ids, "labels": ids, "use_cache": False},
        device_type="accelerator" if torch.cuda.is_available() else "cpu",
    )
    folder = RunFolder.of({"output": settings.output})
    saved = plan.async_save_bytes * num_ranks
    num_saves = (2 if settings.save_every < settings.steps else 1) * settings.save
    in_files = plan.configured.file_bytes * num_ranks
    parameter_bytes = 2 * plan.num_parameters  # in 16 bits: of an export, or off the device
    if resolved.zero_optimization.offload_param.device == "nvme":
        in_files += parameter_bytes
    export = parameter_bytes * settings.export
    return Preview(
        settings,
        plan,
        used_bytes(torch.device("cpu")),
        limit,
        in_files + num_saves * saved + export,
        shutil.disk_usage(nearest_folder(folder.root)).free,
    )
