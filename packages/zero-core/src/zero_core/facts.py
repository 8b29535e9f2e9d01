"""What all ranks must know of a step's gradient before it is used: norm, users, who spoilt it."""

from __future__ import annotations

import json
import math

import torch
from torch import Tensor

from zero_core.collectives import ControlGroup
from zero_core.comm_report import FACTS, Meter
from zero_core.flow import Flow
from zero_core.layout import Layout
from zero_core.segment_grads import SegmentGrads

__all__ = ["GradientFacts"]

_MAX_NAMED = 3
_MAX_RANKS = 8


class GradientFacts:
    """Collects, per segment, what `complete` then agrees on with all ranks.

    Attributes:
        norm: 2-norm of the whole model's gradient, loss scale included; set by `complete`.
        used: ranks that have a gradient, by parameter; set by `complete`.
        grads: the complete gradients, by segment.
    """

    def __init__(
        self,
        layout: Layout,
        control: ControlGroup,
        flow: Flow,
        device: torch.device,
        meter: Meter,
    ) -> None:
        self.norm = 0.0
        self.used: list[float] = []
        self._layout = layout
        self._control = control
        self._flow = flow
        self._device = device
        self._meter = meter
        self._num_segments = sum(s.is_trainable for s in layout.segments)
        self._square_sums: dict[int, Tensor] = {}
        self.grads: dict[int, SegmentGrads] = {}

    def add(self, grads: SegmentGrads) -> None:
        """The gradient of one segment is complete."""
        index = grads.segment.index
        self._square_sums[index] = grads.norm().to(torch.float64).square()
        self.grads[index] = grads

    def clear(self) -> None:
        """Start a new step."""
        self._square_sums.clear()

    def complete(self) -> None:
        """Have everything reduced that is not yet, and agree; every rank must call it."""
        if len(self._square_sums) < self._num_segments:
            # No parameter was used on this rank, or the last backward ran within no_sync.
            self._flow.end_backward()
        facts = self._gather()
        if facts[1] > 0:  # on some rank, gradients came after their unit's reduction
            self._flow.end_backward()
            facts = self._gather()
        self.norm = math.sqrt(float(facts[0]))
        self.used = facts[2:].tolist()

    @property
    def has_any(self) -> bool:
        """Whether this rank has a gradient of the step to come."""
        return bool(self._flow.fired)

    def is_whole(self) -> bool:
        """Whether this rank has a gradient of the step to come, and none will be added to it."""
        return self.has_any and self._flow.is_boundary() and self._flow.should_sync

    def p_norm(self, p: float) -> float:
        """``p``-norm of the whole model's gradient, after `complete`; every rank must call it."""
        if p == 2.0:
            return self.norm
        norms = [g.norm(p).to(self._device, torch.float64) for g in self.grads.values()]
        local = torch.linalg.vector_norm(torch.stack(norms), p)
        return float(torch.linalg.vector_norm(self._control.gather(local.view(1)), p))

    def explain_nonfinite(self) -> str:
        """The parameters whose gradient is not finite, and the ranks whose batches did it.

        Every rank must call it, before gradients are discarded. A segment that several batches
        spoilt names them all.
        """
        own = [found for grads in self.grads.values() for found in self._spoilt(grads)]
        by_name: dict[str, set[int | None]] = {}
        for row in self._control.gather_bytes(json.dumps(own).encode()):
            for name, ranks in json.loads(row):
                by_name.setdefault(name, set()).update([None] if ranks is None else ranks)
        named = [_describe(name, ranks) for name, ranks in list(by_name.items())[:_MAX_NAMED]]
        if len(by_name) > len(named):
            named.append(f"and {len(by_name) - len(named)} more")
        return "; ".join(named) or "no element by itself, their norm overflows"

    def _spoilt(self, grads: SegmentGrads) -> list[tuple[str, list[int] | None]]:
        """The spoilt parameters of this rank's shard of a segment, with the ranks at fault."""
        bad = torch.nonzero(~torch.isfinite(grads.values())).flatten()
        if not bad.numel():
            return []
        low, _ = grads.segment.shard_range(self._control.rank)
        at = bad.cpu() + low
        ranks = grads.spoilers()
        return [
            (self._layout.params[slot.param].name, ranks)
            for slot in grads.segment.slots
            if bool(((at >= slot.start) & (at < slot.stop)).any())
        ]

    def _gather(self) -> Tensor:
        """Summed over ranks: squared norm, ranks with unreduced gradients, users per parameter."""
        facts = torch.zeros(2 + len(self._layout.params), dtype=torch.float64)
        facts[0] = torch.stack(list(self._square_sums.values())).sum().cpu()
        facts[1] = float(self._flow.has_unreduced)
        if self._flow.fired:
            facts[2 + torch.tensor(sorted(self._flow.fired))] = 1.0
        self._meter.add_all_reduce(FACTS, facts.nbytes)
        return self._control.sum(facts.to(self._device)).cpu()


def _describe(name: str, ranks: set[int | None]) -> str:
    known = sorted(rank for rank in ranks if rank is not None)
    if not known and None in ranks:
        return f"{name}: which rank's batch did it is not known"
    if not known:
        return f"{name}: each rank's part is finite, their sum is not"
    batches = "batch of rank" if len(known) == 1 else "batches of ranks"
    more = f" and {len(known) - _MAX_RANKS} more" if len(known) > _MAX_RANKS else ""
    return f"{name}: {batches} {', '.join(map(str, known[:_MAX_RANKS]))}{more}"
