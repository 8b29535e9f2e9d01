"""`TorchCollectives` between real processes."""

import pytest
import torch
from support.real_ranks import DTYPES, SHAPES, Outcomes, outcomes_of, values_of

from zero_comm import TorchCollectives
from zero_comm.transport.protocol import TransportCollectives


def exchange(rank: int, world_size: int) -> Outcomes:
    everyone = TorchCollectives()
    found: Outcomes = {}
    for dtype in (*DTYPES, torch.int64, torch.bool, torch.complex64):
        mine = (torch.arange(3 * world_size) + 10 * rank).to(dtype)
        parts = torch.empty_like(mine)
        everyone.all_to_all(parts, mine, unit=0).wait()
        gathered = mine.new_empty(world_size * len(mine))
        everyone.all_gather(gathered, mine, unit=0, version=0, backward=False).wait()
        found[str(dtype)] = (parts, gathered)
    return found


def exchange_in_subgroups(rank: int, world_size: int) -> Outcomes:
    """Exchange among the even ranks and among the odd ranks, then on each rank alone."""
    everyone = TorchCollectives()
    ranks = list(range(rank % 2, world_size, 2))
    group = everyone.subgroup(ranks)
    mine = torch.arange(2 * len(ranks)) + 100 * rank
    parts, gathered = torch.empty_like(mine), mine.new_empty(len(mine) * len(ranks))
    group.all_to_all(parts, mine, unit=0).wait()
    group.all_gather(gathered, mine, unit=0, version=0, backward=False).wait()
    alone = group.subgroup([group.rank])
    copied = torch.empty_like(mine)
    alone.all_to_all(copied, mine, unit=0).wait()
    return {"ranks": ranks, "parts": parts, "gathered": gathered, "copied": copied}


def sum_exactly(rank: int, world_size: int) -> Outcomes:
    out = torch.empty(5, dtype=torch.bfloat16)
    full = values_of(rank, 5 * world_size, torch.bfloat16)
    TorchCollectives().reduce_scatter(out, full, unit=0).wait()
    return {"out": out}


@pytest.fixture(scope="module", params=SHAPES)
def ranks(request: pytest.FixtureRequest) -> list[Outcomes]:
    return outcomes_of((exchange, exchange_in_subgroups, sum_exactly), *request.param)


def test_every_dtype_is_exchanged_and_gathered(ranks: list[Outcomes]) -> None:
    size = len(ranks)
    for dtype in (*DTYPES, torch.int64, torch.bool, torch.complex64):
        sent = [(torch.arange(3 * size) + 10 * r).to(dtype) for r in range(size)]
        for rank, outcomes in enumerate(ranks):
            parts, gathered = outcomes["exchange"][str(dtype)]
            assert parts.equal(torch.cat([s[3 * rank : 3 * rank + 3] for s in sent]))
            assert gathered.equal(torch.cat(sent))


def test_subgroups_of_different_sizes_exchange_among_themselves(ranks: list[Outcomes]) -> None:
    for rank, outcomes in enumerate(ranks):
        got = outcomes["exchange_in_subgroups"]
        sent = [torch.arange(2 * len(got["ranks"])) + 100 * r for r in got["ranks"]]
        place = got["ranks"].index(rank)
        assert got["parts"].equal(torch.cat([s[2 * place : 2 * place + 2] for s in sent]))
        assert got["gathered"].equal(torch.cat(sent))
        assert got["copied"].equal(sent[place])


def test_the_exact_sum_is_taken_in_fp32_in_rank_order(ranks: list[Outcomes]) -> None:
    fulls = [values_of(r, 5 * len(ranks), torch.bfloat16).float() for r in range(len(ranks))]
    total = fulls[0].clone()
    for full in fulls[1:]:
        total += full
    for rank, outcomes in enumerate(ranks):
        expected = total[5 * rank : 5 * rank + 5].bfloat16()
        assert outcomes["sum_exactly"]["out"].equal(expected)


def test_it_is_what_the_collectives_ask_of_a_carrier() -> None:
    assert isinstance(TorchCollectives(), TransportCollectives)


def test_without_a_process_group_this_process_is_the_only_rank() -> None:
    alone = TorchCollectives()
    values, out = torch.arange(3), torch.empty(3, dtype=torch.int64)
    assert (alone.rank, alone.world_size) == (0, 1)
    alone.all_gather(out, values, unit=0, version=0, backward=False).wait()
    assert out.equal(values)
    alone.all_to_all(out.zero_(), values, unit=0).wait()
    assert out.equal(values)
    ran = []
    alone.launch(lambda: ran.append(1), is_reduction=True).wait()
    assert ran == [1]
    assert alone.zeros(3, torch.bfloat16, "cpu").equal(torch.zeros(3, dtype=torch.bfloat16))


@pytest.mark.parametrize("ranks", [[], [1], [0, 1], [0, 0]])
def test_a_subgroup_of_other_ranks_is_refused(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="ranks of a subgroup must be"):
        TorchCollectives().subgroup(ranks)


@pytest.mark.parametrize("out", [torch.empty(4), torch.empty(3, dtype=torch.float64)])
def test_an_output_that_does_not_fit_is_refused(out: torch.Tensor) -> None:
    alone = TorchCollectives()
    with pytest.raises(ValueError, match=r"out must have 3 elements of torch.float32"):
        alone.all_gather(out, torch.ones(3), unit=0, version=0, backward=False)
    with pytest.raises(ValueError, match=r"out must have 3 elements of torch.float32"):
        alone.all_to_all(out, torch.ones(3), unit=0)
