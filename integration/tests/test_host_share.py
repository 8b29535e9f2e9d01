"""The host's share of the elements under schedules, across checkpoints, and as "auto" chooses it.

That no share changes a bit is shown by rows of test_equalities.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import zero_core
from zero_core.testing import Case, SimulatedRanks, batch, make_model, on_ranks, train
from zero_core.testing.training import assert_same

SHARES: dict[str, dict[str, Any]] = {
    "0.3": {"ratio": 0.3},
    "0.999": {"ratio": 0.999},
    "auto": {"ratio": "auto"},
    "names": {"parameters": ["blocks.1.*", "*.norm.bias", "embed.weight"]},
    "budget": {"device_budget": 5_000},
}
NADAM = {"type": "NAdam", "params": {"lr": 1e-2}}
"""Has scalars beside its moments (``mu_product``), and only torch's own update."""
SGD = {"type": "SGD", "params": {"lr": 0.5}}


def _build(
    stage: int, share: str, optimizer: dict[str, Any], ranks: SimulatedRanks | None = None
) -> zero_core.Engine:
    zero = {"offload_optimizer": {"device": "cpu", **SHARES[share]}}
    case = Case(stage, clipping=0.5, zero=zero, top={"optimizer": optimizer})
    return zero_core.build(make_model(), case.config(), process_group=ranks)


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_a_checkpoint_at_one_ratio_goes_on_at_any_share(ranks, tmp_path):
    before, after, other = (
        [batch(step, 0, ranks.rank) for step in steps]
        for steps in (range(4), range(4, 8), range(20, 23))
    )
    saved = _build(2, "0.3", NADAM, ranks)
    train(saved, before)
    saved.save_checkpoint(tmp_path)
    expected = train(saved, after), saved.full_state_dict(dtype=torch.float32)
    saved.close()
    for stage, share in ((1, "0.999"), (3, "auto"), (2, "names"), (2, "budget")):
        engine = _build(stage, share, NADAM, ranks)
        train(engine, other)  # another run's state, which is replaced
        engine.load_checkpoint(tmp_path)
        assert_same((train(engine, after), engine.full_state_dict(dtype=torch.float32)), expected)
        engine.close()


@pytest.mark.parametrize(
    ("stage", "share"), [(1, "0.3"), (2, "0.999"), (3, "auto"), (1, "names"), (3, "budget")]
)
def test_a_schedule_reaches_both_parts_as_in_torch(stage: int, share: str) -> None:
    """SGD is the learning rate times the gradient: a part without the schedule would stand out."""
    model = make_model()
    params = [p for p in model.parameters() if p.requires_grad]
    plain, engine = torch.optim.SGD(params, lr=0.5), _build(stage, share, SGD)
    schedule, own = (LambdaLR(each, lambda n: 0.5 ** (n % 4)) for each in (plain, engine.optimizer))
    engine.lr_scheduler = own
    for step in range(6):
        inputs = batch(step, 0, 0)
        plain.zero_grad()
        model(**inputs)["loss"].backward()
        nn.utils.clip_grad_norm_(params, 0.5)
        plain.step()
        schedule.step()
        train(engine, [inputs])
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        assert rates == [group["lr"] for group in plain.param_groups]
    full = engine.full_state_dict(dtype=torch.float32)
    for name, param in model.named_parameters():
        torch.testing.assert_close(full[name], param.detach(), rtol=0, atol=1e-6, msg=name)
    engine.close()


def test_a_real_search_settles_and_reports(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="zero_offload")
    zero = {"offload_optimizer": {"device": "cpu", "ratio": "auto"}}
    engine = zero_core.build(make_model(), Case(2, zero=zero).config())
    train(engine, [batch(step, 0, 0) for step in range(60)])
    tier: Any = engine.sharded_state.tier
    assert tier.ratio_report is not None
    assert tier.host_numel == round(tier.controller.ratio * tier.geometry.numel)
    assert any("settled on ratio" in record.message for record in caplog.records)
    engine.close()
