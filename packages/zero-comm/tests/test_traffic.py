"""Traffic between nodes in a step: 3 M bytes when plain, 0.75 M or half of that with ZeRO++.

M is what enters a node when every weight is sent to it once in 16 bits. A plain step takes 3: a
gather for forward, one for backward, a reduction (ZeRO++, arXiv 2306.10209, table 1).
"""

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

NUMEL = 16384  # of a shard


def four_bit(size: int) -> dict[str, Any]:
    return {
        **FOUR_BIT,
        **QGZ,
        **hpz(size),
        "zero_quantized_gradients_within_node": "int8",
        "zero_quantized_gradients_hadamard": True,
    }


def bytes_between_nodes(config: dict[str, Any], world_size: int, per_node: int) -> int:
    """Return the bytes between nodes of each rank in a unit's second step.

    Every rank sends as many.
    """
    network = Network(world_size, per_node)
    after_first = [0] * world_size

    def program(transport: SimulatedTransport) -> None:
        collectives = make_collectives(transport, config, per_node)
        generator = torch.Generator().manual_seed(transport.rank)
        shard = torch.randn(NUMEL, generator=generator).bfloat16()
        full = torch.empty(world_size * NUMEL, dtype=torch.bfloat16)
        reduced = torch.empty(NUMEL)
        for step in range(2):
            after_first[transport.rank] = network.between[transport.rank]
            for backward in (False, True):
                collectives.all_gather(full, shard, unit=0, version=step, backward=backward).wait()
            collectives.reduce_scatter(reduced, full, unit=0).wait()

    run_ranks(network, program)
    (sent,) = {b - a for a, b in zip(after_first, network.between, strict=True)}
    return sent


CONFIGS: dict[str, Any] = {
    "qwZ": lambda size: QWZ,
    "hpZ": hpz,
    "qgZ": lambda size: QGZ,
    "all three": lambda size: {**QWZ, **QGZ, **hpz(size)},
    "4-bit mode": four_bit,
}


@pytest.mark.parametrize(
    ("name", "world_size", "per_node", "bar"),
    [
        ("qwZ", 4, 2, 1.4),
        ("hpZ", 4, 2, 1.4),
        ("qgZ", 4, 2, 1.3),
        ("all three", 4, 2, 3.8),
        ("all three", 64, 16, 3.8),
        ("4-bit mode", 4, 2, 5.8),
        ("4-bit mode", 16, 4, 5.8),
    ],
)
def test_bytes_between_nodes_are_so_many_times_fewer(
    name: str, world_size: int, per_node: int, bar: float
) -> None:
    num_others = world_size // per_node - 1
    # A header, a byte or half of one each, 16 bits for each block of 256 or 128.
    weights8 = 32 + NUMEL + NUMEL // 256 * 2
    changes4 = 32 + NUMEL // 2 + NUMEL // 256 * 2
    gradients4 = 32 + NUMEL // 2 + NUMEL // 128 * 2
    exact = 2 * NUMEL
    # What a collective beneath carries itself goes to every rank here, and not to every node once.
    direct = exact * per_node
    expected = {
        "qwZ": 2 * weights8 + direct,
        "hpZ": exact + direct,
        "qgZ": 2 * direct + gradients4,
        "all three": weights8 + gradients4,
        "4-bit mode": changes4 + gradients4,
    }[name]
    sent = bytes_between_nodes(CONFIGS[name](per_node), world_size, per_node)
    assert sent == expected * num_others
    num_direct = {"qwZ": 1, "hpZ": 1, "qgZ": 2}.get(name, 0)
    once_per_node = sent - num_direct * (direct - exact) * num_others
    assert 3 * exact * num_others / once_per_node >= bar
