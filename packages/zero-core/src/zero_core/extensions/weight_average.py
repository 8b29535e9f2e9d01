"""Exponential moving average of the weights, as an extension for `zero_core.build`.

    average = WeightAverage(decay=0.999)
    engine = zero_core.build(model, "zero.json", extensions=[average])
    ...
    weight = engine.states.get_full("blocks.0.weight", AVERAGE)  # every rank

Each step that is not skipped updates ``average += (1 - decay) * (master weight - average)``, like
`torch.optim.swa_utils.get_ema_multi_avg_fn` over master weights. Each rank averages its part of the
master weights in host memory, in fp32 (float64 if a parameter is float64). In fp32 this takes 4
bytes per trainable element of that part: all at stage 0, a shard at stages 1 to 3. The step reads
these master weights and waits for the update. Checkpoints contain the average, for any stage and
world size. After loading a checkpoint without one, the average starts at the loaded weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zero_core.core.extension import PREFIX, EndedStep, Extension
from zero_core.errors import ConfigError
from zero_core.sharded import MASTER
from zero_core.sharded.sharded_state import ShardedState

AVERAGE = f"{PREFIX}average"
"""Name of the average among ``engine.states``."""


class WeightAverage(Extension):
    """Moving average of an engine's master weights. The module's docstring describes its use."""

    _average: Tensor

    def __init__(self, decay: float = 0.999) -> None:
        """Create an average. ``decay`` is the weight of the old average in each step.

        Raises:
            ValueError: ``decay`` is not in [0, 1).
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
