"""DeepSpeed's `safe_get_*` and `safe_set_*` functions of parameters, compared with torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.facade import LR, add_gradients, config, inputs, make, on_ranks, square
from zero_engine import deepspeed
from zero_engine.deepspeed import utils

CLIPPING = 1e-3
STATES = ("master_weight", "grad", "exp_avg", "exp_avg_sq")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 3)]
    layers[4].requires_grad_(False)
    return nn.Sequential(*layers)


def _engine(stage: int, **more: Any) -> Any:
    adam = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}}
    settings = {"optimizer": adam, "gradient_clipping": CLIPPING, **more}
    return make(_model(), config=config(stage, **settings))


def _backward(engine: Any, step: int = 0) -> None:
    dtype = engine.module[4].weight.dtype
    loss = square(engine, inputs(step, engine.global_rank).to(dtype))
    engine.backward(loss.float())


def _reference(world_size: int) -> nn.Sequential:
    model = _model()
    add_gradients(model, 0, world_size)
    return model


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)


def _pairs(engine: Any, model: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    return zip(engine.module.parameters(), model.parameters(), strict=True)


def _joined(part: Tensor) -> Tensor:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return torch.cat(parts)


def _reads(rank: int, world_size: int) -> None:
    for stage in (0, 2, 3):
        engine, model = _engine(stage), _reference(world_size)
        assert utils.safe_get_full_grad(engine.module[0].weight) is None
        _backward(engine)
        for mine, other in _pairs(engine, model):
            grad = utils.safe_get_full_grad(mine)
            if other.grad is None:
                assert grad is None, "frozen"
                assert utils.safe_get_full_fp32_param(mine) is None, "as in DeepSpeed"
                continue
            # The gradient is not clipped yet, although its norm exceeds the bound.
            torch.testing.assert_close(grad, other.grad, rtol=1e-5, atol=1e-8)
            torch.testing.assert_close(utils.safe_get_full_fp32_param(mine), other.detach())
            assert utils.safe_get_full_optimizer_state(mine, "exp_avg") is None
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
        for mine, other in _pairs(engine, model):
            assert utils.safe_get_full_grad(mine) is None
            first = utils.safe_get_full_optimizer_state(mine, "exp_avg")
            if other.grad is None:
                assert first is None
                continue
            torch.testing.assert_close(first, 0.1 * other.grad, rtol=1e-4, atol=1e-10)
            mine.requires_grad_(False)  # only ``requires_grad`` at initialize() counts
            assert utils.safe_get_full_fp32_param(mine) is not None
            assert utils.safe_get_full_optimizer_state(mine, "no_such_state") is None
        engine.destroy()


def _writes(rank: int, world_size: int) -> None:
    for stage in (0, 3):
        engine = _engine(stage, gradient_clipping=0.0)
        _backward(engine)
        engine.step()
        _backward(engine, 1)
        generator = torch.Generator().manual_seed(5)
        for name, param in engine.module.named_parameters():
            given = {what: torch.rand(param.shape, generator=generator) for what in STATES}
            utils.safe_set_full_fp32_param(param, given["master_weight"])
            if not param.requires_grad:
                given = {"master_weight": given["master_weight"]}
            else:
                utils.safe_set_full_grad(param, given["grad"])
                for what in ("exp_avg", "exp_avg_sq"):
                    utils.safe_set_full_optimizer_state(param, given[what], what)
            for what, value in given.items():
                assert torch.equal(engine.core.states.get_full(name, what), value), (name, what)
        engine.step()
        engine.destroy()


def _local_parts(rank: int, world_size: int) -> None:
    engine = _engine(3)
    _backward(engine)
    for param in engine.module[:4].parameters():
        for read_all, read_own in (
            (utils.safe_get_full_fp32_param, utils.safe_get_local_fp32_param),
            (utils.safe_get_full_grad, utils.safe_get_local_grad),
        ):
            whole, own = read_all(param), read_own(param)
            assert whole is not None
            assert own is not None
            assert torch.equal(_joined(own), whole.flatten())
        own = utils.safe_get_local_fp32_param(param)
        assert own is not None
        utils.safe_set_local_fp32_param(param, own + 1)
        torch.testing.assert_close(utils.safe_get_local_fp32_param(param), own + 1, rtol=0, atol=0)
    engine.destroy()


def _small_gradients_in_fp16(rank: int, world_size: int) -> None:
    for stage in (1, 3):
        engine = _engine(stage, fp16={"enabled": True, "initial_scale_power": 16})
        _backward(engine)
        for param in engine.module[:4].parameters():
            given = torch.full(param.shape, 0.0015, dtype=torch.float16)
            utils.safe_set_full_grad(param, given)
            found = utils.safe_get_full_grad(param)
            assert found is not None
            assert torch.equal(found, given.float())
        engine.destroy()


def _parts_of_the_optimizer(rank: int, world_size: int) -> None:
    for stage in (0, 1, 3):
        engine, model = _engine(stage), _reference(world_size)
        assert not engine.optimizer.state
        _backward(engine)
        engine.step()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer = _adamw(model)
        optimizer.step()
        packed = engine.optimizer.state_dict()
        assert packed["param_groups"][0]["lr"] == LR
        trained = [pair for pair in _pairs(engine, model) if pair[0].requires_grad]
        numbers = packed["param_groups"][0]["params"]
        for number, (param, other) in zip(numbers, trained, strict=True):
            own = engine.optimizer.state.get(param, {})
            assert own.keys() == packed["state"].get(number, {}).keys()
            assert own.get("step", torch.tensor(1.0)) == 1
            part = own.get("exp_avg", torch.empty(0))
            whole = part if stage == 0 else _joined(part)
            expected = optimizer.state[other]["exp_avg"].reshape(whole.shape)
            torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-10)
        with pytest.raises(TypeError, match="safe_set_full_optimizer_state"):
            engine.optimizer.state[param] = {}
        with pytest.raises(TypeError, match="safe_set_full_optimizer_state"):
            engine.optimizer.state.clear()
        assert not engine.optimizer.state.keys() & set(engine.module[4].parameters())
        names = {1: "single_partition_of_fp32_groups", 3: "fp32_partitioned_groups_flat"}
        there = [name for name in names.values() if hasattr(engine.optimizer, name)]
        assert there == [names[s] for s in (stage,) if s in names]
        for name in there:
            (own,) = getattr(engine.optimizer, name)
            assert own.dtype == torch.float32
            expected = torch.cat([other.flatten() for _, other in trained])
            found = _joined(own).sort()[0]
            torch.testing.assert_close(found, expected.sort()[0], rtol=1e-4, atol=1e-6)
        _follows_after_load(engine, packed)
        engine.destroy()
    muon = {"type": "Muon", "params": {"lr": LR, "weight_decay": 0.0}}
    engine = _engine(3, optimizer=muon)
    for step in range(3):
        _backward(engine, step)
        engine.step()
    packed = engine.optimizer.state_dict()
    assert {scalars["num_steps"] for scalars in packed["scalars"].values()} <= {0, 3}
    _follows_after_load(engine, packed, optimizer=muon)
    engine.destroy()


def _follows_after_load(engine: Any, packed: dict[str, Any], **more: Any) -> None:
    """Check that another engine takes the same next step after loading weights and ``packed``."""
    weights = engine.core.full_state_dict()
    other = _engine(engine.zero_optimization_stage(), **more)
    with other.core.gathered(modifier_rank=0) as module:
        module.load_state_dict(weights)
    packed["param_groups"][0]["lr"] = 3 * LR
    other.optimizer.load_state_dict(packed)
    engine.optimizer.param_groups[0]["lr"] = 3 * LR
    for one in (engine, other):
        _backward(one, 1)
        one.step()
    found, expected = other.core.full_state_dict(), engine.core.full_state_dict()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="load what state_dict"):
        other.optimizer.load_state_dict({**packed, "param_groups": packed["param_groups"] * 2})
    kept = other.optimizer.state_dict()
    state = packed["state"]
    last = next((n for n in reversed(state) if torch.is_tensor(state[n].get("exp_avg"))), None)
    if last is not None:  # the error must leave earlier states unchanged too
        long = {**state, last: {**state[last], "exp_avg": torch.zeros(1000)}}
        with pytest.raises(ValueError, match="load a checkpoint instead"):
            other.optimizer.load_state_dict({**packed, "state": long})
    assert kept["scalars"] == other.optimizer.state_dict()["scalars"] != packed["scalars"]
    with pytest.raises(ValueError, match="number of steps"):
        other.optimizer.load_state_dict({k: v for k, v in packed.items() if k != "scalars"})
    other.destroy()


def _gradients_within_no_sync(rank: int, world_size: int) -> None:
    for stage in (1, 3):
        engine, model = _engine(stage), _model()
        for _ in range(2):
            with engine.no_sync():
                for step in range(2):
                    _backward(engine, step)
                    square(model, inputs(step, rank)).backward()
                    for mine, other in _pairs(engine, model):
                        found = utils.safe_get_full_grad(mine)
                        assert (found is None) == (other.grad is None)
                        if found is not None:
                            torch.testing.assert_close(found, other.grad, rtol=1e-5, atol=1e-8)
            engine.zero_grad()
            model.zero_grad()
        assert not engine.core.states.holds_gradient
        weight = engine.module[0].weight
        with engine.no_sync():
            _backward(engine)
            if rank == 0:  # sets this rank's term of the mean, as in DDP
                utils.safe_set_full_grad(weight, torch.ones(7, 3))
            with pytest.raises(ValueError, match="shape"):
                utils.safe_set_full_grad(weight, torch.ones(2))
        square(model, inputs(0, rank)).backward()
        own = torch.ones(7, 3) if rank == 0 else model[0].weight.grad
        dist.all_reduce(own)
        found = utils.safe_get_full_grad(weight)
        torch.testing.assert_close(found, own / world_size, rtol=1e-5, atol=1e-8)  # type: ignore[operator]
        engine.destroy()


ON_TWO_RANKS = [
    _local_parts,
    _small_gradients_in_fp16,
    _parts_of_the_optimizer,
    _gradients_within_no_sync,
]


@pytest.mark.parametrize(("world_size", "further"), [(1, []), (2, ON_TWO_RANKS)])
def test_values_are_those_of_torch_alone_and_a_step_uses_what_was_set(world_size, further):
    on_ranks(world_size, [_reads, _writes, *further])


def test_gradient_carries_the_loss_scale_and_belongs_to_an_engine() -> None:
    engine = _engine(2, fp16={"enabled": True, "loss_scale": 8.0}, gradient_clipping=0.0)
    _backward(engine)
    weight = engine.module[0].weight
    grad = utils.safe_get_full_grad(weight)
    assert grad is not None
    torch.testing.assert_close(grad, 8.0 * _reference(1)[0].weight.grad, rtol=0.05, atol=1e-3)  # type: ignore[operator]
    utils.safe_set_full_grad(weight, grad)
    torch.testing.assert_close(utils.safe_get_full_grad(weight), grad)
    param = nn.Parameter(torch.ones(2))
    assert utils.safe_get_full_fp32_param(param) is None
    assert utils.safe_get_full_grad(param) is None
    with pytest.raises(ValueError, match="belongs to no engine"):
        utils.safe_set_full_fp32_param(param, torch.zeros(2))


def test_gradients_can_be_replaced_by_a_function() -> None:
    engine = _engine(1)
    _backward(engine)
    params = list(engine.module.parameters())
    before = [utils.safe_get_full_grad(p) for p in params]
    utils.safe_update_full_grad_vectorized(params, lambda grad, param: grad + param.numel())
    for param, grad in zip(params, before, strict=True):
        expected = None if grad is None else grad + param.numel()
        torch.testing.assert_close(utils.safe_get_full_grad(param), expected)


def test_leaf_modules_are_marked_by_class_name_suffix_and_configuration() -> None:
    model = _model()
    layers = [model[0], model[2], model[4]]
    assert utils.set_z3_leaf_modules(model, [nn.Linear]) == layers
    assert utils.get_z3_leaf_modules(model) == layers
    assert utils.unset_z3_leaf_modules(model, ["Linear"]) == layers
    assert utils.get_z3_leaf_modules(model) == []
    body = nn.ModuleDict({"body": model})
    found, missing = utils.set_z3_leaf_modules_by_suffix(
        body, ["body.2", "nowhere"], raise_if_not_found=False
    )
    assert (found, missing) == ([model[2]], ["nowhere"])
    for wanted in ([nn.Conv1d], "NotALinear"):
        with pytest.raises(ValueError, match="no module"):
            utils.set_z3_leaf_modules(model, wanted)
    assert utils.set_z3_leaf_modules(model, iter(["Linear"])) == layers
    engine = _engine(3, zero_optimization={"stage": 3, "leaf_module": {"names": ["0"]}})
    assert utils.get_z3_leaf_modules(engine.module) == [engine.module[0]]


@pytest.mark.parametrize("stage", range(4))
def test_given_optimizer_shows_the_state_until_the_engine_ends(stage: int) -> None:
    model = _model()
    given = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    own, weight = given.state, model[0].weight
    engine, view, *_ = deepspeed.initialize(model=model, optimizer=given, config=config(stage))
    # At stage 0 the view equals the optimizer that it wraps.
    assert (view == given, isinstance(view, torch.optim.AdamW), view in {given}) == (
        stage == 0,
    ) * 3
    assert type(view).__name__ == "DeepSpeedOptimizer"
    assert view.optimizer.state[weight] == {}
    _backward(engine)
    view.step()
    assert engine.global_steps == 1
    found = view.optimizer.state[weight]
    expected = utils.safe_get_full_optimizer_state(weight, "exp_avg")
    assert set(found) == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(found["exp_avg"].flatten(), expected.flatten())
    engine.destroy()
    assert given.state is own


@pytest.mark.parametrize(("stage", "is_refused"), [(1, True), (2, True), (3, False), (0, False)])
def test_step_without_a_gradient_is_refused_where_unused_parameters_are(stage, is_refused):
    zero = {"stage": stage, "ignore_unused_parameters": False}
    engine = _engine(stage, zero_optimization=zero)
    for is_used in (True, False):
        engine.module[2].bias.requires_grad_(is_used)  # a frozen parameter does not count as unused
        part = engine.module[0] if is_used else engine
        engine.backward(part(inputs(0)).mean())
        if is_used and is_refused:
            with pytest.raises(AssertionError, match=r"2\.weight.*ignore_unused_parameters"):
                engine.step()
            engine.optimizer.zero_grad()
            engine.core.optimizer.zero_grad()
        else:
            engine.step()


def test_parameter_offload_below_stage_3_has_no_effect_and_a_note(capsys):
    offload = {"device": "cpu", "pin_memory": True}
    engine = _engine(2, zero_optimization={"stage": 2, "offload_param": offload})
    _backward(engine)
    engine.step()
    assert engine.zero_offload_param() is None
    (note,) = (row for row in capsys.readouterr().err.splitlines() if "offload_param" in row)
    assert "used at stage 3 only" in note
