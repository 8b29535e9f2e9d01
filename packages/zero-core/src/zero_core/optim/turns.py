"""Division of a step into turns: see [Note: turns] in `zero_core.optim.device_tier`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

TURN_NUMEL = 1 << 26
"""Elements that are updated at once: 256 MiB of fp32."""
_ALIGNMENT = 32
"""Elements at whose multiples widened gradients begin."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece, or as much of it as one turn takes: ``[start, stop)`` of the flat space."""

    piece: int  # its index
    start: int
    stop: int
    group: int  # index of its parameter group
    param: nn.Parameter  # its master weights
    states: dict[str, Tensor]  # its elementwise states in the flat buffers, by name


@dataclass(slots=True)
class Turn:
    """Parts that are updated together."""

    parts: list[Part]  # in ascending order
    members: list[list[nn.Parameter]]  # their parameters by group
    extents: list[list[int]]  # ``[offer, start, stop]``: the turn's part of an offered gradient
    sizes: list[list[int]] = field(default_factory=list)  # of extents' parts and gaps
    places: list[int] = field(default_factory=list)  # of each part among all ``sizes``


class Due(NamedTuple):
    """A part that is to be updated."""

    part: Part
    offer: int  # start of the offered gradient that it is in
    states: Collection[str]  # names of the elementwise states that the optimizer has for it
    has_state: bool  # whether the update makes no state


def divide(due: Iterable[Due], *, num_groups: int, limit: int) -> list[Turn]:
    """Divide the parts, which are in ascending order, into turns of at most ``limit`` elements."""
    turns: list[Turn] = []
    last: Due | None = None
    for one in due:
        part, offer = one.part, one.offer
        if last is None or _is_full(turns[-1], last, one, limit):
            turns.append(Turn([], [[] for _ in range(num_groups)], []))
        last, turn = one, turns[-1]
        turn.parts.append(part)
        turn.members[part.group].append(part.param)
        if not turn.extents or turn.extents[-1][0] != offer:
            turn.extents.append([offer, part.start, part.start])
            turn.sizes.append([])
        place = turn.places[-1] + 1 if turn.places else 0
        if part.start > turn.extents[-1][2]:
            turn.sizes[-1].append(part.start - turn.extents[-1][2])
            place += 1
        turn.sizes[-1].append(part.stop - part.start)
        turn.places.append(place)
        turn.extents[-1][2] = part.stop
    return turns


def _is_full(turn: Turn, last: Due, one: Due, limit: int) -> bool:
    """Whether a part begins another turn than that of the ``last`` one.

    The states that an optimizer makes in its first step are moved to the flat buffers offer by
    offer: those of one take little memory, those of all as much as all states once more.
    """
    if set(one.states) != set(last.states):
        return True  # torch's fused SGD makes the states of all of a call, or of none
    if last.offer != one.offer:
        before, start = turn.extents, one.part.start
        if not one.has_state:
            return True
    else:
        before, start = turn.extents[:-1], turn.extents[-1][1]
    taken = sum(aligned(high - low) for _, low, high in before)
    return taken + aligned(one.part.stop - start) > limit


def widened_numel(sizes: Iterable[int]) -> int:
    """Return the elements that gradients of ``sizes`` take one after another, each aligned."""
    return sum(map(aligned, sizes))


def aligned(numel: int) -> int:
    """Return the elements that a widened gradient takes, with the gap up to the next one."""
    return -(-numel // _ALIGNMENT) * _ALIGNMENT
