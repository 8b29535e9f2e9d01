"""Exponential moving average of the weights, as an extension that `zero_core.build` attaches.

    average = WeightAverage(decay=0.999)
    engine = zero_core.build(model, "zero.json", extensions=[average])
    ...
    weight = engine.states.get_full("blocks.0.weight", AVERAGE)  # every rank

After each step that was taken, ``average += (1 - decay) * (master weight - average)``: the average
of `torch.optim.swa_utils.get_ema_multi_avg_fn` over master weights. Each rank averages its own part
of them, in fp32 (float64 for float64), in host memory: 4 bytes per parameter and rank, at stages 1
to 3 over the ranks. A step reads all of its master weights for that, which waits for their update.
Checkpoints have the average, for any stage and world size; without one it begins with the weights
that were loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zero_core.core.extension import PREFIX, EndedStep, Extension
from zero_core.errors import ConfigError
from zero_core.sharded.sharded_state import MASTER, ShardedState

AVERAGE = f"{PREFIX}average"
"""Name of the average among ``engine.states``."""


class WeightAverage(Extension):
    """Averages the master weights of one engine. See the note at the top of this file."""

    _average: Tensor

    def __init__(self, decay: float = 0.999) -> None:
        """Prepare. ``decay``: weight of the old average in each step.

        Raises:
            ValueError: it is not from 0 on and below 1.
        """
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay = {decay}: expected a number from 0 on, below 1")
        self._decay = decay
        self._state: ShardedState | None = None

    def attach(self, state: Any) -> None:
        if self._state is not None:
            raise ConfigError("this WeightAverage is an engine's already: make another one")
        self._state = state
        self._spans = [s for s in (flat.source.span for flat in state.params) if s is not None]
        is_wide = any(flat.segment.dtype == torch.float64 for flat in state.params)
        dtype = torch.float64 if is_wide else torch.float32
        self._average = torch.zeros(state.local_numel, dtype=dtype)

    def remove(self) -> None:
        self._state = None

    def describe(self) -> str:
        return f"{super().describe()}(decay={self._decay})"

    def states(self) -> Mapping[str, Tensor]:
        return {"average": self._average}

    def reset(self) -> None:
        self._move(1.0)

    def stepped(self, ended: EndedStep) -> None:
        if not ended.why_skipped:
            self._move(1.0 - self._decay)

    @torch.no_grad()
    def _move(self, share: float) -> None:
        assert self._state is not None, "it was attached"
        for start, stop in self._spans:
            weights = self._state.tier.read_state(MASTER, start, stop).to(self._average)
            self._average[start:stop].lerp_(weights, share)
