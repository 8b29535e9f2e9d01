"""Methods that are replaced on modules, as objects, for as long as an engine lasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


class ObjectMethods:
    """A method that is replaced on some modules, as objects, until `remove`."""

    def __init__(self, name: str, replaced: Sequence[tuple[nn.Module, Any]]) -> None:
        """Replace the method ``name`` of each module by the other one of its pair."""
        self._name = name
        self._replaced = list(replaced)
        self._before = [vars(module).get(name) for module, _ in replaced]
        self._attach()

    def _attach(self) -> None:
        for module, method in self._replaced:
            vars(module)[self._name] = method

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Restore the modules' own methods for a while."""
        self.remove()
        try:
            yield
        finally:
            self._attach()

    def remove(self) -> None:
        """Give the modules their own methods again. What was replaced later is removed first."""
        for (module, _), before in zip(self._replaced, self._before, strict=True):
            if before is None:
                vars(module).pop(self._name, None)
            else:
                vars(module)[self._name] = before
