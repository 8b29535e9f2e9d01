"""Quantized weights and gradients in FSDP2, compared with plain FSDP2.

Bounds are at least twice the measured errors.
"""

from typing import Any

import pytest
import torch
from support.real_ranks import SHAPES, Outcomes, Scenario, counted, message, outcomes_of
from support.toy_training import backward, batch, gap, make_model, train, weights
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zero_comm
from zero_comm import fsdp2

DTYPES_16 = (torch.bfloat16, torch.float16)
LOSS_BOUND = 0.03  # relative to plain FSDP2's loss, at any step


def fsdp(model: nn.Sequential, **kwargs: Any) -> nn.Sequential:
    fully_shard(model[0], **kwargs)
    fully_shard(model[2], **kwargs)
    fully_shard(model, **kwargs)
    return model


def full_weights(model: nn.Module) -> Tensor:
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])  # type: ignore[operator]


PLUGINS: dict[str, dict[str, Any]] = {
    "weights alone": {"gradients": None},
    "gradients alone": {"weights": None},
    "8 bits, checksums": {"weights": "e4m3", "gradients": "int8", "has_checksum": True},
    "error feedback": {"error_feedback": zero_comm.LocoSettings(), "is_stochastic": True},
}


def train_fsdp(rank: int, world_size: int) -> Outcomes:
    plain = train(fsdp(make_model()), rank)
    model = fsdp(make_model())
    fsdp2.apply(model)
    return {"plain": plain, "default": train(model, rank)}


def train_fsdp_with_settings(rank: int, world_size: int) -> Outcomes:
    found: Outcomes = {}
    for name, settings in PLUGINS.items():
        model = fsdp(make_model())
        fsdp2.apply(model, **settings)
        found[name] = train(model, rank)
    for dtype in DTYPES_16:
        policy = MixedPrecisionPolicy(dtype, dtype)
        found[f"plain {dtype}"] = train(fsdp(make_model(), mp_policy=policy), rank)
        model = fsdp(make_model(), mp_policy=policy)
        fsdp2.apply(model)
        found[str(dtype)] = train(model, rank)
    return found


def change_and_restore(rank: int, world_size: int) -> Outcomes:
    """Train a model that was quantized and is plain again, and an equal plain model."""
    model = fsdp(make_model())
    fsdp2.apply(model)
    fsdp2.apply(model, weights="int4", gradients="int8")
    train(model, rank, num_steps=2)
    fsdp2.apply(model, weights=None, gradients=None)
    other = fsdp(make_model())
    other.load_state_dict(model.state_dict())
    return {
        "restored": train(model, rank, num_steps=3),
        "plain": train(other, rank, num_steps=3),
        "restored weights": full_weights(model),
        "plain weights": full_weights(other),
    }


def fsdp_gradients(rank: int, world_size: int) -> Outcomes:
    """Compute gradients with exact weights, for each setting of FSDP2's gradient division."""
    found: Outcomes = {}
    for name, factor, is_summed in (
        ("average", None, False),
        ("own factor", 3.0, False),
        ("own factor by sums", 3.0, True),
    ):
        for kind in ("plain", "quantized"):
            if kind == "plain" and name == "own factor":
                continue  # gloo has no PREMUL_SUM
            model = fsdp(make_model())
            for part in (model[0], model[2], model):
                assert isinstance(part, fsdp2.FSDPModule)
                if factor is not None:
                    part.set_gradient_divide_factor(factor)
                part.set_force_sum_reduction_for_comms(is_summed)
            if kind == "quantized":
                fsdp2.apply(model, weights=None, gradients="int8")
            backward(model, 0, rank)
            shards = [p.grad.full_tensor().flatten() for p in model.parameters()]  # type: ignore[union-attr]
            found[f"{kind} {name}"] = torch.cat(shards)
    return found


def unshard_ahead(rank: int, world_size: int) -> Outcomes:
    """Gather weights synchronously and asynchronously, and check that shards keep every bit."""
    model = fsdp(make_model())
    before = full_weights(model)
    fsdp2.apply(model)
    found: Outcomes = {}
    for is_async in (False, True):
        units = [m for m in model.modules() if isinstance(m, fsdp2.FSDPModule)]
        for handle in [unit.unshard(async_op=is_async) for unit in units]:
            if handle is not None:
                handle.wait()
        found[f"{is_async}"] = weights(model)
        for unit in units:
            unit.reshard()
    found["kept"] = torch.equal(full_weights(model), before)
    found["exact"] = before
    return found


class TwoTypes(nn.Module):
    """Parameters of two dtypes in one group, which FSDP2 gathers as bytes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(33, 64)
        self.narrow = nn.Linear(64, 7, dtype=torch.bfloat16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).bfloat16())  # type: ignore[no-any-return]


def gather_two_dtypes(rank: int, world_size: int) -> Outcomes:
    x, _ = batch(0, rank, torch.float32)
    expected = TwoTypes()(x).detach()
    model = TwoTypes()
    fully_shard(model)
    fsdp2.apply(model)
    out = model(x)
    out.float().sum().backward()
    return {"equal": torch.equal(out.detach(), expected)}


def count_fsdp(rank: int, world_size: int) -> Outcomes:
    found: Outcomes = {}
    for name in ("plain", "quantized"):
        model = nn.Sequential(nn.Linear(256, 512, bias=False, dtype=torch.bfloat16))
        fully_shard(model)
        if name == "quantized":
            fsdp2.apply(model)
        x = torch.ones(4, 256, dtype=torch.bfloat16)
        model(x).sum().backward()
        with counted() as sent:
            model(x).sum().backward()
        found[name] = dict(sent)
    return found


def train_with_replicas(rank: int, world_size: int) -> Outcomes:
    """Train with HSDP: two replicas of two shards each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found: Outcomes = {"plain replicas": train(fsdp(make_model(), mesh=mesh), rank)}
    model = fsdp(make_model(), mesh=mesh)
    fsdp2.apply(model)
    return {**found, "replicas": train(model, rank)}


SCENARIOS = (
    train_fsdp,
    change_and_restore,
    fsdp_gradients,
    unshard_ahead,
    gather_two_dtypes,
    count_fsdp,
)
MORE: dict[int, tuple[Scenario, ...]] = {2: (train_fsdp_with_settings,), 4: (train_with_replicas,)}


def ranks_of(world_size: int, ranks_per_node: int) -> list[Outcomes]:
    return outcomes_of((*SCENARIOS, *MORE.get(world_size, ())), world_size, ranks_per_node)


@pytest.fixture(scope="module", params=SHAPES)
def ranks(request: pytest.FixtureRequest) -> list[Outcomes]:
    return ranks_of(*request.param)


def test_losses_are_those_of_plain_fsdp2(ranks: list[Outcomes]) -> None:
    got = ranks[0]["train_fsdp"]
    assert gap(got["default"], got["plain"]) <= (LOSS_BOUND if len(ranks) > 1 else 0)


@pytest.mark.parametrize("name", [*PLUGINS, *map(str, DTYPES_16), "replicas"])
def test_losses_are_those_of_plain_fsdp2_in_every_setting(name: str) -> None:
    outcomes = ranks_of(*((4, 2) if name == "replicas" else (2, 2)))[0]
    found = {
        **outcomes.get("train_fsdp_with_settings", {}),
        **outcomes.get("train_with_replicas", {}),
    }
    plain = found.get(f"plain {name}", outcomes["train_fsdp"]["plain"])
    assert gap(found[name], plain) <= LOSS_BOUND
    assert found[name] != plain, "nothing was quantized"


def test_gradients_are_divided_as_fsdp2_was_told(ranks: list[Outcomes]) -> None:
    got = ranks[0]["fsdp_gradients"]
    for name, plain in (
        ("average", "average"),
        ("own factor", "own factor by sums"),
        ("own factor by sums", "own factor by sums"),
    ):
        expected = got[f"plain {plain}"]
        if len(ranks) == 1 and name == "own factor":
            expected = got["plain average"] / 3  # with one rank FSDP2 divides by the factor
        error = (got[f"quantized {name}"] - expected).norm() / expected.norm()
        assert error <= (0.04 if len(ranks) > 1 else 1e-6), name


def test_taking_it_back_gives_plain_fsdp2_to_the_bit(ranks: list[Outcomes]) -> None:
    for outcomes in ranks:
        got = outcomes["change_and_restore"]
        assert got["restored"] == got["plain"]
        assert got["restored weights"].equal(got["plain weights"])


def test_asynchronous_gathers_give_the_same_weights_and_shards_keep_every_bit(
    ranks: list[Outcomes],
) -> None:
    first = ranks[0]["unshard_ahead"]
    assert first["False"].equal(first["exact"]) is (len(ranks) == 1)
    for outcomes in ranks:
        got = outcomes["unshard_ahead"]
        assert got["True"].equal(got["False"])
        assert got["True"].equal(first["True"])
        assert got["kept"]


def test_parameters_of_several_dtypes_are_gathered_exactly(ranks: list[Outcomes]) -> None:
    assert all(outcomes["gather_two_dtypes"]["equal"] for outcomes in ranks)


@pytest.mark.parametrize(("size", "per_node"), SHAPES[1:])
def test_traffic_is_that_of_the_formula(size: int, per_node: int) -> None:
    nodes = size // per_node
    numel = -(-512 // size) * 256  # FSDP2 pads the 512 rows to a multiple of the ranks
    for outcomes in ranks_of(size, per_node):
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
