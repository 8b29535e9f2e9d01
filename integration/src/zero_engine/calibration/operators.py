"""Rates of torch's operators on one rank: matrix products, attention, elementwise and others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_core.footprint import ATTENTION, ATTENTION_BACKWARD, Operator

aten = torch.ops.aten
CPU_DTYPES = (torch.float32, torch.bfloat16)
DEVICE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS, LARGE_TOKENS = (64, 256, 1024), (512, 2048, 8192)
"""Rows of the matrices, on a CPU and on an accelerator."""
SHAPES = ((64, 64), (256, 1024), (768, 768), (512, 2048))
LARGE_SHAPES = ((512, 512), (2048, 2048), (2048, 8192), (4096, 4096))
"""Inputs and outputs of linear layers, on a CPU (`SHAPES`) and on an accelerator."""
ROWS = ((16, 64), (256, 256), (1024, 512), (4096, 1024))
HEADS, HEAD_WIDTH = 4, 64
LENGTHS = (64, 256, 1024)
BUDGET_S = 0.03
LEAST, TOGETHER, STEPS = 3, 12, 9
"""Minimal repetitions of a call, repetitions of a collective, and repetitions of a step."""
Points = list[tuple[float, float]]

_Make = Callable[..., Tensor]
_Call = tuple[Any, tuple[Any, ...]]


def rising(points: Points) -> Points:
    """Lower seconds of ``points``, sorted by amount, so that none exceeds a larger amount's."""
    found = points[-1:]
    for amount, seconds in reversed(points[:-1]):
        found.insert(0, (amount, min(seconds, found[0][1])))
    return found


@dataclass
class Stopwatch:
    """Timer of calls on one rank.

    Attributes:
        curves: measured points by the curve names of `zero_engine.planning.rates`.
    """

    device: torch.device
    curves: dict[str, Points] = field(default_factory=dict)

    def seconds(self, call: Callable[[], object], *, is_together: bool = False) -> float:
        """Return the lower quartile of ``call``'s seconds, because other programs only add to them.

        The first call is a warm-up. All ranks must call this method, and with ``is_together``, for
        collectives, they repeat ``call`` equally often.
        """
        times = self._times(call, TOGETHER if is_together else LEAST, is_together)
        return sorted(times)[len(times) // 4]

    def typical_seconds(self, call: Callable[[], object], *, is_together: bool = False) -> float:
        """Return the median seconds of ``call``, with delays by other programs."""
        return statistics.median(self._times(call, STEPS, is_together))

    def _times(self, call: Callable[[], object], least: int, is_together: bool) -> list[float]:
        call()
        if dist.is_initialized():
            dist.barrier()
        times: list[float] = []
        started_at = time.perf_counter()
        while len(times) < least or (
            not is_together and time.perf_counter() - started_at < BUDGET_S
        ):
            times.append(self._once(call))
        return times

    def curve(self, name: str, points: Iterable[tuple[float, Callable[[], object]]]) -> None:
        self.curves[name] = rising([(n, self.seconds(call)) for n, call in points])

    def _once(self, call: Callable[[], object]) -> float:
        if self.device.type == "cpu":
            started_at = time.perf_counter()
            call()
            return time.perf_counter() - started_at
        number = 5
        torch.accelerator.synchronize(self.device)
        started_at = time.perf_counter()
        for _ in range(number):
            call()
        torch.accelerator.synchronize(self.device)
        return (time.perf_counter() - started_at) / number


def time_operators(watch: Stopwatch) -> None:
    dtypes = CPU_DTYPES if watch.device.type == "cpu" else DEVICE_DTYPES
    for dtype in dtypes:

        def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, device=watch.device).to(dtype)

        with torch.no_grad():
            _time_products(watch, make, str(dtype).removeprefix("torch."))
            tables: dict[str, list[_Call]] = {}  # calls of each operator, by rising size
            for rows, width in ROWS:
                for func, args in _calls(make, rows, width):
                    tables.setdefault(str(func), []).append((func, args))
            for calls in tables.values():
                _time_calls(watch, calls)
            for name in (ATTENTION, ATTENTION_BACKWARD):
                points: Points = []
                for length in LENGTHS:
                    is_backward = name == ATTENTION_BACKWARD
                    call, amount, kind = _attention(make, length, is_backward=is_backward)
                    points.append((amount, watch.seconds(call)))
                watch.curves[f"{name}.{kind}"] = rising(points)


def _time_products(watch: Stopwatch, make: _Make, dtype: str) -> None:
    """Time the three matrix products of a linear layer's forward and backward, and batched ones.

    The former are fitted by seconds per operation, per byte and per call, because short or narrow
    matrices have more bytes per operation.
    """
    rows: list[tuple[float, float, float, float]] = []
    is_cpu = watch.device.type == "cpu"
    for tokens in TOKENS if is_cpu else LARGE_TOKENS:
        for width, height in SHAPES if is_cpu else LARGE_SHAPES:
            x, weight = make(tokens, width), make(height, width)
            grad = make(tokens, height)
            calls = ((x, weight.t()), (grad, weight), (grad.t(), x))
            seconds = sum(watch.seconds(partial(torch.mm, a, b)) for a, b in calls)
            nbytes = sum(t.numel() * t.itemsize for t in (x, weight, grad))
            rows.append((2 * tokens * width * height, nbytes, 1.0, seconds / len(calls)))
    operation_s, byte_s, call_s = _fit(torch.tensor(rows, dtype=torch.float64)).tolist()
    watch.curves[f"matmul.{dtype}"] = [(0.0, call_s), (1e9, call_s + 1e9 * operation_s)]
    watch.curves[f"product.{dtype}"] = [(0.0, 0.0), (1e9, 1e9 * byte_s)]
    pairs = [(make(16, n, HEAD_WIDTH), make(16, HEAD_WIDTH, n)) for n in LENGTHS]
    _time_calls(watch, [(aten.bmm.default, pair) for pair in pairs])


def _fit(rows: Tensor) -> Tensor:
    """Fit the last column by a weighted sum of the other columns. Returns the weights, all >= 0.

    The fit minimizes the relative error: a small product counts as much as a large one.
    """
    scaled = rows[:, :-1] / rows[:, -1:]
    used = list(range(scaled.shape[1]))
    found = torch.zeros(len(used), dtype=torch.float64)
    while used:
        wanted = torch.ones(len(scaled), 1, dtype=torch.float64)
        # Columns differ by ten orders of magnitude, so scale them for the solver.
        size = scaled[:, used].abs().max(dim=0).values
        solved = torch.linalg.lstsq(scaled[:, used] / size, wanted).solution[:, 0] / size
        if bool((solved >= 0).all()):
            found[used] = solved
            break
        used.pop(int(solved.mul(size).argmin()))
    return found


def _attention(
    make: _Make, length: int, *, is_backward: bool
) -> tuple[Callable[[], object], int, str]:
    """Return a call of causal attention or its backward, and its `Operator`'s amount and dtype."""
    q, k, v = (make(2, HEADS, length, HEAD_WIDTH) for _ in range(3))
    if q.device.type == "cpu":
        forward = aten._scaled_dot_product_flash_attention_for_cpu.default
        out, rows = forward(q, k, v, 0.0, True)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        args = (make(2, HEADS, length, HEAD_WIDTH), q, k, v, out, rows, 0.0, True)
        func, given = (backward, args) if is_backward else (forward, (q, k, v, 0.0, True))
        operator = Operator.of(func, given, {}, func(*given))
        return lambda: func(*given), operator.amount, operator.dtype
    inputs = [t.requires_grad_() for t in (q, k, v)]
    grad = make(2, HEADS, length, HEAD_WIDTH)
    described = aten._scaled_dot_product_flash_attention_for_cpu.default
    operator = Operator.of(described, (q, k, v), {}, (q,))

    def run() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    if not is_backward:
        return run, operator.amount, operator.dtype

    with torch.enable_grad():
        out = run()
    # Backward has five matrix products, forward two.
    return (
        lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True),
        operator.amount * 5 // 2,
        operator.dtype,
    )


def _time_calls(watch: Stopwatch, calls: Sequence[_Call]) -> None:
    points = []
    for func, args in calls:
        operator = Operator.of(func, args, {}, func(*args))
        points.append((operator.amount, lambda func=func, args=args: func(*args)))
    watch.curve(f"{operator.kind}.{operator.dtype}", points)
    if operator.kind == "add":
        name = f"memory.{operator.dtype}"
        watch.curves[name] = watch.curves[f"add.{operator.dtype}"]


def _calls(make: _Make, rows: int, width: int) -> Iterator[_Call]:
    x, y, scale = make(rows, width), make(rows, width), make(width)
    wide = x.float()
    device = x.device
    yield aten.add.Tensor, (x, y)
    yield aten.mul.Tensor, (x, y)
    yield aten.clone.default, (x.view(rows, 4, -1).transpose(0, 1),)
    yield aten._to_copy.default, (x,)
    yield aten.copy_.default, (y, x)
    yield aten.cat.default, ([x, y],)
    yield aten.sum.dim_IntList, (x, [0])
    yield aten.mean.dim, (x, [-1])
    yield aten.pow.Tensor_Scalar, (x, 2)
    yield aten.neg.default, (x,)
    for name in ("gelu", "silu", "tanh"):
        yield getattr(aten, name).default, (x,)
        yield getattr(aten, f"{name}_backward").default, (y, x)
    out, mean, deviation = aten.native_layer_norm.default(x, [width], scale, scale, 1e-5)
    yield aten.native_layer_norm.default, (x, [width], scale, scale, 1e-5)
    masks = [True, True, True]
    norm = (y, x, [width], mean, deviation, scale, scale, masks)
    yield aten.native_layer_norm_backward.default, norm
    for name in ("_softmax", "_log_softmax"):
        yield getattr(aten, name).default, (x, -1, False)
        yield getattr(aten, f"{name}_backward_data").default, (y, out, -1, x.dtype)
    ids = torch.arange(rows, device=device) % width
    total = wide.sum()
    yield aten.nll_loss_forward.default, (wide, ids, None, 1, -100)
    yield aten.nll_loss_backward.default, (total, wide, ids, None, 1, -100, wide.sum())
    yield aten.embedding.default, (x, ids % rows)
    yield aten.embedding_dense_backward.default, (y, ids % rows, rows, -1, False)
