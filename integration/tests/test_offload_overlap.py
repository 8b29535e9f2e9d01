"""Host updates beside computation: in backward, and in the next forward."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import cpu_adam
import zero_core
import zero_offload
from zero_core.testing import Case, SimulatedRanks, on_ranks, train

TIMEOUT_S = 120.0
HOST = {"offload_optimizer": {"device": "cpu"}}


class GatedAdam:
    """The real kernel, which stops before its ``gate_at``-th call until the gate opens."""

    def __init__(self, gate_at: int) -> None:
        self.gate_at, self.num_calls = gate_at, 0
        self.gate, self.reached = threading.Event(), threading.Event()

    def adam_step(self, *args: Any, **kwargs: Any) -> None:
        if self.num_calls == self.gate_at:
            self.reached.set()
            assert self.gate.wait(TIMEOUT_S)
        self.num_calls += 1
        cpu_adam.adam_step(*args, **kwargs)


class Chain(nn.Module):
    """Three equal blocks that record when they run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.ran: list[int] = []
        self.ran_second = threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            self.ran.append(index)
            if index == 1:
                self.ran_second.set()
        return x.square().mean()


def _build(
    kernel: Any, model: nn.Module, case: Case, ranks: SimulatedRanks | None = None
) -> zero_core.Engine:
    def make(**arguments: Any) -> Any:
        return zero_offload.create_tier(**{**arguments, "adam_kernel": kernel})

    return zero_core.build(model, case.config(), state_tier=make, process_group=ranks)


def _build_gated(kernel: GatedAdam, **top: Any) -> zero_core.Engine:
    return _build(kernel, Chain(), Case(zero=HOST, top=top))


@pytest.mark.parametrize(
    ("work", "ran"), [(lambda e: e(torch.ones(2, 8)), [0, 1]), (lambda e: e.close(), [])]
)
def test_forward_and_close_wait_for_the_last_unit_alone(work: Any, ran: list[int]) -> None:
    kernel = GatedAdam(gate_at=2)  # one call for each block
    engine = _build_gated(kernel)
    train(engine, [torch.ones(2, 8)])
    assert kernel.reached.wait(TIMEOUT_S)
    engine.module.ran.clear()
    engine.module.ran_second.clear()
    thread = threading.Thread(target=work, args=[engine], daemon=True)
    thread.start()
    assert not ran or engine.module.ran_second.wait(TIMEOUT_S)
    thread.join(0.1)
    assert thread.is_alive()
    assert engine.module.ran == ran
    kernel.gate.set()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert engine.module.ran == [0, 1, 2][: 3 * len(ran)]


def test_without_anything_to_call_it_off_a_unit_is_updated_while_backward_goes_on() -> None:
    kernel = GatedAdam(gate_at=-1)
    engine = _build_gated(kernel, check_grad_overflow=False)
    tier: Any = engine.sharded_state.tier
    engine.backward(engine(torch.ones(2, 8)))
    tier.wait_params(0, tier.geometry.numel)
    assert kernel.num_calls == 3, "all are updated before step()"
    engine.step()
    tier.wait_params(0, tier.geometry.numel)
    assert kernel.num_calls == 3, "and none twice"


def _set_lr(engine: zero_core.Engine) -> None:
    engine.optimizer.param_groups[0]["lr"] = 0.5
    engine.step()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.clip_grad_norm_(1.0), "clipping gradients: too late"),
        (lambda e: e.optimizer.zero_grad(), "dropping gradients: too late"),
        (lambda e: e.states.get_full("blocks.0.weight", "grad"), "gradients: too late"),
        (lambda e: e.backward(e(torch.ones(2, 8))), "a further backward of the same step"),
        (_set_lr, "settings between backward and step: too late"),
    ],
)
def test_what_an_update_in_backward_forbids_is_refused_with_the_cure(call, message):
    engine = _build_gated(GatedAdam(gate_at=-1), check_grad_overflow=False)
    engine.backward(engine(torch.ones(2, 8)))
    with pytest.raises(RuntimeError, match=message) as caught:
        call(engine)
    assert "update_in_backward to false" in str(caught.value) or call is _set_lr


class SlowAdam:
    """The real kernel on a slow host."""

    def adam_step(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.05)
        cpu_adam.adam_step(*args, **kwargs)


class Skipping(Chain):
    """A chain whose second block is never used.

    The buffers of its batch norm are rank 0's in every forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](self.norm(torch.tanh(self.blocks[0](x)))).square().mean()


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_a_rank_whose_host_is_late_keeps_the_order_of_exchanges(ranks, stage):
    kernel = SlowAdam() if ranks.rank else cpu_adam
    engine = _build(kernel, Skipping(), Case(stage, zero=HOST), ranks)
    train(engine, [torch.randn(4, 8) for _ in range(3)])
    assert engine.full_state_dict()["blocks.2.weight"].isfinite().all()
    engine.close()


@pytest.mark.parametrize("ratio", [1.0, 0.3])
@pytest.mark.parametrize(("stage", "world_size"), [(1, 3), (2, 3), (3, 1), (3, 3)])
@on_ranks()
def test_two_bytes_go_down_and_two_come_up_per_offloaded_parameter(ranks, stage, ratio):
    zero = {"offload_optimizer": {"device": "cpu", "ratio": ratio}}
    engine = zero_core.build(Chain(), Case(stage, "bf16", zero=zero).config(), process_group=ranks)
    tier: Any = engine.sharded_state.tier
    up = tier.bytes_h2d
    train(engine, [torch.ones(2, 8)] * 3)
    tier.wait_params(0, tier.geometry.numel)
    split = tier.geometry.numel - round(ratio * tier.geometry.numel)
    updated = sum(max(0, p.stop - max(p.start, split)) for p in tier.geometry.pieces)
    assert tier.bytes_d2h == 3 * 2 * (tier.geometry.numel - split)
    assert tier.bytes_h2d - up == 3 * 2 * updated
    report = engine.memory_report()
    largest = max(s.padded_numel for s in engine.layout.segments)
    held = report.get("gradient shards", 0) + report.get("gradients under way", 0)
    # At stage 1 every rank has all gradients. Else none stays: two units' at most are there.
    assert stage == 1 or held <= 4 * (2 * largest) * 2, report
    engine.close()
