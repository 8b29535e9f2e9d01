"""Gathers of lossless differences on simulated ranks: exact bits, and fallback to whole values."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.lossless import integers_of
from support.simulated_ranks import Network, SimulatedTransport, make_collectives, run_ranks
from torch import Tensor

from zero_comm import CorruptMessageError

LAYOUTS = [(2, 1), (3, 1), (4, 2), (6, 2), (6, 3)]
LOSSLESS = {"zero_lossless_weights": True}
NUMEL = 4099
# Upper bounds of a gather's bytes, relative to exact values.
MOST = {torch.bfloat16: 0.15, torch.float16: 0.55, torch.float32: 0.75}


def weights(rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (0.02 * torch.randn(NUMEL, generator=generator)).to(dtype)


def stepped(weights: Tensor, version: int) -> Tensor:
    """Change weights by about 1e-5, and one weight to NaN, -0.0 or Inf."""
    generator = torch.Generator().manual_seed(version)
    moved = weights.float() + 1e-5 * torch.randn(NUMEL, generator=generator)
    moved[version % NUMEL] = (float("nan"), -0.0, float("inf"))[version % 3]
    return moved.to(weights.dtype)


class Run:
    """Gathers of one unit's successive weights on all ranks, into kept or new buffers."""

    def __init__(self, world_size: int, per_node: int, dtype: torch.dtype, is_kept: bool) -> None:
        self.network = Network(world_size, per_node)
        self.per_node, self.dtype, self.is_kept = per_node, dtype, is_kept
        self.config: dict[str, Any] = dict(LOSSLESS)
        self.disturb: Callable[[Any, int, int, Tensor], None] = lambda *_: None

    def gather(self, versions: int) -> list[int]:
        """Gather on all ranks, compare bits, and return rank 0's sent bytes by version."""
        world_size, sent = self.network.world_size, [0]

        def program(transport: SimulatedTransport) -> None:
            collectives = make_collectives(transport, self.config, self.per_node)
            rank = transport.rank
            full = torch.zeros(world_size * NUMEL, dtype=self.dtype)
            own = full[rank * NUMEL : (rank + 1) * NUMEL]
            everyone = [weights(r, self.dtype) for r in range(world_size)]
            for version in range(versions):
                if version:
                    everyone = [stepped(w, version) for w in everyone]
                self.disturb(collectives, rank, version, full)
                out, shard = full, own
                if self.is_kept:
                    own.copy_(everyone[rank])
                else:
                    out, shard = torch.zeros_like(full), everyone[rank]
                for backward in (False,) if self.is_kept else (False, True):
                    arguments = {"unit": 0, "version": version, "backward": backward}
                    collectives.all_gather(out, shard, **arguments).wait()
                    assert torch.equal(integers_of(out), integers_of(torch.cat(everyone)))
                if rank == 0:
                    sent.append(self.network.between[0])

        run_ranks(self.network, program)
        return [after - before for before, after in pairwise(sent)]


@pytest.mark.parametrize(  # every layout with and without kept buffers, each with one dtype
    ("layout", "is_kept", "dtype"),
    [(x, k, [*MOST][(i + k) % 3]) for i, x in enumerate(LAYOUTS) for k in (False, True)],
)
def test_every_bit_arrives_in_fewer_bytes(layout: Any, is_kept: bool, dtype: torch.dtype) -> None:
    sent = Run(*layout, dtype, is_kept).gather(5)
    assert max(sent[1:]) < MOST[dtype] * sent[0], sent


@pytest.mark.parametrize("is_kept", [False, True])
def test_after_a_change_from_outside_whole_values_are_sent(is_kept: bool) -> None:
    run = Run(4, 2, torch.bfloat16, is_kept)

    def forget(collectives: Any, rank: int, version: int, full: Tensor) -> None:
        if version == 2:
            collectives.forget_values()

    run.disturb = forget
    sent = run.gather(4)
    assert sent[2] >= sent[0] > 4 * sent[1]
    assert sent[3] < sent[0] / 4


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (2,)])
def test_an_edited_weight_is_replaced_as_a_gather_would(ranks: tuple[int, ...]) -> None:
    run = Run(4, 2, torch.bfloat16, True)

    def edit(collectives: Any, rank: int, version: int, full: Tensor) -> None:
        if version == 2 and rank in ranks:
            full[NUMEL + 7] += 1.0

    run.disturb = edit
    sent = run.gather(4)
    assert sent[2] >= sent[0]
    assert sent[3] < sent[0] / 4


def test_what_cannot_be_shortened_is_sent_whole() -> None:
    network = Network(2, 1)

    def program(transport: SimulatedTransport) -> None:
        collectives = make_collectives(transport, LOSSLESS, 1)
        for version in range(3):
            generator = torch.Generator().manual_seed(version)
            shape = (2, NUMEL)
            everyone = torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16)
            out, shard = everyone.new_zeros(2 * NUMEL), everyone[transport.rank].clone()
            before = network.between[0]
            collectives.all_gather(out, shard, unit=0, version=version, backward=False).wait()
            assert torch.equal(out, everyone.view(-1))
            if transport.rank == 0:
                assert network.between[0] - before <= 1.02 * shard.nbytes

    run_ranks(network, program)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_damaged_message_is_refused_with_its_sender(is_kept: bool) -> None:
    run = Run(2, 1, torch.bfloat16, is_kept)
    state = {"version": 0}

    def note(collectives: Any, rank: int, version: int, full: Tensor) -> None:
        state["version"] = version

    def tamper(source: int, carried: Tensor) -> None:
        is_message = carried.dtype == torch.uint8 and carried.numel() > 64
        if state["version"] == 1 and source == 1 and is_message:
            carried[60] ^= 1

    run.disturb, run.network.tamper = note, tamper
    with pytest.raises(CorruptMessageError, match="rank 1 is damaged"):
        run.gather(2)


def test_both_kinds_of_shorter_weights_are_refused() -> None:
    network = Network(2, 1)

    def program(transport: SimulatedTransport) -> None:
        with pytest.raises(ValueError, match="zero_lossless_weights sends every bit"):
            make_collectives(transport, {**LOSSLESS, "zero_quantized_weights": True}, 1)

    run_ranks(network, program)
