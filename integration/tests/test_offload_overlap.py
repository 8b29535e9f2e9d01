"""Host updates that overlap with backward or the next forward, and updates that are undone."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cpu_adam
import zero_core
import zero_offload
from tests.support.host_optimizers import OPTIMIZERS
from zero_core.testing import Case, SimulatedRanks, batch, make_model, on_ranks, train

TIMEOUT_S = 120.0
HOST = {"offload_optimizer": {"device": "cpu"}}


class GatedAdam:
    """The real kernel, whose call number ``gate_at`` (from 0) blocks until the gate opens."""

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
    def adam_step(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.05)
        cpu_adam.adam_step(*args, **kwargs)


class Skipping(Chain):
    """A chain that never uses its second block. Each forward broadcasts rank 0's buffers."""

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


ADAMW = {"optimizer": {"type": "AdamW", "params": OPTIMIZERS["AdamW"]}}
BY_DEFAULT = {"update_in_backward": None, "undo_buffer_size": 1 << 20}


def config_of(
    stage: int = 3, dtype: str = "fp32", clipping: float = 1.0, top: Any = None, **offload: Any
) -> dict[str, Any]:
    """Return a config with updates in backward, unless ``offload`` overrides the setting."""
    block = {"device": "cpu", "update_in_backward": True, **offload}
    zero = {"offload_optimizer": block}
    return Case(stage, dtype, clipping=clipping, zero=zero, top={**ADAMW, **(top or {})}).config()


def build(config: dict[str, Any]) -> zero_core.Engine:
    return zero_core.build(make_model(), config)


def backward(engine: zero_core.Engine, step: int, factor: float = 1.0) -> None:
    """Run forward and backward, then wait until the host has completed all early updates."""
    engine.backward(factor * engine(**batch(step, 0, engine.rank))["loss"])
    tier: Any = engine.sharded_state.tier
    tier.file_traffic()  # waits for the host


def count(engine: zero_core.Engine, what: str) -> int:
    tier: Any = engine.sharded_state.tier
    return sum(getattr(part.tier, f"num_{what}") for part in tier.report() if part.is_host)


def num_kept(**offload: Any) -> int:
    engine = build(config_of(2, clipping=1e9, **offload))
    for step in range(3):
        backward(engine, step)
        engine.step()
    assert count(engine, "undone") == 0
    found = count(engine, "kept")
    engine.close()
    return found


def test_units_beyond_the_size_of_the_log_and_the_devices_are_updated_late() -> None:
    nothing, some, more, all_ = (
        num_kept(undo_buffer_size=size) for size in (1, 8_000, 18_000, None)
    )
    assert 0 == nothing < some < more < all_
    assert 0 == num_kept(ratio=0.0) < num_kept(ratio=0.3) < all_


def test_what_cannot_be_undone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(zero_core.ConfigError, match="states in a file cannot be undone"):
        build(config_of(device="nvme", nvme_path=str(tmp_path)))
    with pytest.raises(zero_core.ConfigError, match="update_in_backward needs updates that can"):
        build(config_of(top={"optimizer": {"type": "NAdam", "params": {}}}))
    config = config_of(top={"optimizer": {"type": "Adamax", "params": {"lr": 1e-2}}})
    with pytest.raises(zero_core.ConfigError, match="updates of Adamax with these settings"):
        zero_core.plan(make_model(), config, 1, device_type="cpu")


def test_with_a_size_of_the_log_steps_begin_in_backward_else_after_the_decision(caplog):
    caplog.set_level("INFO", logger="zero_core.step.update")
    engine = build(config_of(clipping=1e-3, **BY_DEFAULT))
    assert "updated in backward, with" in caplog.text
    backward(engine, 0)
    engine.step()
    engine.sharded_state.tier.wait_params(0, 1)
    assert count(engine, "undone")
    engine.close()
    engine = build(config_of(update_in_backward=None))
    assert "undo log" not in engine.memory_report()
    engine.close()


def test_units_of_an_optimizer_with_a_step_pre_hook_are_updated_after_backward() -> None:
    def train_by(is_early: bool | None) -> dict[str, torch.Tensor]:
        model = make_model()
        given = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        (group,) = given.param_groups
        given.register_step_pre_hook(lambda *_: group.update(lr=group["lr"] / 2))
        top = {"check_grad_overflow": False}
        config = config_of(2, clipping=0.0, top=top, update_in_backward=is_early)
        engine = zero_core.build(model, config, optimizer=given)
        train(engine, [batch(step, 0, 0) for step in range(3)])
        return engine.full_state_dict()

    torch.testing.assert_close(train_by(None), train_by(False), rtol=0.0, atol=0.0)
    with pytest.raises(zero_core.ConfigError, match="the optimizer has a step pre-hook"):
        train_by(True)
