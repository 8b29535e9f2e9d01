"""A unit at run time: its values, gathered or not, and its gradients on their way to the shard.

[Note: the tensors of a segment]
shard       [shard_numel], compute dtype, arena: this rank's slice of the values; or it rests off
            the device: see zero_core.resting
full        [padded_numel], compute dtype: the gathered values; at stages 0 to 2 it lies in the
            arena for good and ``shard`` is a view of it; at stage 3 it is a pool buffer while
            unsharded
views       one per parameter, into ``full``, in the parameter's shape: what ``param.data`` is
placeholder one NaN expanded to the parameter's shape: what ``param.data`` is while sharded, so
            that reading a sharded parameter is loud
full_grad   [padded_numel], communication dtype (accumulation dtype if it outlives a backward):
            this rank's own gradients, divided by the world size, until they are reduced
grad_shard  [shard_numel], accumulation dtype, arena: the reduced gradients of the micro-steps
            so far. Where the state tier keeps gradients itself and a step has one micro-step
            there is none: what was reduced (``arrived``) stays in a pool buffer until the tier
            has it
final_grad  what the state tier gets: ``grad_shard`` or ``arrived``; at stage 0 all ranks' of them,
            gathered, of which ``grad_shard`` is a view if ``full_grad`` does not lie there. A tier
            that keeps gradients gets them rounded to the communication dtype
"""

from __future__ import annotations

from collections.abc import Sequence

from zero_core.protocols import StateTier
from zero_core.resting import Outlook
from zero_core.segment_grads import SegmentGrads
from zero_core.segment_values import SegmentValues

__all__ = ["Unit"]


class Unit:
    """One unit: its segments' values and gradients, and its name for messages."""

    def __init__(
        self,
        index: int,
        name: str,
        values: Sequence[SegmentValues],
        grads: Sequence[SegmentGrads],
        outlook: Outlook | None = None,
    ) -> None:
        self.index = index
        self.name = name
        self.values = list(values)
        self.grads = list(grads)
        self._outlook = outlook

    def announce_next(self, *, backward: bool) -> None:
        """The unit is in use: let those that follow be read ahead, if they rest off the device."""
        if self._outlook is not None:
            self._outlook.announce(self.index, backward=backward)

    @property
    def num_trainable(self) -> int:
        """Parameters that a backward brings gradients of: those that require one now."""
        return sum(p.requires_grad for g in self.grads for p in g.params)

    @property
    def is_root(self) -> bool:
        """Whether it is what belongs to no block."""
        return self.index == 0

    @property
    def is_exchanged(self) -> bool:
        """Whether its values come from other ranks: all must then gather it at the same place."""
        return any(v.is_exchanged for v in self.values)

    def is_updated(self, tier: StateTier | None) -> bool:
        """Whether the tier has no update of its values under way."""
        spans = [v.local_span for v in self.values if v.local_span is not None]
        return tier is None or all(tier.are_params_ready(*span) for span in spans)

    @property
    def is_in_use(self) -> bool:
        """Whether its parameters hold the current values."""
        return all(v.is_current for v in self.values)

    def __repr__(self) -> str:
        return f"unit {self.index} ({self.name or 'root'})"
