"""Losses and values of training under `zero_engine.deepspeed`, compared with torch."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zero_engine.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from tests.support.facade import (
    HOST,
    adamw,
    add_gradients,
    by_torch,
    check_values,
    config,
    inputs,
    make,
    net,
    on_ranks,
    square,
    train,
    update,
)
from zero_core.testing import Case, batch, make_model, run_ddp, spawn
from zero_engine import deepspeed
from zero_engine.deepspeed.utils import safe_set_full_fp32_param

STEPS = 3
SGD = {"type": "SGD", "params": {"lr": 0.1}}
LOSS = {"fp32": 4e-6, "bf16": 0.07}
VALUE = {"fp32": 2e-6, "bf16": 0.04}


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def _like_ddp(rank: int, world_size: int) -> None:
    """Compare with DDP, clipped at 1.0 (DeepSpeed's default), with and without set boundaries."""
    stages = range(4) if world_size > 1 else (0, 3)
    both = [(0, True), (3, True), *((stage, False) for stage in stages)]
    for dtype, ways in (("fp32", both), ("bf16", [(3, False)])):
        expected = run_ddp(Case(0, dtype, accumulation=2, clipping=1.0), rank, STEPS)
        for stage, is_declared in ways:
            case = Case(stage, dtype, accumulation=2, clipping=1.0)
            settings = case.config()
            del settings["gradient_clipping"]
            model = make_model()
            engine = make(model, model_parameters=model.parameters(), config=settings)
            losses = []
            for step, micro in itertools.product(range(STEPS), range(2)):
                if is_declared:
                    engine.set_gradient_accumulation_boundary(is_boundary=micro == 1)
                loss = engine(**batch(step, micro, rank))["loss"]
                assert engine.backward(loss).item() == pytest.approx(loss.item() / 2)
                losses.append(loss.item())
                if not is_declared or micro == 1:
                    engine.step()
            assert losses == pytest.approx(expected.losses, rel=0, abs=LOSS[dtype])
            found = engine.core.full_state_dict(dtype=torch.float32)
            for name, value in expected.values.items():
                assert (found[name] - value).abs().max() <= VALUE[dtype], name
            assert engine.global_steps == STEPS
            assert engine.global_samples == STEPS * 2 * 2 * world_size
            engine.destroy()


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_follows_ddp_with_clipping_at_1_by_default(world_size: int) -> None:
    spawn(_like_ddp, world_size)


def _shorter_last_step(rank: int, world_size: int) -> None:
    model, reference = net(), net()
    optimizer = _sgd(reference)
    engine = make(model, optimizer=_sgd(model), config=config(3, gradient_accumulation_steps=3))
    numbers = itertools.count()
    for length in (3, 1, 3):  # the second epoch has one micro-step instead of three
        for micro in range(length):
            number = next(numbers)
            engine.set_gradient_accumulation_boundary(micro == length - 1)
            loss = square(engine, inputs(number, rank)) / length
            engine.backward(loss, scale_wrt_gas=False)
            add_gradients(reference, number, world_size, over=length)
        engine.step()
        update(optimizer)
    check_values(engine, reference)
    engine.destroy()


def _without_data(rank: int, world_size: int) -> None:
    values = []
    for stage, is_idle in ((0, False), *((stage, True) for stage in range(4))):
        engine = make(config=config(stage, gradient_accumulation_steps=2))
        for micro in range(6):
            has_data = rank < world_size - 1 or micro % 2 == 0
            if is_idle and not has_data:
                engine.idle_step()
                continue
            loss = square(engine, inputs(micro, rank))
            engine.backward(loss if has_data else loss * 0.0)
            engine.step()
        assert engine.global_steps == 3
        values.append(engine.core.full_state_dict())
        engine.destroy()
        torch.testing.assert_close(values[-1], values[0], rtol=0, atol=0)


def _unmanaged(rank: int, world_size: int) -> None:
    expected = by_torch(world_size, [1, 3, 2], over=2)
    for stage, device in ((0, "none"), (1, "cpu"), (2, "none"), (3, "none"), (3, "cpu")):
        settings = config(
            managed_gradient_accumulation=False,
            gradient_accumulation_steps=2,
            check_grad_overflow=False,  # allows updates in backward, because nothing is clipped
            zero_optimization={"stage": stage, "offload_optimizer": {"device": device}},
        )
        engine = make(config=settings)
        seen: list[bool] = []  # boundary flags that a scheduler reads within step()
        engine.core.lr_scheduler = SimpleNamespace(
            step=lambda e=engine, s=seen: s.append(e.is_gradient_accumulation_boundary()),
            get_last_lr=lambda: [0.0],
        )
        numbers = itertools.count()
        for count in (1, 3, 2):
            for _ in range(count):
                engine.backward(square(engine, inputs(next(numbers), rank)))
                assert not engine.is_gradient_accumulation_boundary()
            engine.optimizer.step()
            assert engine.was_step_applied()
        assert seen == [True] * 3
        assert (engine.global_steps, engine.global_samples) == (3, 6 * 2 * world_size)
        check_values(engine, expected, rtol=1e-6)
        boundary = partial(engine.set_gradient_accumulation_boundary, True)
        for call in (engine.coalesce_grad_reduction().__enter__, boundary):
            with pytest.raises(RuntimeError, match="managed_gradient_accumulation = false"):
                call()
        engine.destroy()


def _coalesced(rank: int, world_size: int) -> None:
    expected = by_torch(world_size, [3, 1, 2])
    for stage in range(4):
        engine = make(stage=stage)
        numbers = itertools.count()
        for count in (3, 1, 2):
            with engine.coalesce_grad_reduction():
                for _ in range(count):
                    engine.backward(square(engine, inputs(next(numbers), rank)))
                with pytest.raises(RuntimeError, match="step after it"):
                    engine.step()
            engine.step()
            sent = [row for row in engine.core.comm_report() if row.collective == "reduce_scatter"]
            assert sum(row.num_calls for row in sent) <= len(engine.core.layout.units)
        check_values(engine, expected, rtol=1e-6)
        with engine.no_sync(), pytest.raises(AssertionError, match="inside no_sync"):
            engine.step()
        engine.set_train_batch_size(2 * world_size * 2)
        with pytest.raises(RuntimeError, match="a block is a whole step"):
            engine.coalesce_grad_reduction().__enter__()
        engine.set_train_batch_size(2 * world_size)
        for outer in (engine.no_sync, engine.coalesce_grad_reduction):
            with outer(), pytest.raises(RuntimeError, match="leave one out"):
                engine.coalesce_grad_reduction().__enter__()
        engine.destroy()


def _adversaries(rank: int, world_size: int) -> None:
    """Train a generator through a critic, which discards its gradient of the generator's loss."""
    dropped = (
        lambda engine: engine.zero_grad(),
        lambda engine: engine.optimizer.zero_grad(),
        lambda engine: engine.module.zero_grad(),
    )
    for drop, stage in zip((*dropped, dropped[0]), (2, 1, 3, 0), strict=True):
        references = nn.Linear(3, 3), net(1)
        optimizers = [adamw(m) for m in references]
        front, judge = make(copy.deepcopy(references[0]), stage=stage), make(net(1), stage=stage)
        for step in range(2):
            front.backward(square(judge, front(inputs(step, rank))))
            add_gradients(nn.Sequential(*references), step, world_size)
            front.step()
            update(optimizers[0])
            drop(judge)
            optimizers[1].zero_grad()
            judge.backward(square(judge, inputs(step + 50, rank)))
            add_gradients(references[1], step + 50, world_size)
            judge.step()
            update(optimizers[1])
        for reference, engine in zip(references, (front, judge), strict=True):
            check_values(engine, reference, rtol=1e-4, atol=1e-5)
            engine.destroy()


def test_steps_end_where_the_script_ends_them_on_two_ranks() -> None:
    checks = [_shorter_last_step, _without_data, _unmanaged, _coalesced, _adversaries]
    on_ranks(2, checks)


MICRO_STEPS = 4


class _Outputs(nn.Module):
    """Two outputs, one computed from the other, like Hugging Face's loss and logits."""

    def __init__(self, *, is_reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x.requires_grad_()
        if self.is_reentrant is None:
            y = self.first(x)
        else:
            y = checkpoint(self.first, x, use_reentrant=self.is_reentrant)
        y = self.second(y.tanh()) * self.frozen
        return {"loss": y.square().mean(), "logits": y}


def _both(model: Any, x: Tensor) -> Tensor:
    found = model(x)
    return found["loss"] + found["logits"].sum()


_WAYS: dict[str, Callable[[Any, Tensor], object]] = {
    "plain": lambda engine, x: _both(engine, x).backward(),
    "scaled": lambda engine, x: engine.scale(_both(engine, x)).backward(),
    "the engine's": lambda engine, x: engine.backward(_both(engine, x)),
    "past the engine": lambda e, x: e.backward(e(x)["loss"] + e.module(x)["logits"].sum()),
}


def _two_losses(engine: Any, x: Tensor) -> None:
    found = engine(x)
    found["loss"].backward(retain_graph=True)
    engine.backward(found["logits"].sum())


def _outputs(stage: int, *, is_reentrant: bool | None = None, **more: Any) -> Any:
    settings = config(stage, optimizer=SGD, gradient_accumulation_steps=MICRO_STEPS, **more)
    return make(_Outputs(is_reentrant=is_reentrant), config=settings)


def _check_average(engine: Any, *ways: Callable[[Any, Tensor], object]) -> None:
    model = _Outputs()
    optimizer = _sgd(model)
    for number in range(2 * MICRO_STEPS):
        ways[number % len(ways)](engine, inputs(number, engine.global_rank))
        engine.step()
        add_gradients(model, number, engine.world_size, over=MICRO_STEPS, loss=_both)
        if number % MICRO_STEPS == MICRO_STEPS - 1:
            update(optimizer)
    check_values(engine, model)
    engine.destroy()


def _every_backward(rank: int, world_size: int) -> None:
    for stage, recomputed in ((0, (True,)), (2, (False,)), (3, (False, True))):
        for names in (["past the engine"], ["plain", "scaled", "the engine's"]):
            _check_average(_outputs(stage), *(_WAYS[name] for name in names))
        for is_reentrant in recomputed:
            _check_average(_outputs(stage, is_reentrant=is_reentrant), _WAYS["plain"])
    _check_average(_outputs(0), _two_losses)


def _small_parameters(rank: int, world_size: int) -> None:
    for threshold, further in ((100_000, {}), (10, {}), (10, HOST)):
        plain = net()
        optimizer = _sgd(plain)
        zero = {"stage": 3, "stage3_param_persistence_threshold": threshold, **further}
        engine = make(config=config(optimizer=SGD, zero_optimization=zero))
        for step in range(3):
            train(engine, 1, step)
            add_gradients(plain, step, world_size)
            update(optimizer)
            for param, expected in zip(engine.module.parameters(), plain.parameters(), strict=True):
                is_small = expected.numel() <= threshold
                assert (param.ds_status == ZeroParamStatus.AVAILABLE) == is_small
                if is_small:
                    torch.testing.assert_close(param.detach(), expected.detach())
        bias = engine.module[2].bias
        with deepspeed.zero.GatheredParameters([bias], modifier_rank=0):
            bias.data.fill_(rank)
        assert bias.item() == 0
        safe_set_full_fp32_param(bias, torch.tensor([0.5]))
        assert bias.item() == 0.5
        engine.destroy()


def test_backwards_are_averaged_and_small_parameters_whole_on_two_ranks() -> None:
    on_ranks(2, [_every_backward, _small_parameters])


def test_parameter_unfrozen_later_is_averaged_too() -> None:
    model = _Outputs()
    optimizer = _sgd(model)
    model.first.requires_grad_(False)
    settings = config(gradient_accumulation_steps=MICRO_STEPS)
    engine = make(model, optimizer=optimizer, config=settings)
    model.first.requires_grad_(True)
    _check_average(engine, _WAYS["plain"])


@pytest.mark.parametrize("end", [lambda e: e.destroy(), lambda e: e.core.unwrap()])
def test_ended_engine_divides_no_gradient(end: Callable[[Any], Any]) -> None:
    engine, seen = _outputs(0), []
    end(engine)
    engine.module.second.bias.register_hook(lambda grad: seen.append(grad.clone()))
    engine.module(torch.ones(2, 3))["logits"].sum().backward()
    torch.testing.assert_close(seen, [torch.full((2,), 2.0)])


@pytest.mark.parametrize("stage", range(4))
def test_zero_grad_within_an_accumulation_drops_its_part_and_says_so(stage, caplog):
    engine, other = make(config=config(stage, gradient_accumulation_steps=2)), net()
    optimizer = adamw(other)
    for number in range(2 * STEPS):
        train(engine, 1, number)
        if number % 2 == 0:
            engine.zero_grad()
        else:
            add_gradients(other, number, 1, over=2)
            update(optimizer)
    check_values(engine, other)
    assert caplog.text.count("zero_grad() drops the gradient since") == (stage >= 2)


def test_at_stage_0_what_is_set_on_parameters_counts_in_step_without_a_backward(caplog):
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2}
    engine, masters = make(config=config(fp16=fp16)), net().half().float()
    optimizer = adamw(masters)
    for value, scale in ((0.5, 16), (math.inf, 8), (math.nan, 4), (-0.25, 4)):
        for param, master in zip(engine.parameters(), masters.parameters(), strict=True):
            param.grad = torch.full_like(param, value)
            master.grad = torch.full_like(master, value / engine.core.loss_scale)
        if math.isfinite(value):
            optimizer.step()
        engine.step()
        assert engine.core.loss_scale == scale
    assert caplog.text.count("not finite (param.grad was changed to values that are not") == 2
    check_values(engine, masters, atol=1e-3)


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_initial_sum_of_a_group_of_adagrad_is_its_constructors_as_in_torch(offload: str) -> None:
    made = []
    for model in (net(), net()):
        first = {"params": list(model[0].parameters()), "initial_accumulator_value": 0.1}
        groups = [first, {"params": list(model[2].parameters()), "lr": 0.3}]
        made.append((model, torch.optim.Adagrad(groups, lr=0.1)))
    (model, given), (alone, optimizer) = made
    zero = {"stage": 1, "offload_optimizer": {"device": offload}}
    engine = make(model, optimizer=given, config=config(zero_optimization=zero))
    train(engine, 2)
    for step in range(2):
        add_gradients(alone, step, 1)
        update(optimizer)
    check_values(engine, alone)
