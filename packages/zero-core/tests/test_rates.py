"""Curves and calibrations: hand-computed seconds, JSON there and back, wrong files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zero_core import ConfigError
from zero_core.plan.rates import Calibration, Curve, Rates
from zero_core.plan.step_time import LANES, StepTime


def test_a_rate_takes_its_latency_and_the_amount_over_the_rate() -> None:
    curve = Curve.of_rate(10e9, latency_s=5e-6)
    assert curve.seconds(20e9) == pytest.approx(2 + 5e-6)
    assert curve.seconds(1e4) == pytest.approx(6e-6)
    assert curve.seconds(0) == 0.0


def test_points_are_joined_by_lines_and_continued_by_the_last_one() -> None:
    curve = Curve(((10, 1.0), (20, 3.0), (40, 4.0)))
    seconds = [curve.seconds(amount) for amount in (1, 10, 15, 20, 30, 40, 80)]
    assert seconds == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 6.0])
    assert Curve(((10, 1.0),)).seconds(40) == 4.0
    assert Curve(((10, 1.0),)).seconds(4) == 1.0


def test_the_first_name_with_a_curve_is_taken() -> None:
    rates = Rates(1, 1, 1, {"memory.float32": Curve(((8, 2.0),))})
    assert rates.seconds(("gelu.float32", "memory.float32"), 16) == 4.0
    with pytest.raises(ConfigError, match=r"no rate called .matmul\.float32."):
        rates.seconds(("matmul.float32",), 1)


def test_a_calibration_goes_through_json_and_finds_the_nearest_number_of_ranks() -> None:
    rates = tuple(Rates(n, 1, 8, {"step": Curve(((1, n / 8),))}) for n in (1, 4, 8))
    written = Calibration("a processor", "by hand", rates)
    assert Calibration.from_json(json.loads(written.to_json()), "it") == written
    assert [written.at(n).ranks for n in (1, 2, 3, 16)] == [1, 1, 4, 8]


GOOD = {"ranks": 1, "threads": 1, "cores": None, "curves": {"step": [[1, 0.5]]}}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"format": "else"}, "format 'else'"),
        ({"rates": []}, "no rates"),
        ({"rates": [{**GOOD, "ranks": 0}]}, "at least 1, found 0"),
        ({"rates": [{**GOOD, "curves": {"step": [[2, 1], [1, 1]]}}]}, "amounts must rise"),
        ({"rates": [{**GOOD, "curves": {"step": [[1, float("nan")]]}}]}, "finite"),
        ({"rates": [{}]}, "no key 'ranks'"),
    ],
)
def test_another_file_is_refused(change: dict[str, Any], cause: str) -> None:
    good = {"format": "zero calibration 1", "device": "", "source": "", "rates": [GOOD]}
    Calibration.from_json(good, "rates.json")
    with pytest.raises(ConfigError, match=f"rates\\.json is no calibration .*{cause}"):
        Calibration.from_json(good | change, "rates.json")


def test_the_busiest_lane_bounds_a_step() -> None:
    lanes = dict.fromkeys(LANES, 0.0) | {"compute": 2.0, "host": 3.0}
    found = StepTime(4.0, lanes, samples=8)
    assert (found.bound, found.bound_s, found.sample_s) == ("host", 3.0, 0.5)
