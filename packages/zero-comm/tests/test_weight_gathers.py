"""Gathers with qwZ, hpZ and differences on simulated ranks: bytes sent, received and kept."""

from typing import Any

import pytest
import torch
from support.simulated_ranks import (
    FOUR_BIT,
    QWZ,
    Network,
    SimulatedTransport,
    hpz,
    make_collectives,
    run_ranks,
)
from torch import Tensor

from zero_comm import BlockFormat, dequantize, quantize
from zero_comm.quantizer.message import Packing

LAYOUTS = [(2, 2), (3, 1), (4, 2), (6, 2), (6, 3)]


def shard_of(rank: int, numel: int, dtype: torch.dtype, version: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * version + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def gather(collectives: Any, shard: Tensor, world_size: int, **more: Any) -> Tensor:
    out = torch.full((world_size * shard.numel(),), 9.0).to(shard.dtype)
    arguments = {"unit": 0, "version": 0, "backward": False, **more}
    collectives.all_gather(out, shard, **arguments).wait()
    return out


def gather_on_ranks(
    config: dict[str, Any], world_size: int, per_node: int, numel: int, dtype: torch.dtype
) -> tuple[list[Tensor], Network]:
    network = Network(world_size, per_node)

    def program(transport: SimulatedTransport) -> Tensor:
        shard = shard_of(transport.rank, numel, dtype)
        before = shard.clone()
        out = gather(make_collectives(transport, config, per_node), shard, world_size)
        assert torch.equal(shard, before)
        return out

    return run_ranks(network, program), network


@pytest.mark.parametrize(("world_size", "per_node"), LAYOUTS)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("int8", torch.float32),
        ("int4", torch.bfloat16),
        ("e4m3", torch.float32),
        ("e5m2", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("has_secondary", [False, True])
def test_every_rank_gets_what_quantizing_each_shard_leaves(
    world_size: int, per_node: int, kind: str, dtype: torch.dtype, has_secondary: bool
) -> None:
    numel = 1001
    config = {**QWZ, "zero_quantized_weights_format": kind}
    config |= hpz(per_node) if has_secondary else {}
    outs, _ = gather_on_ranks(config, world_size, per_node, numel, dtype)
    shards = [shard_of(rank, numel, dtype) for rank in range(world_size)]
    expected = [dequantize(quantize(s, kind), numel, kind, dtype=dtype) for s in shards]
    assert not torch.equal(expected[0], shards[0])
    for out in outs:
        assert torch.equal(out, torch.cat(expected))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_what_quantizing_would_not_shorten_travels_exactly(dtype: torch.dtype) -> None:
    numel = 1000 if dtype == torch.int64 else 8
    for config in (QWZ, FOUR_BIT, {**QWZ, **hpz(2)}):
        outs, _ = gather_on_ranks(config, 4, 2, numel, dtype)
        assert torch.equal(outs[3], torch.cat([shard_of(r, numel, dtype) for r in range(4)]))


def versions_on_ranks(
    config: dict[str, Any], program: Any, world_size: int = 4, per_node: int = 2
) -> tuple[list[Any], Network]:
    network = Network(world_size, per_node)
    run = run_ranks(
        network, lambda transport: program(make_collectives(transport, config, per_node), transport)
    )
    return run, network


@pytest.mark.parametrize("config", [hpz(2), {**QWZ, **hpz(2)}, {**FOUR_BIT, **hpz(2)}])
def test_a_version_crosses_nodes_once_and_a_new_one_is_never_missed(config: Any) -> None:
    numel, dtype = 4096, torch.bfloat16
    crossed: list[int] = []

    def program(collectives: Any, transport: SimulatedTransport) -> list[Tensor]:
        outs = []
        for version in (0, 1, 2):
            shard = shard_of(transport.rank, numel, dtype) + version
            for backward in (False, True, False):
                out = gather(collectives, shard, 4, version=version, backward=backward)
                if transport.rank == 0:
                    crossed.append(transport.network.between[0])
                outs.append(out)
        return outs

    (first, *others), _ = versions_on_ranks(config, program)
    steps = torch.tensor(crossed).view(3, 3).diff(dim=1)
    assert not steps.any()  # later gathers of a version send nothing between nodes
    assert len(set(crossed)) == 3
    for version in range(3):
        expected = torch.cat([shard_of(r, numel, dtype) + version for r in range(4)])
        step = 7.0 / 7 if "zero_quantized_weights_format" in config else 0.05
        assert (first[3 * version] - expected).abs().max() <= step
        for out in first[3 * version : 3 * version + 3]:
            assert torch.equal(out, first[3 * version])
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_differences_follow_the_weights_to_within_half_a_step_of_the_change() -> None:
    numel, world_size = 4096, 4
    torch.manual_seed(0)
    changes = 1e-3 * torch.randn(20, world_size, numel)

    def program(collectives: Any, transport: SimulatedTransport) -> list[float]:
        weights = shard_of(transport.rank, numel, torch.float32)
        everyone = torch.cat([shard_of(r, numel, torch.float32) for r in range(world_size)])
        errors = []
        for version, change in enumerate(changes):
            out = gather(collectives, weights, world_size, version=version)
            errors.append(float((out - everyone).abs().max()))
            weights = weights + change[transport.rank]
            everyone = everyone + change.view(-1)
        return errors

    (errors, *_), network = versions_on_ranks(FOUR_BIT, program)
    assert errors[0] == 0.0  # the first gather sends the weights exactly
    # Half a step. The largest change of a block, including the last error, is below 5e-3.
    assert 0.0 < max(errors[1:]) <= 0.5 / 7 * 5e-3 * 1.01
    exact, packed = 4 * numel, Packing(BlockFormat("int4", 256)).nbytes(numel)
    assert network.between == [exact + 19 * packed] * world_size


@pytest.mark.parametrize("config", [hpz(2), {**QWZ, **hpz(2)}, FOUR_BIT, QWZ])
def test_forgetting_starts_from_the_weights_themselves(config: Any) -> None:
    numel = 2048

    def program(collectives: Any, transport: SimulatedTransport) -> list[Tensor]:
        outs = []
        for version in (0, 1):
            shard = shard_of(transport.rank, numel, torch.float32, version)
            gather(collectives, shard, 4, version=version)
        collectives.forget_values()
        # The version is unchanged, but the weights are not: the gather must not use the kept ones.
        shard = shard_of(transport.rank, numel, torch.float32, 7)
        outs.append(gather(collectives, shard, 4, version=1))
        return outs

    ((out,), *_), _ = versions_on_ranks(config, program)
    expected = torch.cat([shard_of(r, numel, torch.float32, 7) for r in range(4)])
    if "zero_quantized_weights_format" in config or "zero_quantized_weights" not in config:
        assert torch.equal(out, expected)
    else:
        assert (out - expected).abs().max() <= 4.5 / 127 / 2


@pytest.mark.parametrize("config", [hpz(2), {**QWZ, **hpz(2)}, FOUR_BIT, QWZ])
def test_evaluation_may_come_before_training(config: Any) -> None:
    # The first gather, in inference mode, allocates buffers that later gathers reuse outside it.

    def program(collectives: Any, transport: SimulatedTransport) -> bool:
        shards = [shard_of(transport.rank, 2048, torch.float32, v) for v in (0, 1)]
        with torch.inference_mode():
            gather(collectives, shards[0], 4, version=0)
        out = gather(collectives, shards[1], 4, version=1)
        return bool(out.isfinite().all()) and not out.is_inference()

    assert versions_on_ranks(config, program)[0] == [True] * 4


def test_frozen_weights_alone_are_quantized_if_asked() -> None:
    config = {"zero_quantized_nontrainable_weights": True}
    numel = 1024

    def program(transport: SimulatedTransport) -> list[bool]:
        collectives = make_collectives(transport, config, 2, frozen=[1])
        shard = shard_of(transport.rank, numel, torch.float32)
        expected = torch.cat([shard_of(r, numel, torch.float32) for r in range(4)])
        return [torch.equal(gather(collectives, shard, 4, unit=u), expected) for u in (0, 1)]

    assert run_ranks(Network(4, 2), program) == [[True, False]] * 4


def test_frozen_weights_cross_once_until_they_are_replaced() -> None:
    network = Network(4, 2)
    crossed = []

    def program(transport: SimulatedTransport) -> list[bool]:
        collectives = make_collectives(transport, hpz(2), 2, frozen=[0])
        found = []
        for version in range(4):
            if version == 3:
                collectives.forget_values()
            shard = shard_of(transport.rank, 100, torch.float32, version // 3)
            expected = [shard_of(r, 100, torch.float32, version // 3) for r in range(4)]
            out = gather(collectives, shard, 4, version=version)
            found.append(torch.equal(out, torch.cat(expected)))
            if transport.rank == 0:
                crossed.append(network.between[0])
        return found

    assert run_ranks(network, program) == [[True] * 4] * 4
    assert crossed == [400, 400, 400, 800]


def test_negative_versions_are_carried_exactly_and_never_kept() -> None:
    def program(collectives: Any, transport: SimulatedTransport) -> list[Tensor]:
        outs = []
        for round_ in range(2):
            values = shard_of(transport.rank, 512, torch.float32, round_)
            outs.append(gather(collectives, values, 4, version=-1))
        return outs

    (outs, *_), _ = versions_on_ranks({**QWZ, **hpz(2)}, program)
    for round_, out in enumerate(outs):
        expected = [shard_of(r, 512, torch.float32, round_) for r in range(4)]
        assert torch.equal(out, torch.cat(expected))


def test_a_shard_that_overlaps_the_output_is_refused() -> None:
    transport = SimulatedTransport(Network(2, 1), [0, 1], 0)
    out = torch.randn(8192)
    with pytest.raises(ValueError, match="must not overlap out"):
        make_collectives(transport, QWZ, 1).all_gather(
            out, out[:4096], unit=0, version=0, backward=False
        )


def test_a_damaged_message_is_refused_by_the_senders_name() -> None:
    network = Network(4, 2)

    def damage(source: int, carried: Tensor) -> None:
        if source == 3 and carried.dtype == torch.uint8:
            carried.view(-1)[2] = 7

    network.tamper = damage
    with pytest.raises(RuntimeError, match=r"message of rank [13] is damaged"):
        run_ranks(
            network,
            lambda transport: gather(
                make_collectives(transport, QWZ, 2), shard_of(transport.rank, 999, torch.float32), 4
            ),
        )
