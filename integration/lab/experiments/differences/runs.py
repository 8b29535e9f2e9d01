"""Bytes of parameters between two nodes over whole runs, with the losses.

Four ranks act as two nodes of two, at stage 3 in bf16 over fp32 master weights. With secondary
shards (hpZ) each step's weights go to the other node once: whole, in 8 bits (qwZ), as 4-bit
differences (SDP4Bit), or as lossless differences. Fine-tuning starts from the final weights of the
run from scratch that sends whole weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import zero_core
from benchmarks.harness.job import QWZ
from benchmarks.harness.models import Gpt
from benchmarks.harness.ranks import HERE, Place, Row, run_ranks
from lab.experiments.differences.codecs import SHAPE
from lab.text import training_config, training_loss
from zero_engine.launch.ranks import sum_over_ranks
from zero_engine.train.data import Corpus

NUM_RANKS, RANKS_PER_NODE = 4, 2
MICRO_BATCH = 2
WHOLE, LOSSLESS = "whole", "lossless"
_HPZ = {"zero_hpz_partition_size": RANKS_PER_NODE}
CONTENDERS: Mapping[str, Mapping[str, Any]] = {
    WHOLE: _HPZ,
    "qwZ": {**QWZ, **_HPZ},
    "4-bit differences": {**QWZ, **_HPZ, "zero_quantized_weights_format": "int4_difference"},
    LOSSLESS: {"zero_lossless_weights": True, **_HPZ},
}
"""Keys of ``zero_optimization`` in addition to stage 3."""
LIMIT_S = 1800.0


@dataclass(frozen=True)
class Run:
    """A contender at one learning rate, from scratch or from the weights in ``base``."""

    contender: str
    lr: float
    steps: int
    base: str | None = None
    """File with the initial weights."""
    saved: str | None = None
    """File to which the final weights are written."""


def start(run: Run, corpus: Path) -> Row:
    """Train in fresh processes and return the figures of `measure`."""
    arguments = {"run": run, "corpus": str(corpus)}
    nodes = (HERE,) * (NUM_RANKS // RANKS_PER_NODE)
    return run_ranks(f"{__name__}:measure", arguments, NUM_RANKS, nodes=nodes, limit_s=LIMIT_S)[0]


def measure(place: Place, run: Mapping[str, Any], corpus: str) -> Row:
    """Train on this rank. Return mean losses and bytes between nodes per step, over all ranks."""
    what, text = Run(**run), Corpus.open(Path(corpus), seed=0)
    torch.set_num_threads(1)
    place.join()
    torch.manual_seed(0)
    shape = replace(SHAPE, vocab=text.vocab_size, context=text.train.shape[1])
    config = training_config(what.steps)
    config["optimizer"]["params"]["lr"] = what.lr
    config |= {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, **CONTENDERS[what.contender]},
    }
    engine = zero_core.build(Gpt(shape), config)
    if what.base is not None:
        zero_core.load_pretrained(engine, what.base)
    here = {"rank": engine.rank, "world_size": engine.world_size}
    losses, sent = [], []
    for step in range(what.steps):
        loss = engine(text.batch(step, **here, micro_batch_size=MICRO_BATCH))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().double())
        rows = [row for row in engine.comm_report() if row.content == "parameters"]
        sent.append(sum(row.between_nodes_bytes for row in rows))
    means = (sum_over_ranks(torch.stack(losses)) / engine.world_size).tolist()
    total = sum_over_ranks(torch.tensor(sent, dtype=torch.float64)).tolist()
    if what.saved is not None:
        engine.export_safetensors(what.saved)
    engine.close()
    return {"losses": means, "training": training_loss(means), "sent_bytes": total}
