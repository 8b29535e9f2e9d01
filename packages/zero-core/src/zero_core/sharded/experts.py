"""Agreement of all ranks on which experts of a unit are gathered.

[Note: experts]
Which experts a forward calls depends on the data of a rank, and each expert that is gathered is a
collective of all ranks. A unit gathers all of its experts, ahead of their use and without asking,
as long as enough of them are used. With the statistics of a step (the number of ranks with a
gradient of each parameter) all ranks know how many were. Where at most half were used by any rank,
the unit is *sparse* from the next step on, and gathers only what is called, in rounds: in each
round a rank that calls an expert that is not there names it, a rank whose forward of the block has
ended names none, and all gather what was named, in ascending order. A rank waits for its own
expert alone. The rounds of a block end when no rank names any. So each rank takes part in the same
collectives whatever it calls, and in whatever order. The last round of a block is its only one if
no rank calls an expert.

A forward without gradients gathers all experts, as ranks that evaluate or generate may keep their
units and run different numbers of forwards; so does one within ``gathered``.

Backward gathers at once what its step's forwards gathered, which is the same on all ranks. As
larger experts alone have segments of their own (`zero_core.layout.experts`), a round costs less
than a gather that it may save. A model without such experts takes part in no round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from zero_core.comm.control import ControlGroup
from zero_core.sharded.unit import Unit

USED_SHARE = 0.5
"""Part of a unit's experts up to which the unit becomes sparse. Where more are used, the gathers
that are saved do not outweigh those that no longer run ahead of their use."""


def agree(
    control: ControlGroup, called: int | None, num_experts: int, device: torch.device
) -> list[int]:
    """Take part in one round. Every rank must.

    Args:
        control: the ranks.
        called: the expert that this rank waits for, None if its forward of the block has ended.
        num_experts: experts of the unit.
        device: of the control group.

    Returns:
        The experts that ranks wait for, ascending. None: the rounds have ended.
    """
    num_waiting = torch.zeros(num_experts, dtype=torch.int32, device=device)
    if called is not None:
        num_waiting[called] = 1
    found: list[int] = control.sum(num_waiting).nonzero().flatten().tolist()
    return found


def are_sparse(units: Sequence[Unit], num_ranks_with_grad: Sequence[float]) -> Iterator[bool]:
    """Yield for each of ``units`` whether it is to gather what is called alone.

    ``num_ranks_with_grad`` is that of each parameter in the step that ends. Frozen experts, of
    which nothing is known, count as used.
    """
    for unit in units:
        num_used = sum(
            any(num_ranks_with_grad[slot.param] > 0 for flat in own for slot in flat.segment.slots)
            for own in unit.experts
        )
        yield 0 < num_used <= USED_SHARE * len(unit.experts)
