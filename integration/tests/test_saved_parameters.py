"""Parameters that an autograd.Function or a checkpoint has saved, as backward reads them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import _CheckpointFrame, checkpoint

from tests.support.facade import check_values, update
from zero_core.testing import LR, spawn
from zero_engine import deepspeed
from zero_engine.deepspeed import zero

VOCAB = 12_000  # a head of more elements than the smallest tail
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "SGD", "params": {"lr": LR}},
}


class _Head(torch.autograd.Function):
    """``hidden @ weight.T + bias``, whose backward gathers both, as fused losses do."""

    found: list[tuple[Any, ...]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        return torch.addmm(bias, hidden, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight, bias = ctx.saved_tensors
        _look(hidden, weight, bias)
        with zero.GatheredParameters([weight, bias]):
            return grad @ weight, grad.t() @ hidden, grad.sum(0)


def _look(hidden: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Record in ``_Head.found`` what a library that serves DeepSpeed reads."""
    if hasattr(weight, "ds_status"):
        missing = [p for p in (weight, bias) if p.ds_status != zero.ZeroParamStatus.AVAILABLE]
        _Head.found.append((missing, weight.ds_id, weight.ds_shape, bias.ds_numel))
        assert not hasattr(hidden, "ds_id")


def _recomputed_head(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if torch._C._current_graph_task_id() != -1:  # in a backward
        _look(hidden, weight, bias)
    return torch.addmm(bias, hidden, weight.t())


class _Model(nn.Module):
    """A model that uses its head's weights without calling the head.

    A tied head is in the root, another one in the tail.
    """

    def __init__(self, *, is_tied: bool, is_recomputed: bool) -> None:
        super().__init__()
        self.is_recomputed = is_recomputed
        self.embed = nn.Embedding(VOCAB, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, VOCAB)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        with zero.GatheredParameters([self.head.weight, self.head.bias]):
            saved = (hidden, self.head.weight, self.head.bias)
            if self.is_recomputed:
                return checkpoint(_recomputed_head, *saved, use_reentrant=False).square().mean()
            return _Head.apply(*saved).square().mean()


def _trains(rank: int, world_size: int) -> None:
    get_inputs = vars(_CheckpointFrame).get("get_inputs")
    names = set(dir(Tensor))  # of which torch.compile takes each for an attribute of every tensor
    for is_tied, is_recomputed in itertools.product((True, False), repeat=2):
        torch.manual_seed(0)
        expected = DistributedDataParallel(_Model(is_tied=is_tied, is_recomputed=is_recomputed))
        optimizer = torch.optim.SGD(expected.parameters(), lr=LR)
        torch.manual_seed(0)
        model = _Model(is_tied=is_tied, is_recomputed=is_recomputed)
        engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
        assert set(dir(Tensor)) == names
        for step in range(2):
            ids = torch.arange(8) * (step + 2 + rank) % 13
            wanted = expected(ids)
            wanted.backward()
            update(optimizer)
            loss = engine(ids)
            engine.backward(loss)
            engine.step()
            assert torch.equal(loss, wanted)
        weight = model.head.weight
        assert _Head.found == [([], weight.ds_id, (VOCAB, 6), VOCAB)] * 2
        _Head.found.clear()
        check_values(engine, expected.module, rtol=0, atol=0)
        engine.destroy()
    assert "saved_tensors" not in vars(BackwardCFunction)
    assert vars(_CheckpointFrame).get("get_inputs") is get_inputs
    assert not hasattr(torch.ones(2), "ds_status")
    with pytest.raises(AttributeError, match="has no attribute 'ds_status'"):
        _ = model.head.weight.data.ds_status


def test_a_saved_parameter_has_its_ds_attributes_in_backward() -> None:
    spawn(_trains, 2)
