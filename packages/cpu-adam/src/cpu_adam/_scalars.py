"""Adam's hyperparameters, checked, and boiled down to the numbers that every element shares.

Computed in double precision and rounded to fp32 once, at the end, as torch.optim's for-loop does.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

__all__ = ["AdamScalars", "adam_scalars"]

_FLOAT32_MAX = 3.4028234663852886e38


class AdamScalars(NamedTuple):
    """What one update needs besides the arrays, in the order of the compiled kernel's argument.

    ``decay`` multiplies the master weight, ``l2`` times the master weight joins the gradient; one
    of the two is neutral. The learning rate and ``bias_correction1`` are in ``neg_step_size``.
    """

    grad_scale: float
    decay: float
    l2: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    bias_correction2_sqrt: float
    eps: float
    neg_step_size: float


def _number(name: str, value: Any) -> float:
    """``value`` as a finite float that fp32 can hold as well."""
    if isinstance(value, str | bytes):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}") from None
    except OverflowError:
        raise ValueError(f"{name}: too large for fp32") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}: must be finite, got {number}")
    if abs(number) > _FLOAT32_MAX:
        raise ValueError(f"{name}: too large for fp32, got {number}")
    return number


def _not_negative(name: str, value: Any) -> float:
    number = _number(name, value)
    if number < 0.0:
        raise ValueError(f"{name}: must not be negative, got {number}")
    return number


def _beta(name: str, value: Any) -> float:
    number = _number(name, value)
    if not 0.0 <= number < 1.0:
        raise ValueError(f"{name}: must be in [0, 1), got {number}")
    return number


def _step(value: Any) -> int:
    try:
        step = operator.index(value)
    except TypeError:
        raise TypeError(f"step: expected an integer, got {type(value).__name__}") from None
    if step < 1:
        raise ValueError(f"step: counts from 1, got {step}")
    return step


def adam_scalars(
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw_mode: bool = True,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
) -> AdamScalars:
    """Check the hyperparameters of update number ``step`` and derive its scalars.

    Raises:
        TypeError: one of them is not a number, or ``step`` not an integer.
        ValueError: one of them is not finite or out of range, or ``step`` is below 1.
    """
    step = _step(step)
    lr = _not_negative("lr", lr)
    beta1 = _beta("beta1", beta1)
    beta2 = _beta("beta2", beta2)
    eps = _not_negative("eps", eps)
    weight_decay = _not_negative("weight_decay", weight_decay)
    grad_scale = _number("grad_scale", grad_scale)
    correction1 = correction2 = 1.0
    if bias_correction:
        # As floats: a step too large for pow() in integers is no reason to fail.
        correction1 = 1.0 - beta1 ** float(min(step, 2**62))
        correction2 = 1.0 - beta2 ** float(min(step, 2**62))
    step_size = lr / correction1
    if step_size > _FLOAT32_MAX:
        raise ValueError(f"lr: lr / (1 - beta1 ** step) is too large for fp32, got {step_size}")
    decay = 1.0 - lr * weight_decay if adamw_mode else 1.0
    if abs(decay) > _FLOAT32_MAX:
        raise ValueError(f"weight_decay: lr * weight_decay is too large for fp32, got {decay}")
    return AdamScalars(
        grad_scale=grad_scale,
        decay=decay,
        l2=0.0 if adamw_mode else weight_decay,
        one_minus_beta1=1.0 - beta1,
        beta2=beta2,
        one_minus_beta2=1.0 - beta2,
        bias_correction2_sqrt=math.sqrt(correction2),
        eps=eps,
        neg_step_size=-step_size,
    )
