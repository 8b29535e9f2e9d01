"""State of torch's contexts, which each micro-batch of the vertical schedule has for itself.

[Note: contexts of a paused forward]
A forward may pause within contexts that it has entered: autocast, ``no_grad``, a device, a kernel
choice for attention, checkpointing around a block, the forward of an autograd function. torch keeps
their state per thread or per process, and all micro-batches share a thread. So a pause exchanges
the forward's state for the state before the step, and the next turn exchanges it back. Contexts
around the whole step apply to every micro-batch, contexts in a forward only to that forward.
The dispatch keys show contexts that cannot be exchanged. They raise `NotExchanged`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch._C import _autograd, _dynamo
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device, _python_dispatch

_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Functions that get and set a value."""


class NotExchanged(Exception):
    """Raised where a forward pauses within a context whose state cannot be exchanged."""


def _dispatch_keys() -> Any:
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def _autocast_depth() -> int:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _set_autocast_depth(depth: int) -> None:
    while _autocast_depth() < depth:
        torch.autocast_increment_nesting()
    while _autocast_depth() > depth:
        torch.autocast_decrement_nesting()


def _saved_tensors_hooks() -> list[Any]:
    """Return the functions of all active `saved_tensors_hooks`, the innermost last."""
    found: list[Any] = []
    while (top := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        found.insert(0, top)
        _autograd._pop_saved_tensors_default_hooks()
    for each in found:
        _autograd._push_saved_tensors_default_hooks(*each)
    return found


def _set_saved_tensors_hooks(hooks: list[Any]) -> None:
    for _ in _saved_tensors_hooks():
        _autograd._pop_saved_tensors_default_hooks()
    for each in hooks:
        _autograd._push_saved_tensors_default_hooks(*each)


def _set_function_modes(modes: list[Any]) -> None:
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


def _set_dispatch_modes(modes: list[Any]) -> None:
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)


def _variable(module: ModuleType, name: str) -> _Setting:
    return partial(getattr, module, name), partial(setattr, module, name)


_SETTINGS: tuple[_Setting, ...] = (
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled),
    (torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    (torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled),
    (torch._C._get_torch_function_state, torch._C._set_torch_function_state),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (_autocast_depth, _set_autocast_depth),
    (_dynamo.eval_frame.get_eval_frame_callback, _dynamo.eval_frame.set_eval_frame),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    (_saved_tensors_hooks, _set_saved_tensors_hooks),
    (_get_current_function_mode_stack, _set_function_modes),
    (_python_dispatch._get_current_dispatch_mode_stack, _set_dispatch_modes),
    _variable(_device, "CURRENT_DEVICE"),
    *(_variable(_python_dispatch, n) for n in vars(_python_dispatch) if n.startswith("_is_in_")),
)


class TorchState:
    """Exchanges the state of torch's contexts for the state when this object was made."""

    def __init__(self, device: torch.device) -> None:
        self._settings = list(_SETTINGS)
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
        values = self._outside if new is None else new
        for (_, put), value, now in zip(self._settings, values, old, strict=True):
            if value != now:
                put(value)
        return old

    def leave(self) -> list[Any]:
        """Set the state before the step, and return a paused forward's. Raises `NotExchanged`."""
        inside = self.exchange()
        if _dispatch_keys() != self._keys:
            self.exchange(inside)
            raise NotExchanged
        return inside
