"""Engines on a simulated device with random delays, bit-identical to CPU ranks."""

import itertools

import pytest
import torch
from support import fake_cuda
from support.fake_cuda.simulated import simulate_on_devices

import zero_core
from zero_core.testing.models import batch, make_model, seeded
from zero_core.testing.oracle import Case, train_unread
from zero_core.testing.ranks import alone, run_alone
from zero_core.testing.simulated import device_collectives, simulate
from zero_core.testing.training import assert_same

GRID = [
    Case(stage=stage, dtype=dtype, accumulation=accumulation, clipping=clipping)
    for stage, (dtype, accumulation, clipping) in itertools.product(
        range(4), [("fp32", 1, 0.0), ("bf16", 2, 0.5), ("fp16", 1, 0.0)]
    )
]
CHOSEN = [GRID[n] for n in (1, 5, 6, 7, 9, 10, 11)]  # each dtype at stage 3 and below
WHOLE = {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2}}}


def train(ranks, case):
    """Train without reading a loss before the end, so that the host runs ahead of the device.

    On several nodes, CPU ranks sum in the order of the device's collectives.
    """

    def collectives(native, **_):
        is_on_nodes = ranks.device.type == "cpu" and ranks.per_node < ranks.size
        return device_collectives(ranks) if is_on_nodes else native

    engine = case.build(ranks, collectives=collectives)
    return train_unread(engine, ranks.rank, ranks.device, steps=3, accumulation=case.accumulation)


def _run_grid(world_size, grid, per_node=None):
    for seed, case in enumerate(grid):
        expected = simulate(train, world_size, case, ranks_per_node=per_node)
        fake_cuda.set_delays(seed=seed, kernel_s=5e-5, copy_s=2e-3)
        found = simulate_on_devices(train, world_size, case, ranks_per_node=per_node)
        for (losses, values), (exact_losses, exact_values) in zip(found, expected, strict=True):
            assert losses == exact_losses, case
            torch.testing.assert_close(values, exact_values, rtol=0, atol=0, msg=str(case))


@pytest.mark.cuda
@pytest.mark.parametrize("grid", [CHOSEN, pytest.param(GRID, marks=pytest.mark.slow)])
def test_every_stage_has_the_bits_of_the_cpu(grid):
    run_alone(_run_grid, 3, [*grid, Case(2, clipping=0.5, top=WHOLE)])


@pytest.mark.cuda
@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_sums_on_two_nodes_have_the_bits_of_their_tree(step):
    run_alone(_run_grid, 4, GRID[4:8:step], 2)


def _hold(ranks):
    case = Case(stage=2, dtype="bf16")
    engine = case.build(ranks)
    built = engine.memory_report()["exchange buffers"]
    planned = zero_core.plan(make_model(case.width), case.config(), ranks.size)
    assert built == planned.memory.device["exchange buffers"] > 0
    inputs = batch(0, 0, ranks.rank)
    engine.backward(engine(**{**inputs, "ids": inputs["ids"].to(ranks.device)})["loss"])
    engine.step()
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
    found = simulate_on_devices(_running_means, 2)
    assert_same(found, expected)
