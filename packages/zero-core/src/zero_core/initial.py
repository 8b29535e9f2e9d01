"""The initial values of a model: its own, recorded ones, or those of parked parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zero_core.deferred import recordings_of
from zero_core.errors import ConfigError
from zero_core.parked import held_of, is_parked

__all__ = ["InitialValues", "is_left_over"]


class InitialValues:
    """Gives the values of a model's tensors one at a time."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._recordings = recordings_of(model)

    def of(self, tensor: Tensor) -> Tensor:
        """The value of ``tensor``: itself, or what was recorded, computed now on the CPU.

        Zeros for one on the meta device that nothing is known of. Every rank must ask for one
        that `is_in_parts`.
        """
        held = held_of(tensor)
        if is_parked(tensor) and held is not None:
            return held.computed() if held.recorded is not None else held.whole(tensor)
        if not tensor.is_meta:
            return tensor.detach()
        for recording in self._recordings:
            if recording.knows(tensor):
                return recording.value(tensor)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def is_recorded(self, tensor: Tensor) -> bool:
        """Whether its value has to be computed first."""
        held = held_of(tensor) if is_parked(tensor) else None
        return tensor.is_meta if held is None else held.recorded is not None

    def is_in_parts(self, tensor: Tensor) -> bool:
        """Whether its value lies in slices on the ranks."""
        return is_parked(tensor) and not self.is_recorded(tensor)

    def check(self, *, has_pretrained: bool) -> None:
        """Refuse a model of which not all values are known.

        Args:
            has_pretrained: whether a file gives the parameters and the persistent buffers.

        Raises:
            ConfigError: a tensor is on the meta device and nothing recorded it, or it was changed
                after it was recorded; or its value is in the shards of another engine.
        """
        for path, module in self._model.named_modules():
            kept = set(module._buffers) - module._non_persistent_buffers_set
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                is_in_file = has_pretrained and (name in module._parameters or name in kept)
                if tensor is None or is_in_file:
                    continue
                whole_name = f"{path}.{name}" if path else name
                if tensor.is_meta:
                    self._check_one(whole_name, tensor)
                elif not is_parked(tensor) and is_left_over(tensor):
                    raise ConfigError(
                        f"{whole_name} holds no value: an engine that keeps it in shards has the "
                        "model, or had it when it was closed. Give the model its values with "
                        "zero_core.give_back(engine) in place of engine.close(), or have them read "
                        "from a file: build(..., pretrained=path)"
                    )

    def _check_one(self, name: str, tensor: Tensor) -> None:
        known = [r for r in self._recordings if r.knows(tensor)]
        if not known:
            raise ConfigError(
                f"{name} is on the meta device and its values are not known: make the model under "
                "zero_core.deferred_init() instead of torch.device('meta'), or, for parameters and "
                "persistent buffers, give their file: build(..., pretrained=path)"
            )
        if known[0].is_changed(tensor):
            raise ConfigError(
                f"{name} was changed after deferred_init(), where nothing is recorded: initialise "
                "and change the model within it, or use zero_core.load_pretrained() after build()"
            )

    def give_attributes(self) -> None:
        """Give tensors that the model keeps as plain attributes their values, on the CPU."""

        def is_deferred(value: object) -> bool:
            is_plain = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            return is_plain and any(r.knows(value) for r in self._recordings)  # type: ignore[arg-type]

        def give(value: Any) -> Any:
            return self.of(value) if is_deferred(value) else value

        for module in self._model.modules():
            for name, value in vars(module).items():
                if name in ("_parameters", "_buffers", "_modules"):
                    continue
                if any(is_deferred(leaf) for leaf in pytree.tree_leaves(value)):
                    vars(module)[name] = pytree.tree_map(give, value)


def is_left_over(tensor: Tensor) -> bool:
    """Whether it is one NaN in the shape of a parameter, as a sharding engine leaves it."""
    can_tell = tensor.numel() > 1 and (tensor.is_floating_point() or tensor.is_complex())
    if not can_tell or tensor.layout is not torch.strided or any(tensor.stride()):
        return False
    value = tensor.detach()[(0,) * tensor.ndim].item()
    return bool(value != value)  # NaN alone
