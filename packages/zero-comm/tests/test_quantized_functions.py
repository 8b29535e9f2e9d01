"""`quantized_all_gather` and `quantized_reduce_scatter` between real processes."""

import pytest
import torch
import torch.distributed as dist
from support.real_ranks import DTYPES, SHAPES, Outcomes, outcomes_of, values_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zero_comm import dequantize, quantize, quantized_all_gather, quantized_reduce_scatter

PER_NODE = dict(SHAPES)


def gather_with_the_function(rank: int, world_size: int) -> Outcomes:
    matrix = values_of(rank, 1001, torch.bfloat16).view(143, 7)
    return {
        "int8": quantized_all_gather(matrix),
        "int4": quantized_all_gather(matrix, "int4", group=dist.group.WORLD),
        "small": quantized_all_gather(torch.tensor([rank + 0.1])),
        "integers": quantized_all_gather(torch.tensor([[rank, 3]])),
        "negated": quantized_all_gather(torch._neg_view(matrix)),
        "small, negated": quantized_all_gather(torch._neg_view(torch.tensor([rank + 0.1]))),
        "conjugate": quantized_all_gather(torch.tensor([rank + 3j]).conj()),
    }


def reduce_with_the_function(rank: int, world_size: int) -> Outcomes:
    reduce = quantized_reduce_scatter
    found: Outcomes = {}
    for dtype in DTYPES:
        full = values_of(rank, 1001 * world_size, dtype)
        found[f"int4 {dtype}"] = reduce(full)
        found[f"int8 e4m3 {dtype}"] = reduce(full, "int8", between="e4m3", op="sum")
    matrix = values_of(rank, 700 * world_size).view(100 * world_size, 7)
    found["matrix"] = reduce(matrix, "int8")
    found["negated"] = reduce(torch._neg_view(matrix), "int8")
    found["small"] = reduce(values_of(rank, world_size))
    found["small, negated"] = reduce(torch._neg_view(values_of(rank, world_size)))
    found["one hop"] = reduce(matrix, ranks_per_node=1)
    found["seeds"] = [reduce(matrix, seed=seed) for seed in (1, 1, 2)]
    found["huge"] = reduce(torch.full((512 * world_size,), 6e4, dtype=torch.float16))
    poisoned = values_of(rank, 512 * world_size)
    if rank == world_size - 1:
        poisoned[0] = torch.nan
    found["poisoned"] = reduce(poisoned)
    return found


def take_nodes_from_a_mesh(rank: int, world_size: int) -> Outcomes:
    """Reduce with two nodes given in three ways, with one rank per node, with invalid meshes."""
    mesh = init_device_mesh("cpu", (2, 2))
    full = values_of(rank, 4 * 1001)
    reduce = quantized_reduce_scatter
    found: Outcomes = {
        "environment": reduce(full),
        "number": reduce(full, ranks_per_node=2),
        "mesh": reduce(full, ranks_per_node=mesh),
        "one per node": reduce(full, ranks_per_node=1),
    }
    for name, shape in (("flat", (4,)), ("crossed", (2, 2))):
        other = init_device_mesh("cpu", shape)
        if name == "crossed":
            other = DeviceMesh("cpu", [[0, 2], [1, 3]])
        try:
            reduce(full, ranks_per_node=other)
        except ValueError as error:
            found[name] = str(error)
    return found


SCENARIOS = (gather_with_the_function, reduce_with_the_function)


@pytest.fixture(scope="module", params=SHAPES)
def ranks(request: pytest.FixtureRequest) -> list[Outcomes]:
    return outcomes_of(SCENARIOS, *request.param)


def as_received(values: Tensor, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return dequantize(quantize(values, kind), values.numel(), kind, dtype=dtype)


def two_hops(fulls: list[Tensor], rank: int, within: str, between: str) -> Tensor:
    """Return the sum by the definition of [Note: the two hops], slice by slice in fp32.

    ``fulls`` holds the input of each rank, [W, s].
    """
    size = len(fulls)
    per_node = PER_NODE[size]
    if size == 1:
        return fulls[0][0].float()
    partial = []
    for node in range(size // per_node):
        slices = [fulls[node * per_node + i][rank] for i in range(per_node)]
        if per_node > 1:
            slices = [as_received(s, within) for s in slices]
        total = slices[0].float()
        for s in slices[1:]:
            total = total + s
        partial.append(total)
    if len(partial) > 1:
        partial = [as_received(p, between) for p in partial]
    total = partial[0]
    for p in partial[1:]:
        total = total + p
    return total


def test_the_sum_is_that_of_the_two_hops(ranks: list[Outcomes]) -> None:
    size = len(ranks)
    for dtype in DTYPES:
        fulls = [values_of(r, 1001 * size, dtype).view(size, -1) for r in range(size)]
        for rank, outcomes in enumerate(ranks):
            got = outcomes["reduce_with_the_function"]
            average = (two_hops(fulls, rank, "int4", "int4") * (1 / size)).to(dtype)
            total = two_hops(fulls, rank, "int8", "e4m3").to(dtype)
            if size == 1:  # a single rank sends and rounds nothing
                average = total = fulls[0][0]
            assert got[f"int4 {dtype}"].equal(average), dtype
            assert got[f"int8 e4m3 {dtype}"].equal(total), dtype
    fulls = [values_of(r, 700 * size).view(size, -1) for r in range(size)]
    for rank, outcomes in enumerate(ranks):
        average = two_hops(fulls, rank, "int8", "int8") * (1 / size)
        got = outcomes["reduce_with_the_function"]
        assert got["matrix"].equal(average.view(100, 7))
        assert got["negated"].equal(-got["matrix"])
        assert got["small, negated"].equal(-got["small"])


def test_a_slice_that_would_not_shorten_is_averaged_exactly(ranks: list[Outcomes]) -> None:
    size = len(ranks)
    exact = torch.stack([values_of(r, size) for r in range(size)]).mean(0)
    for rank, outcomes in enumerate(ranks):
        got = outcomes["reduce_with_the_function"]["small"]
        torch.testing.assert_close(got, exact[rank : rank + 1])


def test_seeds_tell_roundings_apart(ranks: list[Outcomes]) -> None:
    for outcomes in ranks:
        first, same, other = outcomes["reduce_with_the_function"]["seeds"]
        assert first.equal(same)
        assert first.equal(other) is (len(ranks) == 1)


def test_the_average_of_large_fp16_does_not_overflow(ranks: list[Outcomes]) -> None:
    for outcomes in ranks:
        got = outcomes["reduce_with_the_function"]["huge"]
        assert (got.float() - 6e4).abs().max() <= 6e4 * 0.01


def test_nan_of_any_rank_arrives_in_its_block_alone(ranks: list[Outcomes]) -> None:
    length = 128 if len(ranks) > 1 else 1
    for rank, outcomes in enumerate(ranks):
        is_nan = outcomes["reduce_with_the_function"]["poisoned"].isnan()
        assert is_nan.sum() == (length if rank == 0 else 0)
        assert is_nan[:length].all() or rank > 0


def test_gathers_join_shards_along_the_first_dimension(ranks: list[Outcomes]) -> None:
    shards = [values_of(r, 1001, torch.bfloat16) for r in range(len(ranks))]
    for outcomes in ranks:
        got = outcomes["gather_with_the_function"]
        for kind in ("int8", "int4"):
            expected = torch.cat([as_received(s, kind, torch.bfloat16) for s in shards])
            assert got[kind].equal(expected.view(-1, 7))
        assert got["small"].equal(torch.tensor([r + 0.1 for r in range(len(ranks))]))
        assert got["integers"].tolist() == [[r, 3] for r in range(len(ranks))]
        assert got["negated"].equal(-got["int8"])
        assert got["small, negated"].equal(-got["small"])
        assert got["conjugate"].tolist() == [r - 3j for r in range(len(ranks))]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"full": torch.tensor(1.0)}, "full"),
        ({"full": torch.ones(4, dtype=torch.int64)}, "full"),
        ({"full": torch.ones(4), "op": "max"}, "op"),
        ({"full": torch.ones(4), "format": "int3"}, "format"),
        ({"full": torch.ones(4), "ranks_per_node": 2}, "ranks_per_node"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} must"):
        quantized_reduce_scatter(**arguments)  # type: ignore[arg-type]


def test_a_scalar_is_not_gathered() -> None:
    with pytest.raises(ValueError, match="shard must have at least one dimension"):
        quantized_all_gather(torch.tensor(1.0))


def test_environment_number_and_mesh_mean_the_same_nodes() -> None:
    for outcomes in outcomes_of((*SCENARIOS, take_nodes_from_a_mesh), 4, 2):
        got = outcomes["take_nodes_from_a_mesh"]
        assert got["environment"].equal(got["number"])
        assert got["environment"].equal(got["mesh"])
        assert not got["environment"].equal(got["one per node"])


@pytest.mark.parametrize("name", ["flat", "crossed"])
def test_a_mesh_that_does_not_fit_the_group_is_refused(name: str) -> None:
    for outcomes in outcomes_of((*SCENARIOS, take_nodes_from_a_mesh), 4, 2):
        error = outcomes["take_nodes_from_a_mesh"][name]
        assert "must have 2 dimensions" in error
        assert "[0, 1, 2, 3]" in error
