"""Errors of DeepSpeed's interface, and the stand-in for names that are not served."""

from __future__ import annotations

from typing import Any, NoReturn, Union

from zero_core import ConfigError, ZeroError

INNER = "it is an inner part of DeepSpeed, which works differently here"
_DATA = (str, bytes, int, float, list, tuple, dict, set, frozenset)


class NotServedError(ZeroError, AttributeError):
    """Use of a part of DeepSpeed that is not served. An AttributeError too, for ``hasattr``."""

    def __init__(self, what: str, instead: str = "") -> None:
        hint = instead or "remove the call, or run the script with DeepSpeed itself"
        super().__init__(f"deepspeed: {what} is not served by zero-engine; {hint}")


class ModelMissingError(ZeroError, ValueError, AssertionError):
    """`initialize` got no model. An AssertionError too, as in DeepSpeed."""


class UntestedOptimizerError(ConfigError, AssertionError):
    """The configuration forbids the optimizer. An AssertionError too, as in DeepSpeed."""


class NoSyncError(ZeroError, RuntimeError, AssertionError):
    """``step`` was called within ``no_sync``. An AssertionError too, as in DeepSpeed."""


class NotScalarError(ZeroError, ValueError, AssertionError):
    """``scale`` got a loss of several values. An AssertionError too, as in DeepSpeed."""


class Unserved:
    """Stand-in for a class, function or constant that is not served. Most uses raise.

    A script may import such a name, compare it with None, and use it in an annotation.
    """

    def __init__(self, name: str, instead: str) -> None:
        """Keep the dotted ``name``, without "deepspeed.", and the advice ``instead``.

        An `INNER` part may be a class of which DeepSpeed's engine makes objects. ``isinstance``
        raises for it, because False could be wrong, and returns False for others.
        """
        self.__dict__.update(_name=name, _instead=instead)

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotServedError(self._name, self._instead)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # imports, copies and inspection look these up
            raise AttributeError(name)
        self._refuse()

    def __instancecheck__(self, instance: object) -> bool:
        return self._refuse() if self._instead == INNER else False

    __subclasscheck__ = __instancecheck__

    def __repr__(self) -> str:
        return f"<deepspeed.{self._name}, not served by zero-engine>"

    def __or__(self, other: Any) -> Any:
        """Return a union, for an annotation ``PipelineModule | None``."""
        return Union[self, other]  # noqa: UP007

    def __ror__(self, other: Any) -> Any:
        return self | other

    def __eq__(self, other: object) -> bool:
        """Refuse comparison with data and, for an `INNER` part, with a class."""
        is_class = isinstance(other, type) and other is not Any
        if isinstance(other, _DATA) or (is_class and self._instead == INNER):
            self._refuse()
        return self is other

    __hash__ = object.__hash__
    # An `Unserved` cannot be called or subclassed, and its attributes cannot be replaced.
    __call__ = __mro_entries__ = __setattr__ = __delattr__ = _refuse
    # An `Unserved` cannot be used as a constant or a context manager.
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __setitem__ = _refuse
    __str__ = __format__ = __fspath__ = __int__ = __float__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __mod__ = __rmod__ = __enter__ = __exit__ = _refuse
