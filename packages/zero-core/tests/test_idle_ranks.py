"""Ranks without data, which take part in the steps of other ranks as under DDP's Join."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import zero_core
from zero_core.testing.models import batch, make_model, make_tower, rows
from zero_core.testing.oracle import Case
from zero_core.testing.ranks import on_processes
from zero_core.testing.simulated import on_ranks, simulate
from zero_core.testing.training import adamw, assert_same, check_like_ddp, train

# number of micro-batches of each rank, by step
NUM_MICRO = [(2, 2, 2), (2, 1, 0), (2, 0, 1), (1, 2, 0), (0, 0, 2)]


def _draw(number, rank):
    step, micro = divmod(number, 2)
    return batch(step, micro, rank) if micro < NUM_MICRO[step][rank] else None


@pytest.mark.parametrize(("world_size", "stage"), [(3, 0), (2, 3)])
@on_ranks()
def test_ranks_without_data_add_zero_to_the_average(ranks, stage):
    case = Case(stage, accumulation=2, top={"activation_checkpointing": {}} if stage else {})
    check_like_ddp(ranks, make_model, _draw, case, steps=len(NUM_MICRO))


def _normed():
    model = make_tower()
    for block in model.blocks:
        block.insert(0, nn.BatchNorm1d(7))
    return model


@on_processes(2)
def test_the_average_is_that_of_join(ranks):
    lengths = (4, 2)
    model = _normed()
    ddp = DistributedDataParallel(model)
    optimizer = adamw(model)
    with Join([ddp]):
        for step in range(lengths[ranks.rank]):
            optimizer.zero_grad()
            ddp(rows(step, ranks.rank)).backward()
            optimizer.step()
    # At its end, Join gives all ranks the weights of the rank with the most batches.
    expected = {name: value.detach() for name, value in model.state_dict().items()}
    del ddp
    for stage in (1, 3):
        engine = Case(stage).build(model=_normed())
        train(
            engine,
            [rows(n, ranks.rank) if n < lengths[ranks.rank] else None for n in range(max(lengths))],
        )
        found = engine.full_state_dict()
        for name in dict(model.named_parameters()):
            assert torch.equal(found[name], expected[name]), name
        engine.close()
    dist.barrier()


def _wait_in_vain(ranks):
    engine = Case(3).build(ranks)
    for micro in range(2 if ranks.rank == 0 else 1):
        engine.backward(engine(**batch(0, micro, 0))["loss"])


def test_the_error_of_ranks_that_diverge_names_idle_step():
    with pytest.raises(zero_core.CollectiveError, match=r"must call engine.idle_step\(\)"):
        simulate(_wait_in_vain, 2, timeout_s=1.0)


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2)
def test_all_ranks_raise_for_a_parameter_that_one_of_those_with_data_has_not_used(ranks, stage):
    zero = {"ignore_unused_parameters": False}
    engine = Case(stage=stage, zero=zero).build(
        ranks, nn.ModuleDict({"used": nn.Linear(3, 1), "other": nn.Linear(3, 1)})
    )
    used, other, x = engine.module["used"], engine.module["other"], torch.ones(1, 3)
    if ranks.rank == 0:  # a rank without data does not count as leaving out a parameter
        engine.idle_step()
    else:
        engine.backward((used(x) + other(x)).sum())
        engine.step()
    engine.backward((used(x) + other(x) if ranks.rank else used(x)).sum())
    missed = r"2 trainable .*other\.bias on 1 of 2 ranks.*ignore_unused_parameters"
    with pytest.raises(zero_core.UnusedParameterError, match=missed):
        engine.step()
    engine.optimizer.zero_grad()
    engine.backward((used(x) + other(x)).sum())
    engine.step()
    assert engine.global_steps == 2
    engine.close()


@on_ranks(2)
def test_a_rank_is_idle_after_a_forward_that_failed(ranks):
    engine = Case(3).build(ranks, _normed())
    train(engine, [rows(0, ranks.rank)])

    def refuse(module, args):
        raise ValueError("a bad sample")

    handle = engine.module.blocks[1].register_forward_pre_hook(refuse)
    with pytest.raises(ValueError, match="a bad sample"):
        engine(rows(1, ranks.rank))
    handle.remove()
    train(engine, [rows(1, ranks.rank) if ranks.rank else None])


@on_ranks(2, timeout_s=20.0)
def test_an_idle_rank_goes_the_way_of_its_last_forward_of_the_same_kind(ranks):
    results = []
    for stage in (2, 3):
        model = make_tower()
        first = model.first
        del model.first
        model.first = first  # registered after the blocks, but used before them
        engine = Case(stage).build(ranks, model)
        for step in range(4):
            is_idle = step > 1 and ranks.rank == 1
            train(engine, [None if is_idle else rows(step, ranks.rank)])
            with torch.no_grad():
                if is_idle and step > 2:
                    engine.idle_forward()
                else:
                    engine(rows(step, ranks.rank), (0, 2, 3))
        results.append(engine.full_state_dict())
    assert_same(results[1], results[0])
