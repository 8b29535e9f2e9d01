"""Which elements the host updates changes no bit while "auto" moves the border, under
learning-rate schedules, and across checkpoints, at stages 1 to 3.

Ratios, names and a budget that stay are rows of test_equalities.py.

The oracle is the engine with everything on the host, which test_equivalence holds against DDP; the
schedule's is torch's optimizer under the same schedule. Several ranks are simulated ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import zero_core
from zero_core import ConfigError
from zero_core.optim.device_tier import DeviceTier
from zero_core.protocols import StateTier
from zero_core.testing import Case, SimulatedRanks, batch, make_model, simulate
from zero_offload import create_tier
from zero_offload.flat.geometry import Geometry
from zero_offload.flat.intervals import Intervals
from zero_offload.tiers.auto_ratio import AutoRatio, Sample
from zero_offload.tiers.twin import TwinTier

STAGES = (1, 2, 3)
SCRIPT = (0.5, 0.25, 0.999, 0.0, 1.0, 0.3)
STEPS = len(SCRIPT) + 2
SHARES: dict[str, dict[str, Any]] = {
    "all": {"ratio": 1.0},
    "0.3": {"ratio": 0.3},
    "0.999": {"ratio": 0.999},
    "auto": {"ratio": "auto"},
    "names": {"parameters": ["blocks.1.*", "*.norm.bias", "embed.weight"]},
    "budget": {"device_budget": 5_000},
}


class Scripted(AutoRatio):
    """Goes through given ratios, one a step."""

    def __init__(self) -> None:
        super().__init__()
        self.left = list(SCRIPT)

    def observe(self, sample: Sample, least_ratio: float = 0.0) -> float:
        self.ratio = self.left.pop(0) if self.left else self.ratio
        return self.ratio


@pytest.fixture
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_offload.tiers.auto_tier.AutoRatio", Scripted)


def _build(
    stage: int,
    share: str,
    dtype: str = "fp32",
    optimizer: dict[str, Any] | None = None,
    ranks: SimulatedRanks | None = None,
) -> zero_core.Engine:
    zero = {"offload_optimizer": {"device": "cpu", **SHARES[share]}}
    config = Case(stage, dtype, clipping=0.5, zero=zero).config()
    if optimizer is not None:
        config["optimizer"] = optimizer
    return zero_core.build(make_model(), config, process_group=ranks)


def _halves(step: int) -> float:
    return float(0.5 ** (step % 4))


def _train(engine: zero_core.Engine, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(**batch(step, 0, rank))["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _everything(engine: zero_core.Engine) -> dict[str, torch.Tensor]:
    """Every number of this rank's optimizer state, and the whole model's weights."""
    tier, found = engine.sharded_state.tier, dict(engine.full_state_dict(dtype=torch.float32))
    numel = engine.layout.local_numel(is_sharded=True)
    for name in tier.state_names():
        found[f"state {name}"] = tier.read_state(name, 0, numel)
    for i in range(len(engine.sharded_state.pieces)):
        scalars = tier.read_scalars(i)
        found[f"scalars {i}"] = torch.tensor([scalars[k] for k in sorted(scalars)])
    return found


def _assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


def _compare_shares(ranks: SimulatedRanks, dtype: str) -> None:
    expected: tuple[list[float], dict[str, torch.Tensor]] | None = None
    for stage in STAGES:
        for share in ("all", "auto"):
            engine = _build(stage, share, dtype, ranks=ranks)
            schedule = LambdaLR(engine.optimizer, _halves)
            engine.lr_scheduler = schedule
            tier: Any = engine.sharded_state.tier
            losses = _train(engine, ranks.rank, range(STEPS))
            if share == "auto":
                assert not tier.controller.left, "every ratio of the script was taken"
            found = (losses, _everything(engine))
            expected = found if expected is None else expected
            assert found[0] == expected[0], (stage, share)
            _assert_same(found[1], expected[1])
            engine.close()


@pytest.mark.usefixtures("_scripted")
@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_a_border_that_moves_changes_no_bit_under_a_schedule(dtype: str) -> None:
    simulate(_compare_shares, 3, dtype)


NADAM = {"type": "NAdam", "params": {"lr": 1e-2}}
"""Has scalars beside its moments (``mu_product``), and only torch's own update."""


def _cross(ranks: SimulatedRanks, folder: str) -> None:
    rank = ranks.rank
    saved = _build(2, "0.3", optimizer=NADAM, ranks=ranks)
    _train(saved, rank, range(4))
    saved.save_checkpoint(folder)
    _train(saved, rank, range(4, 8))
    expected = _everything(saved)
    saved.close()
    for stage, share in ((1, "0.999"), (3, "auto"), (2, "names"), (2, "budget")):
        engine = _build(stage, share, optimizer=NADAM, ranks=ranks)
        _train(engine, rank, range(20, 23))  # another run's state, which is replaced
        engine.load_checkpoint(folder)
        _train(engine, rank, range(4, 8))
        _assert_same(_everything(engine), expected)
        engine.close()


@pytest.mark.usefixtures("_scripted")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_at_one_ratio_goes_on_at_any_share(world_size: int, tmp_path: Path) -> None:
    simulate(_cross, world_size, str(tmp_path))


@pytest.mark.usefixtures("_scripted")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("share", ["0.3", "0.999", "auto", "names"])
def test_a_schedule_reaches_both_parts_as_in_torch(stage: int, share: str) -> None:
    """SGD is the learning rate times the gradient: a part without the schedule would stand out."""
    model = make_model()
    params = [p for p in model.parameters() if p.requires_grad]
    plain = torch.optim.SGD(params, lr=0.5)
    schedule = LambdaLR(plain, _halves)
    sgd = {"type": "SGD", "params": {"lr": 0.5}}
    engine = _build(stage, share, optimizer=sgd)
    engine.lr_scheduler = LambdaLR(engine.optimizer, _halves)
    for step in range(6):
        inputs = batch(step, 0, 0)
        plain.zero_grad()
        model(**inputs)["loss"].backward()
        nn.utils.clip_grad_norm_(params, 0.5)
        plain.step()
        schedule.step()
        engine.backward(engine(**inputs)["loss"])
        engine.step()
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        assert rates == [group["lr"] for group in plain.param_groups]
    full = engine.full_state_dict(dtype=torch.float32)
    for name, param in model.named_parameters():
        torch.testing.assert_close(full[name], param.detach(), rtol=0, atol=1e-6, msg=name)
    engine.close()


def _choose_alone(ranks: SimulatedRanks) -> None:
    """Each rank takes ratios of its own, in its own order; they compute the same all the same."""
    rank = ranks.rank
    expected = _build(3, "all", ranks=ranks)
    losses = _train(expected, rank, range(STEPS))
    engine = _build(3, "auto", ranks=ranks)
    tier: Any = engine.sharded_state.tier
    tier.controller.left = [abs(ratio - rank / 3) for ratio in SCRIPT]
    assert _train(engine, rank, range(STEPS)) == losses
    _assert_same(_everything(engine), _everything(expected))
    for each in (engine, expected):
        each.close()


@pytest.mark.usefixtures("_scripted")
def test_ranks_choose_their_own_ratios() -> None:
    simulate(_choose_alone, 3)


def test_a_real_search_settles_and_reports(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="zero_offload")
    zero = {"offload_optimizer": {"device": "cpu", "ratio": "auto"}}
    engine = zero_core.build(make_model(), Case(2, zero=zero).config())
    _train(engine, 0, range(60))
    tier: Any = engine.sharded_state.tier
    assert tier.ratio_report is not None
    assert tier.host_numel == round(tier.controller.ratio * tier.geometry.numel)
    assert any("settled on ratio" in record.message for record in caplog.records)
    engine.close()


class _Space:
    """Two shards, three parameters with padding after each; a factory of tiers over it."""

    numel = 96
    pieces = ((0, 37, 0), (48, 60, 0), (64, 95, 0))
    end = "first"

    def __init__(self, optimizer_class: Any, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(3)
        self.initial = torch.randn(self.numel, generator=generator)
        self.shards = [self.initial[:48].to(dtype), self.initial[48:].to(dtype)]
        self.groups = [dict(optimizer_class([nn.Parameter(torch.zeros(1))]).defaults)]
        self._class = optimizer_class

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.numel, self.pieces, [(0, self.shards[0]), (48, self.shards[1])], 1)

    def make(self, host: Intervals, engine_tier: bool) -> TwinTier:
        self._engine_tier = engine_tier
        tier = TwinTier(self.geometry, self.groups, host, self)
        tier.write_state("master_weight", 0, self.initial)
        return tier

    def make_host(self, part: Geometry, share: Intervals, groups: Any) -> StateTier:
        return create_tier(
            **self._described(part, groups),
            config={},
            adam_kernel=None,
            device_tier=DeviceTier,
        )

    def make_device(self, part: Geometry, share: Intervals, groups: Any) -> StateTier:
        if not self._engine_tier:
            return self.make_host(part, share, groups)
        return DeviceTier(**self._described(part, groups))

    def _described(self, part: Geometry, groups: Any) -> dict[str, Any]:
        return {
            "numel": part.numel,
            "pieces": [(p.start, p.stop, p.group) for p in part.pieces],
            "params": part.shards,
            "device": torch.device("cpu"),
            "optimizer_class": self._class,
            "groups": groups,
        }

    def step(self, tier: TwinTier, step: int) -> None:
        generator = torch.Generator().manual_seed(100 + step)
        grad = torch.randn(self.numel, generator=generator).to(self.shards[0].dtype)
        tier.offer_grad(48, grad[48:].clone())
        tier.offer_grad(0, grad[:48].clone())
        active = [0, 2] if step < 2 else [0, 1, 2]
        tier.step(self.groups, active, grad_scale=0.5)
        tier.wait_params(0, self.numel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adagrad])
def test_the_engines_own_device_tier_is_split_and_migrated_as_well(
    cls: Any, dtype: torch.dtype
) -> None:
    """It is what an accelerator's part is made of."""
    results = []
    for host, cuts in (
        (Intervals([(0, 96)]), ()),
        (Intervals([(0, 20)]), (50, 96, 3, 0, 95)),
        (Intervals([(5, 9), (20, 50), (58, 70), (90, 96)]), ()),
    ):
        space = _Space(cls, dtype)
        tier = space.make(host, engine_tier=bool(host.complement(96)))
        for step in range(7):
            space.step(tier, step)
            if step < len(cuts):
                tier.resplit(cuts[step])
        found = {name: tier.read_state(name, 0, 96) for name in tier.state_names()}
        found["params"] = torch.cat(space.shards)
        for i in range(3):
            scalars = tier.read_scalars(i)
            found[f"scalars {i}"] = torch.tensor([scalars[k] for k in sorted(scalars)])
        results.append(found)
    for result in results[1:]:
        _assert_same(result, results[0])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"parameters": ["block.*"]}, r"'block\.\*' matches no trainable parameter; near it are"),
    ({"parameters": ["embed.*"], "ratio": 0.5}, "ratio and parameters each say"),
]


@pytest.mark.parametrize(("block", "match"), REFUSED)
def test_shares_that_cannot_be_are_refused(block: dict[str, Any], match: str) -> None:
    config = Case(2, zero={"offload_optimizer": {"device": "cpu", **block}}).config()
    build: Callable[..., object] = zero_core.build
    with pytest.raises(ConfigError, match=match):
        build(make_model(), config)
