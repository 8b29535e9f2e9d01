"""GPT-2's matrix products in fp32, for processors without 16-bit products.

Without AVX-512 torch computes bf16 products element by element. The gradient of a layer's input
took 50 times as long as in fp32 (torch 2.13, AVX2, layers of 2048 x 8192). Here each operand is
converted to fp32 for its product, one layer at a time, and the result is rounded back. The fp32
weight is freed afterwards, because autograd saves the 16-bit one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def has_16_bit_products() -> bool:
    """Return whether this processor computes bf16 products as fast as fp32 products."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def widen_products(model: nn.Module) -> None:
    """Make all `Conv1D` layers of ``model`` compute in fp32. Parameters and results stay 16-bit."""
    for module in model.modules():
        if isinstance(module, Conv1D):
            module.__class__ = _WideConv1D


class _WideConv1D(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        found: Tensor = _WideProduct.apply(  # type: ignore[no-untyped-call]
            flat, self.weight, self.bias
        )
        return found.view(*x.shape[:-1], self.nf)


class _WideProduct(torch.autograd.Function):
    """``x @ weight + bias`` in fp32: x [rows, inputs], weight [inputs, outputs], bias [outputs]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias.float(), x.float(), weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0].float()
        of_x = (grad @ weight.float().t()).to(x.dtype)
        of_weight = (x.float().t() @ grad).to(weight.dtype)
        return of_x, of_weight, grad.sum(0).to(weight.dtype)
