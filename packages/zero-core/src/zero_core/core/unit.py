"""A unit at run time: its flat parameters and flat gradients.

A unit is a block of the model that is gathered, computed and reduced together. Its parameters are
laid out one after another in *segments*: one per dtype and trainability. This glossary names every
tensor of a segment; the rest of the code uses these names. ``shard_numel`` is ``padded_numel`` over
the world size.

[Note: the tensors of a segment]
shard       [shard_numel], compute dtype: this rank's slice of the values. In the arena, or
            offloaded to a parameter tier.
full        [padded_numel], compute dtype: the gathered values. At stages 0 to 2 it is in the arena
            for good, and ``shard`` is a view of it. At stage 3 it is borrowed from a pool while the
            unit is in use.
views       one per parameter, into ``full``, in the parameter's shape: ``param.data`` while
            gathered.
placeholder one NaN (0 for integer dtypes), expanded to the parameter's shape: ``param.data`` while
            sharded. The parameter's class refuses reads of it: `zero_core.core.access`.
full_grad   [padded_numel], communication dtype: this rank's own gradients, before their reduction.
            Already multiplied by ``predivide`` (1 / world size; 1 for a sum, or where the loss is
            divided by all micro-batches). Accumulation dtype while unreduced backwards add up.
grad_shard  [shard_numel], accumulation dtype, arena: the reduced gradients of the micro-steps so
            far. Absent where the state tier copies gradients, and adds up those of several
            micro-steps. With one rank it is ``full_grad``.
grad_sum    [padded_numel], accumulation dtype: at stage 0, all ranks' ``grad_shard``, gathered.

Which of the gradients' tensors exist, and in what memory, is a `GradientPlan`: see
`zero_core.layout.gradient_plan`. The state tier gets ``grad_shard`` or ``grad_sum`` in the dtype
`GradientPlan.offered`.

One rank has nothing to shard: without offloaded shards every stage is as stage 0 there.

The *arena* is memory allocated once and kept; a *pool* lends equal buffers for short use
(`zero_core.core.pool`). The *state tier* holds master weights and optimizer states and runs the
update, on the device, the host or NVMe. It *owns gradients* if it copies them as they are offered.
A *parameter tier* holds shards outside the device. Slot, piece, local flat space: see
`zero_core.layout.arithmetic` and `zero_core.protocols`. A *gap* is padding between and after slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zero_core._torch import find_trainable
from zero_core.core.grads import FlatGrads
from zero_core.core.params import FlatParams


class Hints(Protocol):
    """Announces the units after one in use: `zero_core.sharded.param_offload.PrefetchHints`."""

    def announce(self, unit: int, *, backward: bool) -> None: ...


class Unit:
    """One unit.

    Attributes:
        index: 0 for the root, which holds what belongs to no block; then blocks in the order of
            the module tree, then the tail, which is used after the blocks, if there is one.
        is_block: whether it is neither root nor tail, which stay gathered from forward to backward.
        is_exchanged: whether its values come from other ranks. All ranks must then gather it at
            the same place in the order of collectives.
        hints: announces the units that come next; None if nothing is offloaded.
    """

    def __init__(
        self,
        index: int,
        name: str,
        params: Sequence[FlatParams],
        grads: Sequence[FlatGrads],
        hints: Hints | None = None,
        *,
        is_tail: bool = False,
    ) -> None:
        self.index = index
        self.name = name
        self.params = tuple(params)
        self.grads = tuple(grads)
        self.is_root = index == 0
        self.is_tail = is_tail
        self.is_block = not (self.is_root or is_tail)
        self.is_exchanged = any(p.is_exchanged for p in params)
        self.hints = hints
        self._trainable = [p for g in grads for p in g.params]

    def gather(self, *, exact: bool = False, backward: bool = False) -> None:
        """Start to gather the current values: see `FlatParams.gather`."""
        for flat in self.params:
            flat.gather(exact=exact, backward=backward)

    def count_trainable(self) -> int:
        """Count the parameters that require a gradient now. A backward brings one for each."""
        return sum(find_trainable(self._trainable))

    def is_updated(self) -> bool:
        """Whether the state tier has no update of its values under way."""
        return all(flat.source.is_updated() for flat in self.params)

    @property
    def is_current(self) -> bool:
        """Whether its parameters hold the current values."""
        return all(flat.is_current for flat in self.params)

    def __repr__(self) -> str:
        return f"unit {self.index} ({self.name or 'root'})"
