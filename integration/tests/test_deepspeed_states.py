"""`safe_get_*` and `safe_set_*` of parameters: what they give is what torch alone computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_core.testing import spawn
from zero_engine import deepspeed
from zero_engine.deepspeed import utils

LR, CLIPPING = 1e-2, 1e-3


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleList([nn.Linear(3, 7), nn.Linear(7, 3)])
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = torch.tanh(layer(x))
        y: Tensor = self.frozen(x)
        return y.square().mean()


def _inputs(rank: int, step: int = 0) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def _engine(stage: int, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": CLIPPING,
        **more,
    }
    return deepspeed.initialize(model=_Model(), config=config)[0]


def _reference(world_size: int) -> _Model:
    """The model with the mean gradient of all ranks' batches."""
    model = _Model()
    for rank in range(world_size):
        (model(_inputs(rank)) / world_size).backward()
    return model


def _pairs(engine: Any, model: _Model) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    for name, param in model.named_parameters():
        yield engine.module.get_parameter(name), param


def _read(rank: int, world_size: int) -> None:
    for stage in (0, 1, 2, 3):
        engine, model = _engine(stage), _reference(world_size)
        assert utils.safe_get_full_grad(engine.module.body[0].weight) is None
        engine.backward(engine(_inputs(rank)))
        for mine, other in _pairs(engine, model):
            grad = utils.safe_get_full_grad(mine)
            if other.grad is None:
                assert grad is None, "frozen"
                assert utils.safe_get_full_fp32_param(mine) is None, "as in DeepSpeed"
                continue
            # Unclipped, though clipping is far below its norm.
            torch.testing.assert_close(grad, other.grad, rtol=1e-5, atol=1e-8)
            torch.testing.assert_close(utils.safe_get_full_fp32_param(mine), other.detach())
            assert utils.safe_get_full_optimizer_state(mine, "exp_avg") is None
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
        for mine, other in _pairs(engine, model):
            assert utils.safe_get_full_grad(mine) is None
            first = utils.safe_get_full_optimizer_state(mine, "exp_avg")
            if other.grad is None:
                assert first is None
                continue
            torch.testing.assert_close(first, 0.1 * other.grad, rtol=1e-4, atol=1e-10)
            mine.requires_grad_(False)  # what it was at initialize() counts
            assert utils.safe_get_full_fp32_param(mine) is not None
            assert utils.safe_get_full_optimizer_state(mine, "no_such_state") is None
        engine.destroy()


@pytest.mark.parametrize("world_size", [1, 2])
def test_values_are_those_of_torch_alone(world_size: int) -> None:
    spawn(_read, world_size)


def _write(rank: int, world_size: int) -> None:
    for stage in (0, 2, 3):
        engine = _engine(stage, gradient_clipping=0.0)
        engine.backward(engine(_inputs(rank)))
        engine.step()
        model = _Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        for _, other in _pairs(engine, model):
            if other.requires_grad:
                other.grad = torch.zeros_like(other)
        optimizer.step()
        generator = torch.Generator().manual_seed(5)
        engine.backward(engine(_inputs(rank, 1)))
        for mine, other in _pairs(engine, model):
            value, grad, moment = (torch.rand(other.shape, generator=generator) for _ in range(3))
            utils.safe_set_full_fp32_param(mine, value)
            other.data = value.clone()
            if not other.requires_grad:
                continue
            utils.safe_set_full_grad(mine, grad)
            utils.safe_set_full_optimizer_state(mine, moment, "exp_avg")
            utils.safe_set_full_optimizer_state(mine, moment + 1, "exp_avg_sq")
            other.grad = grad.clone()
            state = optimizer.state[other]
            state["exp_avg"], state["exp_avg_sq"] = moment.clone(), moment + 1
            torch.testing.assert_close(utils.safe_get_full_grad(mine), grad)
        engine.step()
        optimizer.step()
        for mine, other in _pairs(engine, model):
            found = engine.core.states.get_full(engine.core.owns(mine))  # of frozen ones, too
            torch.testing.assert_close(found, other.detach(), rtol=1e-6, atol=1e-7)
        engine.destroy()


@pytest.mark.parametrize("world_size", [1, 2])
def test_step_uses_what_was_set(world_size: int) -> None:
    spawn(_write, world_size)


def _local(rank: int, world_size: int) -> None:
    engine = _engine(3)
    engine.backward(engine(_inputs(rank)))
    for param in engine.module.body.parameters():
        for read_all, read_own in (
            (utils.safe_get_full_fp32_param, utils.safe_get_local_fp32_param),
            (utils.safe_get_full_grad, utils.safe_get_local_grad),
        ):
            whole, own = read_all(param), read_own(param)
            assert whole is not None
            assert own is not None
            rows: list[Any] = [None] * world_size
            dist.all_gather_object(rows, own)
            assert torch.equal(torch.cat(rows), whole.flatten())
        own = utils.safe_get_local_fp32_param(param)
        assert own is not None
        utils.safe_set_local_fp32_param(param, own + 1)
        after = utils.safe_get_local_fp32_param(param)
        assert after is not None
        assert torch.equal(after, own + 1)
    engine.destroy()


def test_local_parts_make_up_the_whole() -> None:
    spawn(_local, 2)


def test_gradient_carries_the_loss_scale_as_in_deepspeed() -> None:
    engine = _engine(2, fp16={"enabled": True, "loss_scale": 8.0}, gradient_clipping=0.0)
    engine.backward(engine(_inputs(0).half()).float())
    weight = engine.module.body[0].weight
    grad = utils.safe_get_full_grad(weight)
    assert grad is not None
    (other,) = (p.grad for n, p in _reference(1).named_parameters() if n == "body.0.weight")
    assert other is not None
    torch.testing.assert_close(grad, 8.0 * other, rtol=0.05, atol=1e-3)
    utils.safe_set_full_grad(weight, grad)
    torch.testing.assert_close(utils.safe_get_full_grad(weight), grad)
    engine.destroy()
    dist.destroy_process_group()


def test_gradients_can_be_replaced_by_a_function() -> None:
    engine = _engine(1)
    engine.backward(engine(_inputs(0)))
    params = list(engine.module.parameters())
    before = [utils.safe_get_full_grad(p) for p in params]
    utils.safe_update_full_grad_vectorized(params, lambda grad, param: grad + param.numel())
    for param, grad in zip(params, before, strict=True):
        found = utils.safe_get_full_grad(param)
        if grad is None:
            assert found is None
        else:
            torch.testing.assert_close(found, grad + param.numel())
    engine.destroy()
    dist.destroy_process_group()


def test_parameter_of_no_engine_has_nothing_and_cannot_be_set() -> None:
    param = nn.Parameter(torch.ones(2))
    assert utils.safe_get_full_fp32_param(param) is None
    assert utils.safe_get_full_grad(param) is None
    with pytest.raises(ValueError, match="belongs to no engine"):
        utils.safe_set_full_fp32_param(param, torch.zeros(2))


def test_leaf_modules_are_marked_by_class_name_and_suffix() -> None:
    model = _Model()
    assert utils.set_z3_leaf_modules(model, [nn.Linear]) == [*model.body, model.frozen]
    assert utils.get_z3_leaf_modules(model) == [*model.body, model.frozen]
    assert utils.unset_z3_leaf_modules(model, ["Linear"]) == [*model.body, model.frozen]
    assert utils.get_z3_leaf_modules(model) == []
    found, missing = utils.set_z3_leaf_modules_by_suffix(
        model, ["body.1", "nowhere"], raise_if_not_found=False
    )
    assert (found, missing) == ([model.body[1]], ["nowhere"])
    with pytest.raises(ValueError, match="no module"):
        utils.set_z3_leaf_modules(model, [nn.Conv1d])


def _small_gradient(rank: int, world_size: int) -> None:
    for stage in (1, 2, 3):
        engine = _engine(stage, fp16={"enabled": True, "initial_scale_power": 16})
        engine.backward(engine(_inputs(rank).half()).float())
        for param in engine.module.body.parameters():
            given = torch.full(param.shape, 0.0015, dtype=torch.float16)
            utils.safe_set_full_grad(param, given)
            found = utils.safe_get_full_grad(param)
            assert found is not None
            assert torch.equal(found, given.float())
        engine.destroy()


def test_small_fp16_gradient_is_set_as_it_is_given() -> None:
    spawn(_small_gradient, 2)


def _states(rank: int, world_size: int) -> None:
    for stage in (0, 1, 3):
        engine, model = _engine(stage), _reference(world_size)
        assert not engine.optimizer.state
        engine.backward(engine(_inputs(rank)))
        engine.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        optimizer.step()
        packed = engine.optimizer.state_dict()
        numbers = packed["param_groups"][0]["params"]
        assert packed["param_groups"][0]["lr"] == LR
        trained = [n for n, p in engine.module.named_parameters() if p.requires_grad]
        for number, name in zip(numbers, trained, strict=True):
            param = engine.module.get_parameter(name)
            expected = optimizer.state[model.get_parameter(name)]["exp_avg"]
            own = engine.optimizer.state.get(param, {})
            assert own.keys() == packed["state"].get(number, {}).keys()
            assert own.get("step", torch.tensor(1.0)) == 1
            part = own.get("exp_avg", torch.empty(0))
            if stage == 0:
                torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-10)
                continue
            rows: list[Any] = [None] * world_size
            dist.all_gather_object(rows, part)
            torch.testing.assert_close(torch.cat(rows), expected.flatten(), rtol=1e-4, atol=1e-10)
        with pytest.raises(TypeError, match="safe_set_full_optimizer_state"):
            engine.optimizer.state[param] = {}
        with pytest.raises(TypeError, match="safe_set_full_optimizer_state"):
            engine.optimizer.state.clear()
        assert not engine.optimizer.state.keys() & set(engine.module.frozen.parameters())
        names = {1: "single_partition_of_fp32_groups", 3: "fp32_partitioned_groups_flat"}
        there = [name for name in names.values() if hasattr(engine.optimizer, name)]
        assert there == [names[s] for s in (stage,) if s in names]
        for name in there:
            (own,) = getattr(engine.optimizer, name)
            assert own.dtype == torch.float32
            rows = [None] * world_size
            dist.all_gather_object(rows, own)
            values = [p.flatten() for p in model.parameters() if p.requires_grad]
            found, expected = torch.cat(rows), torch.cat(values)
            torch.testing.assert_close(found.sort()[0], expected.sort()[0], rtol=1e-4, atol=1e-6)
        _follows_after_load(engine, packed, rank)
        engine.destroy()


def _follows_after_load(engine: Any, packed: dict[str, Any], rank: int, **more: Any) -> None:
    """A new engine with the weights and the loaded state takes the same next step."""
    stage = engine.zero_optimization_stage()
    weights = engine.core.full_state_dict()
    other = _engine(stage, **more)
    with other.core.gathered(modifier_rank=0) as module:
        module.load_state_dict(weights)
    packed["param_groups"][0]["lr"] = 3 * LR
    other.optimizer.load_state_dict(packed)
    engine.optimizer.param_groups[0]["lr"] = 3 * LR
    for one in (engine, other):
        one.backward(one(_inputs(rank, 1)))
        one.step()
    found, expected = other.core.full_state_dict(), engine.core.full_state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    short = {**packed, "param_groups": packed["param_groups"] * 2}
    with pytest.raises(ValueError, match="load what state_dict"):
        other.optimizer.load_state_dict(short)
    kept = other.optimizer.state_dict()
    state = packed["state"]
    last = next((n for n in reversed(state) if torch.is_tensor(state[n].get("exp_avg"))), None)
    if last is not None:  # the others' states are right, and not taken
        long = {**state, last: {**state[last], "exp_avg": torch.zeros(1000)}}
        with pytest.raises(ValueError, match="load a checkpoint instead"):
            other.optimizer.load_state_dict({**packed, "state": long})
    assert kept["scalars"] == other.optimizer.state_dict()["scalars"] != packed["scalars"]
    with pytest.raises(ValueError, match="number of steps"):
        other.optimizer.load_state_dict({k: v for k, v in packed.items() if k != "scalars"})
    other.destroy()


def _states_of_muon(rank: int, world_size: int) -> None:
    muon = {"type": "Muon", "params": {"lr": LR, "weight_decay": 0.0}}
    for stage in (0, 3):
        engine = _engine(stage, optimizer=muon)
        for step in range(3):
            engine.backward(engine(_inputs(rank, step)))
            engine.step()
        packed = engine.optimizer.state_dict()
        assert {scalars["num_steps"] for scalars in packed["scalars"].values()} <= {0, 3}
        _follows_after_load(engine, packed, rank, optimizer=muon)
        engine.destroy()


def _all_states(rank: int, world_size: int) -> None:
    _states(rank, world_size)
    _states_of_muon(rank, world_size)


def test_optimizer_has_this_ranks_part_of_the_state() -> None:
    spawn(_all_states, 2)


def _within_no_sync(rank: int, world_size: int) -> None:
    for stage in (0, 1, 3):
        engine, model = _engine(stage), _Model()
        for _ in range(2):  # the second time after zero_grad
            with engine.no_sync():
                for step in range(2):
                    engine.backward(engine(_inputs(rank, step)))
                    model(_inputs(rank, step)).backward()
                    for mine, other in _pairs(engine, model):
                        found = utils.safe_get_full_grad(mine)
                        if other.grad is None:
                            assert found is None
                            continue
                        torch.testing.assert_close(found, other.grad, rtol=1e-5, atol=1e-8)
            engine.zero_grad()
            model.zero_grad()
        assert not engine.core.states.holds_gradient
        with engine.no_sync():
            engine.backward(engine(_inputs(rank)))
            weight = engine.module.body[0].weight
            if rank == 0:  # as it would be with DDP: this rank's part of the mean
                utils.safe_set_full_grad(weight, torch.ones(7, 3))
            with pytest.raises(ValueError, match="shape"):
                utils.safe_set_full_grad(weight, torch.ones(2))
        own = torch.zeros(7, 3)
        if rank:
            model(_inputs(rank)).backward()
            own = model.get_parameter("body.0.weight").grad
        dist.all_reduce(own)
        found = utils.safe_get_full_grad(weight)
        torch.testing.assert_close(found, (own + 1.0) / world_size, rtol=1e-5, atol=1e-8)
        engine.destroy()


def test_gradients_within_no_sync_are_the_ranks_own() -> None:
    spawn(_within_no_sync, 2)


def test_view_at_stage_0_stands_for_the_driven_optimizer() -> None:
    for stage in (0, 1):
        model = _Model()
        given = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
        engine, view, *_ = deepspeed.initialize(model=model, optimizer=given, config=config)
        is_bare = stage == 0
        assert (view == given) is is_bare
        assert isinstance(view, torch.optim.AdamW) is is_bare
        assert (view in {given}) is is_bare
        assert type(view).__name__ == "DeepSpeedOptimizer"
        engine.backward(engine(_inputs(0)))
        view.step()
        assert engine.global_steps == 1
        engine.destroy()
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", range(4))
def test_given_optimizer_shows_the_state_until_the_engine_ends(stage: int) -> None:
    model = _Model()
    given = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    own, weight = given.state, model.body[0].weight
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    engine, view, *_ = deepspeed.initialize(model=model, optimizer=given, config=config)
    assert view.optimizer.state[weight] == {}
    engine.backward(engine(_inputs(0)))
    engine.step()
    found = view.optimizer.state[weight]
    expected = utils.safe_get_full_optimizer_state(weight, "exp_avg")
    assert set(found) == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(found["exp_avg"].flatten(), expected.flatten())
    engine.destroy()
    assert given.state is own
    dist.destroy_process_group()


def test_step_without_a_gradient_is_refused_where_unused_parameters_are() -> None:
    for stage, is_refused in ((1, True), (2, True), (3, False), (0, False)):
        engine = _engine(
            stage, zero_optimization={"stage": stage, "ignore_unused_parameters": False}
        )
        unused = engine.module.body[1].bias
        for is_used in (True, False):
            unused.requires_grad_(is_used)  # what is frozen for now is not missed
            engine.backward(
                engine.module.body[0](_inputs(0)).mean() if is_used else engine(_inputs(0))
            )
            if is_used and is_refused:
                with pytest.raises(
                    AssertionError, match=r"body\.1\.weight.*ignore_unused_parameters"
                ):
                    engine.step()
                engine.optimizer.zero_grad()
                engine.core.optimizer.zero_grad()
            else:
                engine.step()
        engine.destroy()
    dist.destroy_process_group()


def test_leaf_named_in_the_configuration_is_marked() -> None:
    zero = {"stage": 3, "leaf_module": {"names": ["body.0"]}}
    engine = _engine(3, zero_optimization=zero)
    assert utils.get_z3_leaf_modules(engine.module) == [engine.module.body[0]]
    engine.destroy()
    dist.destroy_process_group()


def test_parameter_offload_below_stage_3_has_no_effect_and_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    offload = {"device": "cpu", "pin_memory": True}
    engine = _engine(2, zero_optimization={"stage": 2, "offload_param": offload})
    engine.backward(engine(_inputs(0)))
    engine.step()
    assert engine.zero_offload_param() is None
    told = [row for row in capsys.readouterr().err.splitlines() if "offload_param" in row]
    assert len(told) == 1
    assert "used at stage 3 only" in told[0]
    engine.destroy()
    dist.destroy_process_group()


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_initial_sum_of_a_group_of_adagrad_is_its_constructors_as_in_torch(offload: str) -> None:
    def groups(model: _Model) -> list[dict[str, Any]]:
        first = {"params": list(model.body[0].parameters()), "initial_accumulator_value": 0.1}
        return [first, {"params": list(model.body[1].parameters()), "lr": 0.3}]

    model, alone = _Model(), _Model()
    given, optimizer = (torch.optim.Adagrad(groups(m), lr=0.1) for m in (model, alone))
    zero = {"stage": 1, "offload_optimizer": {"device": offload}}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=given, config={**config, "gradient_clipping": 0.0}
    )
    for step in range(2):
        engine.backward(engine(_inputs(0, step)))
        engine.step()
        optimizer.zero_grad()
        alone(_inputs(0, step)).backward()
        optimizer.step()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
    engine.destroy()
    dist.destroy_process_group()
