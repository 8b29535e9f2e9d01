"""`zero_engine.deepspeed` is called as DeepSpeed is, and trains as DistributedDataParallel does."""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib.util
import itertools
import math
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from zero_core import ConfigError
from zero_core.testing import (
    Call,
    Case,
    Failure,
    batch,
    described,
    failing,
    make_model,
    run_ddp,
    spawn,
)
from zero_engine import deepspeed
from zero_engine.deepspeed.config import attributes
from zero_engine.deepspeed.engine.facts import UNSERVED, Facts
from zero_engine.deepspeed.errors import NotServedError

STEPS = 4
INITIALIZE = sys.modules["zero_engine.deepspeed.initialize"].__file__
DEFAULT_CLIPPING = 1.0
LOSS = {"fp32": 4e-6, "bf16": 0.07}
VALUE = {"fp32": 2e-6, "bf16": 0.04}


def _config(stage: int = 0, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def _linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def _inputs(step: int, rank: int = 0) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(7 * step + rank))


def _engine(config: dict[str, Any] | None = None, **arguments: Any) -> Any:
    engine, *_ = deepspeed.initialize(model=_linear(), config=config or _config(), **arguments)
    return engine


def _train(engine: Any, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = engine(_inputs(step, engine.global_rank)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# ------------------------------------------------------------------- as with DDP


def _by_count(engine: Any, micro: int, accumulation: int) -> bool:
    return True


def _by_declaration(engine: Any, micro: int, accumulation: int) -> bool:
    """As accelerate does: the boundary is declared, and step called there alone."""
    is_last = micro == accumulation - 1
    engine.set_gradient_accumulation_boundary(is_boundary=is_last)
    return is_last


def _compare(rank: int, world_size: int) -> None:
    for dtype, stage in (("fp32", 0), ("fp32", 1), ("fp32", 2), ("fp32", 3), ("bf16", 3)):
        case = Case(stage, dtype, accumulation=2, clipping=DEFAULT_CLIPPING)
        expected = run_ddp(case, rank, STEPS)
        for is_ready in (_by_count, _by_declaration):
            config = case.config()
            del config["gradient_clipping"]
            model = make_model()
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=config
            )
            losses = []
            for step, micro in itertools.product(range(STEPS), range(2)):
                is_step = is_ready(engine, micro, 2)
                loss = engine(**batch(step, micro, rank))["loss"]
                returned = engine.backward(loss)
                assert returned.item() == pytest.approx(loss.item() / 2)
                losses.append(loss.item())
                if is_step:
                    engine.step()
            worst = max(abs(x - y) for x, y in zip(losses, expected.losses, strict=True))
            assert worst <= LOSS[dtype], (stage, dtype, is_ready)
            for name, param in engine.module.named_parameters():
                if param.requires_grad:
                    master = deepspeed.utils.safe_get_full_fp32_param(param)
                    assert master is not None
                    assert (master - expected.values[name]).abs().max() <= VALUE[dtype], name
            assert engine.global_steps == STEPS
            assert engine.global_samples == STEPS * 2 * 2 * world_size
            engine.destroy()


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_follows_ddp_with_clipping_at_1_by_default(world_size: int) -> None:
    spawn(_compare, world_size)


def _read_on_one_rank(rank: int, world_size: int) -> None:
    for stage in (0, 1, 2):
        engine = _engine(_config(stage))
        _train(engine, 2)
        expected = engine.core.full_state_dict()
        if rank == 0:  # no other rank takes part
            found = engine.module.state_dict()
            for name, value in expected.items():
                assert torch.equal(found[name], value), (stage, name)
        dist.barrier()
        engine.destroy()


def test_state_dict_holds_current_values_on_one_rank_below_stage_3() -> None:
    spawn(_read_on_one_rank, 2)


def _shorter_last_step(rank: int, world_size: int) -> None:
    model, reference = _linear(), _linear()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    config = _config(3, accumulation=3, gradient_clipping=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=given, config=config)
    batches = iter(range(100))
    for length in (3, 1, 3):  # an epoch of four micro-steps ends early
        for micro in range(length):
            number = next(batches)
            engine.set_gradient_accumulation_boundary(micro == length - 1)
            loss = engine(_inputs(number, rank)).square().mean() / length
            engine.backward(loss, scale_wrt_gas=False)
            for other in range(world_size):
                mean = reference(_inputs(number, other)).square().mean()
                (mean / length / world_size).backward()
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    for name, param in reference.named_parameters():
        mine = deepspeed.utils.safe_get_full_fp32_param(model.get_parameter(name))
        torch.testing.assert_close(mine, param.detach(), rtol=1e-6, atol=1e-7)
    engine.destroy()


def test_step_may_have_fewer_micro_steps_when_the_boundary_is_declared() -> None:
    spawn(_shorter_last_step, 2)


def _without_data(rank: int, world_size: int) -> None:
    """The last rank has a batch in every other micro-step alone."""
    for stage in range(4):
        values = []
        for is_idle in (False, True):
            engine = _engine(_config(stage, accumulation=2))
            for micro in range(6):
                has_data = rank < world_size - 1 or micro % 2 == 0
                if is_idle and not has_data:
                    engine.idle_step()
                    continue
                loss = engine(_inputs(micro, rank)).square().mean()
                engine.backward(loss if has_data else loss * 0.0)  # as DeepSpeed's scripts do
                engine.step()
            assert engine.global_steps == 3
            values.append(engine.core.full_state_dict())
            engine.destroy()
        assert all(torch.equal(value, values[1][key]) for key, value in values[0].items())


def test_idle_step_does_what_a_batch_does_whose_loss_is_zero() -> None:
    spawn(_without_data, 2)


# ------------------------------------------------------------ optimizer and scheduler


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the loader's workers
def test_returns_engine_optimizer_loader_and_scheduler() -> None:
    data = TensorDataset(torch.arange(12.0).view(4, 3))
    config = _config(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}})
    made = deepspeed.initialize(model=_linear(), config=config, training_data=data)
    engine, optimizer, loader, scheduler = made
    assert loader is not None
    assert len(loader) == 2
    seen = torch.cat([x for (x,) in loader])
    assert sorted(seen[:, 0].tolist()) == [0.0, 3.0, 6.0, 9.0]
    assert optimizer is engine.optimizer
    assert scheduler is engine.lr_scheduler
    engine.destroy()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the loader's workers
def test_the_loader_is_torchs_with_its_sampler() -> None:
    data = TensorDataset(torch.arange(8.0).view(8, 1))
    engine, _, loader, _ = deepspeed.initialize(
        model=_linear(), config=_config(), training_data=data
    )
    assert loader is not None
    torchs = DataLoader(data, 2, sampler=DistributedSampler(data, num_replicas=1, rank=0))
    for epoch in range(2):
        for one in (loader, torchs):
            one.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for (found,), (expected,) in zip(loader, torchs, strict=True):
            assert torch.equal(found, expected)
    facts = "batch_size", "collate_fn", "dataset", "drop_last"
    assert [getattr(loader, fact) for fact in facts] == [getattr(torchs, fact) for fact in facts]
    engine.destroy()


def test_callables_make_optimizer_and_scheduler() -> None:
    engine = _engine(
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step),
    )
    rates = [engine.get_lr()]
    for step in range(3):
        _train(engine, 1, step)
        rates.append(engine.get_lr())
    assert rates == [[1.0], [0.5], [0.25], [0.125]]
    assert type(engine.basic_optimizer) is torch.optim.SGD
    assert engine.optimizer_name() == "function"  # DeepSpeed's answer, too
    engine.destroy()


def test_scheduler_object_over_the_given_optimizer_is_stepped() -> None:
    model = _linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    config = _config(accumulation=2)
    engine, shown, _, returned = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    _train(engine, 4)
    assert returned is scheduler
    assert scheduler.get_last_lr() == [1.0 / 3]
    assert shown is not None
    assert shown.param_groups is optimizer.param_groups
    engine.destroy()


def test_own_scheduler_over_the_returned_optimizer_does_not_warn() -> None:
    engine = _engine()
    scheduler = LambdaLR(engine.optimizer, lambda step: 0.5**step)
    for step in range(2):
        _train(engine, 1, step)
        scheduler.step()  # warnings are errors here
    assert engine.get_lr() == [1e-2 / 4]
    engine.destroy()


def test_arguments_of_step_reach_the_scheduler() -> None:
    engine = _engine(lr_scheduler=lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0))
    for step, metric in enumerate((1.0, 2.0, 3.0)):
        engine.backward(engine(_inputs(step)).square().mean())
        engine.step(lr_kwargs={"metrics": metric})
    assert engine.get_lr() == [1e-2 / 4]
    engine.destroy()


def test_parameters_in_no_group_are_not_trained() -> None:
    model = _linear()
    before = model[0].weight.detach().clone()  # type: ignore[index]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[
            {"params": model[2].parameters(), "lr": 0.5},  # type: ignore[index]
            {"params": []},
        ],
        config=_config(),
    )
    _train(engine, 1)
    assert engine.get_lr() == [0.5, 1e-2]
    assert torch.equal(engine.module[0].weight, before)
    engine.destroy()


# ------------------------------------------------------------------- the methods


def test_facts_of_the_configuration_are_methods() -> None:
    config = _config(3, accumulation=4, zero_allow_untested_optimizer=True)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    engine = _engine(config)
    assert engine.get_batch_info() == (8, 2, 4)
    assert engine.zero_optimization_stage() == 3
    assert engine.zero_optimization_partition_weights()
    assert engine.zero_gather_16bit_weights_on_model_save()
    assert engine.optimizer_name() == "adamw"
    assert engine.gradient_clipping() == DEFAULT_CLIPPING
    assert not engine.fp16_enabled()
    assert engine.config is config
    engine.destroy()


def test_single_keys_are_methods_too() -> None:
    config = _config(3, flops_profiler={"enabled": True, "module_depth": 2}, memory_breakdown=True)
    config["zero_optimization"].update(reduce_bucket_size=4096, contiguous_gradients=False)
    config["fp16"] = {"enabled": True, "initial_scale_power": 3, "loss_scale_window": 7}
    engine = _engine(config)
    assert engine.zero_reduce_bucket_size() == 4096
    assert engine.zero_contiguous_gradients() is False
    assert engine.zero_hpz_partition_size() == 1
    assert engine.communication_data_type == torch.float16
    assert engine.dynamic_loss_scale_args() == {
        "init_scale": 8,
        "scale_window": 7,
        "delayed_shift": 2,
        "consecutive_hysteresis": False,
        "min_scale": 1,
    }
    assert engine.memory_breakdown()
    assert engine.flops_profiler_enabled()
    assert engine.flops_profiler_module_depth() == 2
    assert engine.get_model_parallel_rank() == 0
    assert engine.torch_autocast_enabled() is False
    for path in _all_facts():
        value = getattr(engine, path)()
        if path in attributes.NAMES and path != "torch_autocast_lower_precision_safe_modules":
            assert value == getattr(engine._config, path), path
    engine.destroy()


def _all_facts() -> list[str]:
    names = vars(Facts)
    return [n for n in names if callable(names[n]) and not n.startswith("_")]


def test_every_public_method_of_deepspeeds_engine_is_there_or_refused() -> None:
    found = importlib.util.find_spec("deepspeed")
    if found is None or found.origin is None:
        pytest.skip("DeepSpeed is not installed: its methods cannot be compared")
    tree = ast.parse((Path(found.origin).parent / "runtime" / "engine.py").read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    methods = next(c for c in classes if c.name == "DeepSpeedEngine").body
    names = {m.name for m in methods if isinstance(m, ast.FunctionDef) and m.name[0] != "_"}
    own = {name for name in names if hasattr(deepspeed.DeepSpeedEngine, name)}
    assert names - own == UNSERVED


def test_arguments_that_are_not_served_are_refused() -> None:
    engine = _engine()
    for arguments in ({"schedule": [(0, [])]}, {"compiled_autograd_enabled": True}):
        with pytest.raises(NotServedError, match=next(iter(arguments))):
            engine.compile(backend="eager", **arguments)
    assert not engine.is_compiled
    state = {"module": {k: v.clone() for k, v in _linear(1).state_dict().items()}}
    with pytest.raises(NotServedError, match="allowed_missing_keys"):
        engine.load_module_state_dict(state, allowed_missing_keys=["0.bias"])
    engine.load_module_state_dict(state, fetch_z3_params=True, z3_params_to_fetch=[])
    assert torch.equal(engine.core.full_state_dict()["0.weight"], state["module"]["0.weight"])
    engine.destroy()


def test_train_batch_size_can_change_between_steps() -> None:
    engine = _engine(_config(accumulation=2))
    _train(engine, 2)
    engine.set_train_batch_size(6)
    assert engine.gradient_accumulation_steps() == 3
    _train(engine, 3)
    assert (engine.global_steps, engine.global_samples) == (2, 4 + 6)
    with pytest.raises(ValueError, match="multiple of 2"):
        engine.set_train_batch_size(5)
    engine.destroy()


def test_what_the_engine_lacks_is_the_models() -> None:
    engine = _engine()
    engine.module.config = "the model's"
    engine.module.answer = 42
    assert engine.answer == 42
    assert engine.config["train_micro_batch_size_per_gpu"] == 2
    assert not hasattr(engine, "no_such_thing")
    assert not hasattr(engine, "random_ltd_initialize")
    with pytest.raises(NotServedError, match="random_ltd_initialize is not served"):
        engine.random_ltd_initialize()
    engine.destroy()


def test_names_get_the_prefix_of_the_module() -> None:
    engine = _engine()
    assert next(n for n, _ in engine.named_parameters()) == "module.0.weight"
    assert engine.train() is engine
    assert engine.module.training
    engine.eval()
    assert not engine.module.training
    engine.destroy()


def test_moving_or_casting_the_engine_is_refused_where_it_would_change_something() -> None:
    engine = _engine()
    assert engine.to("cpu") is engine
    assert engine.float() is engine
    with pytest.raises(RuntimeError, match="set the precision in the configuration"):
        engine.half()
    engine.destroy()


def test_step_is_told_as_skipped_when_a_gradient_is_not_finite() -> None:
    engine = _engine()
    _train(engine, 1)
    assert engine.was_step_applied()
    loss = engine(_inputs(0)).square().mean()
    engine.backward(loss * math.inf)
    engine.step()
    assert engine.optimizer.overflow
    assert not engine.was_step_applied()
    assert (engine.global_steps, engine.skipped_steps) == (2, 1)
    engine.destroy()


def test_at_stage_0_what_is_set_on_parameters_counts_in_step_without_a_backward(caplog) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2}
    engine, other = _engine(_config(fp16=fp16)), _linear().half()
    masters = [nn.Parameter(param.detach().float()) for param in _linear().parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.1)
    for value, scale in ((0.5, 16), (math.inf, 8), (math.nan, 4), (-0.25, 4)):
        for param, like in zip(engine.parameters(), other.parameters(), strict=True):
            param.grad = torch.full_like(like, value)
        if math.isfinite(value):
            for master in masters:
                master.grad = torch.full_like(master, value / engine.core.loss_scale)
            optimizer.step()
        engine.step()
        assert engine.core.loss_scale == scale
    assert caplog.text.count("not finite (param.grad was changed to values that are not") == 2
    for (name, _), master in zip(engine.module.named_parameters(), masters, strict=True):
        found = engine.core.states.get_full(name)
        torch.testing.assert_close(found, master.detach(), rtol=1e-6, atol=1e-7)
    engine.destroy()


def _adversaries(rank: int, world_size: int) -> None:
    """Train a generator and a discriminator whose gradient of the other's loss is dropped."""
    bce = nn.functional.binary_cross_entropy_with_logits
    one, zero = torch.ones(2, 1), torch.zeros(2, 1)

    def pair() -> tuple[nn.Module, nn.Module]:
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), _linear(1)

    dropped = (
        lambda engine: engine.zero_grad(),
        lambda engine: engine.optimizer.zero_grad(),
        lambda engine: engine.module.zero_grad(),
    )
    for drop, stage in itertools.product(dropped, range(4)):
        torch.manual_seed(0)
        plain = pair()
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in plain]
        config = _config(stage, gradient_clipping=0.0)
        torch.manual_seed(0)
        engines = [deepspeed.initialize(model=m, config=config)[0] for m in pair()]
        for step in range(STEPS):
            noise, real = (torch.cat([_inputs(step + n, r) for r in (0, 1)]) for n in (0, 50))
            mine = slice(2 * rank, 2 * rank + 2)
            for trained in (0, 1):
                optimizers[trained].zero_grad()
                drop(engines[trained])
                for (g, d), part in ((plain, slice(0, 4)), (engines, mine)):
                    yes, no = (t.repeat(world_size, 1)[part] for t in (one, zero))
                    if trained == 0:
                        loss = bce(d(g(noise[part])), yes)
                    else:
                        loss = bce(d(real[part]), yes) + bce(d(g(noise[part]).detach()), no)
                    (engines[trained].backward if g is engines[0] else Tensor.backward)(loss)
                optimizers[trained].step()
                engines[trained].step()
        for model, engine in zip(plain, engines, strict=True):
            found = engine.core.full_state_dict()
            for name, value in model.state_dict().items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
            engine.destroy()


def test_zero_grad_drops_the_gradient_of_another_engines_loss() -> None:
    spawn(_adversaries, 2)


@pytest.mark.parametrize("stage", range(4))
def test_zero_grad_within_an_accumulation_drops_its_part_and_says_so(stage: int, caplog) -> None:
    engine, other = _engine(_config(stage, accumulation=2, gradient_clipping=0.0)), _linear()
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        for micro in (0, 1):
            engine.backward(engine(_inputs(2 * step + micro)).square().mean())
            engine.step()
            if micro == 0:
                engine.zero_grad()
        (other(_inputs(2 * step + 1)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = engine.core.full_state_dict()
    for name, value in other.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    assert caplog.text.count("zero_grad() drops the gradient") == (stage >= 2)  # DeepSpeed differs
    engine.destroy()


@pytest.mark.parametrize("is_object", [True, False])
def test_empty_group_keeps_its_place_in_the_schedule(is_object: bool) -> None:
    engine_of = _linear(), _linear()
    groups = [[{"params": [], "lr": 0.5}, {"params": [*m.parameters()]}] for m in engine_of]
    optimizers = [torch.optim.AdamW(g, lr=1e-2, weight_decay=0.1) for g in groups]
    schedules = [LambdaLR(o, [lambda s: 0.5**s, lambda s: 1 / (1 + s)]) for o in optimizers]
    config = _config(2, gradient_clipping=0.0)
    if is_object:
        given = {"optimizer": optimizers[0], "lr_scheduler": schedules[0]}
    else:
        lambdas = schedules[0].lr_lambdas
        given = {"model_parameters": groups[0], "lr_scheduler": lambda o: LambdaLR(o, lambdas)}
    engine = deepspeed.initialize(model=engine_of[0], config=config, **given)[0]
    for step in range(STEPS):
        engine.backward(engine(_inputs(step)).square().mean())
        engine.step()
        engine_of[1](_inputs(step)).square().mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        schedules[1].step()
        assert engine.get_lr() == schedules[1].get_last_lr()
    found = engine.core.full_state_dict()
    for name, value in engine_of[1].state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    engine.destroy()


def test_at_stage_0_torch_clips_and_the_optimizer_drops_gradients() -> None:
    engine, other = _engine(), _linear()
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        engine.backward(engine(_inputs(step)).square().mean())
        other(_inputs(step)).square().mean().backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (engine, other)]
        assert torch.equal(*norms)
        if step == 1:
            engine.optimizer.zero_grad()
            optimizer.zero_grad()
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    for (name, _), param in zip(engine.module.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(engine.core.states.get_full(name), param.detach())
    engine.destroy()


def test_backward_of_several_values_is_refused() -> None:
    engine = _engine()
    with pytest.raises(ValueError, match="takes a scalar"):
        engine.backward(engine(_inputs(0)))
    with pytest.raises(AssertionError, match="scalar tensor"):  # as DeepSpeed's
        engine.scale(engine(_inputs(0)))
    engine.destroy()


def test_scaled_loss_may_run_backward_by_itself() -> None:
    mine, other = _engine(), _linear()
    loss = mine(_inputs(0)).square().mean()
    mine.scale(loss).backward()
    other(_inputs(0)).square().mean().backward()
    found = deepspeed.utils.safe_get_full_grad(mine.module[0].weight)
    torch.testing.assert_close(found, other[0].weight.grad)  # type: ignore[index]
    mine.destroy()


def test_recomputation_of_the_models_own_choice_changes_no_gradient() -> None:
    class Recomputed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = deepspeed.checkpointing.checkpoint(self.inner, x)
            return y

    config = _config(2, activation_checkpointing={"cpu_checkpointing": True})
    deepspeed.checkpointing.configure(None, deepspeed_config=config)
    engine, *_ = deepspeed.initialize(model=Recomputed(_linear()), config=_config(2))
    engine.backward(engine(_inputs(0)).square().mean())
    reference = _linear()
    reference(_inputs(0)).square().mean().backward()
    for name, param in reference.named_parameters():
        found = deepspeed.utils.safe_get_full_grad(engine.module.inner.get_parameter(name))
        torch.testing.assert_close(found, param.grad)
    engine.destroy()


# -------------------------------------------------------------------- the arguments


def test_configuration_comes_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 1}}}')
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    engine, *_ = deepspeed.initialize(args=args, model=_linear())
    assert engine.train_batch_size() == 4
    assert args.local_rank == 0
    engine.destroy()
    with pytest.raises(ValueError, match="give one"):
        deepspeed.initialize(args=args, model=_linear(), config=_config())


def test_missing_model_or_configuration_is_said() -> None:
    for error in (ValueError, AssertionError):  # the latter is DeepSpeed's
        with pytest.raises(error, match="needs a model"):
            deepspeed.initialize(config=_config())
    with pytest.raises(ValueError, match="no configuration"):
        deepspeed.initialize(model=_linear())


def test_sequence_and_model_parallelism_are_refused() -> None:
    class Mpu:
        def get_model_parallel_world_size(self) -> int:
            return 2

    for arguments in ({"mesh_param": (1, 2)}, {"mpu": Mpu()}):
        with pytest.raises(NotServedError):
            deepspeed.initialize(model=_linear(), config=_config(), **arguments)  # type: ignore[arg-type]


def test_unserved_names_import_and_fail_at_their_first_use() -> None:
    assert not isinstance(_linear(), deepspeed.PipelineModule)  # type: ignore[arg-type]
    with pytest.raises(NotServedError, match="init_inference is not served"):
        deepspeed.init_inference(_linear())


def test_wrong_optimizer_name_is_a_configuration_error() -> None:
    config = _config(optimizer={"type": "NoSuch", "params": {}})
    with pytest.raises(ConfigError, match="NoSuch"), contextlib.suppress(NotServedError):
        _engine(config)


def test_refused_initialize_leaves_the_earlier_engine_stepping() -> None:
    engine, undisturbed = _engine(), _engine()
    for one in (engine, undisturbed):
        one.backward(one(_inputs(0)).square().mean())
    model = engine.module
    some = torch.optim.LBFGS(model[0].parameters())  # needs a closure
    for config, given in (
        (_config(optimizer={"type": "NoSuch", "params": {}}), None),
        (_config(train_batch_size=7), None),
        (_config(), some),
    ):
        with pytest.raises(ConfigError):
            deepspeed.initialize(model=model, optimizer=given, config=config)
    for one in (engine, undisturbed):
        one.step()
    assert _train(engine, 2, first=1) == _train(undisturbed, 2, first=1)
    engine.destroy()
    undisturbed.destroy()


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True)


_GIVEN: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "parameters": lambda model: {"model_parameters": model.parameters()},
    "groups": lambda model: {"model_parameters": [{"params": list(model.parameters())}]},
    "optimizer": lambda model: {"optimizer": _adamw(model.parameters())},
    "callable": lambda model: {"optimizer": _adamw, "model_parameters": model.parameters()},
}


@pytest.mark.parametrize("given", _GIVEN)
@pytest.mark.parametrize("stage", range(4))
def test_a_parameter_that_the_optimizer_has_is_frozen_and_unfrozen_as_in_torch(
    stage: int, given: str
) -> None:
    plain, model = _linear(), _linear()
    optimizer = _adamw(plain.parameters())
    model[0].requires_grad_(False)
    config = _config(stage, gradient_clipping=0.0)
    engine, *_ = deepspeed.initialize(model=model, config=config, **_GIVEN[given](model))
    assert isinstance(engine.optimizer.optimizer, torch.optim.AdamW)
    for phase, is_frozen in enumerate((True, False, True, False)):
        for module in (plain, engine.module):
            module[0].requires_grad_(not is_frozen)
        losses = _train(engine, 2, first=2 * phase)
        for step in range(2):
            loss = plain(_inputs(2 * phase + step)).square().mean()
            assert loss.item() == losses[step]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("stage", range(4))
def test_a_channels_last_model_trains_and_changes_engines_as_in_torch(stage: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    plain, model = make(), make()
    optimizer = _adamw(plain.parameters())
    for phase in range(2):
        config = _config(stage, gradient_clipping=0.0)
        engine, *_ = deepspeed.initialize(
            model=model, config=config, optimizer=_adamw(model.parameters())
        )
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(phase))
        for module, step in ((engine, engine.step), (plain, optimizer.step)):
            loss = module(x).square().mean()
            engine.backward(loss) if module is engine else loss.backward()
            step()
        for param, own in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(own), param)
            if stage == 0:
                states = engine.optimizer.state[own], optimizer.state[param]
                assert torch.equal(states[0]["exp_avg"], states[1]["exp_avg"])
        optimizer = _adamw(plain.parameters())  # as of the next engine
        optimizer.zero_grad()
    engine.destroy()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for param, own in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(own, param)


def _fail(rank: int, world_size: int, stage: int) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = _linear()
        return model, torch.optim.AdamW(model[0].parameters(), lr=1e-2)

    def start(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=lambda given: LambdaLR(given, lambda step: 0.5),
            training_data=TensorDataset(torch.zeros(8, 3)),
            config=_config(stage),
        )
        return engine

    with failing(None, "call", INITIALIZE) as own:
        engine = start(*make())
    expected = _train(engine, 2), engine.core.full_state_dict()
    lists: list[Any] = [None] * world_size
    dist.all_gather_object(lists, own)
    calls: list[Call] = [call for call in own if all(call in other for other in lists)]
    assert {"build", "DeepSpeedEngine.__init__"} <= {name for name, _ in calls}
    made = make()
    before = described(*made, has_places=True)
    for call in calls:
        with pytest.raises(Failure), failing(call, "call", INITIALIZE):
            start(*made)
        assert described(*made, has_places=True) == before, call
    engine = start(*made)
    torch.testing.assert_close(
        (_train(engine, 2), engine.core.full_state_dict()), expected, rtol=0.0, atol=0.0
    )
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
def test_initialize_that_any_of_its_calls_ends_changes_nothing(stage: int) -> None:
    spawn(_fail, 2, stage)


# --------------------------------------------------------------------- evaluation


def _evaluate(rank: int, world_size: int) -> None:
    reference = _linear()
    config = _config(3, scheduler={"type": "WarmupLR", "params": {}})
    del config["optimizer"]
    _evaluate_after_dropped_engines(config)
    model = _linear()
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config=config)
    assert optimizer is None
    assert scheduler is None
    with torch.no_grad():
        expected = reference(_inputs(0))
    found = engine(_inputs(0))
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad
    with pytest.raises(RuntimeError, match="without an optimizer"):
        engine.backward(found.mean())
    for call in (engine.step, lambda: engine.set_gradient_accumulation_boundary(True)):
        with pytest.raises(RuntimeError, match="without an optimizer"):
            call()
    with pytest.raises(RuntimeError, match="without an optimizer"), engine.no_sync():
        pass
    _train_with_further_engines(model, reference)


def _evaluate_after_dropped_engines(config: dict[str, Any]) -> None:
    """A model keeps its values when the script drops the engine without ``destroy``.

    Lightning's DeepSpeedStrategy does between ``Trainer.test`` and ``Trainer.predict``.
    """
    model = _linear()
    for _ in range(2):
        engine, *_ = deepspeed.initialize(model=model, config=config)
        with torch.no_grad():
            torch.testing.assert_close(engine(_inputs(0)), _linear()(_inputs(0)))
        alive = weakref.ref(engine.core)
        del engine
        gc.collect()
    del model
    gc.collect()
    assert alive() is None


def _train_with_further_engines(model: nn.Module, reference: nn.Module) -> None:
    """Each makes one step of SGD, and is left in the middle of the next one, not destroyed."""
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    left = None
    for stage in (3, 2, 3, 0):
        config = _config(stage, gradient_clipping=0.0, optimizer=sgd)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        if left is not None:
            with pytest.raises(RuntimeError, match="another initialize"):
                left.step()
        _train(engine, 1, first=stage)
        torch.stack(
            [reference(_inputs(stage, r)).square().mean() for r in (0, 1)]
        ).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(_inputs(9)).mean())
        left = engine
    torch.testing.assert_close(engine.core.full_state_dict(), dict(reference.state_dict()))
    engine.destroy()


def test_engine_without_an_optimizer_evaluates_and_further_ones_train_its_model() -> None:
    spawn(_evaluate, 2)
