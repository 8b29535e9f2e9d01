"""Exponential moving average of the weights, as an extension that `zero_core.build` attaches.

    average = WeightAverage(decay=0.999)
    engine = zero_core.build(model, "zero.json", extensions=[average])
    ...
    weight = engine.states.get_full("blocks.0.weight", AVERAGE)  # every rank

After each step that was taken, ``average += (1 - decay) * (master weight - average)``: the average
of `torch.optim.swa_utils.get_ema_multi_avg_fn` over master weights. Each rank averages its own part
of them, in fp32 (float64 for float64), in host memory: 4 bytes per parameter and rank, at stages 1
to 3 over the ranks. Checkpoints have it, for any stage and world size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zero_core.core.extension import EndedStep, Extension
from zero_core.sharded.sharded_state import MASTER, ShardedState

AVERAGE = "extension.average"
"""Name of the average among ``engine.states``."""


class WeightAverage(Extension):
    """Averages the master weights of one engine. See the note at the top of this file."""

    _state: ShardedState
    _average: Tensor

    def __init__(self, decay: float = 0.999) -> None:
        """Prepare. ``decay``: the share of the average that a step leaves.

        Raises:
            ValueError: it is not between 0 and 1.
        """
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay = {decay}: expected a number from 0 on, below 1")
        self._decay = decay

    def attach(self, state: Any) -> None:
        self._state = state
        trainable = [s for s in state.layout.segments if s.is_trainable]
        is_wide = any(segment.dtype == torch.float64 for segment in trainable)
        self._average = torch.zeros(
            state.local_numel, dtype=torch.float64 if is_wide else torch.float32
        )

    def states(self) -> Mapping[str, Tensor]:
        return {"average": self._average}

    def begun(self) -> None:
        """Begin with the first weights."""
        for piece in self._state.pieces:
            self._average[piece.start : piece.stop] = self._read(piece.start, piece.stop)

    @torch.no_grad()
    def stepped(self, ended: EndedStep) -> None:
        if ended.why_skipped:
            return
        for piece in self._state.pieces:
            weight = self._read(piece.start, piece.stop)
            self._average[piece.start : piece.stop].lerp_(weight, 1.0 - self._decay)

    def _read(self, start: int, stop: int) -> Tensor:
        return self._state.tier.read_state(MASTER, start, stop).to(self._average)
