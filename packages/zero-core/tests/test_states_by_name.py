"""``engine.states`` reads and writes states by parameter name, compared with DDP and torch."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import zero_core
from zero_core.testing.models import batch, make_model, make_tower, rows
from zero_core.testing.oracle import Case, SimulatedDDP
from zero_core.testing.ranks import on_processes
from zero_core.testing.simulated import on_ranks
from zero_core.testing.training import adamw, assert_same, step_ddp, train, train_steps

NAMES = ("embed.weight", "gain", "blocks.0.up.weight", "blocks.1.side.bias", "sometimes")
MOMENTS = ("exp_avg", "exp_avg_sq")


class _Reference:
    """DDP with torch.optim.AdamW, after the backward of its third step."""

    def __init__(self, ranks):
        self.model = make_model()
        self.ddp = SimulatedDDP(self.model, ranks)
        self.optimizer = adamw(self.model)
        self.params = dict(self.model.named_parameters())
        for step in (0, 1):
            step_ddp(self.ddp, self.optimizer, batch(step, 0, ranks.rank))
        self.optimizer.zero_grad()
        self.ddp(**batch(4, 0, ranks.rank))["loss"].backward()
        self.ddp.average_gradients()

    def read(self, name, what):
        param = self.params[name]
        if what in MOMENTS:
            return self.optimizer.state[param][what]
        return param.grad if what == "grad" else param.detach()


def _engine(stage, ranks):
    engine = Case(stage=stage).build(ranks)
    train_steps(engine, 0, 2)
    engine.backward(engine(**batch(4, 0, ranks.rank))["loss"])
    return engine


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_weights_gradients_and_moments_are_those_of_ddp(ranks):
    reference = _Reference(ranks)
    control = ranks.connect()
    for stage in (0, 1, 2, 3):
        states = _engine(stage, ranks).states
        for name in NAMES:
            for what in ("master_weight", "grad", *MOMENTS):
                if (name, what) == ("sometimes", "grad"):
                    continue  # unused in this step: None in torch, zeros in the engine
                full = states.get_full(name, what)
                assert_same(full, reference.read(name, what))
                local = states.get_local(name, what)
                lengths = control.sum(torch.tensor([local.numel()]))
                copies = ranks.size if stage == 0 else 1
                assert lengths.item() == copies * full.numel()
                if stage == 0 or local.numel() == full.numel():
                    assert torch.equal(local, full.flatten())
        frozen = states.get_full("frozen.0.up.weight")
        assert torch.equal(frozen, reference.read("frozen.0.up.weight", "master_weight"))
        assert torch.equal(states.get_full("head.weight"), states.get_full("embed.weight"))


def _new(name, what, shape):
    generator = torch.Generator().manual_seed(len(name) + 10 * len(what))
    return torch.rand(shape, generator=generator) * 0.1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_what_is_set_is_what_the_step_uses(ranks, is_local):
    reference = _Reference(ranks)
    whats = [(name, what) for name in NAMES for what in ("master_weight", "grad", *MOMENTS)]
    with torch.no_grad():
        for name, what in whats:
            if (name, what) == ("sometimes", "grad"):
                reference.params[name].grad = _new(name, what, reference.params[name].shape)
            else:
                found = reference.read(name, what)
                found.copy_(_new(name, what, found.shape))
        reference.params["frozen.0.up.bias"].fill_(0.5)
    reference.optimizer.step()
    loss = reference.ddp(**batch(5, 0, ranks.rank))["loss"].item()
    for stage in (0, 1, 2, 3):
        engine = _engine(stage, ranks)
        for name, what in whats:
            value = _new(name, what, reference.params[name].shape)
            if is_local:  # write this rank's part only
                engine.states.set_full(name, value, what)
                part = engine.states.get_local(name, what)
                engine.states.set_full(name, torch.zeros_like(value), what)
                engine.states.set_local(name, part, what)
            else:
                engine.states.set_full(name, value, what)
            assert torch.equal(engine.states.get_full(name, what), value)
        engine.states.set_full("frozen.0.up.bias", torch.full((23,), 0.5))
        engine.step()
        # The engine's gradients were set, so they have no rounding errors of a reduction.
        after = engine.full_state_dict()
        for name in (*NAMES, "frozen.0.up.bias"):
            torch.testing.assert_close(
                after[name], reference.params[name].detach(), rtol=0.0, atol=1e-7
            )
        assert engine(**batch(5, 0, ranks.rank))["loss"].item() == pytest.approx(loss, abs=1e-5)


def test_what_is_not_there_is_refused_by_name():
    engine = Case().build()
    states = engine.states
    for call, error, match in (
        (lambda: states.get_full("blocks.9.weight"), KeyError, "no parameter"),
        (lambda: states.get_full("gain", "exp_avg"), KeyError, "exp_avg"),
        (lambda: states.get_local("gain", "exp_avg"), KeyError, "exp_avg"),
        (lambda: states.get_full("frozen.0.up.bias", "grad"), KeyError, "frozen"),
        (lambda: states.get_local("frozen.0.up.bias"), KeyError, "frozen"),
        (lambda: states.set_full("gain", torch.zeros(2)), ValueError, "shape"),
        (lambda: states.set_local("gain", torch.zeros(2)), ValueError, "elements"),
    ):
        with pytest.raises(error, match=match):
            call()
    train_steps(engine, 0, 1)
    with pytest.raises(RuntimeError, match="before its first step"):
        states.set_full("never", torch.zeros(5), "exp_avg")
    with engine.no_sync(), pytest.raises(RuntimeError, match="not whole yet"):
        states.get_full("gain", "grad")


def _net(*, is_wrapped=False):
    model = make_tower(3)
    model.head.requires_grad_(False)
    blocks = list(model.blocks)
    for block in blocks:
        block.register_buffer("shift", torch.full((6,), 0.5))
    if is_wrapped:
        blocks = [checkpoint_wrapper(torch.compile(block, backend="eager")) for block in blocks]
        model.first = checkpoint_wrapper(model.first)
        model.head = torch.compile(model.head, backend="eager")
    model.blocks = nn.ModuleList(blocks)
    return model


@on_processes(2)
def test_wrapped_models_have_the_names_of_the_model(ranks, tmp_path):
    for stage in (0, 3):
        config, folder = Case(stage).config(), tmp_path / str(stage)
        engine, plain = (zero_core.build(_net(is_wrapped=w), config) for w in (True, False))
        for each in (engine, plain):
            train(each, [rows(step, ranks.rank) for step in range(2)])
        state = engine.full_state_dict()
        _net().load_state_dict(state)
        assert_same(state, plain.full_state_dict())
        assert list(state) == list(plain.full_state_dict())
        for one, other in ((plain, engine), (engine, plain)):
            one.save_checkpoint(folder)
            train(other, [rows(2, ranks.rank)])
            other.load_checkpoint(folder)
            assert_same(other.full_state_dict(), state)
        engine.export_safetensors(folder / "export")
        assert load_file(folder / "export" / "model.safetensors").keys() == state.keys()
        fresh = zero_core.build(_net(is_wrapped=True), config, pretrained=folder / "export")
        assert_same(fresh.full_state_dict(), state)
        for name, param in engine.module.named_parameters():
            own = zero_core.engine_of(param).owns(param)
            assert torch.equal(engine.states.get_full(name), state[own])


def test_states_made_at_construction_are_read_before_the_first_step():
    options = {"lr": 0.1, "initial_accumulator_value": 0.25}
    model = torch.nn.Linear(3, 2)
    expected = torch.optim.Adagrad(model.parameters(), **options).state[model.weight]["sum"]
    engine = Case(2, top={"optimizer": {"type": "Adagrad", "params": options}}).build(model=model)
    assert torch.equal(engine.states.get_full("weight", "sum"), expected)
    engine.close()
