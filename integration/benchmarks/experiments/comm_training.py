"""One training run of `benchmarks.experiments.comm_convergence`, on one rank.

All ranks are on one machine. Their environment says that every `RANKS_PER_NODE` of them are a node,
as torchrun would, and that decides which hop each byte takes.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import zero_core
from benchmarks.harness.models import Gpt, GptShape
from benchmarks.harness.ranks import Place, Row
from zero_engine.launch.ranks import sum_over_ranks
from zero_engine.train.data import Corpus
from zero_engine.train.settings import default_config_text, fill_auto

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
class Training:
    """A run: its flags, its dtype and its seed."""

    contender: str
    """Of `CONTENDERS`."""
    dtype: str
    """Of `DTYPES`: of the computation, over fp32 master weights."""
    seed: int
    """Of the first weights and of the order of the text."""
    steps: int


def choose_nodes(rank: int) -> None:
    """Set the environment, as torchrun does, to nodes of `RANKS_PER_NODE` ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_NODE)
    os.environ["LOCAL_RANK"] = str(rank % RANKS_PER_NODE)
    os.environ["GROUP_RANK"] = str(rank // RANKS_PER_NODE)


def training_config(steps: int) -> dict[str, Any]:
    """Return the train program's optimizer, schedule and clipping, for a run of ``steps``."""
    config = fill_auto(json.loads(default_config_text()), steps)
    return {name: config[name] for name in ("optimizer", "scheduler", "gradient_clipping")}


def measure(place: Place, job: Mapping[str, Any], corpus: str) -> Row:
    """Train on this rank. See `train`."""
    torch.set_num_threads(1)
    choose_nodes(place.rank)
    place.join()
    return train(Training(**job), Corpus.open(Path(corpus), seed=0))


def train(job: Training, corpus: Corpus) -> Row:
    """Train from the first step to the last, then evaluate. Every rank calls it, after
    `choose_nodes`.

    Args:
        job: the run.
        corpus: the text; the job's seed orders it.

    Returns:
        Losses are in nats per token, means over all ranks: ``held_out``; ``training``, over the
        last `LAST_STEPS` steps; ``curve``, means over steps, `CURVE_POINTS` of them or one per
        step. ``is_finite``: every step's loss and the held-out one. ``skipped_steps``: those with
        a gradient that was not finite; in fp16 the first few, until the loss scale fits. Bytes are
        those that a rank sends per step, parameters and gradients.
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
    sent = [row for row in engine.comm_report() if row.content in ("parameters", "gradients")]
    means = (sum_over_ranks(torch.stack(losses)) / engine.world_size).tolist()
    held_out = _held_out_loss(engine, corpus)
    engine.close()
    return {
        "contender": job.contender,
        "dtype": job.dtype,
        "seed": job.seed,
        "held_out": held_out,
        "training": statistics.fmean(means[-LAST_STEPS:]),
        "curve": _curve(means),
        "is_finite": bool(torch.isfinite(torch.tensor([*means, held_out])).all()),
        "skipped_steps": engine.skipped_steps,
        "within_node_bytes": sum(row.within_node_bytes for row in sent),
        "between_nodes_bytes": sum(row.between_nodes_bytes for row in sent),
        "seconds": time.perf_counter() - started_at,
    }


def _config(job: Training) -> dict[str, Any]:
    return {
        **training_config(job.steps),
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "bf16": {"enabled": job.dtype == "bf16"},
        "fp16": {"enabled": job.dtype == "fp16"},
        "zero_optimization": {"stage": 3, **CONTENDERS[job.contender]},
    }


@torch.no_grad()
def _held_out_loss(engine: zero_core.Engine, corpus: Corpus) -> float:
    """Return the mean over the first held-out windows, with the weights as gathered."""
    engine.eval()
    batches = corpus.held_out_batches(
        HELD_OUT_WINDOWS,
        rank=engine.rank,
        world_size=engine.world_size,
        micro_batch_size=HELD_OUT_BATCH,
    )
    losses = torch.stack([engine(ids).double() for ids in batches])
    return float(sum_over_ranks(losses.mean())) / engine.world_size


def _curve(losses: Sequence[float]) -> list[float]:
    size = max(1, len(losses) // CURVE_POINTS)
    chunks = (losses[start : start + size] for start in range(0, len(losses), size))
    return [round(statistics.fmean(chunk), 4) for chunk in chunks]
