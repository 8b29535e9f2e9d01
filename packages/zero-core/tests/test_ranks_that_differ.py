"""Ranks that differ in needed gradients, failures, settings or replicated values."""

import os
import re

import pytest
import torch
from support.launches import LoggedCollectives
from torch import nn

import zero_core
from zero_core.testing.models import rows, seeded
from zero_core.testing.oracle import Case
from zero_core.testing.ranks import on_processes
from zero_core.testing.simulated import on_ranks
from zero_core.testing.training import adamw, assert_same, check_like_ddp, train

WIDTH = 6


class _Failing(nn.Linear):
    def forward(self, x):
        if x.isnan().any():
            raise ArithmeticError("a batch of NaN")
        return torch.tanh(super().forward(x))


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        with seeded(5):
            self.first = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(_Failing(WIDTH, WIDTH) for _ in range(4))
            self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, is_detached=False, has_no_grad=False):
        x = self.first(x)
        if is_detached:
            x = x.detach()
        with torch.set_grad_enabled(not has_no_grad):
            for block in self.blocks:
                x = block(x)
        return self.head(x).square().mean()


def _make(is_frozen):
    net = _Net()
    net.blocks.requires_grad_(not is_frozen)
    return net


# Whether no block needs a gradient, by step: on the last rank, and on other ranks.
WITHOUT = [(True, False), (False, False), (True, False), (True, True), (True, True), (False, False)]


def _inputs(step, ranks, is_frozen):
    is_without = WITHOUT[step][ranks.rank < ranks.size - 1]
    return rows(step, ranks.rank, WIDTH), is_without and is_frozen, is_without and not is_frozen


@pytest.mark.parametrize("is_frozen", [True, False], ids=["frozen blocks", "no_grad"])
@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (3, 1), (3, 2), (2, 3), (3, 3)])
@on_ranks()
def test_one_rank_may_need_no_gradient_of_any_block(ranks, stage, is_frozen):
    check_like_ddp(
        ranks,
        lambda: _make(is_frozen),
        lambda step, _: _inputs(step, ranks, is_frozen),
        Case(stage),
        steps=len(WITHOUT),
    )


@on_ranks(2)
def test_blocks_that_no_rank_needs_in_backward_are_not_gathered_from_the_second_step_on(ranks):
    log, found = [], []
    engine = Case(3).build(ranks, _make(True), collectives=LoggedCollectives.factory(log))
    for step in range(3):
        log.clear()
        train(engine, [(_inputs(step, ranks, False)[0], True)])
        found.append(sum(launch.kind == "b" for launch in log))
    assert found == [3, 0, 0]  # in the first step, the last of four blocks stays gathered


@pytest.mark.parametrize("world_size", [2, 3])
@on_processes()
def test_a_rank_that_raises_in_forward_ends_the_others_with_its_name(ranks):
    engine = Case(3).build(model=_Net())
    x = torch.full((3, WIDTH), float("nan")) if ranks.rank == 1 else torch.ones(3, WIDTH)
    if ranks.rank == 1:
        with pytest.raises(ArithmeticError):
            engine(x)
    else:
        expected = r"rank 1: the forward of unit 1 \(blocks.0\) raised ArithmeticError: a batch of"
        with pytest.raises(zero_core.CollectiveError, match=expected):
            engine.backward(engine(x))
    os._exit(0)


@on_processes(2)
def test_a_failure_that_all_ranks_got_over_is_not_named_later(ranks):
    engine = Case(3).build(model=_Net())
    with pytest.raises(ArithmeticError):
        engine(torch.full((3, WIDTH), float("nan")))
    train(engine, [torch.ones(3, WIDTH)])
    if ranks.rank == 0:
        found = "failed or timed out: the process of rank 1 has ended, last seen in"
        with pytest.raises(zero_core.CollectiveError, match=found):
            engine.backward(engine(torch.ones(3, WIDTH)))
    os._exit(0)


class _Keeping(nn.Linear):
    def forward(self, kept):
        kept.append(super().forward(kept[-1]))


class _OfKeeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Keeping(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        kept = [x]
        for block in self.blocks:
            block(kept)
        return kept[-1].mean()


@on_processes(2)
def test_a_forward_in_the_handler_of_an_error_is_not_said_to_have_raised_it(ranks):
    engine = Case(3).build(model=_OfKeeping())
    try:
        raise MemoryError("the batch before")
    except MemoryError:
        loss = engine(torch.ones(3, WIDTH))
    if ranks.rank == 0:
        with pytest.raises(zero_core.CollectiveError) as caught:
            engine.backward(loss)
        assert "MemoryError" not in str(caught.value)
    os._exit(0)


@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (3, 1), (2, 2), (3, 3)])
@on_ranks()
def test_a_schedule_on_a_ranks_own_loss_is_refused_before_the_update(ranks, stage):
    engine = Case(stage).build(ranks, _Net())
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=0, factor=0.5)
    for own_loss in (1.0, 0.5 + ranks.rank):
        train(engine, [torch.ones(3, WIDTH)])
        schedule.step(own_loss)
    before = engine.full_state_dict()
    engine.backward(engine(torch.ones(3, WIDTH)))
    differ = r"step 3: .* optimizer group 0, 'lr': 0.01 on rank 0, 0.005 on rank"
    with pytest.raises(zero_core.RankMismatchError, match=differ):
        engine.step()
    assert_same(engine.full_state_dict(), before)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.005
    engine.step()
    model = _Net()
    optimizer = adamw(model)
    for lr in (0.01, 0.01, 0.005):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        model(torch.ones(3, WIDTH)).backward()
        optimizer.step()
    torch.testing.assert_close(engine.full_state_dict(), dict(model.state_dict()))


@pytest.mark.parametrize(
    ("key", "values", "differ"),
    [
        ("lr", torch.tensor([0.1, 0.10001, 0.1]), "optimizer group 0, 'lr': "),
        ("betas", [[0.9, 0.99], [0.9, 0.98], [0.9, 0.99]], "optimizer group 0, 'betas': "),
        ("", [], r"parameter head.bias: trainable on ranks 0, 2, frozen on rank 1\."),
    ],
)
@on_ranks(3)
def test_settings_in_tensors_and_lists_and_frozen_parameters_are_compared(
    ranks, key, values, differ
):
    net = _Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1), foreach=False)
    engine = Case(1).build(ranks, net, optimizer=optimizer)
    net.head.bias.requires_grad_(bool(key) or ranks.rank != 1)
    engine.backward(engine(torch.ones(3, WIDTH)))
    if key:
        engine.optimizer.param_groups[0][key] = values[ranks.rank]
    with pytest.raises(zero_core.RankMismatchError, match=differ):
        engine.step()


@on_ranks(3)
def test_build_names_the_key_the_group_and_the_buffer_in_which_ranks_differ(ranks):
    net, config = _Net(), Case(3).config()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 if ranks.rank else 0.2)
    with pytest.raises(
        zero_core.RankMismatchError, match=r"'lr': 0.2 on rank 0, 0.1 on ranks 1, 2"
    ):
        zero_core.build(net, config, optimizer=optimizer, process_group=ranks)
    changed = config | {"gradient_clipping": float(ranks.rank == 2)}
    differ = r"configuration: gradient_clipping: 0.0 on ranks 0, 1, 1.0 on rank 2\."
    with pytest.raises(zero_core.RankMismatchError, match=differ):
        zero_core.build(net, changed, process_group=ranks)
    with pytest.raises(zero_core.RankMismatchError, match="different model"):
        zero_core.build(nn.Linear(3 + ranks.rank, 2), config, process_group=ranks)
    if ranks.rank == 1:
        net.blocks[0].register_buffer("scale", torch.ones(2))
    differ = r"buffer blocks.0.scale: missing on ranks 0, 2, torch.float32 \(2,\) on rank 1\."
    with pytest.raises(zero_core.RankMismatchError, match=differ):
        zero_core.build(net, config, process_group=ranks)


@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (3, 0), (3, 1), (3, 2)])
@on_ranks()
def test_a_bit_that_flips_on_one_rank_is_named(ranks, stage):
    config = Case(stage).config() | {"check_replicas_every": 2}
    engine = zero_core.build(_Net(), config, process_group=ranks)
    for step in range(4):
        engine.backward(engine(torch.ones(3, WIDTH)))
        if step == 3 and ranks.rank == 1:
            engine.module.head.weight.data.view(torch.int32)[0, 2] ^= 1 << 20
            engine.module.blocks[1].bias.data.view(torch.int32)[0] ^= 1
        if step < 3:
            engine.step()
    with pytest.raises(zero_core.RankMismatchError) as caught:
        engine.step()
    assert set(re.findall(r"([\w.]+): rank", str(caught.value))) >= {"blocks.1.bias", "head.weight"}
    said = "ranks 0, 1 have no majority" if ranks.size == 2 else "rank 1 differs from the others"
    assert str(caught.value).count(said) == 2
