"""Tensors that forwards leave in attributes of modules."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

_OWN = frozenset(vars(nn.Module()))  # parameters, buffers, hooks


class TensorAttributes:
    """Finds attributes of modules that hold other tensors than they did before.

    Parameters and buffers are not looked at. Lists, tuples and dicts are looked into, once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, list[Tensor]] = {}

    def note(self) -> None:
        """Note what attributes hold."""
        self._before = dict(self._find())

    def find_changed(self) -> str | None:
        """Return the name of an attribute whose tensors have changed since `note`, or None.

        `note` is called then.
        """
        before = self._before
        self.note()
        for name, tensors in self._before.items():
            known = {id(tensor) for tensor in before.get(name, ())}
            if any(id(tensor) not in known for tensor in tensors):
                return name
        return None

    def _find(self) -> Iterator[tuple[str, list[Tensor]]]:
        for path, module in self._model.named_modules():
            for key, value in vars(module).items():
                if key in _OWN:
                    continue
                if isinstance(value, list | tuple):
                    inner = list(value)
                else:
                    inner = list(value.values()) if isinstance(value, dict) else [value]
                tensors = [item for item in inner if isinstance(item, Tensor)]
                if tensors:
                    yield f"{path}.{key}".removeprefix("."), tensors
