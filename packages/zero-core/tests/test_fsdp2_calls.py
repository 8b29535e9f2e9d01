"""FSDP2's methods on the engine, which control when units are gathered and released."""

from contextlib import nullcontext

import pytest
import torch
from support.launches import LoggedCollectives
from torch import nn

from zero_core.testing import Case, assert_same, make_tower, on_ranks, rows, simulate, train


def _build(ranks, **case):
    log = []
    engine = Case(3, **case).build(ranks, make_tower(), collectives=LoggedCollectives.factory(log))
    return engine, log


def _gathers(log):
    return [str(launch) for launch in log if launch.kind != "r"]


def _without(skipped):
    return [block for block in range(4) if block != skipped]


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_units_that_are_not_resharded_are_gathered_once(ranks):
    engine, log = _build(ranks)
    engine.set_reshard_after_forward(False)
    for step in range(2):
        train(engine, [(rows(step, ranks.rank), _without(step if ranks.rank else None))])
        assert sorted(_gathers(log)) == ["f0", "f1", "f2", "f3", "f4"]
        assert not any(flat.full is not None for flat in engine.sharded_state.params)
        log.clear()
    with torch.no_grad():
        for step in range(3):
            engine(rows(step, ranks.rank))
    assert _gathers(log) == ["f0", "f1", "f2", "f3", "f4"]
    engine.set_reshard_after_forward(True, modules=[engine.module.blocks[1]])
    log.clear()
    with torch.no_grad():
        engine(rows(0, ranks.rank))
        engine(rows(0, ranks.rank))
    assert _gathers(log) == ["f2", "f2"]
    engine.set_reshard_after_forward(True)
    assert not any(flat.full is not None for flat in engine.sharded_state.params)


def _in_advance(ranks, depth):
    engine, log = _build(ranks)
    before_first = []
    first, *_, last = blocks = engine.module.blocks
    engine.set_modules_to_forward_prefetch(first, blocks[1 : 1 + depth])
    engine.set_modules_to_backward_prefetch(last, [blocks[2], blocks[1], blocks[0]][:depth])
    first.register_forward_pre_hook(
        lambda *_: before_first.extend([] if before_first else _gathers(log))
    )
    numbers = [(step, 1 if ranks.rank == step else None) for step in range(3)]
    train(engine, [(rows(step, ranks.rank), _without(skipped)) for step, skipped in numbers])
    return before_first, _gathers(log)


@pytest.mark.parametrize("depth", [2, 3])
def test_prefetched_units_are_gathered_once_with_the_one_before_in_one_order(depth):
    one_step = ["f0", "f1", "f2", "f3", "f4", "b3", "b2", "b1"]
    assert simulate(_in_advance, 3, depth) == [(one_step[: 2 + depth], one_step * 3)] * 3


def _prefetch(engine):
    blocks = engine.module.blocks
    engine.set_modules_to_forward_prefetch(blocks[0], blocks[1:])
    engine.set_modules_to_backward_prefetch(blocks[3], [blocks[2], blocks[1], blocks[0]])


@pytest.mark.parametrize(
    "change",
    [
        lambda engine: engine.set_reshard_after_forward(False),
        lambda engine: engine.set_reshard_after_forward(False, modules=engine.module.blocks[:2]),
        _prefetch,
    ],
    ids=["keep", "keep some", "prefetch"],
)
@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_numbers_stay_the_same(ranks, change):
    batches = [rows(step, ranks.rank) for step in range(3)]
    (plain, _), (changed, _) = _build(ranks), _build(ranks)
    change(changed)
    assert train(changed, batches) == train(plain, batches)
    assert_same(changed.full_state_dict(), plain.full_state_dict())


@on_ranks(2)
def test_gradients_wait_until_they_are_to_be_reduced_and_the_last_backward_ends_the_step(ranks):
    (expected, _), (engine, log) = _build(ranks, accumulation=2), _build(ranks)
    for micro in range(2):
        x, is_last = rows(micro, ranks.rank), micro == 1
        with nullcontext() if is_last else expected.no_sync():
            expected.backward(expected(x))
        expected.step()
        engine.set_requires_gradient_sync(is_last)
        engine.set_is_last_backward(is_last)
        engine.backward(engine(x), over=2)
        engine.step()
        assert any(launch.kind == "r" for launch in log) == is_last
    assert engine.global_steps == 1
    assert_same(engine.full_state_dict(), expected.full_state_dict())
    engine.set_requires_gradient_sync(False)
    engine.backward(engine(rows(0, ranks.rank)))
    with pytest.raises(RuntimeError, match=r"set_requires_gradient_sync\(True\)"):
        engine.step()


def test_units_in_another_order_are_refused():
    engine = Case(3).build(model=make_tower())
    blocks = engine.module.blocks
    with pytest.raises(ValueError, match=r"units \[3\] cannot be gathered ahead of unit 1"):
        engine.set_modules_to_forward_prefetch(blocks[0], [blocks[2]])
    with pytest.raises(ValueError, match="begin with unit 2"):
        engine.set_modules_to_backward_prefetch(blocks[2], [blocks[3]])
    with pytest.raises(ValueError, match="name a module of a single one"):
        engine.set_modules_to_forward_prefetch(blocks, [blocks[2]])
    with pytest.raises(ValueError, match="Linear is not a module of this engine"):
        engine.set_reshard_after_forward(False, modules=[nn.Linear(2, 2)])


@on_ranks(2)
def test_generation_that_breaks_off_frees_what_it_kept(ranks):
    engine, _ = _build(ranks)
    with torch.no_grad():
        engine(rows(0, ranks.rank))
    before = engine.memory_report()
    kept = []

    def break_off():
        engine(rows(0, ranks.rank))
        kept.append(sum(engine.memory_report().values()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), torch.no_grad(), engine.generating():
        break_off()
    assert kept[0] > sum(before.values())
    assert engine.memory_report() == before
    engine.close()


@on_ranks(2)
def test_parts_are_without_hooks_while_all_blocks_stay_gathered(ranks):
    engine, _ = _build(ranks)
    part, x = engine.module.blocks[1][0], rows(0, ranks.rank)
    with torch.no_grad(), engine.generating():
        engine(x)
        assert not part._forward_pre_hooks
        with torch.enable_grad():
            engine.backward(engine(x))
        engine.step()
        found = part(x)
        engine(x)
        assert not part._forward_pre_hooks
    assert part._forward_pre_hooks
    values = engine.full_state_dict()
    expected = nn.functional.linear(x, values["blocks.1.0.weight"], values["blocks.1.0.bias"])
    assert torch.equal(found, expected)
