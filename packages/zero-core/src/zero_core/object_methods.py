"""Methods and hooks that an engine sets on modules and can remove, temporarily or for good.

[Note: generation]
A model that generates runs a forward for every token, and values do not change in between. At stage
3 each forward would gather every unit. So ``generate``, the method of transformers' models, runs
within `zero_core.ShardedModel.generating`. The first forward gathers the units, which then stay
gathered, up to ``stage3_max_live_parameters`` elements. If all units stay, later forwards do not
wait for other ranks, and ranks may generate different numbers of tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakMethod

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


def keep_while_generating(model: nn.Module, generating: WeakMethod[Any]) -> ObjectMethods:
    """Make ``generate`` of a model and its submodules run within the ``generating`` context."""

    def keeping(generate: Any) -> Any:
        @functools.wraps(generate)
        def generate_within(*args: Any, **kwargs: Any) -> Any:
            method = generating()
            with nullcontext() if method is None else method():
                return generate(*args, **kwargs)

        return generate_within

    modules = [m for m in model.modules() if "generate" in dir(type(m))]
    return ObjectMethods("generate", [(m, keeping(m.generate)) for m in modules])
