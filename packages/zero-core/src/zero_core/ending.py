"""How an engine ends: closed by a rank alone, or giving its model back with every value whole.

A rank that closes may be one that failed, so it waits for no other. It cannot gather what others
have, and a part of the current values beside a part of older ones would look like a model: such
parameters hold none then, as at stage 3 all the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from zero_core.initial import _is_left_over

if TYPE_CHECKING:
    from zero_core.engine import Engine

__all__ = ["close", "give_back"]


def close(engine: Engine) -> None:
    """See `zero_core.Engine.close`."""
    if not engine._hooks:
        return  # it was closed before, and its model may have values of others since
    _detach(engine)
    if not engine._flow.has_stale_values:
        return
    for values in engine._state.values:
        values.abandon()
    for module in engine.module.modules():
        module.register_state_dict_pre_hook(_refuse_left_over)  # type: ignore[no-untyped-call]


def give_back(engine: Engine, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Close ``engine`` and leave its model with every value whole, for what comes after it.

    Another engine, say; `Engine.close` alone leaves a model without the values that this rank does
    not have. Parameters stay the same objects; each rank then holds all of them in its CPU memory,
    and the buffers too. An optimizer that was given to ``build`` may be stepped again; its states
    are those that it came with.

    Args:
        engine: every rank must call it, between two steps.
        dtype: of floating values, which come from the master weights; None: as they are computed.

    Returns:
        The model.

    Raises:
        RuntimeError: parameters are in use, or gradients wait for a step.
    """
    _check_between_steps(engine)
    values = engine.full_state_dict(dtype=dtype)
    _detach(engine)
    for name, param in engine.module.named_parameters():
        param.data = values[name]
    for module in engine.module.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.cpu()
    return engine.module


def _detach(engine: Engine) -> None:
    engine._tier.wait_params(0, max((p.stop for p in engine._pieces), default=0))
    engine._flow.detach()
    engine._buffers.detach()
    engine._names.clear()
    engine.optimizer.release()
    while engine._hooks:
        engine._hooks.pop().remove()


def _check_between_steps(engine: Engine) -> None:
    if engine._gathering.is_open or engine._flow.is_running:
        raise RuntimeError(
            "give_back() within gathered(), a forward or a backward: call it after they have ended"
        )
    has_gradient = torch.tensor([float(bool(engine._flow.fired))], device=engine.device)
    if engine._control.sum(has_gradient).item() > 0:
        raise RuntimeError(
            "give_back() between a backward and its step(), whose gradient would be lost: step "
            "first, or drop it by engine.optimizer.zero_grad()"
        )


def _refuse_left_over(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    for name, param in module._parameters.items():
        if param is not None and _is_left_over(param):
            raise RuntimeError(
                f"{prefix}{name} holds no value: it went with an engine that was closed. End one "
                "with zero_core.give_back(engine) in place of engine.close()"
            )
