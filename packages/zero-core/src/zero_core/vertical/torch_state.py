"""State of torch's contexts, which each micro-batch of the vertical schedule has for itself.

[Note: contexts of a paused forward]
A forward may pause within contexts: autocast, ``no_grad``, a device, a choice of attention kernels,
checkpointing around a block. torch keeps their state per thread or process, and micro-batches share
a thread. So a pause exchanges the forward's state for the state before the step, and the next turn
exchanges it back. Contexts around the step apply to each micro-batch, and contexts in a forward to
that one alone. Dispatch keys reveal contexts that cannot be exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import _C, overrides
from torch.backends import cuda
from torch.utils import _device
from torch.utils import _python_dispatch as dispatch

_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # functions that get and set a value
_autograd: Any = _C._autograd
_overrides: Any = overrides  # torch has not annotated its stack


def _dispatch_keys() -> Any:
    return _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_autocast_depth(depth: int) -> None:
    while torch.autocast_increment_nesting() <= depth:
        pass
    while torch.autocast_decrement_nesting() > depth:
        pass


def _saved_hooks() -> list[Any]:
    items: list[Any] = []
    while (hooks := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        items.insert(0, hooks)
        _autograd._pop_saved_tensors_default_hooks()
    _set_saved_hooks(items)
    return items


def _set_saved_hooks(items: list[Any]) -> None:
    while _autograd._top_saved_tensors_default_hooks(True) is not None:
        _autograd._pop_saved_tensors_default_hooks()
    for hooks in items:
        _autograd._push_saved_tensors_default_hooks(*hooks)


def _set_function_modes(modes: list[Any]) -> None:
    for _ in _overrides._get_current_function_mode_stack():
        _overrides._pop_mode()
    for mode in modes:
        _overrides._push_mode(mode)


def _set_dispatch_modes(modes: list[Any]) -> None:
    for _ in dispatch._get_current_dispatch_mode_stack():
        dispatch._pop_mode()
    for mode in modes:
        dispatch._push_mode(mode)


_SETTINGS: list[_Setting] = [
    (torch.is_grad_enabled, _C._set_grad_enabled),
    (_C._is_fwd_grad_enabled, _C._set_fwd_grad_enabled),
    (_C._get_torch_function_state, _C._set_torch_function_state),  # type: ignore[attr-defined]
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (_autocast_depth, _set_autocast_depth),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (_C._get_sdp_priority_order, _C._set_sdp_priority_order),
    (_saved_hooks, _set_saved_hooks),
    (overrides._get_current_function_mode_stack, _set_function_modes),
    (dispatch._get_current_dispatch_mode_stack, _set_dispatch_modes),
    *(
        (partial(getattr, module, name), partial(setattr, module, name))
        for module in (_device, dispatch)
        for name in vars(module)
        if name == "CURRENT_DEVICE" or name.startswith("_is_in_")
    ),
]


class TorchState:
    """Exchanges the state of torch's contexts for the state when this object was made."""

    def __init__(self, device: torch.device) -> None:
        self._settings = _SETTINGS.copy()
        for kind in {"cpu", device.type}:
            get = partial(torch.is_autocast_enabled, kind), partial(torch.get_autocast_dtype, kind)
            put = partial(torch.set_autocast_enabled, kind), partial(torch.set_autocast_dtype, kind)
            self._settings += zip(get, put, strict=True)
        if device.type != "cpu":  # `set_stream` sets the device, too
            self._settings.append((torch.accelerator.current_stream, torch.accelerator.set_stream))
        self._outside = [get() for get, _ in self._settings]
        self._keys = _dispatch_keys()

    def exchange(self, new: list[Any] | None = None) -> list[Any]:
        """Set ``new``, by default the state before the step. Return the state until now."""
        # A later cast in another micro-batch would share the autograd node of a cached one.
        torch.clear_autocast_cache()
        old = [get() for get, _ in self._settings]
        for (_, put), value, now in zip(self._settings, new or self._outside, old, strict=True):
            if value is not now:
                put(value)
        return old

    def is_as_before(self) -> bool:
        """Whether `exchange` has set all of the state before the step."""
        return bool(_dispatch_keys() == self._keys)
