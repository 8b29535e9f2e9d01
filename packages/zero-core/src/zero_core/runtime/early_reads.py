"""Reads of parameters that nothing has waited for yet.

[Note: a parameter that is waited for when it is read]
A module's forward is announced by its hooks. Other code may read a parameter without them:
``F.linear(x, self.head.weight)``, or a list of parameters that the model keeps. From the start of
a forward until the tail is waited for, its parameters are of a subclass of their class, whose
``__torch_function__`` torch calls before any operation on them: the first one that needs values
waits for them. Objects, hooks and gradients do not change. After the wait the parameters have their
own class again, so reads cost nothing more.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from zero_core._torch import METADATA_READS

_NEEDS_NO_VALUES = METADATA_READS | {
    *(getattr(Tensor, name).__get__ for name in ("grad", "grad_fn", "is_leaf", "is_meta")),
    Tensor.data.__set__,  # type: ignore[attr-defined]
}


class ParamReader(Protocol):
    """Makes parameters readable. `zero_core.runtime.runtime.Runtime` is the one implementation."""

    def read_early(self) -> None:
        """Call `EarlyReads.end` and wait for the values."""


class _AwaitedParam:
    """Base of the classes of parameters that are watched."""

    __slots__ = ()

    @classmethod
    def read_early(cls) -> None:
        """Have the values waited for."""


class EarlyReads:
    """Has a reader wait at the first read of some parameters between `watch` and `end`."""

    def __init__(self, params: Sequence[nn.Parameter], reader: ParamReader) -> None:
        """``reader``, held weakly, makes ``params`` readable."""
        self._reader = weakref.ref(reader)  # a class is freed late, and must not keep an engine
        self._params = tuple(params)
        self._watched: list[tuple[nn.Parameter, type[nn.Parameter]]] = []  # with their own classes
        self._awaited: dict[type[nn.Parameter], type[nn.Parameter]] = {}

    def watch(self) -> None:
        self.end()
        # Now and not before: an engine's user may give parameters a class of its own.
        self._watched = [(param, type(param)) for param in self._params]
        for param, own in self._watched:
            if own not in self._awaited:
                self._awaited[own] = self._make_awaited(own)
            param.__class__ = self._awaited[own]

    def end(self) -> None:
        for param, own in self._watched:
            param.__class__ = own
        self._watched = []

    def _make_awaited(self, own: type[nn.Parameter]) -> type[nn.Parameter]:
        reader = self._reader

        class Awaited(_AwaitedParam, own):  # type: ignore[misc,valid-type]
            @classmethod
            def read_early(cls) -> None:
                if (alive := reader()) is not None:
                    alive.read_early()

            @classmethod
            def __torch_function__(
                cls,
                func: Any,
                types: Sequence[type],
                args: Sequence[Any] = (),
                kwargs: Mapping[str, Any] | None = None,
            ) -> Any:
                if func not in _NEEDS_NO_VALUES:
                    for kind in types:  # all that the operation reads: torch asks one of them
                        if issubclass(kind, _AwaitedParam):
                            kind.read_early()
                return super().__torch_function__(func, types, args, kwargs or {})

        return Awaited
