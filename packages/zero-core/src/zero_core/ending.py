"""How an engine ends: closed, its values left in shards, or its model given back with all whole.

A rank that closes may be one that failed, so it waits for no other. It cannot gather what others
have, and a part of the current values beside a part of older ones would look like a model: such
parameters hold none then, as at stage 3 all the time. They may be parked in place of that: see
[Note: parked parameters] in `zero_core.parked`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zero_core.initial import is_left_over
from zero_core.layout import Slot
from zero_core.owners import engine_of
from zero_core.parked import Held, apart, can_park, park
from zero_core.segment_values import SegmentValues

if TYPE_CHECKING:
    from zero_core.engine import Engine

__all__ = ["close", "give_back", "leave_parked", "remove_at_end"]


def remove_at_end(engine: Engine, handles: Iterable[Any]) -> None:
    """Have ``handles``, of hooks that others put on the model, removed when ``engine`` ends."""
    engine._hooks += handles


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
        if _refuse_left_over not in module._state_dict_pre_hooks.values():
            module.register_state_dict_pre_hook(_refuse_left_over)  # type: ignore[no-untyped-call]


def give_back(
    engine: Engine, *, dtype: torch.dtype | None = None, drops_partial: bool = False
) -> nn.Module:
    """Close ``engine`` and leave its model with every value whole, for what comes after it.

    Another engine, say; `Engine.close` alone leaves a model without the values that this rank does
    not have. Parameters stay the same objects; each rank then holds all of them in its CPU memory,
    and the buffers too. An optimizer that was given to ``build`` may be stepped again; its states
    are those that it came with.

    Args:
        engine: every rank must call it, between two steps.
        dtype: of floating values, which come from the master weights; None: as they are computed.
        drops_partial: whether gradients that a step has accumulated so far are dropped.

    Returns:
        The model.

    Raises:
        RuntimeError: within ``gathered``, or gradients wait for a step and are not to be dropped;
            or the engine has ended before.
    """
    if not engine._hooks:
        raise RuntimeError(
            "give_back() of an engine that has ended: its model may have other values since, so "
            "go on with the model as it is"
        )
    if engine._gathering.is_open:
        raise RuntimeError("give_back() within gathered(): call it after that has ended")
    if not drops_partial:
        _check_between_steps(engine)
    values = engine.full_state_dict(dtype=dtype)
    _detach(engine)
    for name, param in engine.module.named_parameters():
        param.data = values[name]
    for module in engine.module.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.cpu()
    return engine.module


@torch.no_grad()
def leave_parked(engine: Engine) -> None:
    """Close ``engine`` and leave its model the values that there are, for what comes after it.

    At stages 0 to 2 parameters keep their values where every rank has them all, as after
    `Engine.publish`. Else they are parked, each rank keeping in host memory what it has of them:
    `zero_core.parked.unparked` makes them whole, ``build`` takes them one at a time. As `close`, it
    waits for no other rank; but where there are parameters that can't be parked, integers and those
    of a class of their own, these are gathered, and every rank must call it.
    """
    if not engine._hooks:
        return
    _detach(engine)
    of_segments = engine._state.values
    if engine._flow.has_stale_values or not all(values.is_kept for values in of_segments):
        for values in of_segments:
            _park(values, engine)


def _park(values: SegmentValues, engine: Engine) -> None:
    control, segment = engine._control, values.segment
    shard = values.read_shard().detach()
    ranges = [segment.shard_range(rank) for rank in range(control.world_size)]
    for slot, param in zip(segment.slots, values.params, strict=True):
        spans = [_common(slot, *each) for each in ranges]
        first, last = spans[control.rank]
        low = ranges[control.rank][0] - slot.start
        part = apart(last - first, shard.dtype).copy_(shard[first - low : last - low])
        held = Held(control, engine.device, spans=spans, part=part)
        if can_park(param):
            park(param, held)
        else:
            param.data = held.joined(param, spans, part)


def _common(slot: Slot, low: int, high: int) -> tuple[int, int]:
    """Which elements of a parameter lie between ``low`` and ``high`` of its segment."""
    first = min(max(low, slot.start), slot.stop)
    return first - slot.start, max(first, min(high, slot.stop)) - slot.start


def _detach(engine: Engine) -> None:
    engine._tier.wait_params(0, max((p.stop for p in engine._pieces), default=0))
    engine._flow.detach()
    engine._buffers.detach()
    engine._names.clear()
    engine.optimizer.release()
    while engine._hooks:
        engine._hooks.pop().remove()


def _check_between_steps(engine: Engine) -> None:
    has_gradient = torch.tensor([float(bool(engine._flow.fired))], device=engine.device)
    if engine._control.sum(has_gradient).item() > 0:
        raise RuntimeError(
            "give_back() between a backward and its step(), whose gradient would be lost: step "
            "first, or drop it by drops_partial=True"
        )


def _refuse_left_over(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    for name, param in module._parameters.items():
        if param is not None and is_left_over(param) and engine_of(param) is None:
            raise RuntimeError(
                f"{prefix}{name} holds no value: it went with an engine that was closed. End one "
                "with zero_core.give_back(engine) in place of engine.close()"
            )
