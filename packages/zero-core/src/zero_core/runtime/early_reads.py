"""Reads of parameters that nothing has waited for yet.

[Note: a parameter that is waited for when it is read]
A module's forward is announced by its hooks. Other code may read a parameter without them:
``F.linear(x, self.head.weight)``, or a list of parameters that the model keeps. From the start of
a forward until the tail is waited for, its parameters are of a subclass of ``nn.Parameter`` whose
``__torch_function__`` torch calls before any operation on them: the first one that needs values
waits for them. Python objects, hooks and gradients stay as they are, and afterwards the class is
``nn.Parameter`` again: nothing is intercepted then.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from zero_core._torch import DisableTorchFunctionSubclass

_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "grad_fn")
_NEEDS_NO_VALUES = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in (*_PROPERTIES, "is_leaf", "is_cuda", "is_meta")
        ),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__, Tensor.get_device),
        Tensor.data.__set__,  # type: ignore[attr-defined]
    }
)


class ParamReader(Protocol):
    """Makes parameters readable. `zero_core.runtime.runtime.Runtime` is the one implementation."""

    def read_early(self) -> None:
        """Call `EarlyReads.end` and wait for the values."""


class EarlyReads:
    """Has a reader wait at the first read of some parameters between `watch` and `end`."""

    def __init__(self, params: Sequence[nn.Parameter], reader: ParamReader) -> None:
        """``reader`` makes ``params`` readable. It is held weakly."""
        self._params = list(params)
        held = weakref.ref(reader)  # a class is freed late, and must not keep an engine

        class Awaited(nn.Parameter):
            @classmethod
            def __torch_function__(
                cls,
                func: Any,
                types: Sequence[type],
                args: Sequence[Any] = (),
                kwargs: Mapping[str, Any] | None = None,
            ) -> Any:
                if func not in _NEEDS_NO_VALUES and (alive := held()) is not None:
                    alive.read_early()
                with DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))

        self._awaited = Awaited

    def watch(self) -> None:
        self._set(self._awaited)

    def end(self) -> None:
        self._set(nn.Parameter)

    def _set(self, kind: type[nn.Parameter]) -> None:
        for param in self._params:
            param.__class__ = kind
