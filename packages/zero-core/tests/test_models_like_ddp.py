"""Unusual models, which train as under DDP at every stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from support.mixture import MIXTURE_WIDTH, Mixture, MixtureModel, routed_batch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from zero_core.testing.models import Tower, batch, make_model, make_tower, rows, seeded
from zero_core.testing.oracle import Case, SimulatedDDP
from zero_core.testing.ranks import on_processes
from zero_core.testing.simulated import on_ranks
from zero_core.testing.training import Inputs, adamw, assert_same, check_like_ddp, train, train_ddp

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")


class _Odd(Tower):
    def __init__(self, way):
        super().__init__()
        self.way = way
        if way == "shared":
            self.last = nn.LayerNorm(7)
            self.blocks[0].append(self.last)

    def forward(self, x, used=None):
        if self.way == "shared":
            return super().forward(x) + self.last(x).square().mean()
        x = self.first(x)
        if self.way == "in parts":
            for block in (*self.blocks[2:], *self.blocks[:2]):
                for part in block:
                    x = part(x)
        elif self.way == "twice in one":
            x = checkpoint(self._run, x, (0, 1, 0), use_reentrant=False)
            x = checkpoint(self._run, x, (2, 3), use_reentrant=False)
        else:
            x = checkpoint(self._run, x, (2, 0), use_reentrant=True)
            x = checkpoint(self.blocks[2], x, use_reentrant=True)
        return self.head(x).square().mean()


class _NoInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.register_buffer("start", torch.linspace(-1.0, 1.0, 12).view(3, 4))

    def forward(self):
        x = self.blocks(self.start)
        return x.square().mean()


@dataclass
class _State:
    hidden: Tensor
    extra: Tensor | None


class _Part(nn.Linear):
    def __init__(self, place):
        super().__init__(7, 7)
        self.place = place

    def forward(self, given, mask=None, *, scale=1.0):
        if self.place == "start":
            return _State(super().forward(given["x"]), mask)
        if self.place == "middle":
            hidden = torch.tanh(super().forward(given.hidden))
            return hidden, {"unused": hidden * 2}, None
        hidden, extras, nothing = given
        assert nothing is None
        return _State(super().forward(hidden) * scale, extras["unused"])


class _Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Part(place) for place in ("start", "middle", "end"))

    def forward(self, given):
        start, middle, end = self.blocks
        out = end(middle(start(given)), scale=0.5)
        assert out.extra is not None
        return {"loss": out.hidden.square().mean(), "state": out}


class _Alone(nn.Module):
    def __init__(self, leaf=None):
        super().__init__()
        self.mixture = Mixture()
        self.blocks = nn.Sequential(*(nn.Linear(MIXTURE_WIDTH, MIXTURE_WIDTH) for _ in range(2)))
        if leaf is not None:
            self.get_submodule(leaf)._is_zero_leaf = True

    def forward(self, x, allowed):
        x = self.blocks(self.mixture(x, allowed[0]))
        return x.square().mean()


class _AtRoot(Mixture):
    def forward(self, x, allowed):
        return super().forward(x, allowed[0]).square().mean()


WIDTH, DEPTH, TWICE = 33, 7, 4  # block number TWICE is called twice in a row
# By step: blocks whose branch rank 1 leaves out, and blocks whose first call it leaves out. The
# other ranks must start the gathers that rank 1 waits for before rank 1's backward ends.
LEFT_OUT = [set(), {6}, {5}, {3}, {0}, {5, 6}, set(range(DEPTH))]
SKIPPED = [set(), {6}, {2}, {0}, {0, 1}, {1, 2, 3, 4, 5}, set(range(DEPTH))]


class _Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, has_branch):
        if has_branch is None:
            return x  # stochastic depth
        x = x + torch.tanh(self.always(x))
        return x + self.branch(x) if has_branch else x


class _Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Branch() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 3)
        self.start = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x, left_out, skipped):
        x = x + self.start
        for index, block in enumerate(self.blocks):
            x = block(x, None if index in skipped else index not in left_out)
            if index == TWICE:
                x = block(x, index not in left_out)
        return self.head(x).square().mean()


class _Scaled(nn.Module):
    def __init__(self, is_trained=False):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5)) if is_trained else 2.0

    def forward(self, weight):
        return weight * self.factor


def _parametrize(linear):
    parametrize.register_parametrization(linear, "weight", _Scaled())
    parametrize.register_parametrization(linear, "bias", _Scaled(linear.out_features == 7))


def _add_hooks(linear):
    linear.register_forward_pre_hook(lambda m, args: (args[0] + m.weight.mean(0)[:1],))
    linear.register_forward_hook(lambda m, args, out: out + m.weight.sum() + m.bias)


CHANGES = {
    "weight_norm by hooks": nn.utils.weight_norm,
    "spectral_norm by hooks": nn.utils.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "parametrizations": _parametrize,
    "hooks": _add_hooks,
}


def _layered():
    model = make_tower()
    with seeded(2):
        model.blocks.extend(nn.Linear(7, 7) for _ in range(2))
    return model


def _changed(model, which):
    with seeded(4):
        for module in list(model.modules()):
            if isinstance(module, nn.Linear):
                CHANGES[which](module)
    return model


def _with_hooks_of_units():
    def scale(module, args, kwargs):
        return (args[0] * module.norm.weight.mean() * module.up.weight.norm(),), kwargs

    def add(module, args, kwargs, output):
        return output * (1.0 + kwargs["use_side"]) + module.norm.bias

    model = make_model()
    for block in model.blocks:
        block.register_forward_pre_hook(scale, with_kwargs=True, prepend=True)
        block.register_forward_hook(add, with_kwargs=True)
    return model


def _with_hooks_of_root():
    model = make_tower()
    model.register_forward_pre_hook(lambda m, args: (args[0] + m.head.bias.sum() + m.first.bias,))
    return model


def _with_tensor_hooks():
    model = make_tower()
    model.blocks[0][0].weight.register_hook(lambda grad: grad * 0.5)
    model.blocks[1][3].weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    model.blocks[1][0].requires_grad_(False)
    return model


def _branching(step, rank):
    return rows(step, rank, WIDTH), LEFT_OUT[step] if rank == 1 else set(), set()


def _without_blocks(step, rank):
    return rows(step, rank, WIDTH), set(), SKIPPED[step] if rank == 1 else set()


def _skipping(number, rank):
    return rows(number, rank), [block for block in range(4) if block != (rank + number // 2) % 4]


def _recomputable(number, rank):
    return rows(number, rank).requires_grad_()


def _in_dict(number, rank, dtype=torch.float32):
    return ({"x": rows(number, rank).to(dtype)},)


class Use(NamedTuple):
    make: Callable[[], nn.Module]
    draw: Callable[[int, int], Inputs] = rows
    top: Mapping[str, Any] = {}
    steps: int = 3
    accumulation: int = 1


def _of(kind, *args, dtype=None):
    def make():
        with seeded(3):
            return kind(*args).to(dtype)

    return make


RECOMPUTED = {"activation_checkpointing": {}}
MIXTURES_LEFT_OUT = partial(routed_batch, counts=(8, 1, 0, 8))
USES = {
    **{
        f"tower, recomputes {how}": Use(partial(make_tower, recompute=how), _recomputable)
        for how in ("none", "blocks", "reentrant", "pairs")
    },
    **{
        way: Use(_of(_Odd, way), _recomputable)
        for way in ("shared", "in parts", "in pairs", "twice in one")
    },
    "skipped blocks": Use(make_tower, _skipping, steps=8),
    "parts left out": Use(_of(_Branches), _branching, steps=7),
    "parts left out, recomputed": Use(_of(_Branches), _branching, RECOMPUTED, steps=7),
    "blocks that do nothing": Use(_of(_Branches), _without_blocks, steps=7),
    "no input, no root": Use(_of(_NoInput), lambda number, rank: ()),
    "structured": Use(_of(_Structured), _in_dict),
    "structured, double": Use(
        _of(_Structured, dtype=torch.float64), partial(_in_dict, dtype=torch.float64), RECOMPUTED
    ),
    "mixtures": Use(MixtureModel, routed_batch),
    "mixture alone": Use(_of(_Alone), routed_batch),
    "mixture as a leaf": Use(_of(_Alone, "mixture"), routed_batch),
    "experts as a leaf": Use(_of(_Alone, "mixture.experts"), routed_batch),
    "mixture at the root": Use(_of(_AtRoot), routed_batch),
    "mixtures left out": Use(MixtureModel, MIXTURES_LEFT_OUT, steps=4, accumulation=2),
    "mixtures left out, recomputed": Use(MixtureModel, MIXTURES_LEFT_OUT, RECOMPUTED, steps=4),
    **{which: Use(lambda which=which: _changed(_layered(), which)) for which in CHANGES},
    "hooks of units": Use(_with_hooks_of_units, lambda number, rank: batch(number, 0, rank)),
    "hooks of the root": Use(_with_hooks_of_root),
    "tensor hooks": Use(_with_tensor_hooks),
}


# Two cases of each model are not slow: stage 3 on two ranks, and one lower stage on three ranks.
GRID = [
    pytest.param(stage, size, name, marks=[] if (stage, size) in gate else pytest.mark.slow)
    for number, name in enumerate(USES)
    for gate in [((3, 2), (number % 3, 3))]
    for stage, size in product(range(4), (1, 2, 3))
]


@pytest.mark.parametrize(("stage", "world_size", "name"), GRID)
@on_ranks()
def test_losses_and_values_are_those_of_ddp(ranks, name, stage):
    make, draw, top, steps, accumulation = USES[name]
    case = Case(stage, accumulation=accumulation, top=top)
    # Two reentrant checkpoints give a block's gradient in two parts, which are reduced separately.
    atol = 1e-7 if name == "in pairs" and ranks.size > 1 else 0.0
    check_like_ddp(ranks, make, draw, case, steps=steps, atol=atol)


@on_processes(2)
def test_processes_end_when_one_leaves_out_or_skips_blocks(ranks):
    for draw in (_branching, _without_blocks):
        check_like_ddp(ranks, _of(_Branches), draw, Case(3), steps=len(LEFT_OUT))


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_hooks_registered_after_build_find_current_parameters(ranks, stage):
    batches = [rows(number, ranks.rank) for number in range(3)]
    expected, model = _changed(_layered(), "hooks"), _layered()
    losses = train_ddp(expected, ranks, batches)
    engine = Case(stage).build(ranks, model)
    _changed(model, "hooks")
    assert train(engine, batches) == losses
    assert_same(engine.full_state_dict(), dict(expected.state_dict()))


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_accumulation_hook_sees_the_gradient_only_when_registered_before_build(ranks, stage):
    model, seen = make_tower(), []
    hook = model.head.weight.register_post_accumulate_grad_hook
    hook(lambda param: seen.append(param.grad))
    engine = Case(stage).build(ranks, model)
    hook(lambda param: seen.append(param.grad))
    train(engine, [rows(0, ranks.rank)])
    assert seen[0] is not None  # the rank's own gradient
    assert seen[0].shape == (3, 7)
    assert seen[1] is None


def _penalized(model, number, rank):
    x = rows(number, rank).requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x, create_graph=True)
    return out + grad.square().mean() + second.square().mean()


def _of_two_forwards(model, number, rank):
    left_out = [(3, None), (None, 3), (1, 3), (0, 2)][number]
    used = [[b for b in range(4) if b != block or rank == 0] for block in left_out]
    return sum(model(rows(number, rank), blocks) for blocks in used)


@pytest.mark.parametrize("loss_of", [_penalized, _of_two_forwards])
@on_ranks(3)
def test_losses_beside_a_forward_follow_ddp_at_every_stage(ranks, loss_of):
    engines = [Case(stage).build(ranks, make_tower()) for stage in range(4)]
    ddp = SimulatedDDP(make_tower(), ranks)
    optimizer = adamw(ddp.module)
    for number in range(4):
        loss = loss_of(ddp, number, ranks.rank)
        loss.backward()
        ddp.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
        for engine in engines:
            found = loss_of(engine, number, ranks.rank)
            assert torch.equal(found, loss)
            engine.backward(found)
            engine.step()
    for engine in engines:
        assert_same(engine.full_state_dict(), dict(ddp.module.state_dict()))


@pytest.mark.parametrize(("stage", "again"), [(0, {}), (1, None), (2, {}), (3, None)])
@on_ranks(2)
def test_ddp_values_when_gradients_are_zeroed_between_forward_and_backward(ranks, stage, again):
    # Each step also computes a loss whose backward never runs.
    batches = [_branching(step, ranks.rank) for step in range(len(LEFT_OUT))]
    model = _of(_Branches)()
    train_ddp(model, ranks, batches)
    engine = Case(stage, top={"activation_checkpointing": again}).build(ranks, _of(_Branches)())
    for inputs in batches:
        engine(*inputs)
        loss = engine(*inputs)
        engine.optimizer.zero_grad()
        engine.backward(loss)
        engine.step()
    assert_same(engine.full_state_dict(), dict(model.state_dict()))
