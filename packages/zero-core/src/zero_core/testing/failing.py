"""Injected failures of single calls, and a description of a model for comparison."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn


class Failure(Exception):
    """Stand-in for whatever may go wrong."""


Call = tuple[str, int]
"""A function's name, and which call of it is meant."""
_ONE_AT_A_TIME = threading.Lock()
"""Python refuses to set a thread's profile function while another thread sets its own."""


@contextmanager
def failing(call: Call | None, event: str, file: str | None) -> Iterator[list[Call]]:
    """Make one call from the frames of ``file`` raise: before it runs ("call"), or at its end.

    Yields the calls so far. They are those of Python functions, constructors included.
    """
    calls: list[Call] = []

    def trace(frame: FrameType, kind: str, arg: Any) -> None:
        caller = frame.f_back
        is_from_there = caller is not None and caller.f_code.co_filename == file
        if kind == event and is_from_there and frame.f_code.co_filename != file:
            name = frame.f_code.co_qualname
            calls.append((name, sum(name == other for other, _ in calls)))
            if calls[-1] == call:
                raise Failure(call)

    with _ONE_AT_A_TIME:
        sys.setprofile(trace)
    try:
        yield calls
    finally:
        with _ONE_AT_A_TIME:
            sys.setprofile(None)


def described(model: nn.Module, optimizer: torch.optim.Optimizer, *, has_places: bool) -> Any:
    """Return everything of a model and an optimizer that a plain program can see.

    ``has_places``: with the addresses of parameters.
    """
    modules = [
        {
            key: [repr(item) for item in value.items()] if isinstance(value, dict) else repr(value)
            for key, value in vars(module).items()
            if key not in ("_parameters", "_buffers", "_modules")
        }
        for module in model.modules()
    ]
    params = [
        (
            name,
            id(param),
            type(param),
            param.requires_grad,
            param.device,
            param.stride(),
            sorted(vars(param)),
            None if param.is_meta else _bits(param),
            param.data_ptr() if has_places and not param.is_meta else None,
            None if param.grad is None else (id(param.grad), _bits(param.grad)),
            len(param._backward_hooks or ()),
            len(param._post_accumulate_grad_hooks or ()),
        )
        for name, param in model.named_parameters(remove_duplicate=False)
    ]
    buffers = [(name, id(b), None if b.is_meta else _bits(b)) for name, b in model.named_buffers()]
    groups = [{**group, "params": [*map(id, group["params"])]} for group in optimizer.param_groups]
    given = {key: repr(value) for key, value in vars(optimizer).items() if key != "param_groups"}
    return modules, params, buffers, groups, given


def _bits(tensor: Tensor) -> bytes:
    own = tensor.detach().clone(memory_format=torch.contiguous_format)
    return own.view(-1).view(torch.uint8).numpy().tobytes()
