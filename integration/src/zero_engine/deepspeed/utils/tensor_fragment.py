"""``deepspeed.utils.tensor_fragment``: a parameter's master weight, gradient and optimizer state.

``full`` values have the parameter's shape, in fp32 on the engine's device. Every rank must call a
function of a ``full`` value, and set the same value. ``local`` values are 1-D: the part that this
rank's optimizer state covers. Every rank must call the getter of the gradient, and all setters.

A getter returns None for a parameter that no engine owns or that was frozen at `initialize`, for a
state before the first step, and for a gradient outside the time between a step's last backward and
``step``. A setter raises ValueError if no engine owns the parameter. Setting the master weight of a
frozen parameter sets its value.

Gradients are averaged over ranks, not clipped, and multiplied by the fp16 loss scale, as in
DeepSpeed. Within ``no_sync`` the full gradient is this rank's own sum of the backwards since the
last reduction, and needs no other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from zero_core import engine_of

_MASTER = "master_weight"
_GRAD = "grad"


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the whole master weight. Every rank must call it."""
    return _get(param, _MASTER)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the whole gradient. Every rank must call it."""
    return _get(param, _GRAD)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return the whole state ``optim_state_key`` ("exp_avg", ...). Every rank must call it."""
    return _get(param, optim_state_key)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the master weight."""
    return _get(param, _MASTER, is_local=True)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the gradient. Every rank must call it."""
    return _get(param, _GRAD, is_local=True)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's part of the state ``optim_state_key``."""
    return _get(param, optim_state_key, is_local=True)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set the master weight. Every rank must call it, with the same ``value``."""
    _set(param, value, _MASTER)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the gradient of the next step. Every rank must call it, with the same ``value``."""
    _set(param, value, _GRAD)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set the state ``optim_state_key``. Every rank must call it, with the same ``value``."""
    _set(param, value, optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the master weight. Every rank must call it."""
    _set(param, value, _MASTER, is_local=True)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the gradient. Every rank must call it."""
    _set(param, value, _GRAD, is_local=True)


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Set this rank's part of the state ``optim_state_key``. Every rank must call it."""
    _set(param, value, optim_state_key, is_local=True)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace each gradient by ``update_func(gradient, parameter)``. Every rank must call it."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def _get(param: nn.Parameter, what: str, *, is_local: bool = False) -> Tensor | None:
    engine = engine_of(param)
    if engine is None:
        return None
    name = engine.owns(param)
    assert name is not None, "engine_of found it"
    if not next(spec.is_trainable for spec in engine.layout.params if spec.name == name):
        return None
    if what == _GRAD and not is_local and engine.states.is_kept_unreduced:
        return engine.states.get_unreduced(name)
    if what == _GRAD and not engine.states.has_gradient():
        return None
    read = engine.states.get_local if is_local else engine.states.get_full
    try:
        value = read(name, what)
    except KeyError:  # before the first step, on all ranks alike
        return None
    factor = engine.loss_scale if what == _GRAD else 1.0
    return (value * factor if factor != 1.0 else value).to(engine.device)


def _set(param: nn.Parameter, value: Tensor, what: str, *, is_local: bool = False) -> None:
    engine = engine_of(param)
    if engine is None:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} belongs to no engine: call initialize() "
            "first, and pass a parameter of its model"
        )
    name = engine.owns(param)
    assert name is not None, "engine_of found it"
    if what == _GRAD and not is_local and engine.states.is_kept_unreduced:
        engine.states.set_unreduced(name, value)
        return
    wide = value.detach().to("cpu", torch.float32)
    if what == _GRAD:  # divide in fp32, because in 16 bits a small quotient would be zero
        wide = wide / engine.loss_scale
    write = engine.states.set_local if is_local else engine.states.set_full
    write(name, wide, what)
    if what == _MASTER and engine.config.zero_optimization.stage == 3:
        engine.publish()  # small parameters are not sharded and need the new value
