"""`zero_engine.deepspeed` accepts DeepSpeed's calls and returns the same kinds of values."""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from zero_engine.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zero_engine.deepspeed.runtime.zero.offload_config import (
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
)

from tests.support.facade import (
    HOST,
    add_gradients,
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
from zero_core import ConfigError
from zero_core.testing import Call, Failure, assert_same, described, failing, spawn
from zero_engine import deepspeed
from zero_engine.deepspeed.config.deepspeed_config import NAMES
from zero_engine.deepspeed.engine.facts import Facts
from zero_engine.deepspeed.errors import NotServedError
from zero_engine.deepspeed.utils import safe_get_full_grad

INITIALIZE = sys.modules["zero_engine.deepspeed.initialize"].__file__
SGD = {"type": "SGD", "params": {"lr": 0.1}}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_returns_engine_optimizer_torchs_loader_and_scheduler() -> None:
    data = TensorDataset(torch.arange(8.0).view(8, 1))
    settings = config(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}})
    made = deepspeed.initialize(model=net(), config=settings, training_data=data)
    engine, optimizer, loader, scheduler = made
    assert optimizer is engine.optimizer
    assert scheduler is engine.lr_scheduler
    assert loader is not None
    torchs = DataLoader(data, 2, sampler=DistributedSampler(data, num_replicas=1, rank=0))
    for epoch in range(2):
        for one in (loader, torchs):
            one.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for (found,), (expected,) in zip(loader, torchs, strict=True):
            assert torch.equal(found, expected)
    facts = "batch_size", "collate_fn", "dataset", "drop_last"
    assert [getattr(loader, fact) for fact in facts] == [getattr(torchs, fact) for fact in facts]
    assert len(loader) == 4


def test_callables_make_optimizer_and_a_scheduler_which_has_the_arguments_of_step() -> None:
    engine = make(
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        lr_scheduler=lambda given: ReduceLROnPlateau(given, factor=0.5, patience=0),
    )
    rates = []
    for step, metric in enumerate((1.0, 2.0, 3.0)):
        engine.backward(square(engine, inputs(step)))
        with pytest.raises(RuntimeError, match="no measured value for a ReduceLROnPlateau"):
            engine.step()
        engine.step(lr_kwargs={"metrics": metric})
        rates += engine.get_lr()
    assert rates == [1.0, 0.5, 0.25]
    assert type(engine.basic_optimizer) is torch.optim.SGD
    assert engine.optimizer_name() == "function"  # DeepSpeed returns the same name


def test_scheduler_over_the_given_or_the_returned_optimizer_is_stepped() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    engine, shown, _, returned = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config=config(gradient_accumulation_steps=2),
    )
    train(engine, 4)
    assert returned is scheduler
    assert scheduler.get_last_lr() == [1.0 / 3]
    assert shown is not None
    assert shown.param_groups is optimizer.param_groups
    engine = make()
    scheduler = LambdaLR(engine.optimizer, lambda step: 0.5**step)
    for step in range(2):
        train(engine, 1, step)
        scheduler.step()  # would raise if torch warned about the order of steps
    assert engine.get_lr() == [1e-2 / 4]


def test_parameters_in_no_group_are_not_trained() -> None:
    model = net()
    before = model[0].weight.detach().clone()
    groups = [{"params": model[2].parameters(), "lr": 0.5}, {"params": []}]
    engine = make(model, model_parameters=groups)
    train(engine, 1)
    assert engine.get_lr() == [0.5, 1e-2]
    assert torch.equal(model[0].weight, before)


COSINE = {"total_num_steps": 20, "warmup_num_steps": 10}


@pytest.mark.parametrize(
    ("kind", "params", "rates", "first", "later"),
    [
        ("WarmupLR", {"warmup_num_steps": 2}, (0.1, 0.1), None, [0.1, 0.1]),
        ("WarmupLR", {"warmup_num_steps": 2}, (0.1, 0.2), None, [0.1, 0.2]),
        ("WarmupCosineLR", COSINE, (0.1, 0.2), [0, 0], None),
    ],
)
def test_warm_up_runs_from_its_first_rate_to_each_groups_own(kind, params, rates, first, later):
    model = net()
    groups = [{"params": model[2 * i].parameters(), "lr": lr} for i, lr in enumerate(rates)]
    settings = config(1, scheduler={"type": kind, "params": params})
    engine = make(model, optimizer=torch.optim.SGD(groups), config=settings)
    if first is not None:
        assert [group["lr"] for group in engine.optimizer.param_groups] == first
        train(engine, 1)
        check_values(engine, net(), rtol=0, atol=0)
    if later is not None:
        train(engine, 3)
        assert engine.get_lr() == later


@pytest.mark.parametrize(
    ("named", "offload", "kind"), [("Adam", "none", FusedAdam), ("AdamW", "cpu", DeepSpeedCPUAdam)]
)
def test_the_configurations_optimizer_is_of_deepspeeds_class(named, offload, kind):
    zero = {"stage": 2, "offload_optimizer": {"device": offload}}
    optimizer = {"type": named, "params": {"lr": 1e-2, "torch_adam": False}, "unknown": 3}
    engine = make(config=config(optimizer=optimizer, zero_optimization=zero))
    assert isinstance(engine.basic_optimizer, kind)
    assert not isinstance(engine.optimizer, FusedAdam)  # it is one at stage 0 only
    assert not isinstance(torch.optim.Adam([nn.Parameter(torch.zeros(1))]), FusedAdam)
    assert isinstance(make(config=config(optimizer=optimizer)).optimizer, FusedAdam)
    torchs = {"type": named, "params": {"torch_adam": True}}
    assert not isinstance(make(config=config(optimizer=torchs)).basic_optimizer, FusedAdam)


def test_cpu_adam_without_fp32_states_keeps_16_bits_on_the_host() -> None:
    params = {"lr": 1e-2, "fp32_optimizer_states": False}
    named, model = {"optimizer": {"type": "Adam", "params": params}}, net()
    given = DeepSpeedCPUAdam(model.parameters(), **params)
    for optimizer, keys in ((None, named), (given, {})):
        zero = {"stage": 2, **HOST}
        settings = config(bf16={"enabled": True}, zero_optimization=zero) | keys
        engine = make(model if optimizer else net(), config=settings, optimizer=optimizer)
        train(engine, 1)
        assert engine.core.config.zero_optimization.offload_optimizer.state_dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"needs zero_optimization\.offload_optimizer"):
        make(config=config(**named))


def test_facts_of_the_configuration_are_methods() -> None:
    settings = config(
        3,
        gradient_accumulation_steps=4,
        gradient_clipping=1.0,
        flops_profiler={"enabled": True, "module_depth": 2},
        memory_breakdown=True,
        fp16={"enabled": True, "initial_scale_power": 3, "loss_scale_window": 7},
    )
    settings |= {"prescale_gradients": True, "gradient_predivide_factor": 2.0}
    settings["zero_optimization"] |= {
        "stage3_gather_16bit_weights_on_model_save": True,
        "reduce_bucket_size": 4096,
        "contiguous_gradients": False,
    }
    engine = make(config=settings)
    assert engine.config is settings
    scale = {"init_scale": 8, "scale_window": 7, "min_scale": 1}
    scale |= {"delayed_shift": 2, "consecutive_hysteresis": False}
    expected = {"get_batch_info": (8, 2, 4), "dynamic_loss_scale_args": scale}
    expected |= {"gradient_clipping": 1.0, "zero_reduce_bucket_size": 4096}
    expected |= {"gradient_predivide_factor": 2.0, "postscale_gradients": False}
    expected |= {"zero_optimization_stage": 3, "zero_hpz_partition_size": 1}
    expected |= {"optimizer_name": "adamw", "get_model_parallel_rank": 0}
    expected |= {"flops_profiler_module_depth": 2, "flops_profiler_enabled": True}
    on = ("fp16_enabled", "memory_breakdown", "zero_gather_16bit_weights_on_model_save")
    off = ("bfloat16_enabled", "zero_contiguous_gradients", "torch_autocast_enabled")
    expected |= dict.fromkeys((*on, "zero_optimization_partition_weights"), True)
    expected |= dict.fromkeys(off, False)
    assert {name: getattr(engine, name)() for name in expected} == expected
    assert engine.communication_data_type == torch.float16
    for name, method in vars(Facts).items():
        if callable(method) and not name.startswith("_"):
            value = getattr(engine, name)()
            if name in NAMES and not name.endswith("precision_safe_modules"):
                assert value == getattr(engine._config, name), name


def test_the_configuration_has_deepspeeds_attributes(tmp_path: Path) -> None:
    given = config(3, gradient_accumulation_steps=4, bf16={"enabled": True}, steps_per_print=7)
    given |= {"zero_allow_untested_optimizer": True, "aio": {"queue_depth": 16}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given))
    for source in (given, str(path)):
        found = deepspeed.DeepSpeedConfig(source)
        assert (found.train_batch_size, found.gradient_accumulation_steps) == (8, 4)
        assert (found.zero_optimization_stage, found.zero_enabled) == (3, True)
        assert found.zero_config.stage == 3
        assert (found.bfloat16_config.enabled, found.float16_config.enabled) == (True, False)
        assert found.optimizer_name == "adamw"
        assert (found.zero_allow_untested_optimizer, found.disable_allgather) == (True, False)
        assert (found.aio_config["queue_depth"], found.aio_config["use_gds"]) == (16, False)
        assert not found.activation_checkpointing_config.partition_activations
        assert found.steps_per_print == 7
    engine = make(config=given)
    assert engine._config.train_micro_batch_size_per_gpu == 2
    assert engine._config._param_dict is given
    assert not hasattr(engine._config, "nonsense")
    with pytest.raises(ConfigError, match="does not multiply out"):
        deepspeed.DeepSpeedConfig({"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2})


def test_arguments_that_are_not_served_are_refused() -> None:
    engine = make()
    for arguments in ({"schedule": [(0, [])]}, {"compiled_autograd_enabled": True}):
        with pytest.raises(NotServedError, match=next(iter(arguments))):
            engine.compile(backend="eager", **arguments)
    assert not engine.is_compiled
    state = {"module": net(1).state_dict()}
    with pytest.raises(NotServedError, match="allowed_missing_keys"):
        engine.load_module_state_dict(state, allowed_missing_keys=["0.bias"])
    engine.load_module_state_dict(state, fetch_z3_params=True, z3_params_to_fetch=[])
    check_values(engine, net(1), rtol=0, atol=0)
    engine.destroy()
    parallel = SimpleNamespace(get_model_parallel_world_size=lambda: 2)
    for more in ({"mesh_param": (1, 2)}, {"mpu": parallel}):
        with pytest.raises(NotServedError):
            make(**more)
    assert not isinstance(net(), deepspeed.PipelineModule)  # type: ignore[arg-type]
    with pytest.raises(NotServedError, match="init_inference is not served"):
        deepspeed.init_inference(net())


def test_train_batch_size_can_change_between_steps() -> None:
    engine = make(config=config(gradient_accumulation_steps=2))
    train(engine, 2)
    engine.set_train_batch_size(6)
    assert engine.gradient_accumulation_steps() == 3
    train(engine, 3)
    assert (engine.global_steps, engine.global_samples) == (2, 4 + 6)
    with pytest.raises(ValueError, match="multiple of 2"):
        engine.set_train_batch_size(5)


def test_what_the_engine_lacks_is_the_models() -> None:
    engine = make()
    engine.module.config = "the model's"
    engine.module.answer = 42
    assert engine.answer == 42
    assert engine.config["train_micro_batch_size_per_gpu"] == 2
    assert not hasattr(engine, "no_such_thing")
    assert not hasattr(engine, "random_ltd_initialize")
    with pytest.raises(NotServedError, match="random_ltd_initialize is not served"):
        engine.random_ltd_initialize()
    assert next(n for n, _ in engine.named_parameters()) == "module.0.weight"
    assert engine.train() is engine
    assert engine.module.training
    engine.eval()
    assert not engine.module.training
    assert engine.to("cpu") is engine
    assert engine.float() is engine
    with pytest.raises(RuntimeError, match="set the precision in the configuration"):
        engine.half()


# Exponents of the loss scale after each step, measured with DeepSpeed 0.19.8. An x is an overflow.
OVERFLOWS = "....x...x.xx......."
AT_STAGE_0 = (8, 8, 9, 9, 8, 8, 8, 9, 8, 8, 7, 6, 6, 6, 7, 7, 8, 8, 9)
DELAYED = (8, 8, 9, 9, 9, 9, 9, 10, 10, 10, 9, 8, 8, 8, 9, 9, 10, 10, 11)
CONSECUTIVE = (8, 8, 9, 9, 9, 9, 9, 10, 10, 10, 10, 9, 9, 9, 10, 10, 11, 11, 12)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("is_consecutive", "scales"), [(False, DELAYED), (True, CONSECUTIVE)])
def test_the_loss_scale_changes_when_deepspeeds_does(stage, is_consecutive, scales):
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2}
    engine = make(config=config(stage, fp16={**fp16, "consecutive_hysteresis": is_consecutive}))
    scaler = engine.optimizer.loss_scaler if stage else engine.optimizer.loss_scale_config
    assert (scaler.dynamic_loss_scale, scaler.scale_window, scaler.min_loss_scale) == (True, 2, 1)
    found = []
    for step, kind in enumerate(OVERFLOWS):
        engine.backward(engine(inputs(0).half()).mean() * (math.inf if kind == "x" else 1e-3))
        engine.step()
        assert engine.was_step_applied() == (kind != "x") == (not engine.optimizer.overflow)
        assert scaler.cur_iter == step + 1
        assert scaler.cur_scale == scaler.loss_scale == engine.optimizer.cur_scale
        found.append(round(math.log2(scaler.cur_scale)))
    assert found == list(scales if stage else AT_STAGE_0)
    assert scaler.last_overflow_iter == OVERFLOWS.rindex("x")
    fixed = make(config=config(stage, fp16={"enabled": True, "loss_scale": 8})).optimizer
    assert (fixed.loss_scaler.last_overflow_iter, fixed.needs_scaler()) == (None, False)


def test_backward_or_step_that_cannot_be_is_refused() -> None:
    engine = make()
    with pytest.raises(ValueError, match="takes a scalar"):
        engine.backward(engine(inputs(0)))
    with pytest.raises(AssertionError, match="scalar tensor"):  # DeepSpeed raises the same error
        engine.scale(engine(inputs(0)))
    train(engine, 1)
    with pytest.raises(RuntimeError, match="leave optimizer"):
        engine.optimizer.step()
    assert (engine.global_steps, engine.global_samples) == (1, 2)
    engine.destroy()
    with pytest.raises(RuntimeError, match="engine that was ended"):
        engine.optimizer.step()
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "update_in_backward": True}}
    with pytest.raises(ConfigError, match="leave one of the two out"):
        make(config=config(managed_gradient_accumulation=False, zero_optimization=zero))


def test_autocast_is_around_the_engines_forward() -> None:
    engine = make(config=config(2, torch_autocast={"enabled": True, "dtype": "bfloat16"}))
    assert engine(inputs(0)).dtype == torch.bfloat16
    assert engine.torch_autocast_enabled()
    assert engine.torch_autocast_dtype() == torch.bfloat16
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
    assert "torch.nn.modules.linear.Linear" in engine.torch_autocast_lower_precision_safe_modules()


def test_recomputation_of_the_models_own_choice_changes_no_gradient() -> None:
    block = {"activation_checkpointing": {"cpu_checkpointing": True}}
    deepspeed.checkpointing.configure(None, deepspeed_config=config(2, **block))
    model, reference = net(), net()
    model.forward = partial(deepspeed.checkpointing.checkpoint, model.forward)
    engine = make(model, stage=2)
    engine.backward(square(engine, inputs(0)))
    square(reference, inputs(0)).backward()
    for name, param in reference.named_parameters():
        found = safe_get_full_grad(engine.module.get_parameter(name))
        torch.testing.assert_close(found, param.grad)


def test_configuration_comes_from_the_command_line_or_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 1}}}')
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    engine = make(args=args, config=None)
    assert (engine.train_batch_size(), args.local_rank) == (4, 0)
    engine.destroy()
    for given, error, match in (
        ({"model": net(), "args": args, "config": config()}, ValueError, "give one"),
        ({"model": net()}, ValueError, "no configuration"),
        ({"config": config()}, ValueError, "needs a model"),
        ({"config": config()}, AssertionError, "needs a model"),  # the type that DeepSpeed raises
    ):
        with pytest.raises(error, match=match):
            deepspeed.initialize(**given)


def test_refused_initialize_leaves_the_earlier_engine_stepping() -> None:
    engine, undisturbed = make(), make()
    for one in (engine, undisturbed):
        one.backward(square(one, inputs(0)))
    some = torch.optim.LBFGS(engine.module[0].parameters())
    wrong_name = {"type": "NoSuch", "params": {}}
    for settings, given, match in (
        (config(optimizer=wrong_name), None, "NoSuch"),
        (config(train_batch_size=7), None, "train_batch_size"),
        (config(), some, "LBFGS"),
    ):
        with pytest.raises(ConfigError, match=match):
            make(engine.module, optimizer=given, config=settings)
    for one in (engine, undisturbed):
        one.step()
    assert train(engine, 2, first=1) == train(undisturbed, 2, first=1)
    engine.destroy()
    undisturbed.destroy()


def _interrupted(rank: int, world_size: int, stage: int) -> None:
    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net()
        return model, torch.optim.AdamW(model[0].parameters(), lr=1e-2)

    def start(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        schedule = {"lr_scheduler": lambda given: LambdaLR(given, lambda step: 0.5)}
        data = {"training_data": TensorDataset(torch.zeros(8, 3))}
        return make(model, stage=stage, optimizer=optimizer, **schedule, **data)

    with failing(None, "call", INITIALIZE) as own:
        engine = start(*parts())
    expected = train(engine, 2), engine.core.full_state_dict()
    lists: list[Any] = [None] * world_size
    dist.all_gather_object(lists, own)
    calls: list[Call] = [call for call in own if all(call in other for other in lists)]
    assert {"build", "DeepSpeedEngine.__init__"} <= {name for name, _ in calls}
    made = parts()
    before = described(*made, has_places=True)
    for call in calls:
        with pytest.raises(Failure), failing(call, "call", INITIALIZE):
            start(*made)
        assert described(*made, has_places=True) == before, call
    engine = start(*made)
    found = train(engine, 2), engine.core.full_state_dict()
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_initialize_that_any_of_its_calls_ends_changes_nothing(stage: int) -> None:
    spawn(_interrupted, 2, stage)


def _evaluates(rank: int, world_size: int) -> None:
    settings = config(3, scheduler={"type": "WarmupLR", "params": {}})
    del settings["optimizer"]
    _drop_engines(settings)
    model, reference = net(), net()
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config=settings)
    assert optimizer is None
    assert scheduler is None
    found = engine(inputs(0))
    torch.testing.assert_close(found, reference(inputs(0)).detach())
    assert not found.requires_grad
    for call in (
        lambda: engine.backward(found.mean()),
        engine.step,
        lambda: engine.set_gradient_accumulation_boundary(True),
        lambda: engine.no_sync().__enter__(),
    ):
        with pytest.raises(RuntimeError, match="without an optimizer"):
            call()
    # Engines are dropped in the middle of their second step.
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    left = None
    for stage in (3, 2, 3, 0):
        engine = make(model, config=config(stage, optimizer=SGD))
        if left is not None:
            with pytest.raises(RuntimeError, match="another initialize"):
                left.step()
        train(engine, 1, first=stage)
        add_gradients(reference, stage, world_size)
        update(sgd)
        engine.backward(engine(inputs(9)).mean())
        left = engine
    check_values(engine, reference)
    engine.destroy()


def _drop_engines(settings: dict[str, Any]) -> None:
    model = net()
    for _ in range(2):
        engine = make(model, config=settings)
        with torch.no_grad():
            torch.testing.assert_close(engine(inputs(0)), net()(inputs(0)))
        alive = weakref.ref(engine.core)
        del engine
        gc.collect()
    del model
    gc.collect()
    assert alive() is None


def _offloads_states(rank: int, world_size: int) -> None:
    for stage in range(4):
        engine = make(config=config(stage, bf16={"enabled": True}))
        for step, states in enumerate((None, list(OffloadStateTypeEnum))):
            train(engine, 1, step)
            expected = engine.core.full_state_dict()
            engine.offload_states(include=states, non_blocking=step == 1)
            with pytest.raises(RuntimeError, match="reload_states"):
                engine(inputs(step, rank).bfloat16())
            engine.reload_states()
            assert_same(engine.core.full_state_dict(), expected)
        if stage < 3 and rank == 0:  # complete values, which rank 0 can read alone
            found = dict(engine.module.state_dict())
            torch.testing.assert_close(found, expected, check_dtype=False, rtol=0.01, atol=0)
        engine.offload_states(device=OffloadDeviceEnum.none)
        assert not engine.core.offloaded_states
        with pytest.raises(ValueError, match="cpu alone"):
            engine.offload_states(device=OffloadDeviceEnum.nvme)
        engine.offload_states()
        engine.destroy()


def _communicates(rank: int, world_size: int) -> None:
    comm, total = deepspeed.comm, torch.ones(2)
    comm.all_reduce(total, log_name="total", prof=True)
    assert total.tolist() == [2.0, 2.0]
    parts = torch.empty(2)
    comm.all_gather_into_tensor(parts, tensor=torch.full((1,), float(rank)))
    assert parts.tolist() == [0.0, 1.0]
    part = torch.empty(1)
    comm.reduce_scatter_tensor(part, tensor=torch.tensor([1.0, 2.0]))
    assert part.item() == 2.0 * (1 + rank)
    comm.all_reduce_coalesced([total, parts], async_op=True).wait()
    assert (total.tolist(), parts.tolist()) == ([4.0, 4.0], [0.0, 2.0])
    assert comm.get_all_ranks_from_group() == [0, 1]


def test_engine_evaluates_reads_and_offloads_states_on_two_ranks() -> None:
    on_ranks(2, [_communicates, _evaluates, _offloads_states])
