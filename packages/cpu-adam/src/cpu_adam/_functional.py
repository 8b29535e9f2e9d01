"""Optimizer updates as functions, for programs that keep the state themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

from cpu_adam import _kernels
from cpu_adam._isa import active_isa_index
from cpu_adam._memory import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT8,
    INT16,
    ITEM_BYTES,
    NO_OUT,
    SPLIT,
    UINT8,
    Block,
    check_disjoint,
    describe,
    loaded_torch,
)
from cpu_adam._scalars import (
    AdamHyper,
    adagrad_scalars,
    adam_scalars,
    check_seed,
    compact_adam_scalars,
    finite_number,
    lion_scalars,
    resolve_num_threads,
    sgd_scalars,
)

sums_grads = True
"""Every function accepts several gradients, which it adds in fp32, in order."""

copies_first = True
"""Every update accepts ``copies``, which are made before the update of the same elements."""

_ONLY_FLOAT32 = (FLOAT32,)
_ANY_FLOAT = (FLOAT32, BFLOAT16, FLOAT16)
_ANY_TYPE = (*_ANY_FLOAT, INT8, UINT8, INT16)

Copies = Sequence[tuple[Any, Any]]


def adam_step(
    master: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    *,
    out: Any = None,
    copies: Copies = (),
    num_threads: int | None = None,
    **hyper: Unpack[AdamHyper],
) -> None:
    """Apply one Adam update in place, reading and writing each array once.

    Adam: Kingma and Ba, 2015, algorithm 1. AdamW: Loshchilov and Hutter, 2019, algorithm 2. Arrays
    may be torch tensors, NumPy arrays, or any ``__dlpack__`` objects in host memory. All are
    contiguous and have the same shape. Autograd counts an in-place change but records no operation.
    An element's result does not depend on the instruction set, the thread count, or its index.
    `AdamHyper` lists the hyperparameters.

    Args:
        master: fp32 weights; updated.
        grad: gradient in fp32, bf16 or fp16, or a list or tuple of several gradients, whose dtypes
            may differ and which are added in fp32, in order, in the same pass; unchanged.
        exp_avg: fp32 first moment; updated.
        exp_avg_sq: fp32 second moment; updated.
        out: fp32, bf16 or fp16; receives the new master weights, rounded to nearest even.
        copies: (source, target) pairs of equal dtype, with the shape of an updated array. Elements
            of a source are copied just before the same elements are updated, so memory is read
            once. If the source is an updated array, the target receives its old values. If the
            target is, the update starts from the source's values.
        num_threads: number of threads; None for torch's count if torch is loaded, otherwise for the
            number of CPUs that this process may use.

    Raises:
        TypeError: an argument has the wrong type or dtype. The message names the argument.
        ValueError: wrong device, shape, layout or range; read-only or freed memory; overlapping
            memory that is written; or a number that is not finite. After either error, all arrays
            are unchanged.
    """
    scalars = adam_scalars(**hyper)
    written = _describe(_ONLY_FLOAT32, master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    _update(_kernels.adam, scalars, written | _describe_out(out), grad, copies, num_threads)


def adam_step_split(
    param: Any,
    remainder: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    *,
    copies: Copies = (),
    num_threads: int | None = None,
    **hyper: Unpack[AdamHyper],
) -> None:
    """Apply one Adam update in place, to a master weight that is stored in two halves.

    A bf16 parameter is the fp32 master weight rounded to nearest (ties to greater magnitude), and
    ``remainder`` is the lower half of the master's bits, initially zeros. With moments this takes
    12 bytes per element, where `adam_step` with ``out`` takes 14. The new master has the bits of
    `adam_step`, except NaNs and magnitudes below 2**-134, which become zero. Other arguments and
    errors are those of `adam_step`.

    Args:
        param: bf16 parameter; updated.
        remainder: int16, lower half of the master weight; updated.
        exp_avg: fp32 first moment; updated.
        exp_avg_sq: fp32 second moment; updated.
    """
    scalars = adam_scalars(**hyper)
    written = _describe((BFLOAT16,), param=param) | _describe((INT16,), remainder=remainder)
    written |= _describe(_ONLY_FLOAT32, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    _update(_kernels.adam, scalars, written, grad, copies, num_threads)


def adam_step_8bit(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    exp_avg_scale: Any,
    exp_avg_sq_scale: Any,
    *,
    remainder: Any = None,
    out: Any = None,
    copies: Copies = (),
    num_threads: int | None = None,
    **hyper: Unpack[AdamHyper],
) -> None:
    """Apply one Adam update in place, with 8-bit moments, in one pass over memory.

    Blocks of 128 elements are quantized relative to their maximum (Dettmers et al., 2021, arXiv
    2110.02861). Codes of the first moment are signed approximate square roots. Codes of the second
    moment are floating-point approximations of its square root, 16 per power of two.
    `cpu_adam.reference` defines both. All states are initially zeros. With a bf16 ``param`` and a
    ``remainder``, as in `adam_step_split`, the total is 6.0625 bytes per element. A non-finite
    gradient invalidates the moments of its block, so check gradients with `grad_norm_sq`. Other
    arguments and errors are those of `adam_step`.

    Args:
        param: bf16 parameter with a ``remainder``, or fp32 weights without; updated.
        exp_avg: int8 codes of the first moment; updated.
        exp_avg_sq: uint8 codes of the second moment; updated.
        exp_avg_scale: fp32, one number per 128 elements, 1-D; updated.
        exp_avg_sq_scale: fp32, of the shape of ``exp_avg_scale``; updated.
        remainder: int16, lower half of the master weight of a bf16 ``param``; updated.
        out: as in `adam_step`; only with an fp32 ``param``.
    """
    scalars = compact_adam_scalars(**hyper)
    written = _describe_master(param, remainder, out)
    written |= _describe((INT8,), exp_avg=exp_avg) | _describe((UINT8,), exp_avg_sq=exp_avg_sq)
    scales = _describe(
        _ONLY_FLOAT32, exp_avg_scale=exp_avg_scale, exp_avg_sq_scale=exp_avg_sq_scale
    )
    expected = (-(-written["param"].numel // _kernels.BLOCK_NUMEL),)
    for name, block in scales.items():
        if block.shape != expected:
            raise ValueError(
                f"{name}: must have one number per {_kernels.BLOCK_NUMEL} elements, "
                f"shape {expected}; got {block.shape}"
            )
    _update(_kernels.adam_int8, scalars, written, grad, copies, num_threads, scales=scales)


def adam_step_bf16(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    *,
    seed: int = 0,
    remainder: Any = None,
    out: Any = None,
    copies: Copies = (),
    num_threads: int | None = None,
    **hyper: Unpack[AdamHyper],
) -> None:
    """Apply one Adam update in place, with stochastically rounded bf16 moments.

    Random numbers depend only on ``seed``, ``step`` and an element's index in the array, so results
    are reproducible. Other arguments and errors are those of `adam_step`.

    Args:
        param: bf16 parameter with a ``remainder``, or fp32 weights without; updated.
        exp_avg: bf16 first moment; updated.
        exp_avg_sq: bf16 second moment; updated.
        seed: seed of the random numbers, in [0, 2**64).
        remainder: int16, lower half of the master weight of a bf16 ``param``; updated.
        out: as in `adam_step`; only with an fp32 ``param``.
    """
    scalars = compact_adam_scalars(check_seed(seed), **hyper)
    written = _describe_master(param, remainder, out)
    written |= _describe((BFLOAT16,), exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    _update(_kernels.adam_bfloat16, scalars, written, grad, copies, num_threads, stream=(0,))


def adagrad_step(
    master: Any,
    grad: Any,
    state_sum: Any,
    *,
    step: int,
    lr: float,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    out: Any = None,
    copies: Copies = (),
    num_threads: int | None = None,
) -> None:
    """Apply one Adagrad update (Duchi et al., 2011) in place, as torch.optim.Adagrad does.

    Other arguments and errors are those of `adam_step`.

    Args:
        master: fp32 weights; updated.
        state_sum: fp32 sum of squared gradients; updated.
        lr_decay: the learning rate is divided by ``1 + (step - 1) * lr_decay``.
        weight_decay: L2, not negative.
    """
    scalars = adagrad_scalars(step, lr, lr_decay, eps, weight_decay, grad_scale)
    written = _describe(_ONLY_FLOAT32, master=master, state_sum=state_sum) | _describe_out(out)
    _update(_kernels.adagrad, scalars, written, grad, copies, num_threads)


def lion_step(
    master: Any,
    grad: Any,
    exp_avg: Any,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    out: Any = None,
    copies: Copies = (),
    num_threads: int | None = None,
) -> None:
    """Apply one Lion update in place (Chen et al., 2023, arXiv 2302.06675, algorithm 2).

    Other arguments and errors are those of `adam_step`.

    Args:
        master: fp32 weights; updated.
        exp_avg: fp32 momentum; updated.
        beta1: weight of the momentum in the direction, in [0, 1).
        beta2: decay of the momentum, in [0, 1).
        weight_decay: decoupled, not negative.
    """
    scalars = lion_scalars(lr, beta1, beta2, weight_decay, grad_scale)
    written = _describe(_ONLY_FLOAT32, master=master, exp_avg=exp_avg) | _describe_out(out)
    _update(_kernels.lion, scalars, written, grad, copies, num_threads)


def sgd_step(
    master: Any,
    grad: Any,
    momentum_buffer: Any = None,
    *,
    step: int,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    grad_scale: float = 1.0,
    out: Any = None,
    copies: Copies = (),
    num_threads: int | None = None,
) -> None:
    """Apply one update of stochastic gradient descent in place, as torch.optim.SGD does.

    Other arguments and errors are those of `adam_step`.

    Args:
        master: fp32 weights; updated.
        momentum_buffer: fp32, zeros before the first step; updated. None without momentum.
        step: number of this update, from 1. Update 1 sets ``momentum_buffer`` to the gradient.
        momentum: factor on the buffer, not negative.
        dampening: after the first step gradients enter the buffer with weight ``1 - dampening``.
        weight_decay: L2, not negative.
        nesterov: Nesterov momentum; requires momentum and no dampening.
    """
    scalars = sgd_scalars(step, lr, momentum, dampening, weight_decay, nesterov, grad_scale)
    has_momentum = float(momentum) != 0.0
    if momentum_buffer is not None and not has_momentum:
        raise ValueError("momentum_buffer: has no use without momentum; pass None")
    states = {"momentum_buffer": momentum_buffer} if has_momentum else {}
    written = _describe(_ONLY_FLOAT32, master=master, **states) | _describe_out(out)
    kernel = _kernels.sgd if has_momentum else _kernels.sgd_plain
    _update(kernel, scalars, written, grad, copies, num_threads)


class GradNorm(NamedTuple):
    """Result of `grad_norm_sq`.

    Attributes:
        norm_sq: sum of squares; not finite if any element is not finite.
        is_finite: whether every element is finite.
    """

    norm_sq: float
    is_finite: bool


def grad_norm_sq(grad: Any, *, grad_scale: float = 1.0, num_threads: int | None = None) -> GradNorm:
    """Return the squared norm of ``grad_scale * grad`` and whether all elements are finite.

    Chunks of 32 Ki elements are summed in double precision and added in order. The result's bits do
    not depend on thread count or instruction set. Finite gradients never overflow the sum.
    Errors are those of `adam_step`.

    Args:
        grad: fp32, bf16 or fp16 gradient of any shape, contiguous, in host memory; unchanged. For
            several gradients, as in `adam_step`, the norm is that of their sum in fp32.
        grad_scale: factor on the gradient; the sum is multiplied by its square, in fp64.
        num_threads: as in `adam_step`.
    """
    scale = finite_number("grad_scale", grad_scale)
    threads = resolve_num_threads(num_threads)
    grads = _describe_grads(grad)
    _check_shapes(grads)
    first, *others = grads.values()
    total = _kernels.sum_of_squares(
        active_isa_index(), first.type, first.address, first.numel, threads, _more_grads(others)
    )
    return GradNorm(total * (scale * scale), math.isfinite(total))


def _describe(types: tuple[int, ...], **values: Any) -> dict[str, Block]:
    """Describe arrays that are updated, whose element type must be one of ``types``."""
    return {
        name: describe(name, value, is_written=True, types=types) for name, value in values.items()
    }


def _describe_grads(grad: Any) -> dict[str, Block]:
    is_list = isinstance(grad, list | tuple)
    named = {f"grad[{i}]": value for i, value in enumerate(grad)} if is_list else {"grad": grad}
    if not named:
        raise ValueError("grad: needs at least one gradient, got an empty sequence")
    return {
        name: describe(name, value, is_written=False, types=_ANY_FLOAT)
        for name, value in named.items()
    }


def _more_grads(others: list[Block]) -> list[int]:
    """Flatten further gradients to the (address, type) pairs that kernels take."""
    return [number for b in others for number in (b.address, b.type)]


def _add_copies(
    copies: Copies, written: dict[str, Block], read: dict[str, Block]
) -> list[tuple[Block, Block]]:
    """Check and describe copies. Add memory that is not updated to ``written`` and ``read``."""
    pairs = []
    shapes = {block.shape for block in written.values()}
    updated = {(block.address, block.nbytes) for block in written.values()}
    for i, (source, target) in enumerate(copies):
        name = f"copies[{i}]"
        of = describe(f"{name}[0]", source, is_written=False, types=_ANY_TYPE)
        to = describe(f"{name}[1]", target, is_written=True, types=(of.type,))
        if to.shape != of.shape or of.shape not in shapes:
            raise ValueError(
                f"{name}: both must have the shape of an array that is updated, one of "
                f"{sorted(shapes)}; got {of.shape} and {to.shape}"
            )
        if of.address == to.address and of.numel:
            raise ValueError(f"{name}: source and target are the same memory")
        if (of.address, of.nbytes) not in updated:
            read[f"{name}[0]"] = of
        if (to.address, to.nbytes) not in updated:
            written[f"{name}[1]"] = to
        pairs.append((of, to))
    return pairs


def _describe_out(out: Any) -> dict[str, Block]:
    return {} if out is None else _describe(_ANY_FLOAT, out=out)


def _describe_master(param: Any, remainder: Any, out: Any) -> dict[str, Block]:
    """Describe the master weight of an update: fp32 with an optional ``out``, or split in two."""
    blocks = _describe((FLOAT32, BFLOAT16), param=param)
    if blocks["param"].type == FLOAT32:
        if remainder is not None:
            raise ValueError("remainder: an fp32 param has none; pass None")
        return blocks | _describe_out(out)
    if remainder is None:
        raise ValueError("remainder: a bf16 param needs one, of dtype int16")
    if out is not None:
        raise ValueError("out: a bf16 param is its own copy; pass None")
    return blocks | _describe((INT16,), remainder=remainder)


def _update(
    kernel: Callable[..., None],
    scalars: tuple[float, ...],
    written: dict[str, Block],
    grad: Any,
    copies: Copies,
    num_threads: int | None,
    *,
    scales: dict[str, Block] | None = None,
    stream: tuple[int, ...] = (),
) -> None:
    """Check an update's arrays against each other, and run the kernel.

    ``written`` has the master weight, then the states in the kernel's order, and at any position
    ``out`` or ``remainder``. All have the gradient's shape. ``scales`` are states of another shape.
    ``stream`` is appended to the kernel's item.
    """
    threads = resolve_num_threads(num_threads)
    read = _describe_grads(grad)
    _check_shapes(written | read)
    first, *others = read.values()
    written |= scales or {}
    copy = written.get("remainder") or written.get("out")
    master, *states = (block.address for block in written.values() if block is not copy)
    if copy is None:
        out, out_type = 0, NO_OUT
    else:
        out, out_type = copy.address, SPLIT if copy.type == INT16 else copy.type
    item = [master, first.address, *states, out, first.numel, *stream]
    changed = tuple(written.values())
    pairs = _add_copies(copies, written, read)
    check_disjoint(written, read)
    copied: list[int] = []
    for source, target in pairs:
        # Copies go block by block. An array of scales has one element per block.
        per_block = _kernels.BLOCK_NUMEL if source.numel == first.numel else 1
        block_bytes = per_block * ITEM_BYTES[source.type]
        copied += [source.address, target.address, block_bytes, source.nbytes]
    isa = active_isa_index()
    kernel(isa, first.type, out_type, item, scalars, threads, _more_grads(others), copied)
    torch = loaded_torch()
    if torch is not None:  # mark tensors as changed, as torch's in-place functions do
        for block in (*changed, *(target for _, target in pairs)):
            if isinstance(block.owner, torch.Tensor):
                torch.autograd.graph.increment_version(block.owner)


def _check_shapes(blocks: dict[str, Block]) -> None:
    first = next(iter(blocks))
    shape = blocks[first].shape
    for name, block in blocks.items():
        if block.shape != shape:
            raise ValueError(f"{name}: must have {first}'s shape {shape}, got {block.shape}")
