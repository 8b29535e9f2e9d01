"""Models built by deferred_init(), whose shards get the values of ordinary construction."""

import copy
import threading
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn

import zero_core
from zero_core.init import values
from zero_core.init.values import InitialValues, put_in_slices, whole_value
from zero_core.testing import Case, Hard, assert_same, make_model, on_ranks, simulate, train_steps


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 7)
        nn.init.orthogonal_(self.linear.weight)
        nn.init.trunc_normal_(self.linear.bias, a=-0.5, b=0.5)
        self.embed = nn.Embedding(11, 5, padding_idx=2)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool())
        frequency = 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8)
        self.register_buffer("frequency", frequency, persistent=False)
        self.plain = self.frequency.cos()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.rates += torch.linspace(0, 0.5, 3).tolist()
        self.rates += self.linear.bias.detach().numpy().tolist()
        self.device_of_weight = self.linear.weight.device.type
        self.direct = nn.Parameter(torch.randn(6, 4))
        first, second = torch.randn(2, 9).unbind(0)
        self.first, self.second = nn.Parameter(first), nn.Parameter(second * 2)
        self.low = nn.Parameter(torch.randn(33).to(torch.bfloat16))
        with torch.no_grad():
            self.direct.mul_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
            self.direct[1:3] += torch.rand(2, 4)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2, enable_nested_tensor=False
        )
        self.norm = nn.BatchNorm1d(5)
        nn.init.normal_(self.norm.weight, generator=torch.Generator().manual_seed(5))
        self.recurrent = nn.LSTM(3, 4)
        self.picked = nn.Parameter(torch.randn(5)[torch.tensor([0, 3])])
        self.num_kept = len(torch.nonzero(torch.eye(3)))
        self.twin = copy.deepcopy(self.linear)
        self.never_set = nn.Parameter(torch.zeros(3), requires_grad=False)


def _tensors(model):
    params = model.named_parameters(remove_duplicate=False)
    return dict(params) | dict(model.named_buffers(remove_duplicate=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_value_and_the_generator_are_those_of_an_ordinary_construction(dtype):
    torch.manual_seed(3)
    ordinary = Odd().to(dtype)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with zero_core.deferred_init():
        model = Odd().to(dtype)
    assert torch.equal(torch.get_rng_state(), state)
    expected, found = _tensors(ordinary), _tensors(model)
    assert list(found) == list(expected)
    assert all(p.is_meta for p in model.parameters())
    initial = InitialValues(model)
    for name in reversed(list(expected)):
        value = initial.of(found[name])
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name
    assert model.rates == ordinary.rates
    assert model.num_kept == ordinary.num_kept
    assert model.device_of_weight == "cpu"
    assert model.head.weight is model.embed.weight
    initial.give_attributes()
    assert torch.equal(model.plain, ordinary.plain)


def test_the_default_dtype_of_the_construction_counts_and_replaying_draws_nothing():
    torch.set_default_dtype(torch.float64)
    try:
        expected, model = (
            _seeded(lambda: nn.Linear(5, 3), 0, is_deferred=is_deferred)
            for is_deferred in (False, True)
        )
    finally:
        torch.set_default_dtype(torch.float32)
    state = torch.get_rng_state()
    assert_same(InitialValues(model).of(model.weight), expected.weight.detach())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda t: t.data_ptr(), "has no address"),
        (lambda t: t.resize_(100), "resizes a tensor"),
        (lambda t: t.to(torch.complex64).conj() * 2, "resolve_conj"),
    ],
)
def test_what_cannot_be_recorded_is_refused(act, message):
    with pytest.raises(RuntimeError, match=message), zero_core.deferred_init():
        act(torch.ones(3))


class Buffered(Hard):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6).requires_grad_(False)
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.arange(6).float().sin(), persistent=False)


def _seeded(make, seed, *, is_deferred):
    torch.manual_seed(seed)
    with zero_core.deferred_init() if is_deferred else nullcontext():
        return make()


def _build_both(ranks, case, models):
    engines = []
    for model in models[ranks.rank]:
        engine = case.build(ranks, model)
        assert not any(t.is_meta for t in _tensors(model).values())
        engines.append(engine)
    ordinary, deferred = engines
    assert_same(*(engine.full_state_dict(dtype=torch.float32) for engine in engines))
    for a, b in zip(ordinary.sharded_state.params, deferred.sharded_state.params, strict=True):
        assert torch.equal(a.source.read(), b.source.read())
    assert_same(*(list(engine.module.buffers()) for engine in engines))
    assert train_steps(ordinary, 0, 3) == train_steps(deferred, 0, 3)
    assert_same(*(engine.full_state_dict() for engine in engines))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shards_masters_and_training_are_those_of_an_ordinary_model(world_size, dtype, stage):
    # Make the models before the simulated ranks start, because deferred_init() sets global hooks.
    models = [
        (_seeded(Buffered, 4, is_deferred=False), _seeded(Buffered, 4 + rank, is_deferred=True))
        for rank in range(world_size)
    ]
    simulate(_build_both, world_size, Case(stage=stage, dtype=dtype), models)


def test_an_own_optimizer_over_deferred_parameters_drives_them():
    values = []
    for is_deferred in (False, True):
        model = _seeded(lambda: nn.Linear(4, 3), 0, is_deferred=is_deferred)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        engine = zero_core.build(model, CONFIG, optimizer=optimizer)
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
        values.append(engine.full_state_dict())
    assert_same(*values)
    assert optimizer.state


CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def test_a_plain_meta_model_is_refused_with_both_cures():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(zero_core.ConfigError, match=r"0\.weight .*deferred_init.*pretrained=path"):
        zero_core.build(model, CONFIG)


def _change(model):
    nn.init.ones_(model.bias.data)  # a change through .data, which deferred_init() cannot record
    nn.init.uniform_(model.weight)
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_change, "weight was changed after deferred_init"),
        (nn.Module.double, "weight is on the meta device"),
    ],
)
def test_a_change_after_the_block_is_refused(change, message):
    with zero_core.deferred_init():
        model = nn.Linear(4, 3)
    with pytest.raises(zero_core.ConfigError, match=message):
        zero_core.build(change(model), CONFIG)


def test_another_device_and_a_tensor_of_another_block_are_refused_within_a_block():
    with zero_core.deferred_init():
        model = nn.Linear(4, 3)
    with (
        pytest.raises(RuntimeError, match=r"empty asks for device cuda.*leave the device out"),
        zero_core.deferred_init(),
    ):
        nn.Linear(4, 3, device="cuda")
    with pytest.raises(RuntimeError, match="under one deferred_init"), zero_core.deferred_init():
        nn.init.zeros_(model.weight)
    assert nn.Linear(2, 2).weight.device.type == "cpu", "ordinary again after an error"


def test_a_deferred_model_can_be_planned():
    with zero_core.deferred_init():
        model = make_model()
    planned = zero_core.plan(model, Case(stage=3).config(), 4)
    assert planned.to_json() == zero_core.plan(make_model(), Case(stage=3).config(), 4).to_json()


def test_what_numpy_would_write_unseen_is_refused():
    with zero_core.deferred_init():
        model = nn.Linear(4, 3)
        values = model.weight.detach().numpy()
        assert values.shape == (3, 4)
        with pytest.raises(ValueError, match="read-only"):
            values[:] = 7.0


def test_buffers_that_modules_share_stay_shared():
    for context in (nullcontext, zero_core.deferred_init):
        with context():
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
            table = torch.arange(4.0)
            for module in model:
                module.register_buffer("table", table)
        zero_core.build(model, CONFIG)
        assert model[0].table is model[1].table
        assert torch.equal(model[0].table, torch.arange(4.0))


def test_every_rank_starts_from_rank_zeros_values_and_they_need_not_defer_alike():
    def make(rank):
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        model[1].running_mean.fill_(rank)
        return model

    models = [_seeded(lambda r=rank: make(r), rank, is_deferred=rank > 0) for rank in range(3)]
    models[2] = _seeded(lambda: make(2), 2, is_deferred=False)
    expected = {name: value.clone() for name, value in models[0].state_dict().items()}

    def build(ranks):
        engine = zero_core.build(models[ranks.rank], CONFIG, process_group=ranks)
        assert_same(engine.full_state_dict(), expected)

    simulate(build, 3)


@on_ranks(2)
def test_a_meta_model_on_one_rank_is_refused_on_all(ranks):
    model = nn.Linear(4, 3, device="meta" if ranks.rank == 1 else "cpu")
    with pytest.raises(zero_core.ConfigError, match="weight is on the meta device"):
        zero_core.build(model, CONFIG, process_group=ranks)


def test_slices_are_freed_as_their_unit_is_filled():
    slices = {}
    held = []

    def noted(tensor):
        held.append(sum(found.own.nbytes for found in slices[threading.get_ident()]))
        return whole_value(tensor)

    def build(ranks):
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
        put_in_slices(list(model.parameters()), ranks.connect())
        slices[threading.get_ident()] = [values.slices[param] for param in model.parameters()]
        Case(3).build(ranks, model)

    with mock.patch.object(values, "whole_value", noted):
        simulate(build, 2)
    assert sorted(held) == [n * 8 * 8 * 4 // 2 for n in (1, 1, 2, 2, 3, 3, 4, 4)]
