"""Parameters that autograd saves while they are sharded.

[Note: parameters saved between two gathers]
A forward may use a parameter within `gathered` alone, of this engine or of another one: a teacher's
head in a fused loss. Torch saves what an ``autograd.Function`` names after its forward has
returned, when the context may have ended: the parameter is a placeholder then, or a copy that is
about to go. So it is saved by reference, and gathered again when backward unpacks it, to the end of
that backward. Every rank must unpack it, as it must enter `gathered`.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn


class ParamHolder(Protocol):
    """Gathers an engine's parameters. `zero_core.runtime.gathered.GatheredParams` is the one."""

    def version_of(self, param: nn.Parameter) -> int | None:
        """Return the version of the values of ``param``, None if the engine shards none of it."""

    def some_params(
        self, params: list[nn.Parameter], modifier_rank: int | None
    ) -> AbstractContextManager[Any]:
        """Gather ``params`` within."""


class Reference(NamedTuple):
    """A parameter that autograd saved, its engine's, and the version of its values then."""

    param: nn.Parameter
    holder: ParamHolder
    version: int


class Holding:
    """A holder among those that are asked, until `remove`."""

    def __init__(self, holder: ParamHolder) -> None:
        self._holder = weakref.ref(holder)
        _holders[:] = [ref for ref in _holders if ref() is not None]
        _holders.append(self._holder)

    def remove(self) -> None:
        _holders.remove(self._holder)


_holders: list[weakref.ref[ParamHolder]] = []  # the newest last


def refer(param: nn.Parameter) -> Reference | None:
    """Return a reference to ``param``, None if its memory is its own."""
    for holder in filter(None, (ref() for ref in reversed(_holders))):
        version = holder.version_of(param)
        if version is not None:
            return Reference(param, holder, version)
    return None


class HeldReferences:
    """The references that one backward has unpacked, whose parameters stay gathered."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._held: set[int] = set()

    def read(self, reference: Reference) -> Tensor:
        """Gather the values, unless they are held already. Every rank must call it.

        Raises:
            RuntimeError: they have changed since they were saved.
        """
        param, holder, version = reference
        if holder.version_of(param) != version:
            raise RuntimeError(
                "backward of a forward that ran before the last step or load: a parameter of "
                f"shape {tuple(param.shape)} has changed since; run the forward again"
            )
        if id(param) not in self._held:
            self._stack.enter_context(holder.some_params([param], None))
            self._held.add(id(param))
        return param.data

    def release(self) -> None:
        """Release what is held."""
        self._held.clear()
        self._stack.pop_all().close()
