"""Muon for matrices, AdamW for the rest, in one optimizer.

[Note: whole matrices]
The direction of a matrix is its momentum, made orthogonal: it depends on the whole matrix, where
all else of the update is elementwise. So `Muon` does the elementwise part on whatever its
parameters are, and leaves the direction to its attribute ``directions``: of whole matrices by
default, and across ranks in `zero_core.matrices`, where each parameter is a slice of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, overload

import torch
from torch import Tensor, nn

from zero_core.adam import corrected_update, moments_of

__all__ = ["Direction", "Muon", "direction_of", "split_groups", "tag_matrices"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7
_NOT_MATRICES = ("embed", "lm_head")


class Direction(NamedTuple):
    """What a step follows: bf16 ``values`` of a parameter's shape, and a factor on the rate."""

    values: Tensor
    factor: float


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) as `torch.optim.Muon` has it, and AdamW, by group.

    In a group with ``use_muon`` the parameters are matrices, and with the gradient ``g``:
    ``m = momentum * m + (1 - momentum) * g``, then ``p -= lr * weight_decay * p + lr * factor *
    O``, where ``O`` is ``m``, or ``(1 - momentum) * g + momentum * m`` if ``nesterov``, made
    orthogonal by five Newton-Schulz iterations in bf16. The other groups are AdamW's. ``exp_avg``
    is ``m`` in the former, and the first moment in the latter.

    Args:
        params: groups of parameters, each with ``use_muon``.
        lr: learning rate, of groups that have none of their own, as all that follows.
        weight_decay: decoupled.
        momentum: decay of ``m``.
        nesterov: see above.
        adjust_lr_fn: "original": ``factor = sqrt(max(1, rows / columns))``; "match_rms_adamw":
            ``0.2 * sqrt(max(rows, columns))``.
        betas: AdamW's.
        eps: AdamW's.
        use_muon: whether the parameters are matrices.

    Attributes:
        needs_matrices: the engine gives it whole matrices: see [Note: whole matrices].
    """

    needs_matrices: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        adjust_lr_fn: str = "original",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        use_muon: bool = True,
    ) -> None:
        _check(lr=lr, weight_decay=weight_decay, momentum=momentum, eps=eps)
        if adjust_lr_fn not in ("original", "match_rms_adamw"):
            raise ValueError(
                f"adjust_lr_fn must be 'original' or 'match_rms_adamw', found {adjust_lr_fn!r}"
            )
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "eps": eps,
            "use_muon": use_muon,
            "fused": True,
            "decoupled_weight_decay": True,
            "maximize": False,
        }
        super().__init__(params, defaults)
        self.directions: Callable[[Sequence[_Update]], list[Direction]] = _whole_directions

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates: list[_Update] = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if group["use_muon"]:
                updates += [_Update(p, self._momentum(p, group), group) for p in params]
            else:
                states = [moments_of(self.state[p], p, is_fused=True) for p in params]
                corrected_update(group, params, states)
        # Called without matrices too: other ranks may have some.
        for update, direction in zip(updates, self.directions(updates), strict=True):
            rate, decay = update.group["lr"], update.group["weight_decay"]
            update.param.mul_(1 - rate * decay)
            update.param.add_(direction.values, alpha=-rate * direction.factor)
        return loss

    def _momentum(self, param: Tensor, group: Mapping[str, Any]) -> Tensor:
        """The momentum, brought up to date, as the direction is made of it."""
        assert param.grad is not None
        state = self.state[param]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        average: Tensor = state["exp_avg"].lerp_(param.grad, 1 - group["momentum"])
        return param.grad.lerp(average, group["momentum"]) if group["nesterov"] else average


class _Update(NamedTuple):
    param: Tensor
    momentum: Tensor
    group: Mapping[str, Any]


def direction_of(matrix: Tensor, group: Mapping[str, Any]) -> Direction:
    """``matrix`` [rows, columns] made orthogonal in bf16, as `torch.optim.Muon` does it.

    Quintic Newton-Schulz iterations of what is at most 1 in norm: singular values go near 1.
    """
    rows, columns = matrix.shape
    a, b, c = _COEFFICIENTS
    x = matrix.bfloat16()
    x = x.T if rows > columns else x
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    if group["adjust_lr_fn"] == "original":
        factor = math.sqrt(max(1, rows / columns))
    else:
        factor = 0.2 * math.sqrt(max(rows, columns))
    return Direction(x.T if rows > columns else x, factor)


def _whole_directions(updates: Sequence[_Update]) -> list[Direction]:
    """A parameter of one dimension is a row."""
    found = []
    for update in updates:
        direction = direction_of(update.momentum.view(-1, update.param.shape[-1]), update.group)
        found.append(Direction(direction.values.view_as(update.param), direction.factor))
    return found


def tag_matrices(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Set ``use_muon`` on every parameter that has none yet, as DeepSpeed does.

    True for matrices, but for those with "embed" or "lm_head" in their name.
    """
    for name, param in named:
        if not hasattr(param, "use_muon"):
            is_other = any(word in name.lower() for word in _NOT_MATRICES)
            param.use_muon = param.ndim == 2 and not is_other  # type: ignore[attr-defined]


def split_groups(params: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups for `Muon`: of each given one its matrices and the rest, by ``use_muon``.

    Args:
        params: parameters with the attribute ``use_muon``, or groups of them.
        options: ``optimizer.params``; ``muon_lr`` and ``adam_lr`` win over ``lr``.

    Raises:
        ValueError: a parameter does not say whether it is a matrix.
    """
    groups = [g for g in params if isinstance(g, dict)]
    loose = [p for p in params if not isinstance(p, dict)]
    everything = [*loose, *(p for group in groups for p in group["params"])]
    untold = [tuple(p.shape) for p in everything if not hasattr(p, "use_muon")]
    if untold:
        raise ValueError(
            f"Muon: parameters of shapes {untold[:3]} do not say whether they are matrices: call "
            "zero_core.muon.tag_matrices(model.named_parameters())"
        )
    shared = {k: v for k, v in options.items() if k not in ("lr", "muon_lr", "adam_lr")}
    found = []
    for group in [{"params": loose}, *groups]:
        for use_muon, own, default in ((True, "muon_lr", 0.02), (False, "adam_lr", 3e-4)):
            members = [p for p in group["params"] if p.use_muon is use_muon]
            rate = options.get(own, options.get("lr", default))
            if members:
                found.append({"lr": rate, **shared, **group, "use_muon": use_muon})
                found[-1]["params"] = members
    return found


def _check(**settings: float) -> None:
    for name, value in settings.items():
        if not value >= 0.0:
            raise ValueError(f"{name} must not be negative, got {value}")
