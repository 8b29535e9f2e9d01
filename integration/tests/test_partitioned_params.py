"""Parameters that are sharded before an engine exists, and their reads and writes."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn

import zero_core
from tests.support.facade import run_each, update
from zero_core.testing import Case, Failure, PeakMemory, failing, spawn, train
from zero_core.testing.quantized import Adapted
from zero_engine.deepspeed.zero.partition_parameters import (
    GatheredParameters,
    _check_whole,
    sharded_loading,
)
from zero_engine.deepspeed.zero.partitioned import (
    gathered_params,
    is_partitioned,
    leave_partitioned,
    partition_module,
    partitioned_init,
    value_of,
)

CONFIG = Case(3, top={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}).config()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(()))
        self.low = nn.Parameter(torch.randn(7).bfloat16())
        self.codes = nn.Parameter(torch.arange(6), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("table", torch.linspace(0, 1, 4).cos())
        self.same = self.table
        self.lists = [torch.rand(2), {"key": torch.arange(3)}]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = hidden + block(hidden) * self.scale
        return self.head(self.norm(hidden)).sum() + self.low.sum() + 0 * self.none.sum()


class _Own(nn.Parameter):
    pass


def _make(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def _make_sharded(seed: int = 0) -> Model:
    with partitioned_init():
        return _make(seed)


def _check_values(model: nn.Module, expected: nn.Module) -> None:
    found = dict(model.named_parameters(remove_duplicate=False))
    for name, param in expected.named_parameters(remove_duplicate=False):
        assert found[name].dtype == param.dtype, name
        assert torch.equal(found[name], param), name


def _check_built(model: nn.Module, expected: nn.Module) -> None:
    engine = zero_core.build(model, CONFIG)
    assert not any(map(is_partitioned, model.parameters()))
    found = engine.full_state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name
    engine.close()


def _is_all_partitioned(model: nn.Module) -> bool:
    return all(is_partitioned(p) == p.is_floating_point() for p in model.parameters())


def _read(rank: int, world_size: int) -> None:
    expected = _make()
    generator_state = torch.get_rng_state()
    with partitioned_init() as made:
        model = _make(seed=0 if rank == 0 else 100 + rank)  # ranks get rank 0's values
    if rank == 0:
        assert torch.equal(torch.get_rng_state(), generator_state)
    assert sorted(map(id, made.params)) == sorted(
        id(p) for p in model.parameters() if p.is_floating_point()
    )
    assert model.head.weight is model.embed.weight
    assert [p.shape for p in model.parameters()] == [p.shape for p in expected.parameters()]
    assert all(p.isnan().all() for p in model.parameters() if p.is_floating_point())
    assert model.codes.tolist() == list(range(6))
    for _ in range(2):  # first from recorded initialisations, then from shards
        with gathered_params([*model.parameters(), None, model.table, nn.Parameter(torch.ones(1))]):
            _check_values(model, expected)
            _check_values(copy.deepcopy(model), expected)
        assert _is_all_partitioned(model)
    assert model.same is model.table
    if rank == 0:
        assert torch.equal(model.table, expected.table)
        assert torch.equal(model.lists[0], expected.lists[0])
        assert torch.equal(model.lists[1]["key"], expected.lists[1]["key"])
    _check_built(model, expected)


def _closes_as_it_was(rank: int, world_size: int) -> None:
    model, expected = _make_sharded(), _make()
    weight, bias = model.blocks[0].weight, model.blocks[0].bias
    with gathered_params([weight]):
        weight.data = torch.ones(6, 3)
    assert is_partitioned(weight)
    assert weight.shape == (5, 5)
    with suppress(ZeroDivisionError), gathered_params([weight], modifier_rank=0):
        weight.data = torch.ones(6, 3)
        raise ZeroDivisionError
    with gathered_params([weight]):
        assert torch.equal(weight, expected.blocks[0].weight)
    scale = copy.deepcopy(model.scale)
    with torch.no_grad():
        torch._foreach_zero_([scale])  # bypasses the check that refuses writes
    with pytest.raises(RuntimeError, match="written to"):
        gathered_params([weight, bias, scale]).__enter__()
    assert is_partitioned(weight)
    assert is_partitioned(bias)
    with gathered_params([weight], modifier_rank=0):
        weight.data = torch.ones(6, 3)
    with gathered_params([weight]):
        assert torch.equal(weight, torch.ones(6, 3))


def _change(rank: int, world_size: int) -> None:
    model, expected = _make_sharded(), _make()
    source = world_size - 1
    weight = model.blocks[0].weight
    with gathered_params([weight, model.scale], modifier_rank=source):
        weight.data[2] = 7.0 if rank == source else -1.0
        with torch.no_grad():
            model.scale.fill_(3.0 + rank)
    with gathered_params([weight]):
        with gathered_params([weight], modifier_rank=0):
            weight.data[1] = 5.0 + rank
        weight.data.fill_(10.0 + rank)  # discarded, because only the inner context keeps changes
    bias = model.blocks[0].bias
    with suppress(ZeroDivisionError), gathered_params([bias]):
        with gathered_params([bias], modifier_rank=0):
            bias.data = torch.full((2, 3), 2.0)
        bias.data = torch.zeros(5)
        raise ZeroDivisionError
    with gathered_params([bias], modifier_rank=0):
        assert torch.equal(bias, torch.full((2, 3), 2.0))
        bias.data = torch.full((5,), 2.0)
    with torch.no_grad():
        expected.blocks[0].bias.fill_(2.0)
        expected.blocks[0].weight[2] = 7.0
        expected.scale.fill_(3.0 + source)
        expected.blocks[0].weight[1] = 5.0
    with gathered_params(model.parameters()):
        _check_values(model, expected)
    _check_built(model, expected)


def _copy_and_convert(rank: int, world_size: int) -> None:
    model, expected = _make_sharded(), _make().half().float()
    with gathered_params([model.blocks[0].weight]):  # others keep recorded initialisations
        pass
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.embed.weight is not model.embed.weight
    with gathered_params(copied.parameters(), modifier_rank=0):
        for param in copied.parameters():
            param.data.zero_()
    model.half().to("cpu").to(dtype=torch.float32, memory_format=torch.preserve_format)
    assert _is_all_partitioned(model)
    with gathered_params(model.parameters()):
        _check_values(model, expected)


def _train(rank: int, world_size: int) -> None:
    model, expected = _make_sharded().float(), _make().float()
    model.codes.requires_grad_(False)
    optimizers = [
        torch.optim.Adagrad(
            [p for p in m.parameters() if p.requires_grad], lr=0.1, initial_accumulator_value=0.5
        )
        for m in (model, expected)
    ]
    for state in optimizers[0].state.values():
        assert state["sum"].untyped_storage().nbytes() <= 4, "it takes no memory"
    config = {k: v for k, v in CONFIG.items() if k != "optimizer"}
    engine = zero_core.build(model, config, optimizer=optimizers[0])
    batch = torch.tensor([[1, 4], [3, 3], [10, 0]])[:, 0]
    for _ in range(2):
        wanted = expected(batch)
        wanted.backward()
        update(optimizers[1])
        torch.testing.assert_close(train(engine, [batch]), [wanted.item()])
    engine.close()


def _left_by_engines(rank: int, world_size: int) -> None:
    """Check that `leave_partitioned` shards plain parameters unless all ranks have their values."""
    model = _make()
    model.own = _Own(torch.linspace(0, 1, 3))
    for stage in (3, 1, 0, 3):
        config = {**CONFIG, "zero_optimization": {"stage": stage}}
        engine = zero_core.build(model, config)
        train(engine, [torch.tensor([1 + stage, 4, 10])])
        values = engine.full_state_dict()
        leave_partitioned(engine)
        leave_partitioned(engine)
        assert zero_core.engine_of(model.scale) is None
        is_whole = world_size == 1 or stage < 3
        for param in model.parameters():
            can = param.is_floating_point() and param is not model.own
            assert is_partitioned(param) == (can and not is_whole)
        assert type(model.own) is _Own
        for each in (copy.deepcopy(model), model):
            with gathered_params(each.parameters()):
                for name, param in each.named_parameters(remove_duplicate=False):
                    assert param.dtype == values[name].dtype
                    assert torch.equal(param, values[name]), (stage, name)
    with gathered_params([model.blocks[0].weight], modifier_rank=world_size - 1):
        model.blocks[0].weight.data.fill_(rank)
    engine = zero_core.build(model, CONFIG)
    values["blocks.0.weight"].fill_(world_size - 1)
    assert all(torch.equal(value, values[name]) for name, value in engine.full_state_dict().items())
    engine.close()


def _whole_after_builds_that_fail(rank: int, world_size: int) -> None:
    model, expected = _make_sharded(), _make()
    params = [p for p in model.parameters() if is_partitioned(p) and p is not model.low]
    file = sys.modules["zero_core.building"].__file__
    for call in ("UnitSet.publish", "release_free_pages"):
        with gathered_params(params):
            pass
        with pytest.raises(Failure), failing((call, 0), "call", file):
            zero_core.build(model, CONFIG)
        assert _is_all_partitioned(model)
        assert model.low.is_deferred
        with gathered_params(params):
            _check_values(copy.deepcopy(model.blocks), expected.blocks)
    _check_built(model, expected)


def _drawn() -> nn.Module:
    """Make a model whose layers are initialised after construction, as in transformers."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3, bias=False))
    nn.init.normal_(model[1].weight, std=0.02)
    nn.init.zeros_(tensor=model[0].bias)
    nn.init.xavier_uniform_(model[0].weight)
    return model


def _initialize(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(5 + rank)  # ranks get rank 0's values
        return _drawn()

    torch.manual_seed(5)
    expected = _drawn()
    with partitioned_init():
        model = make()
    assert _is_all_partitioned(model)
    _check_built(model, expected)
    torch.manual_seed(5)
    again = make()
    partition_module(again)
    for draw in (nn.init.normal_, nn.init.xavier_uniform_, nn.init.zeros_, nn.init.kaiming_normal_):
        torch.manual_seed(9)
        drawn = draw(torch.empty(3, 5))
        torch.manual_seed(9 + rank)
        with torch.no_grad():
            assert draw(again[1].weight) is again[1].weight
        assert _is_all_partitioned(again)
        with gathered_params([again[1].weight]):
            assert torch.equal(again[1].weight, drawn)


def _draw_within(opened: nn.Parameter, drawn: nn.Parameter) -> None:
    with gathered_params([opened], modifier_rank=0):
        nn.init.normal_(drawn)


def _refuse(rank: int, world_size: int) -> None:
    model = _make_sharded()
    weight, scale = model.blocks[0].weight, model.scale

    actions: list[Callable[[], object]] = [
        lambda: pickle.dumps(weight),
        lambda: _draw_within(scale, weight),
        lambda: weight.detach().normal_(),
        lambda: scale.__setitem__((), 1.0),
        lambda: torch.add(torch.ones(5, 5), 1, out=weight),
        lambda: weight.__iadd__(1),
        lambda: setattr(weight, "data", torch.zeros(5, 5)),
    ]
    for number, action in enumerate(actions):
        expected = "single memory location" if number == 2 else "while it is sharded"
        with torch.no_grad(), pytest.raises(RuntimeError, match=expected):
            action()
    with pytest.raises(ValueError, match=f"expected a rank below {world_size}"):
        gathered_params([weight], modifier_rank=world_size).__enter__()
    assert is_partitioned(weight)
    with torch.device("meta"):
        bare = nn.Linear(2, 2)
    with pytest.raises(zero_core.ConfigError, match="weight is on the meta device"):
        partition_module(bare)
    scale.data.fill_(1.0)  # detected by the next gather only
    with pytest.raises(RuntimeError, match="written to while it is sharded"):
        gathered_params([scale]).__enter__()


def _disagree(rank: int, world_size: int) -> None:
    if world_size == 1:
        return
    model = _make_sharded()
    differ = pytest.raises(zero_core.RankMismatchError, match="different shapes")
    with differ, gathered_params([model.low], modifier_rank=0):
        model.low.data = torch.zeros(7 if rank == 0 else 8)
    model = _make()
    if rank == 0:
        with partitioned_init():
            model = _make()
        for param in filter(is_partitioned, model.parameters()):
            value_of(param).keep(torch.zeros(param.shape, dtype=param.dtype))
    with pytest.raises(zero_core.RankMismatchError, match="sharded before build"):
        zero_core.build(model, CONFIG)


def _load_quantized(rank: int, world_size: int) -> None:
    model, exact = Adapted(), Adapted()
    x = torch.linspace(-1, 1, 3 * 24).view(3, 24)
    with sharded_loading():
        for module in model.modules():
            for name, param in list(module._parameters.items()):
                setattr(module, name, param)
    absmax = model.inlet.weight.state.absmax
    for param in (absmax, model.outlet.weight.absmax, model.blocks[0].norm.weight):
        assert param.isnan().all()
    params = list(model.parameters())
    with pytest.raises(RuntimeError, match=r"sharded.*no engine has it.*GatheredParameters"):
        model(x)
    with GatheredParameters(params):
        assert model(x).item() == exact(x).item()
        absmax.zero_()  # discarded, because the context is read only
    with GatheredParameters(params, modifier_rank=world_size - 1):
        if rank == world_size - 1:
            absmax.mul_(2.0)
            model.blocks[0].norm.weight.mul_(0.5)
    exact.inlet.weight.state.absmax.mul_(2.0)
    exact.blocks[0].norm.weight.data.mul_(0.5)
    assert absmax.isnan().all()
    with pytest.raises(RuntimeError, match="load the model before"):
        model(x)
    engine = zero_core.build(model, CONFIG)
    assert engine(x).item() == exact(x).item()
    assert _check_whole not in model.inlet._forward_pre_hooks.values()
    engine.close()


CHECKS = [
    _read,
    _closes_as_it_was,
    _change,
    _copy_and_convert,
    _train,
    _left_by_engines,
    _whole_after_builds_that_fail,
    _initialize,
    _load_quantized,
    _refuse,
    _disagree,
]


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_parameters_sharded_from_the_start_are_read_changed_copied_and_built(world_size):
    spawn(run_each, world_size, CHECKS)


WIDTH, DEPTH = 1024, 16
UNIT_BYTES = 4 * WIDTH * (WIDTH + 1)
MODEL_BYTES = DEPTH * UNIT_BYTES  # 67 MB
SLACK_BYTES = 8 * 1024**2  # for threads, messages between ranks and allocator fragmentation


def _measure(rank: int, world_size: int) -> None:
    """Measure memory while values are written one module at a time, and in build()."""
    # Torch and gloo must make their own allocations before the measurement.
    with zero_core.deferred_init():
        small = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zero_core.build(small, CONFIG).close()
    with PeakMemory() as peak:
        with partitioned_init():
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
        for number, layer in enumerate(model):
            with gathered_params(layer.parameters(), modifier_rank=0):
                if rank == 0:
                    layer.weight.data.fill_(number)
    parts = MODEL_BYTES / world_size
    bound = parts + 2 * UNIT_BYTES + SLACK_BYTES
    assert bound < parts + MODEL_BYTES / 3, "a whole model would be seen"
    assert 0.9 * parts <= peak.nbytes <= bound, "what is there is seen, and no more is there"
    with PeakMemory() as peak:
        engine = zero_core.build(model, CONFIG)
    kept = engine.memory_report()["parameters"]
    assert peak.nbytes <= kept + 2 * UNIT_BYTES + SLACK_BYTES, ("built", rank, peak.nbytes, kept)
    with engine.gathered():
        assert all(bool((x.weight == number).all()) for number, x in enumerate(model))


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_no_rank_holds_the_whole_model_when_values_are_written_before_there_is_an_engine() -> None:
    spawn(_measure, 2)
