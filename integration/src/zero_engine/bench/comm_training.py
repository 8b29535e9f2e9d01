"""One training run of the convergence proof, on one rank: a small GPT on text, with quantized
communication or without.

Started by `zero_engine.bench.comm_convergence` on every rank as
``python -m zero_engine.bench.comm_training JOBS_JSON CORPUS RUNS STORE RANK RESULT``. The jobs run
one after another in the same processes; rank 0 appends a line of JSON to the file RUNS as soon as
one has ended, so that what was done stays if a later one fails.

All ranks are on one machine. Their environment says that every `RANKS_PER_NODE` of them are a node,
as torchrun would, and that decides which hop each byte takes.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zero_core
from zero_engine.bench.gpt import Gpt, GptShape
from zero_engine.data import Corpus
from zero_engine.ranks import sum_over_ranks
from zero_engine.settings import default_config_text, fill_auto

__all__ = [
    "CONTENDERS",
    "DTYPES",
    "NUM_RANKS",
    "PLAIN",
    "Job",
    "Run",
    "choose_nodes",
    "train",
    "training_config",
]

NUM_RANKS, RANKS_PER_NODE = 4, 2
LAYERS, WIDTH, HEADS, CONTEXT, VOCAB = 2, 64, 4, 64, 512
"""137 thousand parameters: a shard of each of the three units is several dozen blocks."""
MICRO_BATCH = 2
HELD_OUT_WINDOWS, HELD_OUT_BATCH = 512, 8
CURVE_POINTS = 50
LAST_STEPS = 50
"""The training loss is the mean over this many steps at the end."""

DTYPES = ("fp32", "bf16", "fp16")
PLAIN = "plain"
_QWZ = {"zero_quantized_weights": True}
_HPZ = {"zero_hpz_partition_size": RANKS_PER_NODE}
_QGZ = {"zero_quantized_gradients": True}
CONTENDERS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {},
    "qwZ": _QWZ,
    "hpZ": _HPZ,
    "qgZ": _QGZ,
    "all three": {**_QWZ, **_HPZ, **_QGZ},
    "qgZ, error feedback": {**_QGZ, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}},
    "4-bit": {
        **_QWZ,
        **_HPZ,
        **_QGZ,
        "zero_quantized_weights_format": "int4_difference",
        "zero_quantized_gradients_within_node": "int8",
        "zero_quantized_gradients_between_nodes": "int4",
        "zero_quantized_gradients_hadamard": True,
    },
}
"""Keys of ``zero_optimization``, besides stage 3."""


@dataclass(frozen=True)
class Job:
    """What to train."""

    contender: str
    """Of `CONTENDERS`."""
    dtype: str
    """Of `DTYPES`: what is computed in, over fp32 master weights."""
    seed: int
    """Of the first weights and of the order of the text."""
    steps: int


@dataclass(frozen=True)
class Run:
    """What came of a job. Losses are in nats per token, means over all ranks."""

    contender: str
    dtype: str
    seed: int
    held_out: float
    training: float
    """Mean over the last `LAST_STEPS` steps."""
    curve: Sequence[float]
    """Means over the steps' loss, `CURVE_POINTS` of them or one per step."""
    is_finite: bool
    """Whether every step's loss and the held-out one were."""
    skipped_steps: int
    """Those whose gradient was not finite: in fp16 the first few, until the loss scale fits."""
    within_node_bytes: int
    """What a rank sends per step, parameters and gradients."""
    between_nodes_bytes: int
    seconds: float


def choose_nodes(rank: int) -> None:
    """Say in the environment, as torchrun does, that every `RANKS_PER_NODE` ranks are a node."""
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_NODE)
    os.environ["LOCAL_RANK"] = str(rank % RANKS_PER_NODE)
    os.environ["GROUP_RANK"] = str(rank // RANKS_PER_NODE)


def training_config(steps: int) -> dict[str, Any]:
    """The train program's optimizer, schedule and clipping, for a run of ``steps``."""
    config = fill_auto(json.loads(default_config_text()), steps)
    return {name: config[name] for name in ("optimizer", "scheduler", "gradient_clipping")}


def train(job: Job, corpus: Corpus) -> Run:
    """Train from the first step to the last, then evaluate. Every rank calls it, after
    `choose_nodes`.

    Args:
        job: what to train.
        corpus: the text; the job's seed orders it.
    """
    corpus = replace(corpus, seed=job.seed)
    torch.manual_seed(job.seed)
    shape = GptShape(LAYERS, WIDTH, HEADS, corpus.vocab_size, corpus.train.shape[1])
    engine = zero_core.build(Gpt(shape), _config(job))
    started_at = time.perf_counter()
    losses = []
    for step in range(job.steps):
        ids = corpus.batch(
            step, rank=engine.rank, world_size=engine.world_size, micro_batch_size=MICRO_BATCH
        )
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().double())
    within, between = _sent_bytes(engine)
    means = (sum_over_ranks(torch.stack(losses)) / engine.world_size).tolist()
    held_out = _held_out_loss(engine, corpus)
    engine.close()
    return Run(
        contender=job.contender,
        dtype=job.dtype,
        seed=job.seed,
        held_out=held_out,
        training=statistics.fmean(means[-LAST_STEPS:]),
        curve=_curve(means),
        is_finite=bool(torch.isfinite(torch.tensor([*means, held_out])).all()),
        skipped_steps=engine.skipped_steps,
        within_node_bytes=within,
        between_nodes_bytes=between,
        seconds=time.perf_counter() - started_at,
    )


def _config(job: Job) -> dict[str, Any]:
    return {
        **training_config(job.steps),
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "bf16": {"enabled": job.dtype == "bf16"},
        "fp16": {"enabled": job.dtype == "fp16"},
        "zero_optimization": {"stage": 3, **CONTENDERS[job.contender]},
    }


@torch.no_grad()
def _held_out_loss(engine: zero_core.Engine, corpus: Corpus) -> float:
    """Mean over the first held-out windows, the same for everyone, with the weights as gathered."""
    engine.eval()
    batches = corpus.held_out_batches(
        HELD_OUT_WINDOWS,
        rank=engine.rank,
        world_size=engine.world_size,
        micro_batch_size=HELD_OUT_BATCH,
    )
    losses = torch.stack([engine(ids).double() for ids in batches])
    return float(sum_over_ranks(losses.mean())) / engine.world_size


def _sent_bytes(engine: zero_core.Engine) -> tuple[int, int]:
    """Of the last step: within the node, between nodes."""
    rows = [row for row in engine.comm_report() if row.content in ("parameters", "gradients")]
    return sum(row.within_node_bytes for row in rows), sum(row.between_nodes_bytes for row in rows)


def _curve(losses: Sequence[float]) -> list[float]:
    size = max(1, len(losses) // CURVE_POINTS)
    chunks = (losses[start : start + size] for start in range(0, len(losses), size))
    return [round(statistics.fmean(chunk), 4) for chunk in chunks]


def main() -> None:
    """Read the command line, run all jobs."""
    jobs, folder, runs, store, rank_text, result = sys.argv[1:]
    rank = int(rank_text)
    torch.set_num_threads(1)
    choose_nodes(rank)
    store_of_ranks = dist.FileStore(store, NUM_RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store_of_ranks, rank=rank, world_size=NUM_RANKS)
    corpus = Corpus.open(Path(folder), seed=0)
    for job in json.loads(jobs):
        run = train(Job(**job), corpus)
        gc.collect()  # the next engine finds the memory of this one free
        if rank == 0:
            with Path(runs).open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(run)) + "\n")
    dist.destroy_process_group()
    Path(result).write_text("{}", encoding="utf-8")


if __name__ == "__main__":
    main()
