"""A model that is made without memory gets the values of an ordinary construction, sharded."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core.init.values import InitialValues
from zero_core.optim.device_tier import DeviceTier
from zero_core.testing import Case, make_model, run_engine, spawn


class Odd(nn.Module):
    """Whatever constructors do: every kind of initialisation, buffers, numbers, copies, views."""

    def __init__(self) -> None:
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


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    params = model.named_parameters(remove_duplicate=False)
    return dict(params) | dict(model.named_buffers(remove_duplicate=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_value_and_the_generator_are_those_of_an_ordinary_construction(
    dtype: torch.dtype,
) -> None:
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
    for name in reversed(list(expected)):  # any order will do
        value = initial.of(found[name])
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name
    assert model.rates == ordinary.rates
    assert model.num_kept == ordinary.num_kept
    assert model.device_of_weight == "cpu"
    assert model.head.weight is model.embed.weight
    initial.give_attributes()
    assert torch.equal(model.plain, ordinary.plain)


def test_the_default_dtype_of_the_construction_counts() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        expected = torch.randn(5) / torch.arange(1, 6)
        torch.manual_seed(0)
        with zero_core.deferred_init():
            model = nn.Module()
            model.weight = nn.Parameter(torch.randn(5) / torch.arange(1, 6))
    finally:
        torch.set_default_dtype(torch.float32)
    found = InitialValues(model).of(model.weight)
    assert found.dtype == torch.float64
    assert torch.equal(found, expected)


def test_replaying_leaves_the_generator_alone() -> None:
    with zero_core.deferred_init():
        model = nn.Linear(4, 3)
    state = torch.get_rng_state()
    InitialValues(model).of(model.weight)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda t: t.data_ptr(), "has no address"),
        (lambda t: t.resize_(100), "resizes a tensor"),
        (lambda t: t.to(torch.complex64).conj() * 2, "resolve_conj"),
    ],
)
def test_what_cannot_be_recorded_is_refused(act, message: str) -> None:
    with pytest.raises(RuntimeError, match=message), zero_core.deferred_init():
        act(torch.ones(3))


class Normed(nn.Module):
    """Batch normalisation, buffers that are computed, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh())
            for _ in range(3)
        )
        self.blocks[1].requires_grad_(False)
        self.register_buffer("shift", torch.arange(6).float().sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _build_both(rank: int, world_size: int) -> None:
    for stage in range(4):
        for dtype in ("fp32", "bf16"):
            case = Case(stage=stage, dtype=dtype)
            for make in (make_model, Normed):
                torch.manual_seed(4)
                ordinary = zero_core.build(make(), case.config())
                torch.manual_seed(4 + rank)  # rank 0's values are taken, as ever
                with zero_core.deferred_init():
                    model = make()
                if make is make_model:
                    model.frozen.requires_grad_(False)
                engine = zero_core.build(model, case.config())
                assert not any(t.is_meta for t in _tensors(model).values())
                for (name, a), (other, b) in zip(
                    ordinary.full_state_dict(dtype=torch.float32).items(),
                    engine.full_state_dict(dtype=torch.float32).items(),
                    strict=True,
                ):
                    assert name == other
                    assert torch.equal(a, b), (stage, dtype, name)
                for a, b in zip(
                    ordinary.sharded_state.params, engine.sharded_state.params, strict=True
                ):
                    assert torch.equal(a.read_shard(), b.read_shard())
                for a, b in zip(ordinary.module.buffers(), model.buffers(), strict=True):
                    assert torch.equal(a, b)


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3],
)
def test_shards_masters_and_buffers_are_those_of_an_ordinary_model(world_size: int) -> None:
    spawn(_build_both, world_size)


def _train_both(rank: int, world_size: int) -> None:
    import zero_core.testing as testing

    ordinary = run_engine(Case(stage=3, accumulation=2), rank, 3)
    make, testing.make_model = testing.make_model, _deferred_model
    try:
        deferred = run_engine(Case(stage=3, accumulation=2), rank, 3)
    finally:
        testing.make_model = make
    assert deferred.losses == ordinary.losses
    assert all(torch.equal(deferred.values[n], v) for n, v in ordinary.values.items())


def _deferred_model(width: int) -> nn.Module:
    with zero_core.deferred_init():
        return make_model(width)


def test_a_deferred_model_trains_like_an_ordinary_one() -> None:
    spawn(_train_both, 2)


def test_an_own_optimizer_over_deferred_parameters_drives_them() -> None:
    config = {"train_micro_batch_size_per_gpu": 2}
    torch.manual_seed(0)
    ordinary = nn.Linear(4, 3)
    torch.manual_seed(0)
    with zero_core.deferred_init():
        model = nn.Linear(4, 3)
    engine = zero_core.build(
        model, config, optimizer=torch.optim.Adagrad(model.parameters(), lr=0.1)
    )
    optimizer = torch.optim.Adagrad(ordinary.parameters(), lr=0.1)
    x = torch.randn(2, 4)
    engine.backward(engine(x).square().mean())
    engine.step()
    ordinary(x).square().mean().backward()
    optimizer.step()
    assert torch.equal(engine.full_state_dict()["weight"], ordinary.weight)


CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def test_a_plain_meta_model_is_refused_with_both_cures() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(zero_core.ConfigError, match=r"0\.weight .*deferred_init.*pretrained=path"):
        zero_core.build(model, CONFIG)


def test_a_change_after_the_block_is_refused() -> None:
    with zero_core.deferred_init():
        model = nn.Linear(4, 3)
    nn.init.ones_(model.bias.data)  # what .data hides is known to nobody
    nn.init.uniform_(model.weight)
    with pytest.raises(zero_core.ConfigError, match="weight was changed after deferred_init"):
        zero_core.build(model, CONFIG)


def test_a_conversion_after_the_block_is_refused() -> None:
    with zero_core.deferred_init():
        model = nn.Linear(4, 3)
    with pytest.raises(zero_core.ConfigError, match="weight is on the meta device"):
        zero_core.build(model.double(), CONFIG)


def test_another_device_is_refused_within_the_block() -> None:
    with (
        pytest.raises(RuntimeError, match=r"empty asks for device cuda.*leave the device out"),
        zero_core.deferred_init(),
    ):
        nn.Linear(4, 3, device="cuda")


def test_a_tensor_of_another_block_is_refused() -> None:
    with zero_core.deferred_init():
        model = nn.Linear(4, 3)
    with (
        pytest.raises(RuntimeError, match="under one deferred_init"),
        zero_core.deferred_init(),
    ):
        nn.init.zeros_(model.weight)


def test_construction_is_ordinary_again_after_an_error_within() -> None:
    with pytest.raises(ZeroDivisionError), zero_core.deferred_init():
        raise ZeroDivisionError
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_no_tier_is_made_for_a_model_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceTier, "__init__", lambda *_, **__: pytest.fail("a tier was made"))
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    with pytest.raises(zero_core.ConfigError):
        zero_core.build(model, CONFIG)


def test_a_deferred_model_can_be_planned() -> None:
    with zero_core.deferred_init():
        model = make_model()
    planned = zero_core.plan(model, Case(stage=3).config(), 4)
    assert planned.to_json() == zero_core.plan(make_model(), Case(stage=3).config(), 4).to_json()


def test_what_numpy_would_write_unseen_is_refused() -> None:
    with zero_core.deferred_init():
        model = nn.Linear(4, 3)
        values = model.weight.detach().numpy()
        assert values.shape == (3, 4)
        with pytest.raises(ValueError, match="read-only"):
            values[:] = 7.0


def test_buffers_that_modules_share_stay_shared() -> None:
    for context in (nullcontext, zero_core.deferred_init):
        with context():
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
            table = torch.arange(4.0)
            for module in model:
                module.register_buffer("table", table)
        zero_core.build(model, CONFIG)
        assert model[0].table is model[1].table
        assert torch.equal(model[0].table, torch.arange(4.0))


def _defer_on_one_rank(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)  # rank 0's values count
    with nullcontext() if rank == 0 else zero_core.deferred_init():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    engine = zero_core.build(model, CONFIG)
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).state_dict()
    for name, value in engine.full_state_dict().items():
        assert torch.equal(value, expected[name])


def test_ranks_need_not_defer_alike() -> None:
    spawn(_defer_on_one_rank, 2)


def _meta_on_one_rank(rank: int, world_size: int) -> None:
    with torch.device("meta") if rank == 1 else nullcontext():
        model = nn.Linear(4, 3)
    with pytest.raises(zero_core.ConfigError, match="weight is on the meta device"):
        zero_core.build(model, CONFIG)


def test_a_meta_model_on_one_rank_is_refused_on_all() -> None:
    spawn(_meta_on_one_rank, 2)
