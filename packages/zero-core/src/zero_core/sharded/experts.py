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

from collections.abc import Sequence

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


class ExpertRounds:
    """Gathers experts, and decides with each step which units are sparse.

    Attributes:
        units: those that have experts, in the same order on all ranks.
        entered: units with experts whose forward this rank has entered in the step. The runtime
            adds to it.
    """

    def __init__(self, units: Sequence[Unit], control: ControlGroup) -> None:
        self.units = [unit for unit in units if unit.experts]
        self.entered: set[int] = set()
        self._control = control
        self._becomes_sparse = [False] * len(self.units)

    def begin(self, *, is_whole: bool) -> None:
        """Begin a forward or a backward, in which units gather all experts if it ``is_whole``."""
        for unit in self.units:
            unit.is_whole = is_whole

    def gather(self, unit: Unit, called: int | None, *, is_trained: bool) -> bool:
        """Take part in one round of ``unit``. Every rank must, while one calls an expert.

        ``called`` is the expert that this rank waits for. If the forward ``is_trained``, its
        backward needs what is gathered.

        Returns:
            Whether a rank called any expert.
        """
        found = agree(self._control, called, len(unit.experts), unit.params[0].device)
        for number in found:
            for flat in unit.experts[number]:
                flat.gather()
        if is_trained:
            unit.needed.update(found)
        return bool(found)

    def end(self, unit: Unit, *, is_trained: bool) -> None:
        """End this rank's forward of ``unit``, which is sparse.

        Take part in the rounds of the ranks whose forward of it has not ended.
        """
        if unit.is_whole:
            if is_trained:
                unit.needed.update(range(len(unit.experts)))
            return
        while self.gather(unit, None, is_trained=is_trained):
            pass

    def decide(self, num_ranks_with_grad: Sequence[float], *, is_agreed: bool) -> None:
        """Decide which units are sparse in the next step.

        Args:
            num_ranks_with_grad: that of each parameter in the step that ends. Frozen experts, of
                which nothing is known, count as used.
            is_agreed: whether all ranks entered the same units.
        """
        for number, unit in enumerate(self.units):
            num_used = sum(
                any(
                    num_ranks_with_grad[slot.param] > 0
                    for flat in own
                    for slot in flat.segment.slots
                )
                for own in unit.experts
            )
            is_sparse = 0 < num_used <= USED_SHARE * len(unit.experts)
            self._becomes_sparse[number] = is_agreed and unit.index in self.entered and is_sparse

    def values_changed(self) -> None:
        """Make units sparse, or not, as `decide` has found."""
        for unit, is_sparse in zip(self.units, self._becomes_sparse, strict=True):
            unit.is_sparse = is_sparse
            unit.needed.clear()

    def end_step(self, *, is_awaited: bool) -> None:
        """End a step, taken or not. A forward that ``is_awaited`` still needs its experts."""
        self.entered.clear()
        if not is_awaited:
            for unit in self.units:
                unit.needed.clear()
