"""A plan's other places of parameters and states, other bits, and other schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core import ConfigError
from zero_core.config import load_config
from zero_core.plan.choices import AS_CONFIGURED
from zero_core.plan.result import Choice
from zero_core.testing import Case, wide_blocks
from zero_engine.planning import Calibration, Curve, Rates, TimedPlan, plan

DISK = "/nvme"


def make_config(stage: int, **zero: Any) -> dict[str, Any]:
    top = {"check_grad_overflow": False, "train_micro_batch_size_per_gpu": 4}
    return Case(stage, "bf16", zero=zero, top=top).config()


def sizes_of(config: dict[str, Any], words: str) -> list[Choice]:
    """Return all choices of a placement, of a plan that nothing fits."""
    found = zero_core.plan(wide_blocks(8, 1024), config, 2, device_memory=1, nvme_path=DISK)
    return [choice for choice in found.choices if choice.placement.words == words]


def same_as_configured(choice: Choice, again: Choice) -> bool:
    return replace(again, is_varied=True, placement=choice.placement) == choice


def test_parameters_go_to_the_host_where_nothing_else_fits() -> None:
    config = make_config(3)
    limit = min(c.device_bytes for c in sizes_of(config, "")) - 1
    planned = zero_core.plan(wide_blocks(8, 1024), config, 2, device_memory=limit)
    best = planned.best
    assert best is not None
    assert best.placement.words == "parameters in host memory"
    assert "parameters in host memory fits" in planned.advice
    written = best.apply(config)
    assert written["zero_optimization"]["offload_param"] == {"device": "cpu"}
    again = zero_core.plan(wide_blocks(8, 1024), written, 2, device_memory=limit)
    assert same_as_configured(best, again.configured)


def test_states_go_to_nvme_where_the_host_has_no_room() -> None:
    config = make_config(2)
    device = min(c.device_bytes for c in sizes_of(config, ""))
    on_host = [*sizes_of(config, ""), *sizes_of(config, "parameters in host memory")]
    host = 2 * min(c.host_bytes for c in on_host if c.device_bytes <= device) - 1
    limits: dict[str, Any] = {"device_memory": device, "host_memory": host}
    without = zero_core.plan(wide_blocks(8, 1024), config, 2, **limits)
    assert without.best is None
    assert "name a folder on an NVMe disk" in without.advice
    planned = zero_core.plan(wide_blocks(8, 1024), config, 2, nvme_path=DISK, **limits)
    best = planned.best
    assert best is not None
    assert best.device == "nvme"
    assert "states on NVMe" in best.placement.words
    assert best.file_bytes > 0
    assert "on NVMe per rank" in planned.advice
    written = best.apply(config)
    load_config(written, world_size=2)
    assert written["zero_optimization"]["offload_optimizer"]["nvme_path"] == DISK
    again = zero_core.plan(wide_blocks(8, 1024), written, 2, **limits)
    assert same_as_configured(best, again.configured)


def test_moments_of_fewer_bits_are_shown_and_chosen_only_on_request() -> None:
    config = make_config(2, offload_optimizer={"device": "cpu"})
    eight = sizes_of(config, "8-bit moments")
    host = 2 * max(c.host_bytes for c in eight if c.stage == 3)
    device = min(c.device_bytes for c in sizes_of(config, ""))
    limits: dict[str, Any] = {"device_memory": device, "host_memory": host}
    planned = zero_core.plan(wide_blocks(8, 1024), config, 2, **limits)
    assert planned.best is None
    assert "or allow rounding: " in planned.advice
    assert any("8-bit moments" in row[2] for row in planned.tables()[-1].rows)
    allowed = zero_core.plan(wide_blocks(8, 1024), config, 2, allow_rounding=True, **limits).best
    assert allowed is not None
    assert allowed.placement.words == "8-bit moments"
    assert allowed.placement.is_rounding


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def calibration(cores: int | None, *, has_disk: bool = True) -> Calibration:
    once, rate = Curve(((1.0, 1e-5),)), Curve.of_rate
    curves = {
        **dict.fromkeys(("operator", "pass", "step"), once),
        **dict.fromkeys(("memory.float32", "matmul.float32", "copy.to_device"), rate(1e9)),
        "update.device.float32": rate(1e8),
        "update.host.float32": rate(7e5),
        "update.host.float32.int8": rate(1.4e6),
        **{f"{verb}.within": rate(1e9) for verb in ("gather", "reduce", "agree")},
        "copy.to_host": rate(1e9),
        **(dict.fromkeys(("file.read", "file.write"), rate(1e8)) if has_disk else {}),
    }
    return Calibration("a machine", "by hand", (Rates(2, 1, cores, curves),))


def timed(config: dict[str, Any], cores: int | None, **how: Any) -> TimedPlan:
    with torch.device("meta"):
        model, x = Blocks(), torch.zeros(4, 16, 64, dtype=torch.bfloat16)
    how = {"calibration": calibration(cores), "nvme_path": DISK, **how}
    kind = "accelerator" if cores is None else "cpu"
    return plan(model, config, 2, example_inputs=[x], device_type=kind, **how)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cores", [None, 2])
def test_a_placement_is_predicted_as_its_configuration(cores: int | None) -> None:
    """One simulation for all: written as a configuration, each choice takes what it says."""
    offload = {"device": "cpu", "ratio": 0.5}
    config = make_config(3, offload_optimizer=offload)
    found = timed(config, cores)
    choices = [c for c in found.choices if c.placement != AS_CONFIGURED]
    placed = {c.placement.words: c for c in sorted(choices, key=lambda c: c.ratio == 0.5)}
    expected = {"states on NVMe", "8-bit moments", "bf16 moments"}
    expected |= {"the host updates after backward", "the host has the first part"}
    if cores is None:
        expected |= {"parameters in host memory", "states on NVMe, parameters in host memory"}
    assert expected <= set(placed)
    for words, choice in placed.items():
        again = timed(choice.apply(config), cores).configured
        assert choice.step_time is not None, words
        assert same_as_configured(choice, again), words
    eight, sixteen = (placed[f"{bits} moments"].step_time for bits in ("8-bit", "bf16"))
    assert eight is not None
    assert sixteen is not None
    assert eight.lanes["host"] == pytest.approx(sixteen.lanes["host"] / 2)
    late = placed["the host updates after backward"].step_time
    assert late is not None
    assert found.step_time is not None
    assert late.total_s > found.step_time.total_s  # which updates in backward


def test_shares_between_are_predicted_on_a_cpu() -> None:
    found = timed(make_config(2), 2)
    shares = {c.ratio for c in found.choices if c.step_time is not None and not c.is_varied}
    assert shares == {0.0, 0.25, 0.5, 0.75, 1.0}


def test_a_disk_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="doctor --measure --disk FOLDER"):
        timed(make_config(2), 2, calibration=calibration(2, has_disk=False))
