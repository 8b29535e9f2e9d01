"""Quantized weights and gradients in FSDP2, against plain FSDP2 of the same run.

Bounds are twice what was measured, or more; see docs/decisions.md.
"""

import pytest
import torch
from plugin_ranks import PLUGINS, SHAPES, Outcomes, gap, message, outcomes_of

import zero_comm

LOSS_BOUND = 0.03  # of any step's loss, against plain FSDP2's at that step


@pytest.fixture(scope="module", params=SHAPES)
def ranks(request: pytest.FixtureRequest) -> list[Outcomes]:
    return outcomes_of(*request.param)


def test_losses_are_those_of_plain_fsdp2(ranks: list[Outcomes]) -> None:
    got = ranks[0]["train_fsdp"]
    assert gap(got["default"], got["plain"]) <= (LOSS_BOUND if len(ranks) > 1 else 0)


@pytest.mark.parametrize("name", PLUGINS)
def test_losses_are_those_of_plain_fsdp2_in_every_setting(name: str) -> None:
    outcomes = outcomes_of(2, 2)[0]
    plain = outcomes["train_fsdp"]["plain"]
    losses = outcomes["train_fsdp_with_settings"][name]
    assert gap(losses, plain) <= LOSS_BOUND
    assert losses != plain, "nothing was quantized"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_are_those_of_plain_fsdp2_in_16_bit(dtype: torch.dtype) -> None:
    got = outcomes_of(2, 2)[0]["train_fsdp_with_settings"]
    assert gap(got[f"quantized {dtype}"], got[f"plain {dtype}"]) <= LOSS_BOUND


def test_losses_are_those_of_plain_fsdp2_with_replicas() -> None:
    got = outcomes_of(4, 2)[0]["train_with_replicas"]
    assert gap(got["quantized"], got["plain"]) <= LOSS_BOUND
    assert got["quantized"] != got["plain"]


def test_gradients_are_divided_as_fsdp2_was_told(ranks: list[Outcomes]) -> None:
    got = ranks[0]["fsdp_gradients"]
    for name, plain in (
        ("average", "average"),
        ("own factor", "own factor by sums"),
        ("own factor by sums", "own factor by sums"),
    ):
        expected = got[f"plain {plain}"]
        if len(ranks) == 1 and name == "own factor":
            expected = got["plain average"] / 3  # FSDP2 divides itself where it sends nothing
        error = (got[f"quantized {name}"] - expected).norm() / expected.norm()
        assert error <= (0.04 if len(ranks) > 1 else 1e-6), name


def test_taking_it_back_gives_plain_fsdp2_to_the_bit(ranks: list[Outcomes]) -> None:
    for outcomes in ranks:
        got = outcomes["change_and_restore"]
        assert got["restored"] == got["plain"]
        assert got["restored weights"].equal(got["plain weights"])


def test_asynchronous_gathers_give_the_same_weights(ranks: list[Outcomes]) -> None:
    first = ranks[0]["unshard_ahead"]
    assert first["False"].equal(first["exact"]) is (len(ranks) == 1)
    for outcomes in ranks:
        got = outcomes["unshard_ahead"]
        assert got["True"].equal(got["False"])
        assert got["True"].equal(first["True"])


def test_shards_keep_every_bit(ranks: list[Outcomes]) -> None:
    assert all(outcomes["unshard_ahead"]["kept"] for outcomes in ranks)


def test_parameters_of_several_dtypes_are_gathered_exactly(ranks: list[Outcomes]) -> None:
    assert all(outcomes["gather_two_dtypes"]["equal"] for outcomes in ranks)


@pytest.mark.parametrize(("size", "per_node"), SHAPES[1:])
def test_traffic_is_that_of_the_formula(size: int, per_node: int) -> None:
    nodes = size // per_node
    numel = -(-512 // size) * 256  # FSDP2 pads rows to a multiple of the ranks
    for outcomes in outcomes_of(size, per_node):
        plain, sent = (outcomes["count_fsdp"][name] for name in ("plain", "quantized"))
        exact = [(size - 1) * numel * 2, (size - per_node) * numel * 2]
        assert plain == {"all_gather": exact, "reduce_scatter": exact}
        weights = message(numel, "int8")
        hop_2 = (nodes - 1) * message(numel, "int4")
        hops = (per_node - 1) * nodes * message(numel, "int4") + hop_2
        assert sent["all_gather"] == [(size - 1) * weights, (size - per_node) * weights]
        assert sent["all_to_all"] == [hops, hop_2]
        assert plain["all_gather"][0] / sent["all_gather"][0] >= 1.97
        assert plain["reduce_scatter"][0] / sent["all_to_all"][0] >= 3.8
        if nodes > 1:
            assert plain["reduce_scatter"][1] / sent["all_to_all"][1] >= 3.8 * per_node


def test_a_tree_without_fsdp_modules_is_refused() -> None:
    with pytest.raises(ValueError, match="module holds no FSDPModule"):
        zero_comm.fsdp2.apply(torch.nn.Linear(2, 2))
