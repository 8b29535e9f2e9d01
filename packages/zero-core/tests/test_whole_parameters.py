"""Optimizers that update whole parameters, compared with their own step under DDP."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import zero_core
from zero_core import CheckpointError, ConfigError
from zero_core.optim.whole_tier import assign_owners
from zero_core.testing.models import batch, make_model
from zero_core.testing.oracle import Case, SimulatedDDP, run_ddp, run_engine
from zero_core.testing.simulated import on_ranks, simulate
from zero_core.testing.training import assert_same, step_ddp, train

STEPS = 3
HOST = {"offload_optimizer": {"device": "cpu"}}


class Own(torch.optim.Optimizer):
    """A typical user-written optimizer, with a Python loop over parameters."""

    def __init__(self, params, lr=1e-2, decay=0.1):
        super().__init__(params, {"lr": lr, "decay": decay, "num_calls": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["num_calls"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, self.state[param], group)

    def update(self, param, state, group):
        raise NotImplementedError


class LionLike(Own):
    def update(self, param, state, group):
        average = state.setdefault("exp_avg", torch.zeros_like(param))
        update = (0.9 * average + 0.1 * param.grad).sign_()
        average.mul_(0.99).add_(param.grad, alpha=0.01)
        # Some optimizers assign new memory.
        param.data = param.data - group["lr"] * (update + group["decay"] * param.data)


class Shampoo(Own):
    def update(self, param, state, group):
        if not state:
            state["factors"] = [torch.eye(n) * 1e-2 for n in param.shape]
            state["settings"] = {"count": 0, "shape": tuple(param.shape)}
        state["settings"]["count"] += 1
        grad = param.grad
        for axis, factor in enumerate(state["factors"]):
            rows = grad.movedim(axis, 0).reshape(param.shape[axis], -1)
            factor.add_(rows @ rows.T)
            values, vectors = torch.linalg.eigh(factor)
            root = vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T
            grad = torch.tensordot(root, grad, dims=([1], [axis])).movedim(0, axis)
        param.sub_(grad, alpha=group["lr"] * float(param.norm() / (grad.norm() + 1e-9)) * 0.1)


OPTIMIZERS = {
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2, weight_decay=0.1),
    "a subclass of AdamW": lambda params: type("Mine", (torch.optim.AdamW,), {})(params, lr=1e-2),
    **{kind.__name__: kind for kind in (LionLike, Shampoo)},
}


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def engine_of(make, stage, ranks, model=None, **zero):
    model = model or make_model()
    return Case(stage, zero=zero).build(ranks, model, optimizer=make(trainable(model)))


def trained(engine, rank, steps):
    train(engine, [batch(step, 0, rank) for step in steps])
    return engine


def train_whole(make, ranks, steps=STEPS):
    model = make_model()
    optimizer = make(trainable(model))
    wrapped = SimulatedDDP(model, ranks)
    for step in range(steps):
        step_ddp(wrapped, optimizer, batch(step, 0, ranks.rank))
    return dict(model.state_dict()), optimizer


@pytest.mark.parametrize(
    ("world_size", "name"),
    [(size, "Shampoo") for size in (1, 3)]
    + [(2, name) for name in OPTIMIZERS if name != "Shampoo"],
)
@on_ranks()
def test_update_is_the_optimizers_own_at_every_stage_and_on_the_host(ranks, name):
    make = OPTIMIZERS[name]
    expected, theirs = train_whole(make, ranks)
    start = make_model().state_dict()
    moved = [n for n, value in expected.items() if not torch.equal(value, start[n])]
    assert len(moved) > 5
    grid = [(2, {}), (3, HOST)]
    if name == "Shampoo":  # one optimizer is enough for the other stages
        grid += [(0, {}), (1, {}), (3, {})]
    for stage, zero in grid:
        engine = trained(engine_of(make, stage, ranks, **zero), ranks.rank, range(STEPS))
        assert_same(engine.full_state_dict(), expected)
        ours = engine.optimizer.param_groups[0]
        assert ours.get("num_calls") == theirs.param_groups[0].get("num_calls")
        engine.close()


ADAFACTOR = {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2, "weight_decay": 0.1}}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 13, "hysteresis": 1}}
CASES = [  # tolerated gap from DDP, which sums gradients in their dtype
    (Case(dtype="bf16", accumulation=2, clipping=0.5, top=ADAFACTOR), 2e-3),
    (Case(dtype="fp16", zero=HOST, top={**ADAFACTOR, **FP16}), 2e-4),
    (Case(accumulation=2, is_local=True, clipping=0.5, top=ADAFACTOR), 1e-6),
]


@on_ranks(3)
def test_masters_skips_accumulation_and_clipping_are_those_of_any_optimizer(ranks):
    for case, gap in CASES:
        expected = run_ddp(case, ranks.rank, 4, ranks)
        first, found = (
            run_engine(replace(case, stage=stage), ranks.rank, 4, process_group=ranks)
            for stage in (0, 3)
        )
        assert found.num_skipped == expected.num_skipped == (1 if case.dtype == "fp16" else 0)
        for name, value in expected.values.items():
            assert torch.equal(found.values[name], first.values[name]), name
            torch.testing.assert_close(found.values[name], value, rtol=0.0, atol=gap, msg=name)


def _maker(name):
    return of_two_kinds(Sliced) if name == "of two kinds" else OPTIMIZERS[name]


def _resumes(ranks, name, stages, folder, sizes):
    make = _maker(name)
    if sizes is None:
        trained(engine_of(make, stages[0], ranks), ranks.rank, range(2)).save_checkpoint(folder)
        return
    if sizes == (2, 2):
        expected, _ = train_whole(make, ranks, 4)
    else:  # the reference resumes at stage 0, where each rank has complete states
        engine = engine_of(make, 0, ranks)
        engine.load_checkpoint(folder)
        expected = trained(engine, ranks.rank, range(2, 4)).full_state_dict()
    engine = engine_of(make, stages[1], ranks)
    engine.load_checkpoint(folder)
    assert engine.optimizer.param_groups[0].get("num_calls", 2) == 2
    if name == "of two kinds":
        counts = [repr(state["count"]) for state in engine.optimizer.state.values()]
        assert max(counts) == "2"
    assert_same(trained(engine, ranks.rank, range(2, 4)).full_state_dict(), expected)


@pytest.mark.parametrize(
    ("name", "stages", "sizes"),
    [
        ("Shampoo", (3, 1), (2, 3)),
        ("Shampoo", (1, 3), (3, 2)),
        ("Adafactor", (0, 2), (1, 2)),
        ("LionLike", (2, 3), (2, 1)),
        ("Shampoo", (3, 1), (2, 2)),  # compared with an uninterrupted run
        ("Adafactor", (3, 1), (2, 2)),
        ("of two kinds", (3, 1), (2, 3)),  # sliced states, and states of whole parameters
    ],
)
def test_checkpoint_resumes_with_other_ranks_and_another_stage(tmp_path, name, stages, sizes):
    simulate(_resumes, sizes[0], name, stages, str(tmp_path), None)
    simulate(_resumes, sizes[1], name, stages, str(tmp_path), sizes)


# The shapes of Adafactor's states differ from the parameters'.
@pytest.mark.parametrize("name", ["LionLike", "Adafactor"])
@on_ranks(3)
def test_states_are_read_and_set_by_name_and_each_is_on_one_rank(ranks, name):
    _, theirs = train_whole(OPTIMIZERS[name], ranks)
    engine = trained(engine_of(OPTIMIZERS[name], 3, ranks), ranks.rank, range(STEPS))
    names = [n for n, p in engine.module.named_parameters() if p.requires_grad]
    params = dict(zip(names, theirs.param_groups[0]["params"], strict=True))
    numel = whole = 0
    for key, param in params.items():
        expected = theirs.state.get(param, {})
        assert set(engine.states.of(key)) in (set(), set(expected))
        for what, value in expected.items():
            assert torch.equal(engine.states.get_full(key, what), value), (key, what)
            if what == "exp_avg":
                numel += engine.states.get_local(key, what).numel()
                whole += value.numel()
    assert set(engine.optimizer.state) <= set(engine.module.parameters())
    held = engine.optimizer.state.values()
    assert sum(v["exp_avg"].numel() for v in held if "exp_avg" in v) == numel
    key = next(n for n, p in params.items() if p.ndim == 2 and theirs.state.get(p))
    what = "exp_avg" if name == "LionLike" else "col_var"
    shape = theirs.state[params[key]][what].shape
    engine.states.set_full(key, torch.ones(shape), what)
    assert engine.states.get_full(key, what).eq(1).all()
    with pytest.raises(ValueError, match="has shape"):
        engine.states.set_full(key, torch.ones(*shape, 2), what)
    with pytest.raises(KeyError, match="no state 'momentum'"):
        engine.states.get_full(key, "momentum")
    held = torch.tensor([numel, bool(engine.states.of(key))])
    assert ranks.connect().sum(held).tolist() == [whole, 1]
    assert (numel > 0) == (name == "LionLike")


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["Adafactor", "of two kinds"])
@on_ranks(2)
def test_own_states_are_restored_all_or_none(ranks, name, stage):
    engine, other = (engine_of(_maker(name), stage, ranks) for _ in range(2))
    names = [n for n, p in engine.module.named_parameters() if p.requires_grad]

    def own(one):
        return {n: (one.states.scalars(n), one.states.of(n)) for n in names}

    fresh = own(engine)
    trained(engine, ranks.rank, range(2))
    with other.gathered(modifier_rank=0) as module:
        module.load_state_dict(engine.full_state_dict())
    saved = own(engine)
    other.states.load_own(saved)
    assert [scalars for scalars, _ in own(other).values()] == [s for s, _ in saved.values()]
    for one in (engine, other):
        trained(one, ranks.rank, range(2, 4))
    assert_same(other.full_state_dict(), engine.full_state_dict())
    before = own(other)
    name = next((n for n in reversed(names) if before[n][1]), None)
    if name is not None:
        states = before[name][1].items()
        what = next(w for w, v in states if isinstance(v, torch.Tensor) and v.ndim)
        wrong = (before[name][0], {what: torch.zeros(1, 1, 1, 2)})
        with pytest.raises(ValueError, match="load a checkpoint instead"):
            other.states.load_own({**saved, name: wrong})
    assert_same(own(other), before)
    other.states.load_own(fresh)
    assert not any(states for _, states in own(other).values())


def test_state_that_is_no_tensor_is_refused_by_what_it_is():
    engine = trained(engine_of(Shampoo, 0, None), 0, range(1))
    with pytest.raises(KeyError, match=r"'factors' of gain is no tensor but a list"):
        engine.states.get_full("gain", "factors")


class Deep(nn.Module):
    def __init__(self, depth=6, width=48):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x, num_blocks=None):
        for block in self.blocks[:num_blocks]:
            x = torch.tanh(block(x))
        return x.square().mean()


@on_ranks(3)
def test_a_step_exchanges_one_block_at_a_time_and_nothing_of_unused_ones(ranks):
    model, found = Deep(), []
    engine = engine_of(LionLike, 3, ranks, model)
    for num_blocks in (6, 2):
        train(engine, [(torch.ones(2, 48), num_blocks)])
        (row,) = [row for row in engine.comm_report() if row.content == "whole parameters"]
        assert row.num_calls == 12  # two calls per block: to the owner and back
        found.append(row.sent_bytes)
    matrix = model.blocks[0].weight.nbytes
    # 2/3 of a matrix and of its gradient go to the owner, 2/3 of the new values to other ranks.
    sent = ranks.connect().sum(torch.tensor(found)).tolist()
    assert sent == pytest.approx([6 * 2 * matrix, 2 * 2 * matrix], rel=0.03)
    settings = Case(3, top=ADAFACTOR).config()
    planned = zero_core.plan(Deep(), settings, 3).memory.device["whole parameters in a step"]
    owned = 2 * matrix
    numels = [w.numel for w in assign_owners(engine.layout) if w.owner == ranks.rank]
    assert 4 * sum(numels) == owned
    assert 2 * owned < planned <= 2 * (owned + 2 * matrix)


@pytest.mark.parametrize(
    ("make", "zero", "match"),
    [
        (torch.optim.LBFGS, {}, "torch.optim.lbfgs.LBFGS is not served: its step.. needs a closur"),
        (torch.optim.SparseAdam, {}, "takes sparse gradients, and the engine's are dense"),
        (
            LionLike,
            {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
            "ratio = 0.5 with .*LionLike is not served: it updates whole parameters",
        ),
        (
            LionLike,
            {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}},
            "device = 'nvme' with",
        ),
    ],
)
def test_what_would_be_wrong_is_refused_by_its_name(make, zero, match):
    with pytest.raises(ConfigError, match=match):
        engine_of(make, 2, None, nn.Linear(3, 2), **zero)


class Decaying(LionLike):
    write = None

    def step(self, closure=None):
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                self.write(param)
        super().step()


@pytest.mark.parametrize(
    "write",
    [lambda p: p.mul_(0.9), lambda p: p.data.mul_(0.9), lambda p: setattr(p, "data", p.data * 0.9)],
)
@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (1, 2), (2, 3)])
@on_ranks()
def test_a_write_to_a_parameter_without_a_gradient_is_refused(ranks, stage, write):
    model = make_model()
    given = Decaying(trainable(model))
    given.write = write
    engine = Case(stage, "bf16").build(ranks, model, optimizer=given)
    with pytest.raises(RuntimeError) as error:
        trained(engine, ranks.rank, range(1))
    said = [str(error.value), *getattr(error.value, "__notes__", ())]
    assert re.search(r"Decaying.step\(\) .*whose grad is None: .* must skip", said[-1])


@on_ranks(2)
def test_a_class_that_nobody_knows_is_warned_of_where_ranks_update_different_ones(ranks, caplog):
    for stage, make in ((0, LionLike), (2, torch.optim.Adafactor), (2, LionLike)):
        assert "stage 2: ranks update different parameters" not in caplog.text
        engine_of(make, stage, ranks).close()
        ranks.connect().barrier()
    assert caplog.text.count("LionLike at zero_optimization.stage 2: ranks update different") == 1


class Sliced(Own):
    def is_elementwise_group(self, group):
        return group["decay"] == 0

    def update(self, param, state, group):
        state["count"] = state.get("count", 0) + 1
        average = state.setdefault("average", torch.zeros_like(param))
        param.sub_(average.add_(param.grad), alpha=group["lr"] / state["count"])


class Listing(Sliced):
    def update(self, param, state, group):
        super().update(param, state, group)
        state["scales"] = [1.0, 2.0]


class Keeping(LionLike):
    def update(self, param, state, group):
        state["helper"] = object()


def of_two_kinds(kind):
    return lambda params: kind([{"params": params[:-1], "decay": 0}, {"params": params[-1:]}])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (of_two_kinds(Listing), r"'scales' of .*, a list .*is_elementwise_group"),
        (Keeping, r"state .*/helper is a object: a checkpo"),
    ],
    ids=["beside slices", "of whole parameters"],
)
@on_ranks(2)
def test_state_that_no_checkpoint_holds_is_refused_on_all_ranks(ranks, make, tmp_path, match):
    engine = trained(engine_of(make, 3, ranks), ranks.rank, range(1))
    with pytest.raises(CheckpointError, match=match):
        engine.save_checkpoint(tmp_path)
