"""Rates of one rank: torch's operators, updates, collectives, copies, files, Python.

Each calibrating rank runs ``python -m zero_engine.calibration.rank FOLDER CORES DISK``.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu

import zero_core
from zero_core import adapters
from zero_core.errors import MissingPartError
from zero_core.footprint import ATTENTION, ATTENTION_BACKWARD, Links, Operator, trace_step
from zero_engine.planning import Calibration, Curve, Rates, plan

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
UPDATED = (2**16, 2**20, 2**23)
"""Numbers of elements of the timed updates."""
EXCHANGED = (2**10, 2**16, 2**20, 2**23)
"""Sizes of a rank's shard in the timed collectives, in bytes."""
MOST_EXCHANGED = 2**29
"""Largest result of a gather in bytes. On a host, the limit of all ranks' results together."""
DISK_BYTES = (2**20, 2**24, 2**26)
PRODUCTS = ("matmul", "product", "bmm", ATTENTION, ATTENTION_BACKWARD)
MOST_FACTOR = 2.5
"""Largest factor by which training may slow kernels, and by which it may speed up products."""
_Activation = Callable[[Tensor], Tensor]
DEPTHS = (2, 10)
"""Numbers of blocks of two tiny models, whose times differ by that of the additional blocks."""


def rising(points: Points) -> Points:
    """Lower some seconds of ``points``, sorted by amount, so that a larger amount takes no less."""
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
    norm = (y, x, [width], mean, deviation, scale, scale, [True, True, True])
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


class _Flat(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self) -> Tensor:
        return self.weight.sum()


def time_updates(watch: Stopwatch) -> None:
    alone = adapters.Ranks(None, 0, 1, watch.device)
    host = {"device": "cpu"}
    measured = {
        f"{place}.{dtype}": (dtype, offload)
        for dtype in ("float32", "bfloat16")
        for place, offload in (("device", {"device": "none"}), ("host", host))
    }
    for state in ("bfloat16", "int8"):
        measured[f"host.float32.{state}"] = ("float32", {**host, "state_dtype": state})
    for name, (dtype, offload) in measured.items():
        try:
            points: Points = [(n, _update_s(alone, n, dtype, offload, watch)) for n in UPDATED]
        except MissingPartError:
            continue
        watch.curves[f"update.{name}"] = rising(points)


def _update_s(
    ranks: adapters.Ranks, numel: int, dtype: str, offload: Mapping[str, str], watch: Stopwatch
) -> float:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": dtype == "bfloat16"},
        "gradient_clipping": 1e9,  # clipping moves the update from backward into step()
        "zero_optimization": {"offload_optimizer": {**offload}},
    }
    engine = zero_core.build(_Flat(numel), config, process_group=ranks)
    times: list[float] = []
    for _ in range(1 + STEPS):
        engine.backward(engine())
        if watch.device.type != "cpu":
            torch.accelerator.synchronize(watch.device)
        started_at = time.perf_counter()
        engine.step()
        engine.sharded_state.tier.wait_params(0, numel)
        if watch.device.type != "cpu":
            torch.accelerator.synchronize(watch.device)
        times.append(time.perf_counter() - started_at)
    engine.close()
    return statistics.median(times[1:])


def time_exchanges(watch: Stopwatch) -> None:
    """Time all-gathers, reduce-scatters and small all-reduces. Every rank must call it."""
    ranks = adapters.find_ranks(None, None)
    if ranks.size == 1:
        return
    control = ranks.connect()
    per_node = adapters.count_per_node(control, ranks)
    shared = adapters.share_memory(control, ranks, per_node)
    links = Links(ranks.size, per_node, is_ring=ranks.device.type != "cpu")
    transport = adapters.make_transport(ranks, shared, adapters.Meter(links))
    way = "within" if per_node == ranks.size else "between"
    found: defaultdict[str, Points] = defaultdict(list)
    for nbytes in exchanged(ranks.size, is_host=watch.device.type == "cpu"):
        numel = nbytes // 4
        zeros = transport.zeros
        shard = zeros(numel, torch.float32, watch.device)
        out = zeros(numel * ranks.size, torch.float32, watch.device)
        full = zeros(numel * ranks.size, torch.float32, watch.device)
        total = zeros(numel, torch.float32, watch.device)
        transport.prepare([], [(full.numel(), full.dtype, full.dtype)], watch.device)
        version = 0

        def gather(shard: Tensor = shard, out: Tensor = out) -> None:
            nonlocal version
            version += 1
            transport.all_gather(out, shard, unit=0, version=version, backward=False).wait()

        def reduce(full: Tensor = full, total: Tensor = total) -> None:
            work: Any = transport.reduce_scatter(total, full, unit=0)
            work.wait()
            if watch.device.type == "cpu":
                work.acknowledge().wait()

        sent = nbytes * (ranks.size - 1)
        for name, call in (("gather", gather), ("reduce", reduce)):
            cpu_at, started_at = time.process_time(), time.perf_counter()
            seconds = watch.seconds(call, is_together=True)
            share = (time.process_time() - cpu_at) / (time.perf_counter() - started_at)
            found[f"{name}.{way}"].append((sent, seconds))
            if way == "between":
                found[f"{name}.between.cpu"].append((sent, seconds * share))
    watch.curves |= {name: rising(points) for name, points in found.items()}
    small = torch.zeros(512, dtype=torch.float64, device=watch.device)
    seconds = watch.seconds(lambda: control.sum(small), is_together=True)
    watch.curves[f"agree.{way}"] = [(1.0, seconds), (1e9, seconds)]
    transport.close()


def exchanged(num_ranks: int, *, is_host: bool) -> list[int]:
    sharing = num_ranks if is_host else 1
    return [
        nbytes
        for nbytes in EXCHANGED
        if nbytes * num_ranks * sharing <= MOST_EXCHANGED or nbytes == EXCHANGED[0]
    ]


def time_copies(watch: Stopwatch) -> None:
    if watch.device.type == "cpu":
        return
    to_host, to_device = [], []
    for nbytes in (2**12, 2**20, 2**26):
        there = torch.zeros(nbytes, dtype=torch.uint8, device=watch.device)
        here = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        to_host.append((nbytes, partial(here.copy_, there, non_blocking=True)))
        to_device.append((nbytes, partial(there.copy_, here, non_blocking=True)))
    watch.curve("copy.to_host", to_host)
    watch.curve("copy.to_device", to_device)


def time_files(watch: Stopwatch, folder: Path) -> None:
    written: Points = []
    read: Points = []
    path = folder / f".zero-engine-disk-{os.getpid()}"
    try:
        for nbytes in DISK_BYTES:
            content = os.urandom(2**20) * (nbytes // 2**20)
            started_at = time.perf_counter()
            with path.open("wb") as file:
                file.write(content)
                os.fsync(file.fileno())
            written.append((nbytes, time.perf_counter() - started_at))
            with path.open("rb", buffering=0) as file:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                started_at = time.perf_counter()
                while file.read(2**20):
                    pass
                read.append((nbytes, time.perf_counter() - started_at))
    finally:
        path.unlink(missing_ok=True)
    watch.curves["file.write"], watch.curves["file.read"] = rising(written), rising(read)


class Blocks(nn.Module):
    """Transformer language model whose training is timed."""

    def __init__(
        self, depth: int, width: int, heads: int, vocab: int, *, activation: _Activation = gelu
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(_Block(width, heads, activation) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the mean cross entropy of the next token. ``ids``: int64, [batch, length]."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x[:, :-1])).flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, ids[:, 1:].flatten())


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, activation: _Activation) -> None:
        super().__init__()
        self.heads = heads
        self.activation = activation
        self.norms = nn.ModuleDict({"first": nn.LayerNorm(width), "second": nn.LayerNorm(width)})
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms["first"](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        attend = nn.functional.scaled_dot_product_attention
        x = x + self.out(attend(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(self.activation(self.up(self.norms["second"](x))))
        return y


def fit_operators(watch: Stopwatch) -> None:
    """Fit the time of a call outside its kernel, and factors for kernel times in training.

    It compares measured forward and backward passes of whole models with the sum of their kernels'
    curves. Small tensors yield the time per call. Large tensors yield the factors, because their
    data is in no cache and their results are in new memory.
    """
    watch.curves["operator"] = _constant(0.0)
    few, many = (_compare(watch, Blocks(n, 32, 2, 64), (2, 16), "float32") for n in DEPTHS)
    kernels_s = [found.products_s + found.others_s for found in (few, many)]
    beside = (many.seconds - few.seconds) - (kernels_s[1] - kernels_s[0])
    watch.curves["operator"] = _constant(max(beside, 0.0) / (many.calls - few.calls))
    is_cpu = watch.device.type == "cpu"
    shape, tokens = ((3, 384, 6, 2048), (4, 128)) if is_cpu else ((4, 2048, 16, 16384), (4, 1024))
    per_call = watch.curves["operator"][0][1] if is_cpu else 0.0
    for dtype in ("float32", "bfloat16"):
        models = (Blocks(*shape), Blocks(*shape, activation=_gelu_of_parts))
        plain, parts = (_compare(watch, model, tokens, dtype) for model in models)
        # Two models yield two equations, for the factors of products and of other operators.
        wanted = [found.seconds - per_call * found.calls for found in (plain, parts)]
        slope = parts.products_s / plain.products_s
        others = (wanted[1] - slope * wanted[0]) / (parts.others_s - slope * plain.others_s)
        others = min(max(others, 1.0), MOST_FACTOR)
        products = (wanted[0] - others * plain.others_s) / plain.products_s
        products = min(max(products, 1.0 / MOST_FACTOR), MOST_FACTOR)
        for name in [n for n in watch.curves if n.endswith(f".{dtype}")]:
            kind = name.split(".")[0]
            factor = products if kind in PRODUCTS else others
            if kind != "update":
                watch.curves[name] = [(n, s * factor) for n, s in watch.curves[name]]


def _gelu_of_parts(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * torch.pow(x, 3.0))))


@dataclass(frozen=True)
class _Compared:
    """Measured seconds of a model's forward and backward, and its kernels' seconds by curves."""

    seconds: float
    products_s: float
    others_s: float
    calls: int


def _compare(watch: Stopwatch, model: nn.Module, size: tuple[int, int], dtype: str) -> _Compared:
    config = zero_core.load_config(_config(dtype), world_size=1)
    ids = torch.zeros(size, dtype=torch.int64, device=watch.device)
    trace = trace_step(model, config, [ids], [model])
    assert trace.backward is not None, "a model of plain operators"
    calls = sum(trace.forward.values(), trace.backward)
    rates = Rates(1, 1, 1, {name: Curve(tuple(points)) for name, points in watch.curves.items()})
    kernels = {True: 0.0, False: 0.0}
    for call, number in calls.items():
        kernels[call.is_product] += number * rates.operator_s(call)
    model.to(device=watch.device, dtype=getattr(torch, dtype))

    def run() -> None:
        model.zero_grad()
        torch.autograd.backward(model(ids))

    return _Compared(watch.typical_seconds(run), kernels[True], kernels[False], calls.total())


def time_engine(watch: Stopwatch, threads: int, cores: int | None) -> None:
    """Fit the engine's time per pass and per step: tiny models' measured minus planned time."""
    ranks = adapters.find_ranks(None, None)
    watch.curves |= {"pass": _constant(0.0), "step": _constant(0.0)}
    curves = {name: Curve(tuple(points)) for name, points in watch.curves.items()}
    calibration = Calibration("", "", (Rates(ranks.size, threads, cores, curves),))
    config = {**_config("float32"), "zero_optimization": {"stage": 3 if ranks.size > 1 else 0}}
    rest = []
    for depth in DEPTHS:
        model = Blocks(depth, 32, 2, 64)
        ids = torch.zeros(2, 16, dtype=torch.int64, device=watch.device)
        planned = plan(
            model,
            config,
            ranks.size,
            ranks_per_node=ranks.size,
            example_inputs=[ids],
            device_type="cpu" if watch.device.type == "cpu" else "accelerator",
            calibration=calibration,
        )
        engine = zero_core.build(model, config)

        def run(engine: Any = engine, ids: Tensor = ids) -> None:
            engine.backward(engine(ids))
            engine.step()

        assert planned.step_time is not None, "there are inputs and a calibration"
        rest.append(watch.typical_seconds(run, is_together=True) - planned.step_time.total_s)
        engine.close()
    per_pass = max((rest[1] - rest[0]) / (2 * (DEPTHS[1] - DEPTHS[0])), 0.0)
    watch.curves["pass"] = _constant(per_pass)
    num_passes = 2 * (DEPTHS[0] + 1)
    watch.curves["step"] = _constant(max(rest[0] - num_passes * per_pass, 0.0))


def _config(dtype: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": dtype == "bfloat16"},
    }


def _constant(seconds: float) -> Points:
    return [(1.0, seconds)]


def measure(device: torch.device, *, cores: int | None, disk: Path | None) -> dict[str, Any]:
    """Measure this rank's rates, as a row of a calibration's JSON. Every rank must call it.

    ``cores`` is the number of cores, None with accelerators. ``disk`` is a folder on the disk of
    NVMe offload.
    """
    watch = Stopwatch(device)
    time_operators(watch)
    fit_operators(watch)
    time_updates(watch)
    time_copies(watch)
    if disk is not None:
        time_files(watch, disk)
    time_exchanges(watch)
    threads = torch.get_num_threads()
    time_engine(watch, threads, cores)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return {"ranks": ranks, "threads": threads, "cores": cores, "curves": watch.curves}


def merged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    curves = {}
    for name, points in rows[0]["curves"].items():
        curves[name] = [
            (amount, sum(row["curves"][name][i][1] for row in rows) / len(rows))
            for i, (amount, _) in enumerate(points)
        ]
    return {**rows[0], "curves": curves}


def main() -> None:
    folder, cores, disk = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        assert found is not None
        device = torch.device(found.type, rank)
        torch.accelerator.set_device_index(rank)
    if size > 1:
        backend = "gloo"
        if device.type != "cpu":
            backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    row = measure(
        device,
        cores=int(cores) if device.type == "cpu" else None,
        disk=Path(disk) if disk else None,
    )
    (folder / f"rank{rank}.json").write_text(json.dumps(row), encoding="utf-8")
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
