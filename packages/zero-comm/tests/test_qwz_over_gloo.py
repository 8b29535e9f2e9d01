"""Quantized gathers between real processes, at world sizes 1, 2 and 3."""

from pathlib import Path

import pytest
import rank_program
import torch
import torch.multiprocessing as mp
from rank_program import DTYPES, SIZES, Outcomes, shard_of
from torch import Tensor

from zero_comm import BlockFormat, dequantize, quantize, quantized_nbytes

Ranks = list[dict[str, Outcomes]]


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """The outcomes of every rank; all scenarios share one start of the processes."""
    world_size: int = request.param
    folder: Path = tmp_path_factory.mktemp(f"ranks{world_size}")
    mp.spawn(rank_program.run, args=(world_size, folder), nprocs=world_size)  # type: ignore[attr-defined, no-untyped-call]
    return [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(world_size)]


def as_received(shard: Tensor, format: str | BlockFormat = "int8") -> Tensor:
    """What a shard looks like to every rank."""
    numel = shard.numel()
    if quantized_nbytes(numel, format) >= shard.nbytes:
        return shard.reshape(-1)
    buffer = quantize(shard, format)
    return dequantize(buffer, numel, format, dtype=shard.dtype)


def gathered(shards: list[Tensor], format: str | BlockFormat = "int8") -> Tensor:
    return torch.cat([as_received(s, format) for s in shards])


def test_every_rank_gets_every_dequantized_shard(ranks: Ranks) -> None:
    for bits in (8, 4):
        for numel in SIZES:
            for dtype in DTYPES:
                expected = gathered(
                    [shard_of(r, numel, dtype) for r in range(len(ranks))], f"int{bits}"
                )
                for outcomes in ranks:
                    got = outcomes["gather_sizes_and_dtypes"][f"out {bits} {numel} {dtype}"]
                    assert torch.equal(got, expected), (bits, numel, dtype)


def test_shards_keep_every_bit(ranks: Ranks) -> None:
    for rank, outcomes in enumerate(ranks):
        for bits in (8, 4):
            for numel in SIZES:
                for dtype in DTYPES:
                    kept = outcomes["gather_sizes_and_dtypes"][f"shard {bits} {numel} {dtype}"]
                    assert torch.equal(kept, shard_of(rank, numel, dtype))


def test_two_gathers_at_once_do_not_mix(ranks: Ranks) -> None:
    for step in range(3):
        for i in range(2):
            shards = [shard_of(r, 500 + 100 * i, torch.float32) + step for r in range(len(ranks))]
            for outcomes in ranks:
                assert torch.equal(outcomes["gather_two_at_once"][f"{step} {i}"], gathered(shards))


def test_all_outcomes_but_the_own_shards_are_identical_on_all_ranks(ranks: Ranks) -> None:
    for outcomes in ranks[1:]:
        for scenario, tensors in outcomes.items():
            if scenario == "reduce_gradients":
                continue
            for name, tensor in tensors.items():
                if not name.startswith("shard"):
                    first = ranks[0][scenario][name]
                    assert torch.equal(tensor.nan_to_num(7.0), first.nan_to_num(7.0))


def test_bytes_sent_are_those_of_the_formula(ranks: Ranks) -> None:
    numel = 1 << 14
    for outcomes in ranks:
        eight, four = outcomes["count_bytes"]["sent"].tolist()
        assert eight == quantized_nbytes(numel, "int8") == numel + numel // 256 * 2
        assert four == quantized_nbytes(numel, "int4") == numel // 2 + numel // 128 * 2


def test_an_overflow_on_one_rank_is_seen_by_all(ranks: Ranks) -> None:
    start = 1000 * (len(ranks) - 1) + 512
    for outcomes in ranks:
        out = outcomes["carry_nan"]["out"]
        assert out[start : start + 256].isnan().all()
        assert out[:start].isfinite().all()
        assert out[start + 256 :].isfinite().all()


def test_integers_travel_exactly(ranks: Ranks) -> None:
    expected = torch.cat([torch.arange(1000) + r for r in range(len(ranks))])
    for outcomes in ranks:
        assert torch.equal(outcomes["gather_integers"]["out"], expected)


def test_gradients_are_reduced_by_the_native_collectives(ranks: Ranks) -> None:
    fulls = [shard_of(r, 300 * len(ranks), torch.float32) for r in range(len(ranks))]
    expected = torch.stack(fulls).sum(0).chunk(len(ranks))
    for rank, outcomes in enumerate(ranks):
        torch.testing.assert_close(outcomes["reduce_gradients"]["out"], expected[rank])


def test_the_function_joins_shards_along_the_first_dimension(ranks: Ranks) -> None:
    shards = [shard_of(r, 1001, torch.bfloat16) for r in range(len(ranks))]
    for outcomes in ranks:
        got = outcomes["call_the_function"]
        assert torch.equal(got["8"], gathered(shards).view(-1, 7))
        assert torch.equal(got["4"], gathered(shards, BlockFormat("int4", 64)).view(-1, 7))
        assert torch.equal(got["small"], torch.tensor([r + 0.1 for r in range(len(ranks))]))
        assert got["integers"].tolist() == [[r, 3] for r in range(len(ranks))]
