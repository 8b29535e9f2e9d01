"""Mixtures of experts without a leaf list: ranks route differently, and gather what is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core import blueprint
from zero_core.comm.meter import PARAMETERS
from zero_core.layout.discovery import discover
from zero_core.layout.experts import ExpertList
from zero_core.protocols import TransportCollectives, Work
from zero_core.sharded import experts
from zero_core.sharded.experts import Routing, agree
from zero_core.testing import SimulatedDDP, SimulatedRanks, seeded, simulate
from zero_core.testing.models import (
    MIXTURE_WIDTH,
    NUM_EXPERTS,
    Mixture,
    MixtureModel,
    routed_batch,
)

ADAMW = {"lr": 1e-2, "weight_decay": 0.01}


class _Alone(nn.Module):
    """A list of experts that is in no block."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(3):
            self.mixture = Mixture()
            self.blocks = nn.ModuleList(nn.Linear(MIXTURE_WIDTH, MIXTURE_WIDTH) for _ in range(2))

    def forward(self, x: Tensor, allowed: list[list[int]]) -> Tensor:
        x = self.mixture(x, allowed[0])
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


class _AtRoot(Mixture):
    """A list of experts directly under the root."""

    def __init__(self) -> None:
        with seeded(3):
            super().__init__()

    def forward(self, x: Tensor, allowed: list[list[int]]) -> Tensor:
        return super().forward(x, allowed[0]).square().mean()


def _config(stage: int, **top: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        **top,
    }


def _follow(
    ranks: SimulatedRanks,
    kind: type[nn.Module],
    stage: int,
    num_allowed: list[int],
    top: dict[str, Any],
) -> list[int]:
    """Compare with DDP. Returns the bytes of gathered parameters, by step."""
    model = kind()
    ddp = SimulatedDDP(model, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    micros = int(top.get("gradient_accumulation_steps", 1))
    losses: list[Tensor] = []
    for step, num in enumerate(num_allowed):
        sums: dict[nn.Parameter, Tensor] = {}
        for micro in range(micros):
            loss = ddp(*routed_batch(10 * step + micro, ranks.rank, num))
            (loss / micros).backward()
            ddp.average_gradients()
            losses.append(loss.detach())
            for param in model.parameters():
                if param.grad is not None:
                    grad, param.grad = param.grad, None
                    sums[param] = sums[param] + grad if param in sums else grad
        for param in model.parameters():
            param.grad = sums.get(param)
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: value.detach() for name, value in model.state_dict().items()}

    engine = zero_core.build(kind(), _config(stage, **top), process_group=ranks)
    sent, found = [], []
    for step, num in enumerate(num_allowed):
        for micro in range(micros):
            inputs = routed_batch(10 * step + micro, ranks.rank, num)
            if step < 3:
                with torch.no_grad():
                    engine(*inputs)  # an evaluation, which routes as well
            loss = engine(*inputs)
            found.append(loss.detach())
            engine.backward(loss)
            engine.step()
        rows = engine.comm_report()
        sent.append(sum(row.within_node_bytes for row in rows if row.content == PARAMETERS))
    assert torch.equal(torch.stack(found), torch.stack(losses))
    torch.testing.assert_close(engine.full_state_dict(), expected, rtol=0.0, atol=0.0)
    return sent


@pytest.fixture
def small_experts(monkeypatch):
    """Have experts of any size in segments of their own."""
    monkeypatch.setattr(blueprint, "MIN_EXPERT_SHARD_NUMEL", 1)


@pytest.mark.parametrize("kind", [MixtureModel, _Alone, _AtRoot])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_route_differently_follow_ddp(stage, kind):
    simulate(_follow, 3, kind, stage, [8, 1, 2], {})


# By step: the experts that a rank's tokens may be routed to, 0 for none. Three blocks, an
# evaluation and a forward with gradients each.
NUM_ALLOWED = [8, 1, 1, 0, 8, 1, 8]


@pytest.mark.parametrize(
    ("world_size", "top"),
    [(3, {}), (2, {"gradient_accumulation_steps": 2}), (2, {"activation_checkpointing": {}})],
    ids=["plain", "accumulated", "recomputed"],
)
def test_large_experts_are_gathered_where_a_rank_calls_them(world_size, top, small_experts):
    sent = simulate(_follow, world_size, MixtureModel, 3, NUM_ALLOWED, top)
    assert sent == [sent[0]] * world_size
    whole, *later = sent[0]  # in the first step nothing is known of the routing
    assert min(later) < 0.5 * whole


def test_experts_that_are_small_are_gathered_with_their_block():
    (engine_units,) = simulate(_segments, 1)
    assert engine_units == [1] * 4
    assert simulate(_segments, 2)[0] == [1] * 4


def _segments(ranks: SimulatedRanks) -> list[int]:
    engine = zero_core.build(MixtureModel(), _config(3), process_group=ranks)
    return [len(unit.segments) for unit in engine.layout.units]


def test_large_experts_have_segments_of_their_own_at_stage_3_alone(small_experts):
    assert simulate(_segments, 2)[0] == [1, *[1 + NUM_EXPERTS] * 3]
    assert simulate(_segments, 1)[0] == [1] * 4  # one rank gathers nothing


def test_a_leaf_has_no_experts_of_its_own(small_experts):
    assert simulate(_leaf_segments, 2)[0] == [1] * 4


def _leaf_segments(ranks: SimulatedRanks) -> list[int]:
    config = _config(3)
    config["zero_optimization"]["leaf_module"] = {"classes": ["Mixture"]}
    engine = zero_core.build(MixtureModel(), config, process_group=ranks)
    return [len(unit.segments) for unit in engine.layout.units]


def test_a_list_of_experts_that_is_in_no_block_makes_its_holder_one():
    engine = zero_core.build(_Alone(), _config(3))
    assert [unit.name for unit in engine.layout.units] == ["", "mixture", "blocks.0", "blocks.1"]


def _differ_in_turns(ranks: SimulatedRanks) -> None:
    """Idle ranks, two forwards before their backwards, and a forward within gathered()."""
    results = []
    for stage in (2, 3):
        engine = zero_core.build(MixtureModel(), _config(stage), process_group=ranks)
        for step in range(6):
            if step == 4 and ranks.rank == 1:
                engine.idle_backward()
                engine.idle_step()
                continue
            inputs = [routed_batch(10 * step + turn, ranks.rank, 1) for turn in range(2)]
            if step == 2:
                with engine.gathered():
                    loss = engine(*inputs[0])
                engine.backward(loss)
                engine.backward(engine(*inputs[1]))
            elif step == 3:
                losses = [engine(*own) for own in inputs]
                with torch.no_grad():
                    engine(*inputs[0])
                engine.backward(losses[0])
                engine.backward(losses[1])
            else:
                engine.backward(engine(*inputs[0]))
                engine.backward(engine(*inputs[1]))
            engine.step()
        results.append(engine.full_state_dict())
    torch.testing.assert_close(results[1], results[0], rtol=0.0, atol=0.0)


def test_ranks_that_use_a_sparse_unit_in_other_ways_get_the_numbers_of_stage_2(small_experts):
    simulate(_differ_in_turns, 2)


class _BackwardGathers:
    """The engine's own collectives, and the number of gathers in backwards."""

    def __init__(self, native: TransportCollectives) -> None:
        self._native = native
        self.number = 0

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        self.number += backward
        return self._native.all_gather(out, shard, unit=unit, version=version, backward=backward)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        return self._native.reduce_scatter(out, full, unit=unit)


def _drop_a_gradient(ranks: SimulatedRanks) -> list[int]:
    """Gathers of two equal backwards. The gradient of another one before the second is dropped."""
    made: list[_BackwardGathers] = []

    def collectives(native: TransportCollectives, **_: Any) -> _BackwardGathers:
        made.append(_BackwardGathers(native))
        return made[0]

    engine = zero_core.build(
        MixtureModel(), _config(3), collectives=collectives, process_group=ranks
    )
    batches = [routed_batch(seed, 0, 1) for seed in range(3)]
    engine.backward(engine(*batches[0]))
    engine.step()
    found = []
    for turn in range(2):
        if turn == 1:
            engine.backward(engine(*batches[2]))
            engine.optimizer.zero_grad()
        loss = engine(*batches[1])
        engine.optimizer.zero_grad()  # its backward is still to come
        before = made[0].number
        engine.backward(loss)
        found.append(made[0].number - before)
        engine.backward(engine(*batches[1]))
        engine.step()
    return found


def test_experts_of_a_dropped_gradient_are_not_gathered_in_the_next_backward(small_experts):
    once, again = simulate(_drop_a_gradient, 2)[0]
    assert once == again


def _zero_before_backward(ranks: SimulatedRanks) -> list[int]:
    """Bytes of gathered parameters, by step, of a loop that drops gradients after its forward."""
    engine = zero_core.build(MixtureModel(), _config(3), process_group=ranks)
    sent = []
    for step in range(3):
        loss = engine(*routed_batch(step, 0, 1))
        engine.optimizer.zero_grad()
        engine.backward(loss)
        engine.step()
        rows = engine.comm_report()
        sent.append(sum(row.within_node_bytes for row in rows if row.content == PARAMETERS))
    return sent


def test_experts_are_left_out_where_gradients_are_dropped_before_each_backward(small_experts):
    first, *later = simulate(_zero_before_backward, 2)[0]
    assert max(later) < 0.5 * first


class _Bypassing(MixtureModel):
    """Calls a block's mixture without the block's own forward, if it is told to."""

    is_bypassing = False

    def forward(self, x: Tensor, allowed: list[list[int]]) -> Tensor:
        if not self.is_bypassing:
            return super().forward(x, allowed)
        loss: Tensor = self.head(self.blocks[0].mixture(x, allowed[0])).square().mean()
        return loss


def _call_outside(ranks: SimulatedRanks) -> None:
    engine = zero_core.build(_Bypassing(), _config(3), process_group=ranks)
    inputs = routed_batch(0, ranks.rank, 1)
    engine.backward(engine(*inputs))
    engine.step()
    engine.module.is_bypassing = True
    with pytest.raises(RuntimeError, match=r"Name the block in .*leaf_module"):
        engine(*inputs)


def test_an_expert_that_is_called_without_its_block_is_refused_with_gradients(small_experts):
    simulate(_call_outside, 2)


def _generate(ranks: SimulatedRanks) -> None:
    """Forwards and parts without gradients. Each rank runs another number of forwards."""
    engine = zero_core.build(MixtureModel(), _config(3), process_group=ranks)
    engine.backward(engine(*routed_batch(0, ranks.rank, 1)))
    engine.step()
    with torch.no_grad():
        engine.module.blocks[0].mixture(routed_batch(0, 0, 1)[0], [ranks.rank])
    with torch.no_grad(), engine.generating():
        engine(*routed_batch(1, ranks.rank, 8))
        for turn in range(3 * ranks.rank):
            engine(*routed_batch(2 + turn, ranks.rank, 8))
    with torch.no_grad(), engine.gathered():
        for turn in range(2 * ranks.rank):
            engine(*routed_batch(turn, ranks.rank, 8))
    engine.backward(engine(*routed_batch(5, ranks.rank, 1)))
    engine.step()


def test_ranks_that_keep_their_units_may_generate_different_lengths(small_experts):
    simulate(_generate, 2)


class _Reading(MixtureModel):
    """Reads the weights of each block's last two experts without a call of their modules."""

    def forward(self, x: Tensor, allowed: list[list[int]]) -> Tensor:
        loss = super().forward(x, allowed)
        return loss + self._sum * 1e-3

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.after.register_forward_pre_hook(self._read(block.mixture.experts))

    def _read(self, experts: nn.ModuleList) -> Any:
        def read(module: nn.Module, args: Any) -> None:
            self._sum = torch.stack([expert.up.weight for expert in experts[-2:]]).sum()

        return read


@pytest.mark.parametrize("top", [{}, {"activation_checkpointing": {}}], ids=["plain", "recomputed"])
def test_a_weight_that_is_read_without_a_call_is_gathered(top, small_experts):
    sent = simulate(_follow, 2, _Reading, 3, [1, 1, 1], top, timeout_s=60.0)
    assert min(sent[0][1:]) < 0.8 * sent[0][0]


def _route_freely(ranks: SimulatedRanks, rounds: list[int]) -> list[int]:
    """Rounds of rank 0, by step. ``rounds`` has the rank of each one so far."""
    engine = zero_core.build(MixtureModel(), _config(3), process_group=ranks)
    found = []
    for step in range(8):
        before = rounds.count(0)
        x = torch.randn(
            2, MIXTURE_WIDTH, generator=torch.Generator().manual_seed(9 * step + ranks.rank)
        )
        engine.backward(engine(x, [list(range(NUM_EXPERTS))] * 3))
        engine.step()
        found.append(rounds.count(0) - before)
    return found


def test_ranks_agree_on_all_experts_of_a_block_at_once(small_experts, monkeypatch):
    rounds: list[int] = []

    def agree_and_count(control: Any, *args: Any) -> list[int]:
        rounds.append(control.rank)
        return agree(control, *args)

    monkeypatch.setattr(experts, "agree", agree_and_count)
    first, *_, last, latest = simulate(_route_freely, 2, rounds)[0]
    assert (first, last, latest) == (0, 6, 6)  # three blocks: the needs, and that there are none


def _route(ranks: SimulatedRanks, num: int) -> list[list[int]]:
    """The rounds of ``num`` random routings. Returns what was gathered, in order."""
    control = ranks.connect()
    generator = torch.Generator().manual_seed(num)
    gathered: list[list[int]] = []
    for _ in range(num):
        counts = torch.randint(0, 5, (ranks.size,), generator=generator).tolist()
        calls = [
            torch.randperm(NUM_EXPERTS, generator=generator)[:count].tolist() for count in counts
        ]
        found: list[int] = []
        for expert in calls[ranks.rank]:
            if expert not in found:
                found += agree(control, [expert], NUM_EXPERTS, ranks.device)
            assert expert in found
        while named := agree(control, (), NUM_EXPERTS, ranks.device):
            found += named
        assert len(set(found)) == len(found)
        assert set(found) == {expert for own in calls for expert in own}
        gathered.append(found)
    return gathered


@pytest.mark.parametrize("world_size", [2, 3])
def test_whatever_ranks_call_they_gather_what_any_of_them_calls_in_one_order(world_size):
    first, *others = simulate(_route, world_size, 300)
    assert others == [first] * (world_size - 1)


def test_tensors_beside_experts_that_are_no_choices_do_no_harm():
    routing = Routing(ExpertList(0, (0, 1, 2, 3), ()))
    wide = torch.tensor([[0, 1, 2, 3, 0, 1], [1, 0, 3, 2, 1, 0]])
    routing.note((torch.tensor([5, 0, 1, 2]), torch.full((2, 2), 7), wide))  # counts, no experts
    assert routing.expected() == set()
    routing.called.update(range(4))
    routing.end()  # six choices of each token were all called
    routing.note(torch.randn(2, 4))
    assert routing.expected() == {0, 1, 2, 3}


def test_layers_of_an_expert_are_blocks():
    model = nn.Module()
    model.action_expert_layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
    found = discover(model)
    assert [name for name, _, _ in found.units] == [
        "",
        "action_expert_layers.0",
        "action_expert_layers.1",
    ]
