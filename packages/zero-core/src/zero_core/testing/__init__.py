"""Helpers for tests: ranks on one machine, a model with every difficulty in it, the DDP oracle."""

from zero_core.testing.failing import Call, Failure, described, failing
from zero_core.testing.interrupted import check_left_anywhere
from zero_core.testing.models import (
    Hard,
    RootAndBlocks,
    Tower,
    batch,
    make_model,
    make_tower,
    rows,
    seeded,
    wide_blocks,
)
from zero_core.testing.oracle import (
    LR,
    WEIGHT_DECAY,
    Case,
    Gap,
    SimulatedDDP,
    Trace,
    compare_with_ddp,
    read_gaps,
    run_ddp,
    run_engine,
    train_unread,
)
from zero_core.testing.peak_memory import OwnPeakMemory, PeakMemory
from zero_core.testing.ranks import preload, run_alone, run_on_processes, spawn
from zero_core.testing.simulated import (
    GatedRanks,
    SimulatedRanks,
    device_collectives,
    on_ranks,
    simulate,
)
from zero_core.testing.training import adamw, check_like_ddp, loss_of, step_ddp, train, train_ddp

__all__ = [
    "LR",
    "WEIGHT_DECAY",
    "Call",
    "Case",
    "Failure",
    "Gap",
    "GatedRanks",
    "Hard",
    "OwnPeakMemory",
    "PeakMemory",
    "RootAndBlocks",
    "SimulatedDDP",
    "SimulatedRanks",
    "Tower",
    "Trace",
    "adamw",
    "batch",
    "check_left_anywhere",
    "check_like_ddp",
    "compare_with_ddp",
    "described",
    "device_collectives",
    "failing",
    "loss_of",
    "make_model",
    "make_tower",
    "on_ranks",
    "preload",
    "read_gaps",
    "rows",
    "run_alone",
    "run_ddp",
    "run_engine",
    "run_on_processes",
    "seeded",
    "simulate",
    "spawn",
    "step_ddp",
    "train",
    "train_ddp",
    "train_unread",
    "wide_blocks",
]
