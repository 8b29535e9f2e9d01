"""``deepspeed.zero.TiledLinear``: a linear layer computed tile by tile.

Each tile is a linear layer of its own. Where no list of blocks surrounds the layer, stage 3 gathers
one tile at a time; within a block, which is gathered as a whole, tiles save no memory of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate, pairwise, product
from typing import Any, cast

import torch
from torch import Tensor, nn

from zero_engine.deepspeed.zero.partition_parameters import GatheredParameters


class TiledLinear(nn.Module):
    """`torch.nn.Linear`, of which ``in_splits * out_splits`` tiles are computed one by one.

    Attributes:
        linears: the tiles, by output part, then by input part; the bias is in the last of a row.
        in_parts, out_parts: where the parts of inputs and outputs begin and end.
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
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the tiles.

        Args:
            in_features, out_features, bias: as of `torch.nn.Linear`.
            in_splits, out_splits: parts of the input and the output, equal to within one.
            input_is_already_split: `forward` gets a sequence of ``in_splits`` tensors.
            combine_out_splits: join the parts of the output; else they are returned as a list.
            linear_cls: makes a tile.
            init_linear: a layer to copy values from.
            **kwargs: passed to ``linear_cls``.

        Raises:
            RuntimeError: a number of parts is not within [1, features].
        """
        super().__init__()
        bounds = []
        for name, splits, features in (
            ("in_splits", in_splits, in_features),
            ("out_splits", out_splits, out_features),
        ):
            if not 1 <= splits <= features:
                raise RuntimeError(f"TiledLinear: {name} = {splits}, expected 1 to {features}")
            size, rest = divmod(features, splits)
            bounds.append([0, *accumulate(size + (part < rest) for part in range(splits))])
        self.in_features, self.out_features = in_features, out_features
        self.in_splits, self.out_splits = in_splits, out_splits
        self.use_bias = bias
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts, self.out_parts = bounds
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(stop - start, high - low, bias=bias and stop == in_features, **kwargs)
                for start, stop in pairwise(self.in_parts)
            )
            for low, high in pairwise(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Any:
        """Return the output, [..., out_features], or the list of its parts."""
        if self.input_is_already_split and self.in_splits > 1:
            inputs = cast(Sequence[Tensor], input_)
            if len(inputs) != self.in_splits:
                raise ValueError(
                    f"TiledLinear: the input has {len(inputs)} parts, expected {self.in_splits}"
                )
        else:
            sizes = [stop - start for start, stop in pairwise(self.in_parts)]
            inputs = torch.split(cast(Tensor, input_), sizes, dim=-1)
        rows = [zip(cast(nn.ModuleList, row), inputs, strict=True) for row in self.linears]
        outputs = [reduce(self._add, (tile(part) for tile, part in row)) for row in rows]
        return self._join(outputs) if self.combine_out_splits else outputs

    def _add(self, total: Any, part: Any) -> Any:
        return total + part

    def _join(self, outputs: Sequence[Any]) -> Any:
        return torch.cat(list(outputs), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copy rank 0's weight and bias of ``other``, sharded or not. Every rank must call it.

        Raises:
            ValueError: the shapes differ.
        """
        if other.weight.shape != (self.out_features, self.in_features):
            raise ValueError(
                f"copy_params_from: expected a weight of {(self.out_features, self.in_features)}, "
                f"found {tuple(other.weight.shape)}"
            )
        if self.use_bias != (other.bias is not None):
            raise ValueError("copy_params_from: one of the two layers has a bias")
        spans = product(pairwise(self.out_parts), pairwise(self.in_parts))
        tiles = [cast(nn.Linear, t) for row in self.linears for t in cast(nn.ModuleList, row)]
        with GatheredParameters(other.parameters(recurse=False)):
            for tile, ((low, high), (start, stop)) in zip(tiles, spans, strict=True):
                params = list(tile.parameters(recurse=False))
                with GatheredParameters(params, modifier_rank=0):
                    tile.weight.copy_(other.weight[low:high, start:stop])
                    if tile.bias is not None:
                        tile.bias.copy_(other.bias[low:high])


class TiledLinearReturnBias(TiledLinear):
    """The same of layers that return ``(output, bias)``, as Megatron's do."""

    def _add(self, total: Any, part: Any) -> Any:
        return total[0] + part[0], total[1] if part[1] is None else part[1]

    def _join(self, outputs: Sequence[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        joined = super()._join([output for output, _ in outputs])
        return joined, super()._join(biases) if biases else None
