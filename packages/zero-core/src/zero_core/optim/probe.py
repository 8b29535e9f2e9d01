"""States that an optimizer makes for a parameter, found by steps over two elements."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def optimizer_maker(
    optimizer_class: type[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]]
) -> partial[torch.optim.Optimizer]:
    """Return the optimizer's class with the options of ``groups``, to be called with groups.

    Some options count when the optimizer is made, not per group: Adagrad's initial sum.
    """
    make: Any = optimizer_class  # each class types its own options
    taken = inspect.signature(optimizer_class).parameters.keys() - {"params"}
    return partial(make, **{name: v for name, v in groups[0].items() if name in taken})


def probe_states(
    make: partial[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] = (2,),
) -> dict[str, torch.dtype]:
    """Return the elementwise states of a parameter of ``dtype`` and ``shape``, after a step."""
    found: dict[str, torch.dtype] = {}
    for group in groups:
        state = probe_state(make, group, device, dtype, shape)
        found |= {
            k: v.dtype for k, v in state.items() if isinstance(v, Tensor) and v.shape == shape
        }
    return found


def probe_state(
    make: partial[torch.optim.Optimizer],
    group: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...] = (2,),
) -> dict[str, Any]:
    """Return the state of a parameter of ``dtype`` and ``shape`` after its first step."""
    probe = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
    probe.grad = torch.zeros_like(probe)
    optimizer = make([{**group, "params": [probe]}])
    optimizer.step()
    return dict(optimizer.state.get(probe, {}))


def probe_initial_state(
    make: partial[torch.optim.Optimizer],
    group: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any] | None:
    """Return zeros from which a parameter starts as from none, found by two steps, or None."""
    grad = torch.tensor([0.5, -3.0], dtype=dtype, device=device)

    def step(zeros: Mapping[str, Any] | None) -> tuple[Tensor, dict[str, Any]]:
        probe = nn.Parameter(torch.tensor([1.0, -0.75], dtype=dtype, device=device))
        optimizer = make([{**group, "params": [probe]}])
        if zeros:
            optimizer.state[probe] = {
                k: v.clone() if isinstance(v, Tensor) else v for k, v in zeros.items()
            }
        probe.grad = grad.clone()
        optimizer.step()
        return probe.detach(), dict(optimizer.state.get(probe, {}))

    expected, state = step(None)
    zeros = {
        name: torch.zeros_like(value) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }
    found, from_zeros = step(zeros)
    is_same = torch.equal(found, expected) and all(
        torch.equal(from_zeros[name], value) if isinstance(value, Tensor) else value is None
        for name, value in state.items()
    )
    return zeros if is_same else None
