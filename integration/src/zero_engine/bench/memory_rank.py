"""One rank of one memory measurement: build, train, write what was resident to a file, end.

Started by `zero_engine.bench.memory` as
``python -m zero_engine.bench.memory_rank JOB_JSON STORE RANK RESULT``.

[Note: what is measured]
Resident memory, and its peak (`zero_engine.bench.resident`), over what the process had before the
model was made. By then it has trained a small engine with the same configuration, so
that libraries, kernels' code and the process group's own buffers are there already.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zero_core
from zero_engine.bench.gpt import Gpt, GptShape
from zero_engine.bench.resident import peak_bytes, resident_bytes, restart_peak

__all__ = ["Job"]

WARM_STEPS = 2


@dataclass(frozen=True)
class Job:
    """What is measured: a small GPT, its configuration, and how long it is trained."""

    layers: int
    width: int
    heads: int
    vocab: int
    context: int
    """Tokens per sample."""
    micro_batch: int
    ranks: int
    stage: int | None
    """None: the bare model and torch's AdamW, to compare with."""
    dtype: str
    """"fp32" or "bf16"."""
    steps: int
    offload: str = "none"
    marks: tuple[int, ...] = ()
    """Steps after which resident memory is noted too."""
    is_random_length: bool = False
    """Whether each micro-batch has a length of its own, up to ``context``."""

    def model(self) -> Gpt:
        """The model, with the same weights on every rank."""
        torch.manual_seed(0)
        shape = GptShape(self.layers, self.width, self.heads, self.vocab, self.context)
        return Gpt(shape)

    def config(self) -> dict[str, Any]:
        """The engine's configuration."""
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "bf16": {"enabled": self.dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": self.stage,
                "offload_optimizer": {"device": self.offload},
            },
        }

    def inputs(self, rank: int) -> Iterator[Tensor]:
        """Token ids for ever: int64, ``[micro_batch, length]``, different on every rank."""
        generator = torch.Generator().manual_seed(1 + rank)
        while True:
            length = self.context
            if self.is_random_length:
                length = int(torch.randint(2, self.context + 1, (), generator=generator))
            yield torch.randint(self.vocab, (self.micro_batch, length), generator=generator)


def measure(job: Job, store: str, rank: int) -> dict[str, Any]:
    """Run the job on this rank; times in seconds, memory in bytes."""
    torch.set_num_threads(1)
    store_of_ranks = dist.FileStore(store, job.ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store_of_ranks, rank=rank, world_size=job.ranks)
    _train(replace(job, layers=2, width=64, heads=1, steps=WARM_STEPS, marks=()), rank)
    found = _train(job, rank)
    gc.collect()  # an engine that still held the group would end its threads only at exit
    dist.destroy_process_group()
    return found


def _train(job: Job, rank: int) -> dict[str, Any]:
    """Build and train, and note resident memory over what there was at the start."""
    gc.collect()
    before = resident_bytes()
    model = job.model()
    restart_peak()
    dist.barrier()
    started_at = time.perf_counter()
    cpu_at = time.process_time()
    engine = None if job.stage is None else zero_core.build(model, job.config())
    step_with = _bare(model) if engine is None else _engine(engine)
    found: dict[str, Any] = {
        "build_s": time.perf_counter() - started_at,
        "build_cpu_s": time.process_time() - cpu_at,
        "build_peak_bytes": peak_bytes() - before,
        "built_bytes": resident_bytes() - before,
        "num_parameters": sum(p.numel() for p in model.parameters()),
    }
    dist.barrier()
    restart_peak()
    inputs = job.inputs(rank)
    marks = {}
    for step in range(1, job.steps + 1):
        step_with(next(inputs))
        if step in job.marks:
            marks[step] = resident_bytes() - before
    dist.barrier()
    found |= {
        "peak_bytes": peak_bytes() - before,
        "resident_bytes": marks,
        "held_bytes": {} if engine is None else engine.memory_report(),
    }
    dist.barrier()  # nobody ends while another still measures
    return found


def _engine(engine: zero_core.Engine) -> Callable[[Tensor], None]:
    def step(ids: Tensor) -> None:
        engine.backward(engine(ids))
        engine.step()

    return step


def _bare(model: Gpt) -> Callable[[Tensor], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(ids: Tensor) -> None:
        torch.autograd.backward(model(ids))
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Read the command line, measure, write the result."""
    job, store, rank, result = sys.argv[1:]
    measured = measure(Job(**json.loads(job)), store, int(rank))
    Path(result).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
