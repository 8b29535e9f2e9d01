"""Predicted length of offloaded steps against the real tiers in virtual time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lab.experiments.schedule.job import MODES, Job, Mode, Times
from lab.experiments.schedule.program import random_times
from zero_engine.planning import Calibration, Curve, Rates, plan
from zero_engine.planning.prediction import StepShape, UnitTime, run_steps


def predicted_s(times: Times, mode: Mode, ratio: float) -> float:
    """Return the seconds of a step of equal blocks, of which the host has the last ones."""
    first = round(times.blocks * (1 - ratio))

    def unit(index: int) -> UnitTime:
        share = 1 / times.blocks if index else 0.0
        on_host = share if index > first else 0.0
        return UnitTime(
            forward_s=share * times.forward_s,
            backward_s=share * times.backward_s,
            host_s=on_host * times.host_s,
            undo_s=on_host * times.log_s,
            down_s=on_host * times.link_s,
            up_s=on_host * times.link_s,
        )

    shape = StepShape(
        micro_steps=1,
        last_block=times.blocks,
        is_accelerated=True,
        threads=1,
        is_in_backward=mode == "in backward",
        undo_share=float(mode == "with an undo log"),
        device_update_s=(1 - ratio) * times.device_s,
    )
    program = run_steps(shape, [unit(n) for n in range(times.blocks + 1)], None)
    return program.ends[-1].stop - program.ends[-2].stop


@pytest.mark.parametrize("mode", MODES)
def test_steps_are_as_long_as_those_of_the_real_tiers(mode: Mode) -> None:
    drawn = [Times(), replace(Times(), log_s=3.0), *random_times(3)]
    for times in drawn:
        for ratio in (1.0, 0.4):
            real = Job(times, mode, ratio, chunks_per_block=4).run()
            assert predicted_s(times, mode, ratio) == pytest.approx(real, rel=0.05), (times, ratio)


def test_offload_that_saves_less_than_a_plan_can_know_is_not_chosen() -> None:
    """The device's update takes a little, the host's nothing, and gathers take most of a step."""
    free, link = Curve(((1.0, 0.0),)), Curve.of_rate(1e6)
    names = ("memory.float32", "matmul.float32", "operator", "pass", "step", "agree.within")
    further = ("update.host.float32", "copy.to_host", "copy.to_device")
    curves = {
        **dict.fromkeys((*names, *further), free),
        **dict.fromkeys(("gather.within", "reduce.within"), link),
        "update.device.float32": Curve.of_rate(1e9),
    }
    rates = Calibration("an accelerator", "by hand", (Rates(1, 1, None, curves),))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3},
    }
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.zeros(8, 64)
    found = plan(model, config, 2, example_inputs=[x], calibration=rates)
    fastest = min(found.choices, key=lambda choice: choice.sample_s)
    assert found.best is not None
    assert fastest.ratio > found.best.ratio == 0.0


@pytest.mark.parametrize(
    ("host_rate", "least", "most"), [(1e5, 1.01, 1.1), (2e6, 0.8, 0.95), (1e12, 0.999, 1.001)]
)
def test_an_undo_log_pays_where_the_host_takes_a_little_longer_than_backward(
    host_rate: float, least: float, most: float
) -> None:
    """The host takes many times as long as backward, a little longer, or no time."""
    free = Curve(((1.0, 0.0),))
    names = ("memory.float32", "operator", "pass", "step", "copy.to_host", "copy.to_device")
    curves = {
        **dict.fromkeys((*names, "update.device.float32"), free),
        "matmul.float32": Curve.of_rate(1e8),
        "update.host.float32": Curve.of_rate(host_rate),
    }
    rates = Calibration("an accelerator", "by hand", (Rates(1, 1, None, curves),))
    offload: dict[str, Any] = {"device": "cpu", "undo_buffer_size": 1 << 30}
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 1, "offload_optimizer": offload},
    }
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16))), torch.zeros(8, 64)
    times = []
    for in_backward in (None, False):
        offload["update_in_backward"] = in_backward
        time = plan(model, config, 1, example_inputs=[x], calibration=rates).step_time
        assert time is not None
        times.append(time.total_s)
    assert least <= times[0] / times[1] <= most
