"""The table of devices by name."""

from __future__ import annotations

import math

import pytest

from zero_engine.calibration.machine import device_calibration, device_memory, device_names

DTYPES = ("float32", "bfloat16")
BY_VENDOR = {
    "NVIDIA": ["A10", "A100", "B200", "B300", "GH200", "H100", "H200", "L4", "L40S", "T4", "V100"],
    "NVIDIA RTX": ["RTX 3090", "RTX 4090", "RTX 5090", "RTX 6000 Ada", "RTX PRO 6000"],
    "AMD": ["MI250X", "MI300X", "MI325X", "MI355X"],
}


@pytest.mark.parametrize("vendor", BY_VENDOR)
def test_each_device_has_rates_and_a_source(vendor: str) -> None:
    for name in BY_VENDOR[vendor]:
        found = device_calibration(name.lower(), 8)
        assert found.device == name in device_names()
        assert found.source.startswith(vendor.split()[0])
        for curve in found.rates[0].curves.values():
            assert all(math.isfinite(s) and s >= 0 for point in curve.points for s in point)


def test_figures_are_in_the_units_of_their_keys() -> None:
    """A peak that is off by 1000, or with sparsity, stands out among the others."""
    for name in device_names():
        assert 16e9 <= device_memory(name) <= 300e9, name
        curves = device_calibration(name, 1).rates[0].curves
        reached = [curves.get(f"matmul.{dtype}", curves["matmul.float32"]) for dtype in DTYPES]
        wide, narrow = (1e15 / curve.seconds(1e15) for curve in reached)
        assert 4e12 < wide <= narrow < 1.6e15, name
        assert 2e11 < 1e12 / curves["memory.float32"].seconds(1e12) < 7e12, name


def test_memory_of_the_host_that_the_caller_names_takes_the_place_of_the_tables() -> None:
    table, named = (
        device_calibration("H100", 2, host_bytes_per_s=peak).at(2) for peak in (None, 400e9)
    )
    update = ["update.host.float32"]
    assert named.seconds(update, 1e9) == pytest.approx(table.seconds(update, 1e9) / 2)
    assert named.seconds(["file.read"], 1e9) == table.seconds(["file.read"], 1e9)
    assert "400 GB/s" in device_calibration("H100", 2, host_bytes_per_s=400e9).source
