"""What DeepSpeed has and this engine doesn't: one clear error at its first use."""

from __future__ import annotations

from typing import Any, NoReturn

from zero_core import ZeroError

__all__ = ["NotServedError", "Unserved"]


class NotServedError(ZeroError, AttributeError):
    """A part of DeepSpeed's interface that this engine does not have.

    An AttributeError too, so that ``hasattr`` on the engine answers False.
    """

    def __init__(self, what: str, instead: str = "") -> None:
        """Say that ``what`` is missing, and what to do ``instead``."""
        hint = instead or "remove the call, or run the script with DeepSpeed itself"
        super().__init__(f"deepspeed: {what} is not served by zero-engine; {hint}")


class Unserved:
    """Stands where a class or function would be imported from; fails when it is called or used."""

    def __init__(self, name: str, instead: str = "") -> None:
        """Remember the dotted ``name`` for the message."""
        self.__dict__["_name"] = name
        self.__dict__["_instead"] = instead

    def _refuse(self) -> NoReturn:
        raise NotServedError(self._name, self._instead)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        self._refuse()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        """Refused: a class cannot be derived from it."""
        self._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what imports, copies and inspection ask of anything
            raise AttributeError(name)
        self._refuse()

    def __instancecheck__(self, instance: object) -> bool:
        """Nothing is one: ``isinstance(model, PipelineModule)`` is asked before any use."""
        return False
