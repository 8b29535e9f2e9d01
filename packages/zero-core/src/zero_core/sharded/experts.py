"""Agreement of all ranks on which experts of a unit are gathered.

[Note: experts]
Which experts a forward calls depends on the data of a rank, and each expert that is gathered is a
collective of all ranks. A unit gathers all of its experts, ahead of their use and without asking,
as long as enough of them are used. With the statistics of a step (the number of ranks with a
gradient of each parameter) all ranks know how many were. Where at most half were used by any rank,
the unit is *sparse* from the next step on, and gathers only what is called, in rounds: in each
round a rank that calls an expert that is not there names it, with those that it expects to call
next, a rank whose forward of the block has ended names none, and all gather what was named, in
ascending order. A rank waits for its own expert alone. The rounds of a block end when no rank names
any. So each rank takes part in the same collectives whatever it calls, and in whatever order. A
block has two rounds if all ranks expect what they call, one if no rank calls an expert, and at most
one for each expert besides the last.

[Note: routing]
Nothing tells which experts a forward will call, but one of the modules beside their list mostly
knows: it returns the numbers of each token's experts, [..., choices], or their scores, [...,
experts], of which the highest are taken. How many choices are followed is seen from the calls: in
the next forward a rank names as many of each token's first choices as were all called in this one.
An expectation that is wrong costs a round or a gather, and changes no value.

A forward without gradients gathers all experts, as ranks that evaluate or generate may keep their
units and run different numbers of forwards; so does one within ``gathered``.

Backward gathers at once what its step's forwards gathered, which is the same on all ranks. As
larger experts alone have segments of their own (`zero_core.layout.experts`), a round costs less
than a gather that it may save. A model without such experts takes part in no round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from zero_core._torch import pytree
from zero_core.comm.control import ControlGroup
from zero_core.layout.experts import ExpertList
from zero_core.sharded.unit import Unit

USED_SHARE = 0.5
"""Part of a unit's experts up to which the unit becomes sparse. Where more are used, the gathers
that are saved do not outweigh those that no longer run ahead of their use."""


def agree(
    control: ControlGroup, called: Collection[int], num_experts: int, device: torch.device
) -> list[int]:
    """Take part in one round. Every rank must.

    Args:
        control: the ranks.
        called: experts that this rank waits for, none if its forward of the block has ended.
        num_experts: experts of the unit.
        device: of the control group.

    Returns:
        The experts that ranks wait for, ascending. None: the rounds have ended.
    """
    num_waiting = torch.zeros(num_experts, dtype=torch.int32, device=device)
    if called:
        num_waiting[list(called)] = 1
    found: list[int] = control.sum(num_waiting).nonzero().flatten().tolist()
    return found


class Routing:
    """Expectation of which experts of one list a forward will call. See [Note: routing].

    Attributes:
        unit: index of the unit.
        modules: those beside the list.
        called: the numbers, in the unit, of the experts that the block's forward has called.
    """

    def __init__(self, found: ExpertList) -> None:
        self.unit = found.unit
        self.modules = found.beside
        self.called: set[int] = set()
        self._numbers = found.numbers
        self._output: Tensor | None = None  # [tokens, choices] or [tokens, experts]
        self._expected: set[int] | None = None
        self._num_choices = 0  # of each token, that were all called in the last forward

    def __contains__(self, number: int) -> bool:
        return number in self._numbers

    def begin(self) -> None:
        """Begin a forward of the block."""
        self._output = self._expected = None
        self.called.clear()

    @torch.no_grad()
    def note(self, output: object) -> None:
        """Note what one of `modules` has returned, if it may be the routing."""
        if self._output is not None:
            return
        num_experts = len(self._numbers)
        tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.ndim]
        chosen = [t for t in tensors if _may_be_choices(t, num_experts)]
        scores = [t for t in tensors if t.is_floating_point() and t.shape[-1] == num_experts]
        for tensor in [*chosen, *scores][:1]:
            self._output = tensor.detach().flatten(0, -2) if tensor.ndim > 1 else tensor[None]

    def expected(self) -> set[int]:
        """Return the experts that the block's forward is expected to call, as far as is known."""
        self._expected = set()
        if self._output is not None and self._num_choices:
            places = set(self._choices(self._num_choices).flatten().tolist())
            self._expected = {n for place, n in enumerate(self._numbers) if place in places}
        return self._expected

    def end(self) -> None:
        """End the block's forward. If it called others than expected, count choices anew."""
        output = self._output
        if output is not None and output.numel() and self._expected not in (None, self.called):
            called = [place for place, n in enumerate(self._numbers) if n in self.called]
            choices = self._choices(output.shape[-1])
            known = torch.tensor(called, dtype=choices.dtype, device=choices.device)
            is_called = torch.isin(choices, known).all(0)
            self._num_choices = int(is_called.int().cumprod(0).sum())
        self.begin()

    def _choices(self, number: int) -> Tensor:
        """Return the first choices of each token, [tokens, number or all]: places in the list."""
        assert self._output is not None
        if self._output.is_floating_point():
            return self._output.topk(min(number, self._output.shape[-1]), dim=-1).indices
        return self._output[:, :number]


def _may_be_choices(tensor: Tensor, num_experts: int) -> bool:
    """Whether ``tensor`` may be numbers of experts, [..., choices], rather than counts."""
    if tensor.ndim < 2 or tensor.dtype not in (torch.int32, torch.int64) or not tensor.numel():
        return False
    low, high = torch.stack(tensor.aminmax()).tolist()
    return bool(low >= 0 and high < num_experts)


class ExpertRounds:
    """Gathers experts, and decides with each step which units are sparse.

    Attributes:
        units: those that have experts, in the same order on all ranks.
        entered: units with experts whose forward this rank has entered in the step. The runtime
            adds to it.
        routings: those of all lists of experts.
    """

    def __init__(
        self, units: Sequence[Unit], control: ControlGroup, lists: Iterable[ExpertList] = ()
    ) -> None:
        self.units = [unit for unit in units if unit.experts]
        self.entered: set[int] = set()
        self.routings = [Routing(found) for found in lists if units]
        self._control = control
        self._becomes_sparse = [False] * len(self.units)

    def begin(self, *, is_whole: bool) -> None:
        """Begin a forward or a backward, in which units gather all experts if it ``is_whole``."""
        for unit in self.units:
            unit.is_whole = is_whole
        for routing in self.routings:
            routing.begin()

    def call(self, unit: Unit, number: int, *, is_trained: bool) -> None:
        """Have expert ``number`` gathered by all ranks, with those expected to be called next."""
        named = {number}.union(*(r.expected() for r in self._routings_of(unit) if number in r))
        missing = [n for n in named if not all(flat.is_gathered for flat in unit.experts[n])]
        self.gather(unit, missing, is_trained=is_trained)

    def note_call(self, unit: Unit, number: int) -> None:
        """Note that the forward of ``unit`` under way calls expert ``number``."""
        for routing in self._routings_of(unit):
            if number in routing:
                routing.called.add(number)

    def _routings_of(self, unit: Unit) -> list[Routing]:
        return [routing for routing in self.routings if routing.unit == unit.index]

    def gather(self, unit: Unit, called: Collection[int], *, is_trained: bool) -> bool:
        """Take part in one round of ``unit``. Every rank must, while one calls an expert.

        ``called`` are the experts that this rank waits for or expects to call. If the forward
        ``is_trained``, its backward needs what is gathered.

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
        while self.gather(unit, (), is_trained=is_trained):
            pass
        for routing in self._routings_of(unit):
            routing.end()

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
        """End a step, taken or not. What a forward noted that ``is_awaited`` stays."""
        if not is_awaited:
            self.entered.clear()
            for unit in self.units:
                unit.needed.clear()
