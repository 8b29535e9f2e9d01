"""Quantized model with adapters, for tests of the storage formats of quantization libraries.

Each `_Block` of `Adapted` has a frozen weight in each of three formats: a tensor subclass that
wraps plain tensors (like torchao), plain parameters for 8-bit floats and scales, and a parameter
with metadata in an attribute (like bitsandbytes). `quantize` makes the 4-bit codes of the first and
last format, two per byte, as in QLoRA (arXiv 2305.14314, section 3) but with equidistant levels.
The autograd node of `Product` keeps these codes where no saved-tensor hook sees them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from zero_core.testing.models import seeded

BLOCK = 8


class ScaleState:
    """Metadata of packed codes: scales, an unused offset, and, in a nested object, the levels."""

    def __init__(self, absmax: Tensor, table: Tensor, shape: torch.Size) -> None:
        self.absmax = absmax
        self.offset = torch.tensor(0.0)
        self.shape = shape
        self.inner = SimpleNamespace(values=table)
        self.is_repacked = False


def _drawn(width: int) -> Tensor:
    values: Tensor = torch.randn(width, width) / width**0.5
    return values


def _table() -> Tensor:
    return torch.linspace(-1.0, 1.0, 16)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (uint8 [numel / 2, 1]), and the largest magnitude of each `BLOCK` values."""
    blocks = weight.detach().reshape(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    nearest = (blocks / absmax[:, None])[..., None].sub(_table()).abs().argmin(-1)
    codes = nearest.to(torch.uint8).view(-1, 2)
    return (codes[:, :1] << 4) | codes[:, 1:], absmax


def dequantize(codes: Tensor, absmax: Tensor, table: Tensor, shape: torch.Size) -> Tensor:
    """Return the weight that `quantize` encoded. ``table`` has the level of each code."""
    flat = codes.reshape(-1, 1)
    values = table[torch.cat((flat >> 4, flat & 15), 1).long()]
    return (values.view(-1, BLOCK) * absmax[:, None]).view(shape)


def _weight(codes: Tensor, state: ScaleState, *, is_repacked: bool) -> Tensor:
    if is_repacked:
        codes = (codes >> 4) | (codes << 4)
    return dequantize(codes, state.absmax, state.inner.values, state.shape)


class Product(torch.autograd.Function):
    """Product ``x @ weight.t()`` of a quantized weight, with its codes kept in ``ctx``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, state: ScaleState) -> Tensor:
        ctx.codes, ctx.state, ctx.is_repacked = codes.view(-1), state, state.is_repacked
        return x @ _weight(codes, state, is_repacked=state.is_repacked).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Compute the gradient of ``x`` from the codes' current values."""
        return grad @ _weight(ctx.codes, ctx.state, is_repacked=ctx.is_repacked), None, None


class PackedParam(nn.Parameter):
    """Parameter of packed codes with metadata in the attribute ``state``."""

    state: ScaleState

    @classmethod
    def of(cls, weight: Tensor) -> PackedParam:
        codes, absmax = quantize(weight)
        param: PackedParam = torch.Tensor._make_subclass(cls, codes, False)
        param.state = ScaleState(absmax, _table(), weight.shape)
        return param

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedParam:
        param: PackedParam = torch.Tensor._make_subclass(type(self), self.data.clone(), False)
        param.state = copy.deepcopy(self.state, memo)
        return param


class WrappedCodes(Tensor):
    """Tensor subclass with a weight's shape and dtype that wraps codes and scales."""

    @staticmethod
    def __new__(cls, codes: Tensor, absmax: Tensor, shape: torch.Size) -> WrappedCodes:
        made: WrappedCodes = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.float32, device=codes.device
        )
        return made

    def __init__(self, codes: Tensor, absmax: Tensor, shape: torch.Size) -> None:
        self.codes, self.absmax = codes, absmax

    @classmethod
    def of(cls, weight: Tensor) -> WrappedCodes:
        return cls(*quantize(weight), weight.shape)

    def dequantize(self) -> Tensor:
        return dequantize(self.codes, self.absmax, _table(), self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[()]]:
        return ["codes", "absmax"], ()

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, Tensor], context: tuple[()], size: torch.Size, stride: Any
    ) -> WrappedCodes:
        return cls(inner["codes"], inner["absmax"], size)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            raise TypeError(f"{func} of {cls.__name__}")
        own = args[0]
        made = cls(func(own.codes), func(own.absmax), own.shape)
        return return_and_correct_aliasing(  # type: ignore[no-untyped-call]
            func, args, kwargs or {}, made
        )


class AttachedLinear(nn.Module):
    """Linear layer of a `PackedParam`. The first forward in evaluation mode repacks its codes."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = PackedParam.of(weight)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if not self.training and not weight.state.is_repacked:  # swap the two codes of each byte
            weight.data = ((weight.data >> 4) | (weight.data << 4)).view(-1)
            weight.state.absmax = weight.state.absmax * 1.0
            weight.state.is_repacked = True
        product: Tensor = Product.apply(x, weight, weight.state)  # type: ignore[no-untyped-call]
        return product


class WrappedLinear(nn.Module):
    """Linear layer of `WrappedCodes`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(WrappedCodes.of(weight), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        state = ScaleState(weight.absmax, _table(), weight.shape)
        product: Tensor = Product.apply(x, weight.codes, state)  # type: ignore[no-untyped-call]
        return product


class PlainLinear(nn.Module):
    """Linear layer whose weight is a column-major float8_e4m3fn times one scale per row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        weight = _drawn(width)
        scale = weight.abs().amax(1, keepdim=True) / 448.0
        codes = (weight / scale).t().contiguous().to(torch.float8_e4m3fn).t()
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.float() * self.scale.float())


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.first = WrappedLinear(_drawn(width))
        down, up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        self.adapter = nn.Sequential(OrderedDict(down=down, up=up))
        self.second = PlainLinear(width)
        # The block's backward starts with this layer, before any saved tensor is unpacked.
        self.last = AttachedLinear(_drawn(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = torch.tanh(self.first(y) + self.adapter(y))
        y = torch.tanh(self.second(y))
        total: Tensor = x + self.last(y)
        return total


class Adapted(nn.Module):
    """Frozen quantized model with trainable adapters. ``width`` must be a multiple of `BLOCK`."""

    def __init__(self, width: int = 24, depth: int = 4) -> None:
        super().__init__()
        with seeded(0):
            self.inlet = AttachedLinear(_drawn(width))
            self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
            self.outlet = WrappedLinear(_drawn(width))

    def forward(self, x: Tensor, *, is_reversed: bool = False) -> Tensor:
        """Return a loss of ``x`` [batch, width]. ``is_reversed``: call the last block first."""
        x = self.inlet(x)
        for block in reversed(self.blocks) if is_reversed else self.blocks:
            x = block(x)
        y: Tensor = self.outlet(x)
        return y.float().square().mean()
