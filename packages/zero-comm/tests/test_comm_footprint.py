"""Closed forms of `zero_comm.footprint`, compared with the bytes of real collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.simulated_ranks import (
    FOUR_BIT,
    QGZ,
    QWZ,
    Network,
    SimulatedTransport,
    hpz,
    make_collectives,
    run_ranks,
)

import zero_comm
from zero_comm.footprint import comm_footprint
from zero_comm.quantizer.message import HEADER_NBYTES

WORLD_SIZE = 4
PER_NODE = 2
LOCO = {"zeropp_loco_param": {}}


@pytest.mark.parametrize("numel", [255, 256, 1000, 4096])
@pytest.mark.parametrize(
    ("weights", "within", "between"),
    [(None,) * 3, ("int8", "int8", "int4"), ("e4m3", "e5m2", None), ("e5m2", "int4", "int8")],
)
def test_message_bytes_are_those_of_a_quantized_buffer(
    weights: str | None, within: str | None, between: str | None, numel: int
) -> None:
    config = {
        **QGZ,
        **QWZ,
        "zero_quantized_weights_format": weights,
        "zero_quantized_gradients_within_node": within,
        "zero_quantized_gradients_between_nodes": between,
    }
    form = comm_footprint(config=config, world_size=WORLD_SIZE, ranks_per_node=PER_NODE)

    def expected(kind: str) -> int:
        return HEADER_NBYTES + len(zero_comm.quantize(torch.ones(numel), kind))

    reduction = form.reduction(numel, torch.float32)
    assert reduction.within_nbytes == expected(within or "int4")
    assert reduction.across_nbytes == expected(between or "int4")
    gather = form.gather(numel, torch.float32, is_trainable=True)
    assert (gather.format, gather.across_nbytes) == (weights or "int8", expected(weights or "int8"))


@pytest.mark.parametrize(
    "config",
    [
        {**QWZ, **QGZ, "zero_quantized_gradients_between_nodes": "int8"},
        {**QWZ, **QGZ, "zero_quantized_weights_format": "e4m3", **LOCO, **hpz(2)},
        {**QGZ, **hpz(2)},
        {**FOUR_BIT, **QGZ},
    ],
)
def test_bytes_sent_and_kept_are_those_of_real_collectives(config: dict[str, Any]) -> None:
    numel, dtype = 4096, torch.bfloat16
    network = Network(WORLD_SIZE, PER_NODE)

    def sent(rank: int) -> tuple[int, int]:
        return network.between[rank], network.within[rank]

    def program(transport: SimulatedTransport) -> tuple[list[tuple[int, int]], dict[str, int]]:
        made = make_collectives(transport, config, PER_NODE)
        full = torch.ones(WORLD_SIZE * numel, dtype=dtype)
        shard = torch.ones(numel, dtype=dtype)
        for version in range(2):  # a difference needs an earlier version
            counts = [sent(transport.rank)]
            made.all_gather(full, shard, unit=0, version=version, backward=False).wait()
            counts.append(sent(transport.rank))
            made.reduce_scatter(torch.empty(numel), full, unit=0).wait()
            counts.append(sent(transport.rank))
        return counts, dict(made.private_nbytes)

    (before, between, after), kept = run_ranks(network, program)[0]
    form = comm_footprint(config=config, world_size=WORLD_SIZE, ranks_per_node=PER_NODE)
    gather = form.gather(numel, dtype, is_trainable=True)
    reduction = form.reduction(numel, dtype)
    # With two groups or nodes of two ranks, each phase and each hop sends to one peer.
    gathered = tuple(b - a for a, b in zip(before, between, strict=True))
    assert gathered == (gather.across_nbytes, gather.within_nbytes)
    reduced = tuple(b - a for a, b in zip(between, after, strict=True))
    assert reduced == (reduction.across_nbytes, 2 * reduction.within_nbytes)
    shards, gradients = [(numel, dtype, True)], [(numel, dtype, torch.float32)]
    assert kept == {kind: sum(sizes) for kind, sizes in form.memory(shards, gradients).items()}
