"""Parameters that keep their strides: channels-last convolutions and transposed matrices."""

import copy

import pytest
import torch
from torch import nn

import zero_core
from zero_core.checkpoint.files import read_weights
from zero_core.testing.models import seeded
from zero_core.testing.oracle import Case, SimulatedDDP
from zero_core.testing.simulated import on_ranks, simulate
from zero_core.testing.training import assert_same, step_ddp, train

STEPS = 3


class _Convolutions(nn.Module):
    def __init__(self, *, is_channels_last=True):
        super().__init__()
        with seeded(7):
            self.first = nn.Conv2d(3, 8, 3)
            self.blocks = nn.ModuleList(
                nn.Sequential(
                    nn.Conv2d(8, 8, 3, padding=1, groups=g), nn.ReLU(), nn.Conv2d(8, 8, 1)
                )
                for g in (1, 8)
            )
            self.head = nn.Parameter(torch.randn(5, 8))
            self.frozen = nn.Conv2d(8, 8, 3, padding=1).requires_grad_(False)
        if is_channels_last:
            self.head.data = self.head.data.t().contiguous().t()
            self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = self.first(x.to(self.head.dtype))
        for block in self.blocks:
            x = x + block(x)
        return (self.frozen(x).mean((2, 3)) @ self.head.T).square().mean()


def _x(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(2, 3, 9, 9, generator=generator)
    return x.contiguous(memory_format=torch.channels_last)


def _strides(model):
    return {name: param.stride() for name, param in model.named_parameters()}


class _Whole(torch.optim.AdamW):
    """An AdamW subclass, which the engine does not treat as elementwise."""


def _adamw(model, kind):
    trained = [p for p in model.parameters() if p.requires_grad]
    return kind(trained, lr=1e-2, fused=True)


def _build(ranks, stage, optimizer=torch.optim.AdamW, dtype="fp32", **model):
    net = _Convolutions(**model)
    return Case(stage, dtype).build(ranks, net, optimizer=_adamw(net, optimizer))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, _Whole])
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_losses_weights_and_strides_are_those_of_ddp(ranks, stage, kind):
    model = _Convolutions()
    optimizer, ddp = _adamw(model, kind), SimulatedDDP(model, ranks)
    losses = [step_ddp(ddp, optimizer, _x(step, ranks.rank)) for step in range(STEPS)]
    engine = _build(ranks, stage, kind)
    with engine.gathered():
        assert _strides(engine.module) == _strides(model)
    assert train(engine, [_x(step, ranks.rank) for step in range(STEPS)]) == losses
    full = engine.full_state_dict()
    assert all(value.is_contiguous() for value in full.values())  # required by safetensors
    assert_same(full, dict(model.state_dict()))
    for name, param in model.named_parameters():
        if param.requires_grad:
            moment = optimizer.state[param]["exp_avg"]
            assert torch.equal(engine.states.get_full(name, "exp_avg"), moment), name
    with engine.gathered():
        copied = copy.deepcopy(engine.module)
    assert _strides(copied) == _strides(model)
    left = engine.unwrap()
    assert _strides(left) == _strides(model)
    for found in (left, copied):
        assert_same(dict(found.state_dict()), dict(model.state_dict()))


def _saves(ranks, folder, kind, is_channels_last):
    engine = _build(ranks, 2, kind, "bf16", is_channels_last=is_channels_last)
    train(engine, [_x(step, ranks.rank) for step in range(2)])
    engine.save_checkpoint(folder)
    engine.export_safetensors(folder / "export")
    return _values(engine)


def _values(engine):
    found = {
        f"{spec.name}.{what}": engine.states.get_full(spec.name, what)
        for spec in engine.layout.params
        for what in (("master_weight", "exp_avg") if spec.is_trainable else ("master_weight",))
    }
    return found | {n: v.float() for n, v in engine.full_state_dict().items()}


def _loads(ranks, folder, stage, kind, is_channels_last):
    engine = _build(ranks, stage, kind, "bf16", is_channels_last=is_channels_last)
    train(engine, [_x(0, ranks.rank)])
    engine.load_checkpoint(folder)
    loaded = _values(engine)
    with engine.gathered():
        module = {n: v.float() for n, v in engine.module.state_dict().items()}
    assert_same(module, {n: loaded[n] for n in module})
    train(engine, [_x(2, ranks.rank)])
    fresh = _build(ranks, stage, kind, "bf16", is_channels_last=is_channels_last)
    zero_core.load_pretrained(fresh, folder / "export")
    return loaded, {n: v.float() for n, v in fresh.full_state_dict().items()}


@pytest.mark.parametrize(
    ("optimizer", "world_size", "stage", "was_channels_last", "is_channels_last"),
    [
        *((torch.optim.AdamW, 3, 3, False, True), (torch.optim.AdamW, 3, 3, True, False)),
        *((torch.optim.AdamW, 1, 0, True, True), (_Whole, 3, 3, True, True)),
        *((_Whole, 1, 0, False, True), (_Whole, 1, 0, True, False)),
    ],
)
def test_checkpoints_and_exports_have_values_by_index_whatever_the_strides(
    tmp_path, optimizer, world_size, stage, was_channels_last, is_channels_last
):
    expected = simulate(_saves, 2, tmp_path, optimizer, was_channels_last)[0]
    for weight in read_weights(tmp_path):
        value = weight.value.float()
        assert torch.equal(value, expected[f"{weight.names[0]}.master_weight"]), weight.names
        assert weight.value.is_contiguous()
    zero_core.verify_checkpoint(tmp_path)
    args = tmp_path, stage, optimizer, is_channels_last
    for loaded, exported in simulate(_loads, world_size, *args):
        assert_same(loaded, expected)
        assert_same(exported, {n: expected[n] for n in exported})


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "fp32"), (0, "bf16"), (1, "bf16"), (2, "fp32"), (3, "bf16")]
)
@on_ranks(2)
def test_values_and_gradients_are_read_and_set_by_index(ranks, stage, dtype):
    net, plain = _Convolutions(), _Convolutions()
    config = Case(stage, dtype).config() | {"weight_patches": {}}
    engine = zero_core.build(
        net, config, optimizer=_adamw(net, torch.optim.AdamW), process_group=ranks
    )
    plain = plain.to(net.head.dtype)
    name, other = "blocks.0.0.weight", "head"
    value = torch.arange(8 * 8 * 9.0).view(8, 8, 3, 3)
    engine.states.set_full(name, value)
    with torch.no_grad(), engine.gathered(modifier_rank=0):
        engine.module.get_parameter(other)[1, 2] = 5.0
        engine.module.frozen.weight[3, 4, 1, 2] = 7.0
    assert torch.equal(engine.states.get_full(name), value)
    assert engine.states.get_full(other)[1, 2] == 5.0
    values = engine.full_state_dict()
    assert values["frozen.weight"][3, 4, 1, 2] == 7.0
    patch = engine.weight_patch(since=0)
    for target in (plain, _Convolutions(is_channels_last=False).to(net.head.dtype)):
        if ranks.rank == 0:
            zero_core.apply_patch(target, patch, version=0)
            assert_same(dict(target.state_dict()), values)
    with engine.no_sync():
        engine.backward(engine(_x(0, ranks.rank)))
    unreduced = engine.states.get_unreduced(name)
    assert unreduced is not None
    assert unreduced.stride() == plain.blocks[0][0].weight.stride()
    engine.backward(engine(_x(0, ranks.rank)))
    grad = engine.states.get_full(name, "grad")
    if stage == 0:
        found = net.blocks[0][0].weight.grad
        assert found is not None
        assert torch.equal(found, grad.to(found.dtype))
        net.blocks[0][0].weight.grad[1, 2, 0, 1] = 0.5
    else:
        grad[1, 2, 0, 1] = 0.5
        engine.states.set_full(name, grad, "grad")
    assert engine.states.get_full(name, "grad")[1, 2, 0, 1] == 0.5
    engine.step()
