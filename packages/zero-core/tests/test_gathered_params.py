"""Whole parameters: ``gathered()``, exports in pieces, and reads on a single rank."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn

from zero_core import RankMismatchError
from zero_core.comm import control
from zero_core.core import access
from zero_core.testing.models import batch, make_model, make_tower, rows, seeded
from zero_core.testing.oracle import Case
from zero_core.testing.ranks import run_on_processes
from zero_core.testing.simulated import on_ranks, simulate
from zero_core.testing.training import assert_same, train, train_steps


def _some(model):
    block = model.blocks[1]
    found = [block.up.bias, model.embed.weight, model.gain, model.frozen[0].down.weight]
    return [*found, block.down.weight, model.head.weight, block.up.bias]


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (3, 3)])
@on_ranks()
def test_they_hold_their_exact_values_and_others_do_not(ranks, stage):
    engine = Case(stage, dtype="bf16").build(ranks)
    train_steps(engine, 0, 2)
    with engine.gathered() as model:
        expected = [p.detach().clone() for p in _some(model)]
    with engine.gathered(params=iter(_some(engine.module))) as model:
        found = _some(model)
        assert_same([p.detach() for p in found], expected)
        if stage == 3 and ranks.size > 1:
            assert access.is_refused(model.blocks[1].up.weight)
            for param in found:
                assert param.untyped_storage().nbytes() == param.nbytes
        with torch.no_grad():  # a forward inside the context leaves the parameters gathered
            engine(**batch(0, 0, ranks.rank))
        assert_same([p.detach() for p in found], expected)
    if stage == 3 and ranks.size > 1:
        assert all(map(access.is_refused, _some(engine.module)))


def _change(param, name):
    with torch.no_grad():
        if name == "embed.weight":
            param[3:20] *= 1.5
        elif name == "blocks.1.up.bias":
            param.data = torch.full_like(param, 0.25)
        elif name == "frozen.0.down.weight":
            param.add_(0.125)
        else:
            param.data[2] = 7.0


CHANGED = ("embed.weight", "blocks.1.up.bias", "frozen.0.down.weight", "never")


def _reaches_all(ranks, modifier, stages=range(4)):
    model = make_model()
    if ranks.rank == 0:
        for name in CHANGED:
            _change(model.get_parameter(name), name)
    oracle = Case().build(ranks, model)
    losses, values = train_steps(oracle, 0, 2), oracle.full_state_dict()
    for stage, is_whole in (*((stage, False) for stage in stages), (1, True), (3, True)):
        engine = Case(stage).build(ranks)
        for name in CHANGED:
            param = engine.module.get_parameter(name)
            params = None if is_whole else [param]
            with engine.gathered(params=params, modifier_rank=modifier), torch.no_grad():
                if ranks.rank == modifier:
                    _change(param, name)
                elif not is_whole:
                    param.mul_(-3.0)
        assert train_steps(engine, 0, 2) == losses
        assert_same(engine.full_state_dict(), values)


@pytest.mark.parametrize(("world_size", "modifier"), [(1, 0), (2, 0), (3, 2)])
def test_a_change_before_the_first_step_is_as_if_built_with_it(world_size, modifier):
    simulate(_reaches_all, world_size, modifier)


def test_changes_reach_all_ranks_where_they_share_memory():
    run_on_processes(_reaches_all, 2, 1, (0, 3))


def _gathered(engine):
    with engine.gathered() as model:
        return {n: p.detach().float() for n, p in model.named_parameters()}


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_untouched_master_weights_keep_the_bits_that_bf16_lacks(ranks, stage, is_whole):
    engine = Case(stage, dtype="bf16").build(ranks)
    train_steps(engine, 0, 2)
    expected, rounded = engine.full_state_dict(dtype=torch.float32), _gathered(engine)
    weight = engine.module.embed.weight
    params = None if is_whole else [weight]
    with engine.gathered(params=params, modifier_rank=1), torch.no_grad():
        if ranks.rank == 1:
            weight[5] = 0.5
    for values in (expected, rounded):
        values["embed.weight"][5] = 0.5
    expected["head.weight"][5] = 0.5
    assert_same(engine.full_state_dict(dtype=torch.float32), expected)
    assert_same(_gathered(engine), rounded)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_it_nests(ranks, stage):
    for outer, inner in (("itself", "itself"), ("all", "itself"), ("itself", "all")):
        engine = Case(stage).build(ranks)
        up, other = engine.module.blocks[0].up.weight, engine.module.gain
        params = {"itself": [up], "all": None}
        with engine.gathered(params=params[outer]):
            expected = up.detach().clone()
            expected[1] = 3.0
            with engine.gathered(params=params[inner], modifier_rank=0), torch.no_grad():
                if ranks.rank == 0:
                    up[1] = 3.0
            assert torch.equal(up, expected)
            with engine.gathered(params=[other]):
                assert torch.equal(other, torch.ones(1))
            assert torch.equal(up, expected)
        assert torch.equal(engine.full_state_dict()["blocks.0.up.weight"], expected)


@on_ranks(2)
def test_within_a_forward_it_takes_nothing_away(ranks):
    results = []
    for is_asking in (False, True):
        engine = Case(3).build(ranks, make_tower())
        block, other = engine.module.blocks[1], engine.module.blocks[2][0].weight
        wanted = [*block.parameters(), other]

        def ask(module, args, engine=engine, wanted=wanted):
            with engine.gathered(params=wanted):
                assert wanted[-1].detach().norm() > 0

        if is_asking:
            for part in block:
                part.register_forward_pre_hook(ask)
        train(engine, [rows(step, ranks.rank) for step in range(2)])
        results.append(engine.full_state_dict())
    assert_same(*results)


@on_ranks(2)
def test_contexts_that_overlap_hold_their_parameters_to_their_own_end(ranks):
    engine = Case(3).build(ranks)
    weight, bias = engine.module.blocks[0].up.weight, engine.module.blocks[0].up.bias
    expected = engine.full_state_dict()["blocks.0.up.weight"]
    for number, (one, other) in enumerate(
        [([weight], [bias, weight]), (None, None), (None, [weight]), ([weight], None)]
    ):
        first, second = ExitStack(), ExitStack()
        first.enter_context(engine.gathered(params=one))
        second.enter_context(engine.gathered(params=other))
        first.close()
        if number > 0:
            with torch.no_grad():
                engine(**batch(0, 0, ranks.rank))
        assert torch.equal(weight, expected)
        second.close()
        if number > 0:
            with torch.no_grad():
                engine(**batch(0, 0, ranks.rank))
        assert all(map(access.is_refused, engine.module.parameters()))


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_wrong_parameters_shapes_and_ranks_are_refused(ranks, stage):
    engine = Case(stage).build(ranks)

    def refuses(params, modifier, match):
        kind = RankMismatchError if match.startswith("rank") else ValueError
        with (
            pytest.raises(kind, match=match),
            engine.gathered(params=params, modifier_rank=modifier),
        ):
            pass

    gain, stranger = engine.module.gain, nn.Parameter(torch.ones(2, 3))
    refuses([gain, stranger], None, r"\(2, 3\) is not this engine's")
    refuses(["gain"], None, "'gain' is not this engine's")
    with (
        pytest.raises(ValueError, match="gain was given another shape"),
        engine.gathered(params=[gain], modifier_rank=0),
    ):
        gain.data = torch.ones(3) if ranks.rank == 0 else torch.ones(1)
    assert gain.shape == (1,)
    refuses([gain], 2, "modifier_rank = 2")
    with engine.gathered(params=[], modifier_rank=0):
        pass
    ups = [block.up.weight for block in engine.module.blocks]
    who = f"rank {ranks.rank}: "
    different, mixed = ([ups[0]], [gain]) if ranks.rank == 0 else ([ups[2], gain], [stranger])
    refuses(different, 0, rf"{who}.*blocks\.{2 * ranks.rank}\.up")
    refuses(mixed, 0, rf"{who}.*{('gain', 'not this engine')[ranks.rank]}")
    for params in ([gain], None):
        refuses(params, ranks.rank, rf"{who}.*modifier_rank \(here {ranks.rank}\)")
    train_steps(engine, 0, 1)


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, teacher):
        with teacher.gathered(params=[weight]):
            out = hidden @ weight.t()
        ctx.save_for_backward(out, weight)  # torch saves the tensors after forward has returned
        return out.square().mean()

    @staticmethod
    def backward(ctx, grad):
        out, weight = ctx.saved_tensors
        return grad * 2 / out.numel() * out @ weight, None, None


class _Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x, weight, teacher):
        for block in self.blocks:
            x = torch.tanh(block(x))
        if teacher is None:
            return (x @ weight.t()).square().mean()
        return _Projection.apply(x, weight, teacher)


def _models():
    with seeded(0):
        return _Student(), nn.Sequential(nn.Linear(3, 3), nn.Linear(6, 5, bias=False))


@on_ranks(2)
def test_a_parameter_saved_after_its_gather_is_gathered_in_backward(ranks):
    (expected, plain), (student, model) = _models(), _models()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    case = Case(3, top={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    teacher, engine = case.build(ranks, model), case.build(ranks, student)
    weight = model[1].weight
    x = torch.linspace(-1, 1, 24).view(4, 6)
    for _ in range(2):
        optimizer.zero_grad()
        wanted = expected(x, plain[1].weight.detach(), None)
        wanted.backward()
        optimizer.step()
        loss = engine(x, weight, teacher)
        assert access.is_refused(weight)
        engine.backward(loss)
        assert access.is_refused(weight)
        engine.step()
        torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(engine.full_state_dict(), dict(expected.state_dict()))
    loss = engine(x, weight, teacher)
    with teacher.gathered(params=[weight], modifier_rank=0), torch.no_grad():
        weight.fill_(1.0)
    with pytest.raises(RuntimeError, match=r"shape \(5, 6\) has changed since"):
        engine.backward(loss)
    engine.backward(engine(x, weight, teacher))
    engine.step()
    assert access.is_refused(weight)


LIMIT = 512


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("dtype", "stage"), [("fp32", 3), ("bf16", 1), ("bf16", 0)])
@on_ranks()
def test_pieces_make_the_whole(ranks, dtype, stage, monkeypatch):
    monkeypatch.setattr(control, "PIECE_BYTES", LIMIT)
    engine = Case(stage, dtype).build(ranks)
    group, sizes = engine.sharded_state.control, []
    gather = group.gather_on_device

    def measured(tensor):
        found = gather(tensor)
        sizes.append(found.nbytes)
        return found

    group.gather_on_device = measured
    full, of_one = engine.full_state_dict(), engine.full_state_dict(rank=1)
    assert max(sizes) <= LIMIT
    expected = make_model().to(full["gain"].dtype).state_dict()
    assert list(full) == list(expected)
    assert_same(full, dict(expected))
    assert_same(of_one, full if ranks.rank == 1 else {})
