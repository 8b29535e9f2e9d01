"""Methods and hooks that an engine sets on modules and can remove, temporarily or for good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class ObjectMethods:
    """Replacement of one method on several module instances, until `remove`."""

    def __init__(self, name: str, replaced: Sequence[tuple[nn.Module, Any]]) -> None:
        self._name = name
        self._replaced = list(replaced)  # each module with its replacement method
        self._before = [vars(module).get(name) for module, _ in replaced]
        self.attach()

    def attach(self) -> None:
        for module, method in self._replaced:
            vars(module)[self._name] = method

    def remove(self) -> None:
        """Restore the modules' previous methods. Later replacements must be removed first."""
        for (module, _), before in zip(self._replaced, self._before, strict=True):
            if before is None:
                vars(module).pop(self._name, None)
            else:
                vars(module)[self._name] = before


class SuspendableHooks:
    """Forward pre-hooks that can be suspended, to save their time in calls of the modules.

    Each runs before the pre-hooks that its module already has.
    """

    def __init__(self) -> None:
        self._hooks: list[tuple[nn.Module, Any]] = []
        self.handles: list[RemovableHandle] = []  # empty while suspended

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
