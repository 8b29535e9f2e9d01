"""Offload on the device that is not there, with random delays: the bits of the CPU, one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cpu_adam
import zero_core
from zero_core.errors import ConfigError
from zero_core.testing import (
    Case,
    batch,
    late_device,
    make_model,
    run_alone,
    simulate,
    train_unread,
)
from zero_engine.report import charts
from zero_engine.report.compose import bounds
from zero_engine.report.measured import measure
from zero_engine.report.run import read_run
from zero_offload import OffloadedOptimizer, create_tier

STEPS = 4
MOVED = {0: 0.6, 1: 0.2}
"""Ratios that ``"auto"`` is told to try after these steps: what it measures depends on the load."""


def _case(in_backward: bool, ratio: Any, end: str = "last", **keys: Any) -> Case:
    block = {"device": "cpu", "ratio": ratio, "host_share": end}
    top: dict[str, Any] = {"check_grad_overflow": not in_backward}
    if ratio != 1.0:
        # A device updates by torch's AdamW, not by the host's kernel. NAdam is torch's on both.
        top["optimizer"] = {"type": "NAdam", "params": {"lr": 1e-2}}
    return Case(
        dtype="bf16",
        zero={"offload_optimizer": block},
        clipping=0.0 if in_backward else 0.5,
        top=top,
        **keys,
    )


def _speculating(clipping: float, zero: dict[str, Any] | None = None, **keys: Any) -> Case:
    """Return a case with clipping whose units are updated in backward, and undone if need be."""
    offload = {"device": "cpu", "update_in_backward": True, **keys.pop("offload", {})}
    return Case(
        dtype="bf16", zero={"offload_optimizer": offload, **(zero or {})}, clipping=clipping, **keys
    )


AUTO = _case(False, "auto", stage=2)
CASES = [
    _case(True, 1.0, stage=1),
    _case(False, 1.0, stage=2, accumulation=2),
    _case(True, 1.0, stage=3),
    _case(True, 0.4, stage=3),
    _case(False, 0.4, "first", stage=2),
    AUTO,
    _speculating(1e9, stage=3),
    _speculating(0.5, stage=2, accumulation=2),
    _speculating(8.0, stage=1, offload={"undo_buffer_size": 9000}),
    _speculating(8.0, {"offload_param": {"device": "cpu"}}, stage=3),
    _speculating(8.0, stage=2, offload={"state_dtype": "int8"}),
    _speculating(
        8.0, {"offload_param": {"device": "cpu"}}, stage=3, offload={"state_dtype": "bfloat16"}
    ),
]


def _upload(dtype: str = "bf16", clipping: float = 0.5, top: Any = None, **keys: Any) -> Case:
    """Return a case whose new values go up as differences, of a model large enough for them."""
    block = {"device": "cpu", "lossless_upload": True, **keys.pop("offload", {})}
    return Case(
        dtype=dtype,
        zero={"offload_optimizer": block},
        clipping=clipping,
        top={"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}, **(top or {})},
        width=200,
        **keys,
    )


UPLOADS = [
    _upload(stage=1),
    _upload(
        "fp16", stage=2, accumulation=2, top={"fp16": {"enabled": True, "initial_scale_power": 4}}
    ),
    _upload("fp32", stage=3),
    _upload(stage=3, clipping=0.0, top={"check_grad_overflow": False}),
    _upload(stage=2, offload={"state_dtype": "int8"}),
    _upload(stage=2, clipping=8.0, offload={"update_in_backward": True}),
]


def train(ranks: Any, case: Case) -> tuple[dict[str, torch.Tensor], set[int], int]:
    """Return the values, how many elements the host updated, and the bytes up after a step."""
    made: list[Any] = []
    is_begun_early = "update_in_backward" in case.zero["offload_optimizer"]

    def keep_tier(**keys: Any) -> Any:
        if is_begun_early or case in UPLOADS:  # torch's updates cannot be undone
            keys["adam_kernel"] = cpu_adam
        made.append(create_tier(**keys))
        return made[-1]

    engine = zero_core.build(
        make_model(case.width), case.config(), process_group=ranks, state_tier=keep_tier
    )
    shares, sent = set(), [0]
    for step in range(STEPS):
        for micro in range(case.accumulation):
            inputs = batch(step, micro, ranks.rank)
            loss = engine(**{**inputs, "ids": inputs["ids"].to(ranks.device)})["loss"]
            engine.backward(loss)
            engine.step()
        shares.add(sum(tier.host_numel for tier in made))
        if case in UPLOADS:
            engine.full_state_dict()  # waits
            sent.append(made[0].bytes_h2d)
        if case == AUTO and step in MOVED:
            for tier in made:
                tier.controller.ratio = MOVED[step]
    values = {name: value.cpu() for name, value in engine.full_state_dict().items()}
    engine.close()
    if is_begun_early and case not in UPLOADS:
        parts = [part.tier for tier in made for part in tier.report()]
        assert any(part.num_kept + part.num_undone for part in parts if part is not None)
    return values, shares, sent[-1] - sent[1 % len(sent)]


def _run(world_size: int, cases: list[Case]) -> None:
    late_device.load()
    for seed, case in enumerate(cases):
        expected = simulate(train, world_size, case)
        late_device.set_delays(seed=seed, kernel_s=2e-5, copy_s=1e-3)
        found = simulate(train, world_size, case, device="late")
        late_device.set_delays()
        for (values, shares, sent), (exact, _, whole) in zip(found, expected, strict=True):
            torch.testing.assert_close(values, exact, rtol=0.0, atol=0.0, msg=str(case))
            assert len(shares) == (1 + len(MOVED) if case == AUTO else 1), shares
            assert case not in UPLOADS or 0 < sent < 0.75 * whole, (sent, whole)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_offload_has_the_bits_of_the_cpu(world_size: int) -> None:
    run_alone(_run, world_size, CASES)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(len(UPLOADS)))
@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_lossless_uploads_have_the_bits_of_the_cpu_and_send_less(
    world_size: int, number: int
) -> None:
    run_alone(_run, world_size, UPLOADS[number : number + 1])


def test_a_run_is_built_with_the_installed_codec_and_says_that_a_cpu_sends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = zero_core.build(make_model(11), _upload(stage=2).config())
    engine.close()
    assert "lossless_upload has no effect: the model is computed on the CPU" in caplog.text


def test_an_optimizer_of_whole_parameters_is_refused() -> None:
    config = _upload(stage=0, top={"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}).config()
    with pytest.raises(ConfigError, match=r"lossless_upload = True with .*Muon is not served"):
        zero_core.build(make_model(11), config)


def test_a_plan_expects_fewer_bytes_up_at_a_lower_learning_rate() -> None:
    with torch.device("meta"):
        model = make_model(200)
    up = []
    for rate in (1e-3, 1e-5, 1e-6):
        case = _upload(stage=2, top={"optimizer": {"type": "AdamW", "params": {"lr": rate}}})
        plan = zero_core.plan(model, case.config(), 2)
        up.append(sum(t.host_link_bytes for t in plan.traffic if t.collective == "to_device"))
        kept = plan.memory.host["published weights"]
    case = Case(dtype="bf16", stage=2, zero={"offload_optimizer": {"device": "cpu"}}, width=200)
    plan = zero_core.plan(model, case.config(), 2)
    whole = sum(t.host_link_bytes for t in plan.traffic if t.collective == "to_device")
    assert whole / 8 > up[2]
    assert whole / 2 > up[0] > up[1] > up[2]
    assert 0.95 * whole < kept <= whole  # two bytes of each weight, but for short shards


def _step_on_the_second_device() -> None:
    late_device.load()
    torch.accelerator.set_device_index(1)
    model = nn.Linear(5, 3, device="late:1")
    optimizer = OffloadedOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
    late_device.forget_contexts()
    for _ in range(2):
        model(torch.ones(2, 5, device="late:1")).sum().backward()
        optimizer.step()
    torch.accelerator.synchronize()
    assert late_device.contexts() == [1]


def test_no_thread_touches_another_device() -> None:
    run_alone(_step_on_the_second_device)


def _train_recorded(ranks: Any, folder: Path) -> None:
    case = _case(False, 1.0, stage=2)
    engine = zero_core.build(make_model(case.width), case.config(), process_group=ranks)
    engine.record(folder, detail_every=2)
    train_unread(engine, ranks.rank, ranks.device, steps=10)


def _record(folder: Path) -> None:
    late_device.load()
    late_device.set_delays(kernel_s=2e-5, copy_s=1e-3)
    simulate(_train_recorded, 1, folder, device="late")


def test_report_has_a_lane_of_copies(tmp_path: Path) -> None:
    """In the steps whose course is recorded, in both directions, by events of their streams."""
    run_alone(_record, tmp_path)
    found = measure(read_run(tmp_path))
    (rank,) = found.run.ranks
    detailed = {detail.step: detail for detail in rank.details}
    for step in rank.steps:
        assert ("copies" in step.lanes) is (step.step in detailed)
    for number in (4, 6, 8, 10):
        spans = [span for span in detailed[number].spans if span[0] == "copies"]
        assert {name for _, name, *_ in spans} == {
            "gradients to the host",
            "parameters to the device",
        }
        (step,) = [step for step in rank.steps if step.step == number]
        assert (
            0.0 < step.lanes["copies"] <= sum(stop - start for *_, start, stop, _ in spans) + 1e-4
        )
    timed = [s.lanes["copies"] for s in rank.steps if s.step in (4, 6, 8, 10)]
    assert min(timed) <= found.lane("copies") <= max(timed)
    assert bounds(found)["copies"] == found.lane("copies")
    (spec,) = charts.lanes(found.run.ranks)
    assert {"compute", "copies"} <= set(spec["encoding"]["y"]["sort"])
