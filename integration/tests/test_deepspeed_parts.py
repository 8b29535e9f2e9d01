"""Parts of DeepSpeed's interface that a script asks for, beside plain torch."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zero_engine.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zero_engine.deepspeed.runtime.zero.offload_config import (
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
)
from zero_engine.deepspeed.runtime.zero.partition_parameters import (
    ZeroParamStatus,
    is_zero_param,
)
from zero_engine.deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias

from zero_core import ConfigError
from zero_core.testing import spawn
from zero_engine import deepspeed

STEPS = 3


def config(stage: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage},
        **more,
    }


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def x(number: int, rank: int = 0) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(7 * number + rank))


def make(model: nn.Module | None = None, **arguments: Any) -> Any:
    arguments.setdefault("config", config())
    engine, *_ = deepspeed.initialize(model=model or net(), **arguments)
    return engine


def _values(engine: Any) -> dict[str, Tensor]:
    full: dict[str, Tensor] = engine.core.full_state_dict()
    return full


def _by_torch(world_size: int, backwards: list[int], *, over: int) -> dict[str, Tensor]:
    """One process: the mean over all ranks' inputs, with any number of backwards per step."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    number = itertools.count()
    for count in backwards:
        for _ in range(count):
            micro = next(number)
            losses = [model(x(micro, rank)).square().mean() for rank in range(world_size)]
            (sum(losses) / world_size / over).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


# ----------------------------------------------------------- who ends a step


class _Asks:
    """A scheduler that asks for the boundary within ``step()``."""

    def __init__(self, engine: Any, seen: list[bool]) -> None:
        self._engine, self._seen = engine, seen

    def step(self) -> None:
        self._seen.append(self._engine.is_gradient_accumulation_boundary())

    def get_last_lr(self) -> list[float]:
        return [0.0]


def _boundaries(rank: int, world_size: int) -> None:
    counts = [1, 3, 2]
    expected = _by_torch(world_size, counts, over=2)
    for stage, device in [*((stage, "none") for stage in range(4)), (1, "cpu"), (3, "cpu")]:
        settings = {
            "managed_gradient_accumulation": False,
            "gradient_accumulation_steps": 2,
            "check_grad_overflow": False,  # without clipping: units may be updated in backward
            "zero_optimization": {"stage": stage, "offload_optimizer": {"device": device}},
        }
        seen: list[bool] = []
        engine = make(config=config(**settings))
        engine.core.lr_scheduler = _Asks(engine, seen)
        number = itertools.count()
        for count in counts:
            for _ in range(count):
                engine.backward(engine(x(next(number), rank)).square().mean())
                assert not engine.is_gradient_accumulation_boundary()
            engine.optimizer.step()  # Fabric's loop calls it
            assert engine.was_step_applied()
        assert seen == [True] * 3
        assert engine.global_steps == 3
        assert engine.global_samples == sum(counts) * 2 * world_size
        torch.testing.assert_close(_values(engine), expected, rtol=1e-6, atol=1e-6)
        with pytest.raises(RuntimeError, match="managed_gradient_accumulation = false"):
            engine.coalesce_grad_reduction().__enter__()
        with pytest.raises(RuntimeError, match="managed_gradient_accumulation = false"):
            engine.set_gradient_accumulation_boundary(True)
        engine.destroy()


def _coalesced(rank: int, world_size: int) -> None:
    counts = [3, 1, 2]
    expected = _by_torch(world_size, counts, over=1)
    for stage in range(4):
        engine = make(config=config(stage))
        number = itertools.count()
        for count in counts:
            with engine.coalesce_grad_reduction():
                for _ in range(count):
                    engine.backward(engine(x(next(number), rank)).square().mean())
                with pytest.raises(RuntimeError, match="step after it"):
                    engine.step()
            engine.step()
            sent = [row for row in engine.core.comm_report() if row.collective == "reduce_scatter"]
            assert sum(row.num_calls for row in sent) <= len(engine.core.layout.units)
        torch.testing.assert_close(_values(engine), expected, rtol=1e-6, atol=1e-6)
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


def _offloaded(rank: int, world_size: int) -> None:
    for stage in range(4):
        trained = []
        for states in (None, [], list(OffloadStateTypeEnum), ["lp_params", "optim_states"]):
            engine = make(config=config(stage, bf16={"enabled": True}))
            for step in range(STEPS):
                engine.backward(engine(x(step, rank).bfloat16()).square().mean())
                engine.step()
                if states is not None:
                    engine.offload_states(include=states or None, non_blocking=step == 1)
                    with pytest.raises(RuntimeError, match="reload_states"):
                        engine(x(step, rank).bfloat16())
                    engine.reload_states()
            trained.append(_values(engine))
            engine.offload_states(device=OffloadDeviceEnum.none)
            assert not engine.core.offloaded_states
            with pytest.raises(ValueError, match="cpu alone"):
                engine.offload_states(device=OffloadDeviceEnum.nvme)
            engine.offload_states()
            engine.destroy()  # brings them back first
        for other in trained[1:]:
            torch.testing.assert_close(other, trained[0], rtol=0, atol=0)


class _Tiles(nn.Module):
    def __init__(self, **splits: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = nn.Linear(7, 5)
        self.tiled = TiledLinear(7, 5, init_linear=whole, **splits)
        self.head = nn.Linear(5, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.tiled(inputs)))
        return found


def _tiled(rank: int, world_size: int) -> None:
    inputs = torch.randn(2, 7, generator=torch.Generator().manual_seed(rank))
    expected = None
    for stage in (0, 3):
        engine = make(_Tiles(in_splits=3, out_splits=2), config=config(stage))
        assert len(engine.core.layout.units) == 1 + 6
        for _ in range(STEPS):
            engine.backward(engine(inputs).square().mean())
            engine.step()
        expected = _values(engine) if expected is None else expected
        torch.testing.assert_close(_values(engine), expected, rtol=0, atol=0)
        engine.destroy()


def _tiled_from_shards(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(6, 5)
    torch.manual_seed(0)
    with deepspeed.zero.Init():
        layer = nn.Linear(6, 5)
    owned = make(nn.Sequential(nn.Linear(6, 5)), config=config(3))
    with deepspeed.zero.GatheredParameters(owned.module.parameters(), modifier_rank=0):
        owned.module[0].load_state_dict(whole.state_dict())
    for source in (layer, owned.module[0]):
        tiled = TiledLinear(6, 5, in_splits=2, out_splits=2, init_linear=source)
        torch.testing.assert_close(tiled(torch.ones(6)), whole(torch.ones(6)))
    with deepspeed.zero.Init():
        sharded = TiledLinear(6, 5, in_splits=3)
    sharded.copy_params_from(layer)
    with deepspeed.zero.GatheredParameters(sharded.parameters()):
        torch.testing.assert_close(sharded(torch.ones(6)), whole(torch.ones(6)))
    owned.destroy()


def _all(rank: int, world_size: int, folder: str) -> None:
    for check in (_boundaries, _coalesced, _offloaded, _tiled, _tiled_from_shards):
        check(rank, world_size)
    Path(folder, str(rank)).touch()


def test_steps_states_and_tiles_on_two_ranks(tmp_path: Path) -> None:
    spawn(_all, 2, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2


class _Scaled(nn.Module):
    """A block that multiplies by another block's parameter, too, if it is given one."""

    def __init__(self, other: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.full((5,), 1.3))
        self.others = [other] if other is not None else []

    def forward(self, x: Tensor) -> Tensor:
        for block in (self, *self.others):
            x = x * block.scale
        y: Tensor = self.linear(x)
        return y


class _Similar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        first = _Scaled()
        self.blocks = nn.ModuleList([_Scaled(first), first])
        self.logit_scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * self.logit_scale).square().mean()


def _small_parameters(rank: int, world_size: int) -> None:
    offload = {"offload_optimizer": {"device": "cpu"}}
    for threshold, further in ((100_000, {}), (10, {}), (10, offload)):
        plain = _Similar()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        zero = {"stage": 3, "stage3_param_persistence_threshold": threshold, **further}
        settings = config(optimizer={"type": "SGD", "params": {"lr": 0.1}})
        engine = make(_Similar(), config={**settings, "zero_optimization": zero})
        for step in range(STEPS):
            inputs = [
                torch.randn(2, 5, generator=torch.Generator().manual_seed(7 * step + r))
                for r in range(world_size)
            ]
            torch.stack([plain(x) for x in inputs]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(engine(inputs[rank]))
            engine.step()
            for (name, param), expected in zip(
                engine.module.named_parameters(), plain.parameters(), strict=True
            ):
                is_small = expected.numel() <= threshold
                assert (param.ds_status == ZeroParamStatus.AVAILABLE) == is_small, name
                if is_small:
                    torch.testing.assert_close(param.detach(), expected.detach())
        with deepspeed.zero.GatheredParameters([engine.module.logit_scale], modifier_rank=0):
            engine.module.logit_scale.data.fill_(rank)
        assert engine.module.logit_scale.item() == 0
        deepspeed.utils.safe_set_full_fp32_param(engine.module.logit_scale, torch.tensor(0.5))
        assert engine.module.logit_scale.item() == 0.5
        engine.destroy()


def test_small_parameters_read_their_values_at_stage_3() -> None:
    spawn(_small_parameters, 3)


# -------------------------------------------------------------------- tiles


def test_tiles_compute_what_the_whole_layer_does() -> None:
    torch.manual_seed(0)
    whole, inputs = nn.Linear(7, 5), torch.randn(4, 7)
    expected = whole(inputs)
    for ins, outs in itertools.product((1, 3, 7), (1, 2, 5)):
        tiled = TiledLinear(7, 5, in_splits=ins, out_splits=outs, init_linear=whole)
        torch.testing.assert_close(tiled(inputs), expected)
    tiled = TiledLinear(
        7, 5, in_splits=2, out_splits=2, input_is_already_split=True, combine_out_splits=False
    )
    tiled.copy_params_from(whole)
    parts = tiled(inputs.split([4, 3], dim=-1))
    assert [part.shape[-1] for part in parts] == [3, 2]
    torch.testing.assert_close(torch.cat(parts, -1), expected)
    with pytest.raises(RuntimeError, match=r"in_splits = 8, expected 1 to 7"):
        TiledLinear(7, 5, in_splits=8)
    with pytest.raises(ValueError, match="has a bias"):
        TiledLinear(7, 5, bias=False).copy_params_from(whole)


class _Apart(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        return nn.functional.linear(input, self.weight), self.bias


def test_tiles_that_return_their_bias() -> None:
    tiled = TiledLinearReturnBias(7, 5, in_splits=2, out_splits=3, linear_cls=_Apart)
    inputs = torch.randn(4, 7)
    output, bias = tiled(inputs)
    assert (output.shape, bias.shape) == ((4, 5), (5,))
    whole = nn.Linear(7, 5)
    tiled.copy_params_from(whole)
    output, bias = tiled(inputs)
    torch.testing.assert_close(output + bias, whole(inputs))


# ------------------------------------------------------ names and values asked


@pytest.mark.parametrize(
    ("named", "offload", "kind"),
    [("Adam", "none", FusedAdam), ("AdamW", "cpu", DeepSpeedCPUAdam)],
)
def test_the_configurations_optimizer_is_of_deepspeeds_class(
    named: str, offload: str, kind: type
) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": offload}}
    optimizer = {"type": named, "params": {"lr": 1e-2, "torch_adam": False}, "unknown": 3}
    engine = make(config=config(optimizer=optimizer, zero_optimization=zero))
    assert isinstance(engine.basic_optimizer, kind)
    assert not isinstance(engine.optimizer, FusedAdam)  # at stage 0 alone
    assert not isinstance(torch.optim.Adam([nn.Parameter(torch.zeros(1))]), FusedAdam)
    bare = make(config=config(optimizer=optimizer))
    assert isinstance(bare.optimizer, FusedAdam)
    torches = {"type": named, "params": {"torch_adam": True}}
    assert not isinstance(make(config=config(optimizer=torches)).basic_optimizer, FusedAdam)


def test_a_step_needs_a_backward_where_the_optimizer_is_stepped() -> None:
    engine = make()
    engine.backward(engine(x(0)).mean())
    engine.step()
    with pytest.raises(RuntimeError, match="leave optimizer"):
        engine.optimizer.step()
    assert (engine.global_steps, engine.global_samples) == (1, 2)
    engine.destroy()
    with pytest.raises(RuntimeError, match="engine that was ended"):
        engine.optimizer.step()


def test_an_update_in_backward_needs_a_last_backward() -> None:
    offload = {"device": "cpu", "update_in_backward": True}
    zero = {"stage": 2, "offload_optimizer": offload}
    with pytest.raises(ConfigError, match="leave one of the two out"):
        make(config=config(managed_gradient_accumulation=False, zero_optimization=zero))


def test_init_that_cannot_begin_leaves_none_active() -> None:
    wrong: Any = "no group"
    with pytest.raises(ValueError, match="not registered"):
        deepspeed.zero.Init(data_parallel_group=wrong).__enter__()
    assert not deepspeed.zero.Init.is_active()
    with deepspeed.zero.Init():
        made = nn.Linear(2, 2)
    assert is_zero_param(made.weight)


# Powers of two after each step, as DeepSpeed 0.19.8's scalers give them for the same overflows (x).
OVERFLOWS = "....x...x.xx......."
AT_STAGE_0 = (8, 8, 9, 9, 8, 8, 8, 9, 8, 8, 7, 6, 6, 6, 7, 7, 8, 8, 9)
DELAYED = (8, 8, 9, 9, 9, 9, 9, 10, 10, 10, 9, 8, 8, 8, 9, 9, 10, 10, 11)
CONSECUTIVE = (8, 8, 9, 9, 9, 9, 9, 10, 10, 10, 10, 9, 9, 9, 10, 10, 11, 11, 12)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("is_consecutive", "scales"), [(False, DELAYED), (True, CONSECUTIVE)])
def test_the_loss_scale_changes_when_deepspeeds_does(
    stage: int, is_consecutive: bool, scales: tuple[int, ...]
) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2}
    engine = make(config=config(stage, fp16={**fp16, "consecutive_hysteresis": is_consecutive}))
    scaler = engine.optimizer.loss_scaler if stage else engine.optimizer.loss_scale_config
    assert (scaler.dynamic_loss_scale, scaler.scale_window, scaler.min_loss_scale) == (True, 2, 1)
    found = []
    for step, kind in enumerate(OVERFLOWS):
        engine.backward(engine(x(0).half()).mean() * (math.inf if kind == "x" else 1e-3))
        engine.step()
        assert scaler.cur_iter == step + 1
        assert scaler.cur_scale == scaler.loss_scale == engine.optimizer.cur_scale
        found.append(round(math.log2(scaler.cur_scale)))
    assert found == list(scales if stage else AT_STAGE_0)
    assert scaler.last_overflow_iter == OVERFLOWS.rindex("x")
    assert not make().optimizer.loss_scaler.dynamic


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
        assert found.bfloat16_config.enabled
        assert not found.float16_config.enabled
        assert found.optimizer_name == "adamw"  # integration/compat/checks has all of them
        assert (found.zero_allow_untested_optimizer, found.disable_allgather) == (True, False)
        assert (found.aio_config["queue_depth"], found.aio_config["use_gds"]) == (16, False)
        assert not found.activation_checkpointing_config.partition_activations
        assert found.steps_per_print == 7
    engine = make(config=given)
    assert engine._config.train_micro_batch_size_per_gpu == 2
    assert engine._config._param_dict is given
    with pytest.raises(ConfigError, match="does not multiply out"):
        deepspeed.DeepSpeedConfig({"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2})
    assert not hasattr(engine._config, "nonsense")


def test_cpu_adam_without_fp32_states_keeps_16_bits_on_the_host() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    for is_object in (False, True):
        model = net()
        params = {"lr": 1e-2, "fp32_optimizer_states": False}
        given = DeepSpeedCPUAdam(model.parameters(), **params) if is_object else None
        named = {} if is_object else {"optimizer": {"type": "Adam", "params": params}}
        settings = config(bf16={"enabled": True}, zero_optimization=zero) | named
        engine = make(model, config=settings, optimizer=given)
        engine.backward(engine(x(0).bfloat16()).mean())
        engine.step()
        assert engine.core.config.zero_optimization.offload_optimizer.state_dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"needs zero_optimization\.offload_optimizer"):
        make(config=config(optimizer={"type": "Adam", "params": {"fp32_optimizer_states": False}}))


def test_autocast_is_around_the_engines_forward() -> None:
    engine = make(config=config(2, torch_autocast={"enabled": True, "dtype": "bfloat16"}))
    assert engine(x(0)).dtype == torch.bfloat16
    assert engine.torch_autocast_enabled()
    assert engine.torch_autocast_dtype() == torch.bfloat16
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
    assert "torch.nn.modules.linear.Linear" in engine.torch_autocast_lower_precision_safe_modules()
