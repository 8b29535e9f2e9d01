"""qgZ on simulated ranks: gradients reduced in two quantized hops."""

from importlib import import_module
from typing import Any

import pytest
import torch
from support.simulated_ranks import Network, SimulatedTransport, run_ranks
from torch import Tensor

from zero_comm.collectives.feedback import ErrorFeedback, LocoSettings
from zero_comm.collectives.two_hop import GradientFormat, TwoHopReduce
from zero_comm.collectives.weight_gathers import Grid, MessageGather
from zero_comm.quantizer.backend import find_backend
from zero_comm.quantizer.block_format import BlockFormat
from zero_comm.quantizer.message import Packing
from zero_comm.transport.scratch import Scratch

# (ranks, ranks per node)
LAYOUTS = [(2, 2), (3, 1), (4, 2), (6, 2), (6, 3), (12, 4)]


def gradient(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator).to(dtype)


def reduce_on_ranks(
    network: Network,
    numel: int,
    make_full: object,
    *,
    intra_node: str | BlockFormat = "int4",
    inter_node: str | BlockFormat = "int4",
    dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype = torch.float32,
    has_checksum: bool = False,
) -> list[Tensor]:
    fmt = GradientFormat.make(intra_node, inter_node, has_checksum=has_checksum)

    def program(transport: SimulatedTransport) -> Tensor:
        reduction = TwoHopReduce(transport, fmt, ranks_per_node=network.ranks_per_node)
        out = torch.full((numel,), 9.0, dtype=out_dtype)
        full = make_full(transport.rank).to(dtype)  # type: ignore[operator]
        reduction.reduce(out, full, unit=0)
        return out

    return run_ranks(network, program)


@pytest.mark.parametrize(("world_size", "per_node"), LAYOUTS)
@pytest.mark.parametrize("numel", [1, 129, 1000])
def test_every_slice_reaches_its_owner_when_quantizing_is_exact(
    world_size: int, per_node: int, numel: int
) -> None:
    # All gradients and node sums are multiples of one pattern, which quantizes exactly.
    index = torch.arange(world_size * numel)
    pattern = (index * 5 + index // 7) % 15 - 7.0
    pattern[::8] = 7.0

    def make_full(rank: int) -> Tensor:
        return pattern * (rank % 3 + 1)

    expected = sum(make_full(rank) for rank in range(world_size))
    outs = reduce_on_ranks(Network(world_size, per_node), numel, make_full)
    assert torch.equal(torch.cat(outs), expected)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_nothing_is_lost_to_the_output_dtype(out_dtype: torch.dtype) -> None:
    wide, narrow = (
        reduce_on_ranks(Network(4, 2), 300, lambda r: gradient(r, 1200), out_dtype=dtype)
        for dtype in (torch.float32, out_dtype)
    )
    for a, b in zip(wide, narrow, strict=True):
        assert torch.equal(a.to(out_dtype), b)


def test_rotation_makes_less_of_outliers() -> None:
    numel, world_size = 1024, 4
    # With heavy tails, one large element sets the step of its whole unrotated block.
    fulls = [gradient(rank, world_size * numel) ** 5 for rank in range(world_size)]
    exact = torch.stack(fulls).sum(0)
    errors = []
    for has_rotation in (False, True):
        fmt = BlockFormat("int4", 128, has_rotation=has_rotation)
        network = Network(world_size, 2)
        outs = reduce_on_ranks(network, numel, lambda r: fulls[r], intra_node=fmt, inter_node=fmt)
        errors.append(float((torch.cat(outs) - exact).square().mean()))
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("target", ["header", "scale", "length"])
def test_damaged_messages_are_refused_by_the_senders_name(target: str) -> None:
    def damage(source: int, carried: Tensor) -> None:
        row = carried.view(-1)
        if source == 2 and target == "header":
            row[0] = 0
        elif source == 2 and target == "scale":
            row[32 + 5 * 64 : 32 + 5 * 64 + 2] = 0  # a scale must be positive
        elif source == 2:
            row[8] += 1  # the length in the header is wrong

    network = Network(3, 1)
    network.tamper = damage
    with pytest.raises(RuntimeError, match="message of rank 2 is damaged"):
        reduce_on_ranks(network, 600, lambda r: gradient(r, 3 * 600))


def test_a_flipped_bit_is_found_by_the_checksum_only() -> None:
    def damage(source: int, carried: Tensor) -> None:
        if source == 1:
            carried.view(-1)[40] ^= 1

    for has_checksum in (False, True):
        network = Network(2, 1)
        network.tamper = damage
        arguments = (network, 600, lambda r: gradient(r, 1200))
        if has_checksum:
            with pytest.raises(RuntimeError, match=r"rank 1 .*checksum"):
                reduce_on_ranks(*arguments, has_checksum=True)
        else:
            reduce_on_ranks(*arguments)


def repeated_sums(loco: LocoSettings | None, *, is_stochastic: bool, steps: int) -> Tensor:
    """Reduce a constant gradient repeatedly. Return the mean of the results."""
    numel, network = 256, Network(4, 2)
    fmt = GradientFormat.make("int4", None, is_stochastic=is_stochastic, error_feedback=loco)

    def program(transport: SimulatedTransport) -> Tensor:
        reduction = TwoHopReduce(transport, fmt, ranks_per_node=2)
        full, total = gradient(transport.rank, 4 * numel), torch.zeros(numel)
        out = torch.empty(numel)
        for _ in range(steps):
            reduction.reduce(out, full.clone(), unit=0)
            total += out
        return total / steps

    return torch.cat(run_ranks(network, program))


def test_what_rounding_took_comes_back() -> None:
    exact = torch.stack([gradient(rank, 1024) for rank in range(4)]).sum(0)
    errors = {
        name: float((repeated_sums(loco, is_stochastic=noisy, steps=30) - exact).abs().mean())
        for name, loco, noisy in (
            ("nearest", None, False),
            ("error feedback", LocoSettings(err_beta=0.0), False),
            ("stochastic", None, True),
        )
    }
    assert errors["error feedback"] < 0.25 * errors["nearest"]
    assert errors["stochastic"] < 0.5 * errors["nearest"]


def test_errors_are_dropped_when_asked_in_time_and_if_they_are_not_finite() -> None:
    feedback = ErrorFeedback(LocoSettings(err_beta=0.5, reset_T=2))
    seen = []
    for _ in range(4):
        values = torch.zeros(64)
        feedback.compensate("key", values)
        seen.append(float(values.abs().max()))
        feedback.update("key", torch.ones(64), torch.zeros(64))
    assert seen == [0.0, 0.5, 0.0, 0.5]
    nan = torch.full((64,), float("nan"))
    for drop in (feedback.forget, lambda: feedback.update("key", torch.ones(64) * nan, nan)):
        drop()
        values = torch.zeros(64)
        feedback.compensate("key", values)
        assert torch.equal(values, torch.zeros(64))


class Counted:
    """A backend that records the names of called methods."""

    def __init__(self) -> None:
        self._backend = find_backend(torch.device("cpu"))
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._backend, name)


@pytest.mark.parametrize("num_nodes", [2, 5])
def test_a_hop_is_one_launch_each_way_whatever_the_number_of_nodes(
    num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted()
    quantizer = import_module("zero_comm.quantizer.quantize")
    monkeypatch.setattr(quantizer, "find_backend", lambda device: counted)
    world_size, numel = 2 * num_nodes, 300
    reduce_on_ranks(Network(world_size, 2), numel, lambda r: gradient(r, world_size * numel))
    assert len(counted.calls) == 4 * world_size
    assert counted.calls.count("encode") == counted.calls.count("decode_sum")
    counted.calls.clear()

    packing = Packing("int8")

    def gather(transport: SimulatedTransport) -> Tensor:
        grid = Grid(transport, 2)
        out = torch.empty(world_size * numel)
        shard = gradient(transport.rank, numel)
        weights = MessageGather(transport, grid, Scratch(transport), packing)
        weights.gather(out, shard, unit=0, version=1, backward=False)
        return out

    outs = run_ranks(Network(world_size, 2), gather)
    assert len(counted.calls) == 2 * world_size
    assert all(torch.equal(out, outs[0]) for out in outs)
