"""Engines on a simulated device with random delays, bit-identical to CPU ranks."""

import itertools
from collections import Counter

import pytest
import torch
from support import fake_cuda
from support.fake_cuda.simulated import simulate_on_devices

import zero_core
from zero_core.comm.fused_sum import sum_slices
from zero_core.testing.models import make_model, seeded
from zero_core.testing.oracle import Case, train_unread
from zero_core.testing.ranks import alone, run_alone
from zero_core.testing.simulated import device_collectives, simulate
from zero_core.testing.training import assert_same, train_steps

WHOLE = {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2}}}
# Other combinations of stages and dtypes are rows of test_equalities.py.
CASES = [*(Case(stage, "bf16", 2, 0.5) for stage in (0, 1)), Case(2)]
CASES += [Case(2, clipping=0.5, top=WHOLE), *(Case(3, dtype) for dtype in ("fp32", "bf16", "fp16"))]


def train(ranks, case):
    """Train without reading a loss before the end, so that the host runs ahead of the device.

    If there are several nodes, CPU ranks use the devices' collectives, which sum in another order.
    """

    def collectives(native, **_):
        is_on_nodes = ranks.device.type == "cpu" and ranks.per_node < ranks.size
        return device_collectives(ranks) if is_on_nodes else native

    engine = case.build(ranks, collectives=collectives)
    return train_unread(engine, ranks.rank, steps=3, accumulation=case.accumulation)


def _run_grid(world_size, grid, per_node=None):
    for seed, case in enumerate(grid):
        expected = simulate(train, world_size, case, ranks_per_node=per_node)
        fake_cuda.set_delays(seed=seed, kernel_s=5e-5, copy_s=2e-3)
        found = simulate_on_devices(train, world_size, case, ranks_per_node=per_node)
        for (losses, values), (exact_losses, exact_values) in zip(found, expected, strict=True):
            assert losses == exact_losses, case
            torch.testing.assert_close(values, exact_values, rtol=0, atol=0, msg=str(case))


@pytest.mark.cuda
def test_every_stage_has_the_bits_of_the_cpu():
    run_alone(_run_grid, 3, CASES)


@pytest.mark.cuda
def test_sums_on_two_nodes_have_the_bits_of_their_tree():
    run_alone(_run_grid, 4, CASES[1:3], 2)


def _hold(ranks):
    case = Case(stage=2, dtype="bf16")
    engine = case.build(ranks)
    built = engine.memory_report()["exchange buffers"]
    planned = zero_core.plan(make_model(case.width), case.config(), ranks.size)
    assert built == planned.memory.device["exchange buffers"] > 0
    train_steps(engine, 0, 1)
    assert engine.memory_report()["exchange buffers"] == built
    engine.close()


@pytest.mark.cuda
@pytest.mark.parametrize("per_node", [4, 2])
@alone
def test_buffers_of_reductions_are_allocated_in_build(per_node):
    simulate_on_devices(_hold, 4, ranks_per_node=per_node)


def _running_means(ranks):
    with seeded(0):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    engine = Case(stage=1, dtype="bf16").build(ranks, model)
    for step in range(2):
        x = torch.arange(12.0).view(3, 4) * (step + 1 + ranks.rank)
        engine.backward(engine(x.to(ranks.device)).square().mean())
        engine.step()
    model.eval()
    with torch.no_grad():
        engine(x.to(ranks.device))
    return [buffer.cpu() for buffer in model.buffers()]


@pytest.mark.cuda
@alone
def test_buffers_in_16_bits_are_those_of_rank_0():
    expected = simulate(_running_means, 2)
    assert_same(expected[1], expected[0])
    assert_same(simulate_on_devices(_running_means, 2), expected)


def _count_in_a_block(ranks, stage):
    """Return the engine's launches per block, in forward, and in backward without the sum."""
    device, dtype = ranks.device, torch.bfloat16
    x, counts = torch.ones(2, 20, device=device, dtype=dtype), []

    def count():
        torch.accelerator.synchronize(device)
        return Counter(fake_cuda.counters(device.index).by_name)

    for depth, has_engine in itertools.product((2, 3), (False, True)):
        blocks = [[torch.nn.Linear(20, 20) for _ in range(6)] for _ in range(depth)]
        model = torch.nn.Sequential(*itertools.starmap(torch.nn.Sequential, blocks))
        model = Case(stage, "bf16").build(ranks, model) if has_engine else model.to(device, dtype)
        model(x).sum().backward()
        model.zero_grad()
        before, loss, between = count(), model(x).sum(), count()
        loss.backward()
        counts.append((between - before, count() - between))
    norm, nonfinite = torch.ones((), device=device), torch.zeros(2, device=device) > 0
    before = count()
    sum_slices(x, torch.empty(20, device=device), norm, nonfinite)
    of_sum = count() - before
    # launches without and with an engine, for 2 blocks and then for 3
    forward, backward = ((d - b) - (c - a) for a, b, c, d in zip(*counts, strict=True))
    return forward, backward - of_sum


@pytest.mark.cuda
@pytest.mark.parametrize("stage", [0, 3])
@alone
def test_a_block_has_four_launches_of_the_engine_in_a_pass(stage):
    gather = Counter({"nccl all_gather": int(stage == 3)})
    gradients = {"aten::_foreach_copy_": 1, "aten::mul_": 1, "aten::_foreach_zero_": 1}
    reduction = {"aten::zero_": 1, "nccl all_to_all": 1}  # besides the sum's two Triton kernels
    backward = Counter({**gradients, **reduction, "nccl all_gather": 1})
    for found in simulate_on_devices(_count_in_a_block, 2, stage):
        assert found == (+gather, backward), found
