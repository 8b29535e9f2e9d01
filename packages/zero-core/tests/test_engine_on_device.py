"""Engines on a simulated device with random delays, bit-identical to CPU ranks."""

import itertools
from collections import Counter

import pytest
import torch
from support import fake_cuda
from support.fake_cuda.simulated import simulate_on_devices

import zero_core
from zero_core.comm.fused_sum import sum_slices
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


class _Scaled(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scales = torch.nn.ParameterList(torch.ones(width) for _ in range(6))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        for scale, layer in zip(self.scales, [*self.layers, *self.layers], strict=True):
            x = layer(x * scale)
        return x


class _Blocks(torch.nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.blocks = torch.nn.ModuleList(_Scaled(20) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()


def _launched(device):
    torch.accelerator.synchronize(device)  # a collective is counted when it begins
    return Counter(fake_cuda.counters(device.index).by_name)


def _launches(device, run, *args):
    before = _launched(device)
    return run(*args), _launched(device) - before


def _count_in_blocks(ranks, stage):
    """Return launches per block of forward, backward, and one sum of a reduction."""
    device, dtype, found = ranks.device, torch.bfloat16, []
    x = torch.ones(2, 20, device=device, dtype=dtype)
    for depth in (2, 3):
        plain = _Blocks(depth).to(device, dtype)
        engine = Case(stage, "bf16").build(ranks, _Blocks(depth))
        engine.backward(engine(x))
        engine.step()
        counts = []
        for model, backward in ((plain, torch.Tensor.backward), (engine, engine.backward)):
            loss, forward = _launches(device, model, x)
            counts += [forward, _launches(device, backward, loss)[1]]
        found.append((counts[2] - counts[0], counts[3] - counts[1]))
        engine.close()
    slices, norm = torch.ones(2, 4, device=device, dtype=dtype), torch.ones((), device=device)
    bad = torch.zeros(2, dtype=torch.bool, device=device)
    _, of_sum = _launches(device, sum_slices, slices, norm.expand(4).clone(), norm, bad)
    (forward, backward), (more_forward, more_backward) = found
    return more_forward - forward, more_backward - backward - of_sum


@pytest.mark.cuda
@pytest.mark.parametrize("stage", [0, 3])
@alone
def test_a_block_has_four_launches_of_the_engine_in_a_pass(stage):
    gather = Counter({"nccl all_gather": int(stage == 3)})
    backward = {f"aten::_foreach_{name}_": n for name, n in (("copy", 2), ("mul", 1), ("zero", 1))}
    reduction = {"aten::zero_": 1, "nccl all_to_all": 1}  # and the sum: two kernels of Triton
    for found in simulate_on_devices(_count_in_blocks, 2, stage):
        expected = +gather, gather + Counter({**backward, **reduction})
        assert found == expected, found
