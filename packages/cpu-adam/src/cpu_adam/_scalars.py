"""Checks of thread counts and hyperparameters, and the scalars of an update.

Scalars are equal for all elements. They are computed in double precision and rounded to fp32 only
at the end, as in torch.optim's for-loop. Their order is that of the structs in native/kernels.h.
"""

from __future__ import annotations

import hashlib
import math
import operator
import os
from typing import Any, NamedTuple, NotRequired, TypedDict, Unpack

import numpy as np

from cpu_adam._memory import loaded_torch

_FLOAT32_MAX = 3.4028234663852886e38

# Limit, so that a typo does not start a million threads.
_MAX_THREADS = 512


class AdamHyper(TypedDict):
    """Hyperparameters of Adam: keyword arguments of `cpu_adam.adam_step` and its variants.

    Attributes:
        step: number of this update, from 1.
        lr: learning rate, not negative.
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        eps: added to the denominator, not negative.
        weight_decay: decoupled (``adamw_mode``) or L2, not negative.
        adamw_mode: whether weight decay is decoupled from the gradient; default True.
        bias_correction: divide the moments by ``1 - beta ** step``; default True.
        grad_scale: factor on the gradient (unscale and clip in one), in fp32; default 1.
    """

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    adamw_mode: NotRequired[bool]
    bias_correction: NotRequired[bool]
    grad_scale: NotRequired[float]


def finite_number(name: str, value: Any) -> float:
    """Return ``value`` as a float that is finite in fp32 as well."""
    if type(value) is float and -_FLOAT32_MAX <= value <= _FLOAT32_MAX:
        return value  # fast path, because the code below would dominate the time of a small step
    # NumPy before 2.4 converts an array of one element, with a warning.
    is_array = isinstance(value, np.ndarray) and value.ndim > 0
    if is_array or isinstance(value, str | bytes):
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
    number = finite_number(name, value)
    if number < 0.0:
        raise ValueError(f"{name}: must not be negative, got {number}")
    return number


def _beta(name: str, value: Any) -> float:
    number = finite_number(name, value)
    if not 0.0 <= number < 1.0:
        raise ValueError(f"{name}: must be in [0, 1), got {number}")
    return number


def _flag(name: str, value: Any) -> bool:
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__}") from None


def _step(value: Any) -> int:
    try:
        step = operator.index(value)
    except TypeError:
        raise TypeError(f"step: expected an integer, got {type(value).__name__}") from None
    if step < 1:
        raise ValueError(f"step: counts from 1, got {step}")
    return step


def _decoupled_decay(lr: float, weight_decay: float) -> float:
    decay = 1.0 - lr * weight_decay
    if abs(decay) > _FLOAT32_MAX:
        raise ValueError(f"weight_decay: lr * weight_decay is too large for fp32, got {decay}")
    return decay


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
) -> tuple[float, ...]:
    """Check the hyperparameters of update number ``step`` and derive its scalars.

    ``decay`` multiplies the master weight. ``l2`` times the master weight is added to the gradient.
    With ``adamw_mode``, ``l2`` is 0, otherwise ``decay`` is 1. The step size is the learning rate
    divided by the first moment's bias correction.
    """
    adamw_mode = _flag("adamw_mode", adamw_mode)
    bias_correction = _flag("bias_correction", bias_correction)
    step = _step(step)
    lr = _not_negative("lr", lr)
    beta1 = _beta("beta1", beta1)
    beta2 = _beta("beta2", beta2)
    eps = _not_negative("eps", eps)
    weight_decay = _not_negative("weight_decay", weight_decay)
    grad_scale = finite_number("grad_scale", grad_scale)
    correction1 = correction2 = 1.0
    if bias_correction:
        # Floats, because pow() of integers fails for large steps.
        correction1 = 1.0 - beta1 ** float(min(step, 2**62))
        correction2 = 1.0 - beta2 ** float(min(step, 2**62))
    step_size = lr / correction1
    if step_size > _FLOAT32_MAX:
        raise ValueError(f"lr: lr / (1 - beta1 ** step) is too large for fp32, got {step_size}")
    decay = _decoupled_decay(lr, weight_decay) if adamw_mode else 1.0
    l2 = 0.0 if adamw_mode else weight_decay
    root = math.sqrt(correction2)
    return grad_scale, decay, l2, 1.0 - beta1, beta2, 1.0 - beta2, root, eps, -step_size


class CompactAdamScalars(NamedTuple):
    """Scalars of Adam for the kernels with 8- and 16-bit states.

    The update adds ``m / (sqrt(v) * denominator_scale + denominator_offset)``. These two scalars
    contain bias corrections, ``eps`` and the negated step size.
    """

    grad_scale: float
    decay: float
    l2: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2_sqrt: float
    denominator_scale: float
    denominator_offset: float
    key_low: int
    key_high: int


def _clamp(value: float) -> float:
    return max(-_FLOAT32_MAX, min(value, _FLOAT32_MAX))


def compact_adam_scalars(
    seed: int | None = None, /, **hyper: Unpack[AdamHyper]
) -> CompactAdamScalars:
    """Derive the scalars of kernels with 8- and 16-bit states from `adam_scalars`.

    ``seed``, checked by `check_seed`, is for the rounding of 16-bit states; None for 8-bit states.
    """
    grad_scale, decay, l2, weight1, beta2, weight2, root, eps, neg_step = adam_scalars(**hyper)
    if neg_step == 0.0:  # a step size of zero: an infinite denominator makes the quotient zero
        scale, offset = 0.0, -math.inf
    else:
        scale, offset = _clamp(1.0 / root / neg_step), _clamp(eps / neg_step)
    key = 0 if seed is None else random_key(seed, hyper["step"])
    beta1, root_weight = float(hyper["beta1"]), math.sqrt(weight2)
    moments = (beta1, weight1, beta2, root_weight)
    words = (key & 0xFFFFFFFF, key >> 32)
    return CompactAdamScalars(grad_scale, decay, l2, *moments, scale, offset, *words)


def check_seed(seed: Any) -> int:
    """Return ``seed`` as an unsigned 64-bit integer."""
    try:
        value = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed: expected an integer, got {type(seed).__name__}") from None
    if not 0 <= value < 2**64:
        raise ValueError(f"seed: must be in [0, 2**64), got {value}")
    return value


def random_key(seed: int, step: int) -> int:
    """Return the 64-bit key of the random numbers of update number ``step``."""
    number = operator.index(step) % 2**64  # a NumPy integer would overflow
    words = seed.to_bytes(8, "little") + number.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def adagrad_scalars(
    step: int,
    lr: float,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
) -> tuple[float, ...]:
    """Check Adagrad's hyperparameters and derive its scalars."""
    step = _step(step)
    step_size = _not_negative("lr", lr)
    step_size /= 1.0 + float(min(step, 2**62) - 1) * _not_negative("lr_decay", lr_decay)
    scale = finite_number("grad_scale", grad_scale)
    l2 = _not_negative("weight_decay", weight_decay)
    return scale, l2, _not_negative("eps", eps), -step_size


def lion_scalars(
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
) -> tuple[float, ...]:
    """Check Lion's hyperparameters and derive its scalars."""
    lr = _not_negative("lr", lr)
    beta1 = _beta("beta1", beta1)
    beta2 = _beta("beta2", beta2)
    decay = _decoupled_decay(lr, _not_negative("weight_decay", weight_decay))
    scale = finite_number("grad_scale", grad_scale)
    return scale, decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, -lr


def sgd_scalars(
    step: int,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    grad_scale: float = 1.0,
) -> tuple[float, ...]:
    """Check SGD's hyperparameters and derive its scalars."""
    is_first = _step(step) == 1
    lr = _not_negative("lr", lr)
    momentum = _not_negative("momentum", momentum)
    dampening = finite_number("dampening", dampening)
    nesterov = _flag("nesterov", nesterov)
    if nesterov and (momentum == 0.0 or dampening != 0.0):
        raise ValueError("nesterov: needs a momentum and zero dampening")
    scale = finite_number("grad_scale", grad_scale)
    l2 = _not_negative("weight_decay", weight_decay)
    # The first step sets the momentum buffer to the gradient.
    buffer_decay, grad_weight = (0.0, 1.0) if is_first else (momentum, 1.0 - dampening)
    return scale, l2, momentum, buffer_decay, grad_weight, -lr, nesterov


def resolve_num_threads(num_threads: int | None) -> int:
    """Check the thread count, and return it, limited to `_MAX_THREADS`.

    None means torch's thread count if torch is loaded, otherwise the number of usable CPUs.
    """
    if num_threads is None:
        if (torch := loaded_torch()) is not None:
            num_threads = torch.get_num_threads()
        elif hasattr(os, "sched_getaffinity"):
            num_threads = len(os.sched_getaffinity(0))
        else:
            num_threads = os.cpu_count() or 1
    try:
        count = operator.index(num_threads)
    except TypeError:
        raise TypeError(
            f"num_threads: expected an integer or None, got {type(num_threads).__name__}"
        ) from None
    if count < 1:
        raise ValueError(f"num_threads: must be at least 1, got {count}")
    return min(count, _MAX_THREADS)
