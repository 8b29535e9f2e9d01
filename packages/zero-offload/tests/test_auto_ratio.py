"""The search for the fastest ratio on simulated machines."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_offload.tiers.auto_tier import (
    CHANGE,
    NOISE,
    PATIENCE,
    RESOLUTION,
    STEPS_PER_PROBE,
    AutoRatio,
    Sample,
)

NUMEL = 1_000_000
ENOUGH_STEPS = 12 * (STEPS_PER_PROBE + 1)


@dataclass
class Machine:
    """A machine whose host and device start their updates at the same time.

    The host's parameters are needed ``slack_s`` seconds after the end of the device's update.
    ``host_s`` and ``device_s`` are the seconds of an update of all elements.
    """

    host_s: float
    device_s: float
    slack_s: float
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def step_s(self, ratio: float) -> float:
        """Return the seconds that the update adds to a step."""
        return max(self.host_s * ratio - self.slack_s, self.device_s * (1 - ratio))

    def sample(self, ratio: float) -> Sample:
        host_s = self.host_s * ratio * self._noisy()
        device_s = self.device_s * (1 - ratio) * self._noisy()
        stall_s = max(host_s - device_s - self.slack_s * self._noisy(), 0.0)
        host_numel = round(ratio * NUMEL)
        return Sample(host_numel, NUMEL - host_numel, host_s, device_s, stall_s)

    def _noisy(self) -> float:
        return 1 + self._random.uniform(-self.noise, self.noise)

    def best(self, least: float = 0.0) -> float:
        """Return the largest of the fastest ratios, by exhaustive search."""
        tried = [least + (1 - least) * i / 10_000 for i in range(10_001)]
        return min(reversed(tried), key=self.step_s)


def settled(machine: Machine) -> AutoRatio:
    auto = AutoRatio()
    run(auto, machine, ENOUGH_STEPS)
    return auto


def run(auto: AutoRatio, machine: Machine, num_steps: int, least: float = 0.0) -> list[float]:
    ratios = []
    for _ in range(num_steps):
        ratios.append(auto.ratio)
        auto.observe(machine.sample(auto.ratio), least)
    return ratios


SECONDS = st.floats(0.01, 10.0)


@given(SECONDS, SECONDS, st.floats(0.0, 10.0), st.floats(0.0, 1.0))
@settings(deadline=None)
def test_it_settles_on_the_fastest_ratio_that_fits(
    host_s: float, device_s: float, slack_s: float, least: float
) -> None:
    machine, auto = Machine(host_s, device_s, slack_s), AutoRatio()
    ratios = run(auto, machine, ENOUGH_STEPS, least)
    assert auto.report is not None
    assert auto.report.ratio == auto.ratio
    assert all(ratio >= least for ratio in ratios)
    best = machine.best(least)
    # The result may be lower by the resolution, or higher if the stall is within the noise.
    assert best - RESOLUTION - 1e-3 <= auto.ratio <= best + NOISE + 1e-3
    held = auto.ratio
    assert set(run(auto, machine, 50, least)) == {held}


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_5_percent_neither_misleads_it_nor_moves_it(seed: int) -> None:
    auto = settled(machine := Machine(3.0, 0.5, 1.0, noise=0.05, seed=seed))
    assert auto.report is not None
    held = auto.ratio
    assert abs(held - machine.best()) < 0.05
    assert set(run(auto, machine, 500)) == {held}


@pytest.mark.parametrize(
    ("first_s", "then_s", "noise"), [(1.0, 3.0, 0.02), (3.0, 1.0, 0.0)], ids=["slower", "faster"]
)
def test_a_host_three_times_slower_or_faster_is_given_less_or_more(
    first_s: float, then_s: float, noise: float
) -> None:
    auto = settled(machine := Machine(first_s, 0.5, 0.4, noise=noise))
    before, report = auto.ratio, auto.report
    machine.host_s = then_s
    run(auto, machine, ENOUGH_STEPS)
    assert auto.report is not report
    assert auto.ratio < before - 0.2 if then_s > first_s else auto.ratio > before + 0.2
    assert abs(auto.ratio - machine.best()) < 0.05


def test_a_few_slow_steps_move_nothing() -> None:
    auto = settled(machine := Machine(2.0, 0.5, 0.4))
    held = auto.ratio
    for _ in range(20):
        machine.host_s = 2.0 * (1 + 4 * CHANGE)
        run(auto, machine, PATIENCE - 1)
        machine.host_s = 2.0
        run(auto, machine, 1)
    assert set(run(auto, machine, 20)) == {held}


def test_memory_that_runs_short_moves_it_at_once() -> None:
    auto = settled(machine := Machine(4.0, 0.5, 0.4))
    assert auto.ratio < 0.5
    assert auto.observe(machine.sample(auto.ratio), 0.75) == 0.75
    assert auto.report is not None
    assert auto.report.reason == "device memory has no room for a smaller one"
    assert set(run(auto, machine, 20, 0.75)) == {0.75}


def test_a_bound_that_creeps_is_followed_in_whole_steps() -> None:
    auto = settled(machine := Machine(4.0, 0.5, 0.4))
    reports = []
    for i in range(1000):
        least = 0.5 + i / 10_000
        assert least <= auto.observe(machine.sample(auto.ratio), least) <= least + RESOLUTION
        if auto.report not in reports[-1:]:
            reports.append(auto.report)
    assert len(reports) <= 2 + ceil(0.1 / RESOLUTION)


def test_a_host_that_is_in_time_with_everything_keeps_it_after_one_probe() -> None:
    machine, auto = Machine(1.0, 0.1, 2.0), AutoRatio()
    assert set(run(auto, machine, ENOUGH_STEPS)) == {1.0}
    assert auto.report is not None
    assert auto.report.num_probes == 1
    assert auto.report.device_s_per_element is None
    assert "device not measured" in str(auto.report)


def test_the_report_says_what_was_measured_and_why() -> None:
    auto = settled(machine := Machine(2.0, 0.5, 0.5))
    report = auto.report
    run(auto, machine, 200 - ENOUGH_STEPS)
    assert report is not None
    assert auto.report is report  # the search settled only once
    assert report.host_s_per_element == pytest.approx(2.0 / NUMEL)
    assert report.device_s_per_element == pytest.approx(0.5 / NUMEL)
    assert 2 <= report.num_probes <= 8
    text = str(report)
    assert "host 5e+05 elements/s, device 2e+06 elements/s" in text
    assert "in time, and late at ratio" in text
    assert "device memory: no bound" in text


def test_steps_without_work_are_no_trouble() -> None:
    auto = AutoRatio()
    for _ in range(100):
        auto.observe(Sample(0, 0, 0.0, 0.0, 0.0))
    assert auto.ratio == 1.0
