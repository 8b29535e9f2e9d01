"""Methods and hooks that an engine puts on modules, and takes away for a while or for good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class ObjectMethods:
    """A method that is replaced on some modules, as objects, until `remove`."""

    def __init__(self, name: str, replaced: Sequence[tuple[nn.Module, Any]]) -> None:
        self._name = name
        self._replaced = list(replaced)  # each module, and its method meanwhile
        self._before = [vars(module).get(name) for module, _ in replaced]
        self.attach()

    def attach(self) -> None:
        for module, method in self._replaced:
            vars(module)[self._name] = method

    def remove(self) -> None:
        """Give the modules their own methods again. What was replaced later is removed first."""
        for (module, _), before in zip(self._replaced, self._before, strict=True):
            if before is None:
                vars(module).pop(self._name, None)
            else:
                vars(module)[self._name] = before


class SuspendableHooks:
    """Forward pre-hooks, the first of their modules, that can be taken away for a while.

    A module without hooks is called in less time.
    """

    def __init__(self) -> None:
        self._hooks: list[tuple[nn.Module, Any]] = []
        self.handles: list[RemovableHandle] = []  # of the hooks that are there now

    def add(self, module: nn.Module, hook: Any) -> None:
        self._hooks.append((module, hook))
        self.handles.append(module.register_forward_pre_hook(hook, prepend=True))

    def suspend(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def resume(self) -> None:
        if not self.handles:
            self.handles = [m.register_forward_pre_hook(h, prepend=True) for m, h in self._hooks]

    def remove(self) -> None:
        self.suspend()
        self._hooks = []
