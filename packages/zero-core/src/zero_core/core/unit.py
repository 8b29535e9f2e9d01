"""A unit at run time: its flat parameters and flat gradients.

A unit is the root, a block or the tail of the model (see `Unit`). Its parameters are gathered
together, in *segments*, one per dtype and trainability, and one for quantized parameters. A segment
is one flat, padded buffer with the parameters one after another. ``shard_numel`` is
``padded_numel`` divided by the world size.

[Note: the tensors of a segment]
shard       [shard_numel], compute dtype: this rank's slice of the values. In the arena, or
            offloaded to a parameter tier.
full        [padded_numel], compute dtype: the gathered values. At stages 0 to 2 ``full`` is always
            in the arena, and ``shard`` is a view of ``full``. At stage 3 a pool lends ``full``
            while the unit is in use.
views       one per parameter, into ``full``, in the parameter's shape: ``param.data`` while
            gathered.
placeholder one NaN (0 for integer dtypes), expanded to the parameter's shape: ``param.data`` while
            sharded. Reading a sharded parameter raises: `zero_core.core.access`.
full_grad   [padded_numel], communication dtype: this rank's gradients before their reduction,
            already multiplied by ``predivide`` (1 / world size; 1 for a sum, or where the loss is
            divided by the number of all micro-batches). In the accumulation dtype while gradients
            accumulate locally (``no_sync``).
grad_shard  [shard_numel], accumulation dtype, arena: the reduced gradients of the micro-steps so
            far. Absent if the state tier copies every micro-step's reduced gradient. On a single
            rank it is the same tensor as ``full_grad``.
grad_sum    [padded_numel], accumulation dtype, at stage 0: all ranks' gathered ``grad_shard``.

`GradientPlan` (`zero_core.layout.gradient_plan`) says which gradient tensors exist, and in which
memory. The state tier receives reduced gradients in the dtype `GradientPlan.offered`.

On a single rank every stage works as stage 0, unless shards are offloaded.

The *arena* is memory that is allocated up front and kept. A *pool* lends buffers of equal size for
short use (`zero_core.core.pool`). The *state tier* holds master weights and optimizer states and
runs the update, on the device, the host or NVMe. A tier that *owns gradients* copies each gradient
when it receives it. A *parameter tier* holds shards outside the device. A *gap* is padding between
and after slots. `zero_core.layout.arithmetic` and `zero_core.protocols` define slot, piece and
local flat space.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zero_core.core.grads import FlatGrads
from zero_core.core.params import FlatParams


class Hints(Protocol):
    """Interface of `zero_core.sharded.param_offload.PrefetchHints`."""

    def announce(self, unit: int, *, backward: bool) -> None: ...


class Unit:
    """Parameters that are gathered together, and whose gradients are reduced together.

    Attributes:
        index: 0 for the root. Blocks follow in module order. The tail is last, if any.
        is_block: whether the unit is neither root nor tail, which stay gathered through backward.
        is_exchanged: whether a gather exchanges values with other ranks. Then all ranks must gather
            the unit at the same position in the order of collectives.
        trained_params: trainable parameters, including those that require no gradient now.
        hints: announces upcoming units for prefetching, or None if no parameter is offloaded.
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
        self.trained_params = [param for segment in grads for param in segment.params]

    def is_updated(self) -> bool:
        """Return whether no update of this rank's shards is under way or has failed."""
        return all(flat.source.is_updated() for flat in self.params)

    def __repr__(self) -> str:
        return f"unit {self.index} ({self.name or 'root'})"
