"""``deepspeed.utils.tensor_fragment``: a parameter's master weight, gradient and optimizer state.

The parameter itself is passed, not its name. ``full`` values are whole, in the parameter's shape,
fp32, on the engine's device; every rank must call, and set the same value. ``local`` ones are the
part that this rank's optimizer state covers, 1-D; every rank must call for a gradient, and to set.
What there is none of is None: of a parameter that belongs to no engine, or is frozen, of a state
before the first step, and of a gradient outside of the time between a step's last backward and
``step``. A gradient is as backward left it, averaged over ranks: not clipped, and still multiplied
by the fp16 loss scale, as in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from zero_core import ShardedModel, engine_of

_MASTER = "master_weight"
_GRAD = "grad"


def safe_get_full_optimizer_state(
    param: nn.Parameter, optim_state_key: str, *, is_local: bool = False
) -> Tensor | None:
    """Return the state ``optim_state_key`` ("exp_avg", ...) of ``param``.

    Ranks agree on whether it is None.
    """
    engine = engine_of(param)
    if engine is None:
        return None
    name = _name(engine, param)
    if optim_state_key == _GRAD and not engine.states.has_gradient():
        return None
    read = engine.states.get_local if is_local else engine.states.get_full
    try:
        value = read(name, optim_state_key)
    except KeyError:  # frozen, or before the first step: all ranks agree
        return None
    factor = engine.loss_scale if optim_state_key == _GRAD else 1.0
    return (value * factor if factor != 1.0 else value).to(engine.device)


def safe_set_full_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str, *, is_local: bool = False
) -> None:
    """Set the state ``optim_state_key`` of ``param``.

    Raises:
        ValueError: no engine has the parameter.
    """
    engine = engine_of(param)
    if engine is None:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} belongs to no engine: call initialize() "
            "first, and pass a parameter of its model"
        )
    name = _name(engine, param)
    if optim_state_key == _GRAD:
        value = value / engine.loss_scale
    write = engine.states.set_local if is_local else engine.states.set_full
    write(name, value.detach().to("cpu", torch.float32), optim_state_key)


safe_get_full_fp32_param = partial(safe_get_full_optimizer_state, optim_state_key=_MASTER)
safe_get_full_grad = partial(safe_get_full_optimizer_state, optim_state_key=_GRAD)
safe_get_local_optimizer_state = partial(safe_get_full_optimizer_state, is_local=True)
safe_get_local_fp32_param = partial(safe_get_local_optimizer_state, optim_state_key=_MASTER)
safe_get_local_grad = partial(safe_get_local_optimizer_state, optim_state_key=_GRAD)
safe_set_full_fp32_param = partial(safe_set_full_optimizer_state, optim_state_key=_MASTER)
safe_set_full_grad = partial(safe_set_full_optimizer_state, optim_state_key=_GRAD)
safe_set_local_optimizer_state = partial(safe_set_full_optimizer_state, is_local=True)
safe_set_local_fp32_param = partial(safe_set_local_optimizer_state, optim_state_key=_MASTER)
safe_set_local_grad = partial(safe_set_local_optimizer_state, optim_state_key=_GRAD)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter],
    update_func: Callable[[Tensor, nn.Parameter], Tensor],
) -> None:
    """Replace each gradient by ``update_func(gradient, parameter)``. Every rank must call it."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def _name(engine: ShardedModel, param: nn.Parameter) -> str:
    name = engine.owns(param)
    assert name is not None, "engine_of found it"
    return name
