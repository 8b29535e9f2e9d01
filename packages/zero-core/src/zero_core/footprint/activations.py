"""A micro-batch on the meta device: bytes that autograd saves, and operators that run.

[Note: amounts]
The amount of a product (matrix product, convolution or attention) is a number of operations, as
counted by `torch.utils.flop_counter`. The amount of another operator is the bytes of the tensors
that it reads and writes. Lookups (`_LOOKUPS`) count the rows read, not the table. Views have 0.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zero_core._torch import pytree, storage_of
from zero_core.config import Config
from zero_core.errors import ConfigError
from zero_core.footprint.forecast import MemoryUse
from zero_core.layout.discovery import components, compute_dtype
from zero_core.runtime.host_inputs import page_locked_bytes
from zero_core.tiled import TiledForwards

_META = torch.device("meta")
_CODE_BYTES = 600 << 10
"""Bytes that the process keeps after the first product of a shape in bf16 (oneDNN 3, AVX-512):
measured 0.5 to 0.8 MiB."""
_LOOKUPS = ("embedding", "index", "index_select", "gather")
"""Operators that read only a part of their first argument."""
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
ATTENTION, ATTENTION_BACKWARD = "attention", "attention_backward"


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an operator."""

    kind: str  # name without overload, or `ATTENTION`, `ATTENTION_BACKWARD` or "view"
    dtype: str  # name of the first floating-point dtype of results and arguments
    amount: int  # see [Note: amounts]
    is_product: bool  # whether the amount is a number of operations
    nbytes: int = 0  # bytes that a product reads and writes, 0 for attention

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> Operator:
        """Describe a call of ``func`` that returned ``out``."""
        # Imported late, because it imports Triton with torch 2.15.
        flops: Any = importlib.import_module("torch.utils.flop_counter")
        packet = func.overloadpacket
        kind = packet.__name__
        read, written = _tensors((args, kwargs)), _tensors(out)
        floats = (t.dtype for t in (*written, *read) if t.is_floating_point())
        dtype = str(next(floats, torch.float32)).removeprefix("torch.")
        if kind.startswith(_ATTENTION):
            is_backward = "backward" in kind
            query, key, value = (t.shape for t in read[is_backward : 3 + is_backward])
            # Expand grouped heads, because the flop counter of torch 2.10 does not support groups.
            key, value = (query[:-2] + shape[-2:] for shape in (key, value))
            if is_backward:
                operations = flops.sdpa_backward_flop_count(read[0].shape, query, key, value)
            else:
                operations = flops.sdpa_flop_count(query, key, value)
            kind = ATTENTION_BACKWARD if is_backward else ATTENTION
            return cls(kind, dtype, int(operations), True)
        if packet in flops.flop_registry:
            operations = flops.flop_registry[packet](*args, **kwargs, out_val=out)
            return cls(kind, dtype, int(operations), True, _nbytes(read) + _nbytes(written))
        returns = func._schema.returns
        if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return cls("view", dtype, 0, False)
        if kind in _LOOKUPS:
            read = [*read[1:], *written]
        return cls(kind, dtype, _nbytes(read) + _nbytes(written), False)


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of ``tensors``. An expanded tensor counts as no more than its storage."""
    return sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors)


@dataclass(frozen=True)
class Trace:
    """Saved bytes and operators of one micro-batch on the meta device."""

    saved_bytes: int  # bytes that autograd saves: activations, and autocast's casts of weights
    # the same if blocks are recomputed: inputs of blocks, and saved bytes of the largest block and
    # of all code outside of blocks
    recomputed_bytes: int
    # calls of each operator in forward, by unit. Code before the first block counts for the root,
    # code between blocks for the earlier block, and code after the last block for the last unit
    forward: Mapping[int, Counter[Operator]]
    backward: Counter[Operator] | None  # operators of backward alone. None if not traced
    kept_bytes: int  # inputs of blocks, and other bytes saved before the first block
    border_bytes: int  # bytes of the largest input of a block
    epilogue_bytes: int  # bytes saved after the last block
    # bytes of each input of a block that may be moved to host memory, by unit
    moved: Mapping[int, Sequence[int]]
    freed_bytes: int  # device bytes freed by moving inputs to host memory

    def memory(self, config: Config, *, is_accelerated: bool) -> MemoryUse:
        """Return the bytes of activations, and of kernels that oneDNN compiles on a CPU.

        ``is_accelerated``: whether the compute device is not the host.
        """
        is_again, steps = config.is_recomputed, config.gradient_accumulation_steps
        whole = self.recomputed_bytes if is_again else self.saved_bytes
        each = self.kept_bytes if is_again else self.saved_bytes - self.epilogue_bytes
        host: dict[str, int] = {}
        if config.has_inputs_on_host and is_accelerated:
            # The inputs of two consecutive calls are on the device at the same time.
            sizes = [sum(of_unit) for of_unit in self.moved.values()]
            same = [2 * nbytes for nbytes in sizes] if config.is_vertical else []
            fetched = max([*(a + b for a, b in pairwise([0, *sizes])), *same], default=0)
            whole += fetched - self.freed_bytes
            each -= self.freed_bytes
            times = steps if config.is_vertical else 1
            if waiting := Counter(nbytes for unit in self.moved.values() for nbytes in unit):
                locked = (page_locked_bytes(n, m * times) for n, m in waiting.items())
                host["activations"] = sum(locked)
        if config.is_vertical:
            # Activations of all micro-batches, and for each a gradient of one block's input. Code
            # after the blocks, and recomputed blocks, run for one micro-batch at a time.
            whole += steps * (each + self.border_bytes) - each
        device = {"activations": whole}
        calls = set[Operator]().union(*self.forward.values(), self.backward or ())
        products = sum(c.is_product and c.dtype == "bfloat16" for c in calls)
        if products and not is_accelerated:  # oneDNN compiles a kernel per bf16 shape
            device["kernels"] = _CODE_BYTES * products
        return MemoryUse(device, host)


def trace_step(
    model: nn.Module,
    config: Config,
    inputs: Mapping[str, Any] | Sequence[Any],
    units: Sequence[nn.Module],
) -> Trace:
    """Run one forward on the meta device, and a backward if the forward returns a loss.

    Both run in the compute dtype, without ``torch_autocast``, and in the model's current mode. The
    loss is a 0-dim tensor that requires a gradient. ``inputs`` are keyword or positional arguments
    of one micro-batch. ``units`` are the units' modules, the root first.
    """

    def to_meta(value: Any, dtype: torch.dtype | None = config.compute_dtype) -> Any:
        if not isinstance(value, Tensor):
            return value
        meta = torch.empty_like(value, dtype=compute_dtype(value, dtype), device=_META)
        return meta.requires_grad_(value.requires_grad)

    values: dict[str, Any] = {}
    for name, param in model.named_parameters():
        if len(components(name, param)) > 1:
            raise ConfigError(
                f"parameter {name} is a quantized {type(param).__name__}, whose forward does not "
                "run on the meta device: plan without example_inputs, and add the activations "
                "yourself"
            )
        values[name] = to_meta(param)
    weights = [value for value in values.values() if value.requires_grad]
    values |= {name: to_meta(buffer, config.buffer_dtype) for name, buffer in model.named_buffers()}
    tracer = _Tracer(units, {storage_of(t) for t in values.values()})
    given = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    args, kwargs = pytree.tree_map(to_meta, given)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            hooks = torch.autograd.graph.saved_tensors_hooks(tracer.save, lambda t: t)
            stack.enter_context(hooks)
            stack.enter_context(_WithoutData())
            if config.tiled_compute is not None:
                stack.callback(TiledForwards(model, config.tiled_compute, None).remove)
            tracer.follow(stack)
            stack.enter_context(tracer)
            output = torch.func.functional_call(model, values, args, kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the model's forward does not run on the meta device ({error}): plan without "
            "example_inputs, and add the activations yourself"
        ) from error
    forward, tracer.calls = tracer.calls, {}
    loss = next((t for t in _tensors(output) if t.requires_grad and t.ndim == 0), None)
    backward: Counter[Operator] | None = None
    if loss is not None:
        # An operator without meta kernel raises. NotImplementedError is a RuntimeError.
        with suppress(RuntimeError, TypeError, ValueError):
            with tracer:
                torch.autograd.grad(loss, weights, allow_unused=True)
            backward = sum(tracer.calls.values(), Counter())
    # Autocast keeps a weight's cast until backward if autograd saves the weight. At stage 3 the
    # engine saves a trained weight's cast as the weight: [Note: saved tensors] in
    # `zero_core.core.saved`. 1-D weights stay in fp32.
    cast, is_sharded = config.autocast_dtype, config.zero_optimization.stage == 3
    casts = sum(
        param.numel() * cast.itemsize
        for name, param in model.named_parameters()
        if cast is not None
        and storage_of(values[name]) in tracer.weights
        and param.dtype is torch.float32
        and param.ndim > 1
        and not (is_sharded and param.requires_grad)
    )
    return tracer.trace(casts, forward, backward)


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that counts operators and the tensors that autograd saves, by unit."""

    def __init__(self, modules: Sequence[nn.Module], known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[int, Counter[Operator]] = {}
        self.weights: set[int] = set()  # storages of parameters and buffers that autograd saves
        self._unit = 0  # index of the unit that forward is in
        self._known = known
        self._index_of = {m: i for i, m in enumerate(modules) if m is not modules[0]}
        self._last = len(modules) - 1
        self._is_inside = False  # whether forward is in a block
        self._is_behind = False  # whether forward is after the last block
        # Storages are kept alive, so that no address is reused.
        self._inputs: dict[int, torch.UntypedStorage] = {}  # storages of blocks' inputs
        # saved storages, each with its unit, and whether it was saved after the last block
        self._saved: dict[int, tuple[torch.UntypedStorage, int, bool]] = {}
        self._sizes: dict[int, list[int]] = {}  # bytes of blocks' positional inputs
        self._moved: set[int] = set()  # storages of blocks' inputs that may be moved to the host
        self._stay: set[int] = set()  # storages that another reference keeps on the device

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        call = Operator.of(func, args, kwargs or {}, out)
        self.calls.setdefault(self._unit, Counter())[call] += 1
        return out

    def save(self, tensor: Tensor) -> Tensor:
        """Record a tensor that autograd saves. Serves as autograd's pack hook."""
        number = storage_of(tensor)
        if number in self._known:
            self.weights.add(number)
            return tensor
        where = (self._unit, self._is_behind)
        self._saved.setdefault(number, (tensor.untyped_storage(), *where))
        if not self._is_inside:
            self._stay.add(number)
        return tensor

    def trace(
        self,
        casts: int,
        forward: Mapping[int, Counter[Operator]],
        backward: Counter[Operator] | None,
    ) -> Trace:
        inputs = [storage.nbytes() for storage in self._inputs.values()]
        by_unit: Counter[int] = Counter()  # saved bytes besides blocks' inputs
        for number, (storage, unit, _) in self._saved.items():
            if number not in self._inputs:
                by_unit[unit] += storage.nbytes()
        in_front = by_unit[0]
        of_blocks = [by_unit.pop(block, 0) for block in self._index_of.values()]
        return Trace(
            sum(storage.nbytes() for storage, *_ in self._saved.values()) + casts,
            sum(inputs) + by_unit.total() + max(of_blocks, default=0) + casts,
            forward,
            backward,
            kept_bytes=sum(inputs) + in_front,
            border_bytes=max(inputs, default=0),
            epilogue_bytes=sum(s.nbytes() for s, _, is_behind in self._saved.values() if is_behind),
            moved=self._sizes,
            freed_bytes=sum(self._inputs[number].nbytes() for number in self._moved - self._stay),
        )

    def follow(self, stack: ExitStack) -> None:
        """Note the current unit and blocks' inputs by hooks, until ``stack`` is closed."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            for tensor in _tensors((args, kwargs)):
                if storage_of(tensor) not in self._known:
                    self._inputs[storage_of(tensor)] = tensor.untyped_storage()
            self._unit, self._is_inside = self._index_of[module], True
            positional = [t for t in args if isinstance(t, Tensor) and t.numel()]
            self._sizes.setdefault(self._unit, []).extend(t.nbytes for t in positional)
            self._moved |= {storage_of(t) for t in positional} & self._inputs.keys()
            others = _tensors(([a for a in args if not isinstance(a, Tensor)], kwargs))
            self._stay |= {storage_of(t) for t in others}

        def leave(module: nn.Module, *_: Any) -> None:
            self._is_inside = False
            index = self._index_of[module]
            self._is_behind = index == max(self._index_of.values())
            self._unit = self._last if self._is_behind else index

        for module in self._index_of:
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)


class _WithoutData(TorchFunctionMode):
    """Mode in which a forward on the meta device saves what fused attention kernels save.

    They save query, key, value, output and a number per row. Without this mode, torch on the meta
    device decomposes attention and saves its matrix. Conditions on masks get values as without
    padding, which takes the most memory: ``mask.all()`` is true, ``mask.any()`` is false, and
    ``mask.sum() == n`` is true if ``n`` is the number of elements.
    """

    def __init__(self) -> None:
        super().__init__()
        # By id: a truth value or element count. Tensors are kept alive, so no id is reused.
        self._values: dict[int, tuple[Tensor, int]] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        known = self._values[id(args[0])][1] if args and id(args[0]) in self._values else None
        if func is Tensor.__bool__ and type(known) is bool:
            return known
        result = func(*args, **(kwargs or {}))
        if func in _ALL or func in _ANY:
            self._values[id(result)] = (result, func in _ALL)
        elif func in _SUM and args and args[0].dtype is torch.bool and not result.ndim:
            self._values[id(result)] = (result, args[0].numel())
        elif func in _EQUAL and len(args) == 2 and type(args[1]) is int and type(known) is int:
            self._values[id(result)] = (result, args[1] == known)
        return result


_ALL, _ANY = (torch.all, Tensor.all), (torch.any, Tensor.any)
_SUM, _EQUAL = (torch.sum, Tensor.sum), (torch.eq, Tensor.eq, Tensor.__eq__)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run ``scaled_dot_product_attention``, by the fused CPU kernel if it supports the shapes."""
    is_mask_trained = attn_mask is not None and attn_mask.requires_grad
    if query.dim() != 4 or query.shape[-1] != value.shape[-1] or is_mask_trained:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output
