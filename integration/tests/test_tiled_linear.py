"""DeepSpeed's TiledLinear computes what the whole layer does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zero_engine.deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias

from tests.support.facade import make, on_ranks, square
from zero_engine import deepspeed


def _whole(ins: int = 7, outs: int = 5) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(ins, outs)


class _Tiles(nn.Module):
    """Has the tiles one level below the root, where each becomes a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.tiled = TiledLinear(7, 5, in_splits=3, out_splits=2, init_linear=_whole())
        self.head = _whole(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.tiled(x)))
        return y


def _trains(rank: int, world_size: int) -> None:
    values = []
    for stage in (0, 3):
        engine = make(_Tiles(), stage=stage)
        assert len(engine.core.layout.units) == 1 + 6
        for _ in range(3):
            engine.backward(square(engine, torch.full((2, 7), 1.0 + rank)))
            engine.step()
        values.append(engine.core.full_state_dict())
        engine.destroy()
    torch.testing.assert_close(*values, rtol=0, atol=0)


def _copies_shards(rank: int, world_size: int) -> None:
    whole, ones = _whole(6, 5), torch.ones(6)
    with deepspeed.zero.Init():
        layer = _whole(6, 5)
    owned = make(nn.Sequential(nn.Linear(6, 5)), stage=3)
    with deepspeed.zero.GatheredParameters(owned.module.parameters(), modifier_rank=0):
        owned.module[0].load_state_dict(whole.state_dict())
    for source in (layer, owned.module[0]):
        tiled = TiledLinear(6, 5, in_splits=2, out_splits=2, init_linear=source)
        torch.testing.assert_close(tiled(ones), whole(ones))
    with deepspeed.zero.Init():
        sharded = TiledLinear(6, 5, in_splits=3)
    sharded.copy_params_from(layer)
    with deepspeed.zero.GatheredParameters(sharded.parameters()):
        torch.testing.assert_close(sharded(ones), whole(ones))
    owned.destroy()


def test_tiles_train_and_are_copied_from_shards_on_two_ranks() -> None:
    on_ranks(2, [_trains, _copies_shards])


def test_tiles_compute_what_the_whole_layer_does() -> None:
    whole, inputs = _whole(), torch.randn(4, 7)
    expected = whole(inputs)
    for ins, outs in itertools.product((1, 3, 7), (1, 2, 5)):
        tiled = TiledLinear(7, 5, in_splits=ins, out_splits=outs, init_linear=whole)
        torch.testing.assert_close(tiled(inputs), expected)
    split = {"input_is_already_split": True, "combine_out_splits": False}
    tiled = TiledLinear(7, 5, in_splits=2, out_splits=2, **split)
    tiled.copy_params_from(whole)
    parts = tiled(inputs.split([4, 3], dim=-1))
    assert [part.shape[-1] for part in parts] == [3, 2]
    torch.testing.assert_close(torch.cat(parts, -1), expected)
    with pytest.raises(RuntimeError, match=r"in_splits = 8, expected 1 to 7"):
        TiledLinear(7, 5, in_splits=8)
    with pytest.raises(ValueError, match="has a bias"):
        TiledLinear(7, 5, bias=False).copy_params_from(whole)


class _Apart(nn.Linear):
    """Returns its bias beside the product, as Megatron's layers do."""

    def forward(self, input: Tensor) -> Any:
        return nn.functional.linear(input, self.weight), self.bias


def test_tiles_that_return_their_bias() -> None:
    tiled = TiledLinearReturnBias(7, 5, in_splits=2, out_splits=3, linear_cls=_Apart)
    whole, inputs = _whole(), torch.randn(4, 7)
    tiled.copy_params_from(whole)
    output, bias = tiled(inputs)
    assert (output.shape, bias.shape) == ((4, 5), (5,))
    torch.testing.assert_close(output + bias, whole(inputs))
