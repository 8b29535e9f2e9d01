"""Trial of an optimizer: whether the update of one parameter depends on another one's gradient.

Such an optimizer (one step size for the whole model, a norm over all gradients of its own) is right
only where one rank has all parameters. The trial steps a copy of the optimizer over two small
matrices, together and each alone. Where the copy cannot be stepped so, or draws random numbers,
a warning says that it was not tried.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn

_log = logging.getLogger(__name__)

_BY_PARAMETER = ("torch.", "torchao.", "bitsandbytes.", "transformers.", "zero_core.")
"""Modules whose optimizers update each parameter by itself, and need no trial."""
_SHAPES = ((4, 4), (4, 6))
_NUM_STEPS = 4
_RATE = 1e-3
"""Learning rate of a trial where the optimizer's is 0."""
_TOLERANCE = 1e-3
"""Of an update, relative. Matrix kernels may round otherwise from call to call."""


def mixes_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a trial shows that ``optimizer`` mixes parameters. It is not changed."""
    kind = type(optimizer)
    if f"{kind.__module__}.".startswith(_BY_PARAMETER):
        return False
    both = tuple(range(len(_SHAPES)))
    try:
        together, again = _updates(optimizer, both), _updates(optimizer, both)
        alone = [_updates(optimizer, (number,))[number] for number in both]
    except Exception as error:  # whatever an unknown class does with two matrices
        _warn_untried(kind, f"it fails with {type(error).__name__}: {error}")
        return False
    if not any(update.any() for update in together):
        _warn_untried(kind, "its step changes none of them")
        return False
    if not all(map(torch.equal, together, again)):
        _warn_untried(kind, "its updates are random")
        return False
    return any(
        not torch.allclose(one, other, rtol=0.0, atol=_TOLERANCE * float(other.abs().max()))
        for one, other in zip(together, alone, strict=True)
    )


def _warn_untried(kind: type, reason: str) -> None:
    _log.warning(
        "%s: a trial on two small matrices cannot show whether it updates each parameter by "
        "itself: %s. At stages 1 to 3 ranks update different parameters: use it there only if no "
        "update depends on another parameter's gradient",
        kind.__qualname__,
        reason,
    )


def _updates(optimizer: torch.optim.Optimizer, with_grad: tuple[int, ...]) -> list[Tensor]:
    """Return what some steps add to two parameters, of which some have a gradient."""
    generator = torch.Generator().manual_seed(0)
    values = [0.01 * torch.randn(shape, generator=generator) for shape in _SHAPES]
    params = [nn.Parameter(value.clone()) for value in values]
    trial = _copy_over(optimizer, params)
    for _ in range(_NUM_STEPS):
        for number, param in enumerate(params):
            grad = (1.0, 100.0)[number] * torch.randn(param.shape, generator=generator)
            param.grad = grad if number in with_grad else None
        trial.step()
    return [param.detach() - value for param, value in zip(params, values, strict=True)]


def _copy_over(
    optimizer: torch.optim.Optimizer,
    params: list[nn.Parameter],
    memo: dict[int, Any] | None = None,
) -> torch.optim.Optimizer:
    """Return a copy of ``optimizer`` with the settings of its first group, over ``params``.

    Its constructor is not called: what it was called with is not known. Optimizers that it holds
    are copied so too. ``memo`` has what the copy shares with that of the optimizer around it.
    """
    groups = optimizer.param_groups
    memo = {} if memo is None else memo
    given = [p for group in groups for p in group["params"]]
    for number, param in enumerate(given):  # the model is neither copied nor changed
        is_tried = number < len(params)
        stand_in = params[number] if is_tried else nn.Parameter(torch.empty(0))
        memo.setdefault(id(param), stand_in)
    memo |= {id(param): param for param in params}
    if id(groups) not in memo:
        rate = {"lr": _RATE} if groups[0].get("lr") == 0 else {}  # before a warm-up
        first = {key: value for key, value in groups[0].items() if key != "params"}
        memo[id(groups)] = [{**copy.deepcopy(first, memo), **rate, "params": params}]
    for inner in vars(optimizer).values():
        if isinstance(inner, torch.optim.Optimizer) and id(inner) not in memo:
            memo[id(inner)] = _copy_over(inner, params, memo)
    own: dict[str, Any] = {
        **vars(optimizer),
        "param_groups": groups,
        "state": defaultdict(dict),
        **{name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")},
    }
    own.pop("step", None)  # a schedule's wrapper, bound to the original
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(made).update(copy.deepcopy(own, memo))
    return made
