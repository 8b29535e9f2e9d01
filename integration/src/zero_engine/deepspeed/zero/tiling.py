"""``deepspeed.zero.TiledLinear``, which is one linear layer here.

DeepSpeed's tiles bound the parameters that stage 3 gathers at a time. This engine gathers whole
units. ``tiled_compute`` in the configuration bounds the activations of long sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zero_engine.deepspeed.zero.partition_parameters import GatheredParameters


class TiledLinear(nn.Module):
    """`torch.nn.Linear` whose input and output may be split along the last dimension.

    Args:
        in_splits, out_splits: numbers of parts of the input and the output.
        input_is_already_split: `forward` gets a sequence of ``in_splits`` tensors.
        combine_out_splits: False returns the list of the output's parts.
        linear_cls: class of the layer. It gets ``**kwargs``.
        init_linear: a layer to copy the values from.

    Raises RuntimeError if a number of parts is not within [1, features].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., Any] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (
            ("in_splits", in_splits, in_features),
            ("out_splits", out_splits, out_features),
        ):
            if not 1 <= splits <= features:
                raise RuntimeError(f"TiledLinear: {name} = {splits}, expected 1 to {features}")
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.linear = linear_cls(in_features, out_features, bias=bias, **kwargs)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """Return the output, [..., out_features], or the list of its parts."""
        if self.input_is_already_split and self.in_splits > 1:
            if len(input_) != self.in_splits:
                raise ValueError(
                    f"TiledLinear: the input has {len(input_)} parts, expected {self.in_splits}"
                )
            input_ = torch.cat(list(input_), dim=-1)
        output = self.linear(input_)
        return output if self.combine_out_splits else self._split(output)

    def _split(self, output: Any) -> list[Any]:
        return list(output.tensor_split(self.out_splits, dim=-1))

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copy rank 0's weight and bias of ``other``, sharded or not. Every rank must call it.

        Raises ValueError if the shapes differ.
        """
        own: nn.Linear = self.linear
        if other.weight.shape != own.weight.shape:
            raise ValueError(
                f"copy_params_from: expected a weight of {tuple(own.weight.shape)}, "
                f"found {tuple(other.weight.shape)}"
            )
        if (own.bias is None) != (other.bias is None):
            raise ValueError("copy_params_from: one of the two layers has a bias")
        with (
            GatheredParameters(other.parameters(recurse=False)),
            GatheredParameters(own.parameters(recurse=False), modifier_rank=0),
        ):
            own.weight.copy_(other.weight)
            if own.bias is not None:
                own.bias.copy_(other.bias)


class TiledLinearReturnBias(TiledLinear):
    """`TiledLinear` for layers that return ``(output, bias)``, such as Megatron's."""

    def _split(self, output: Any) -> list[Any]:
        product, bias = output
        biases = [bias] * self.out_splits if bias is None else super()._split(bias)
        return list(zip(super()._split(product), biases, strict=True))
