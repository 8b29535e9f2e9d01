"""Fixtures: the Adam kernels to test with, and how many threads torch may use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from support.kernels import ReferenceKernel, cpu_adam

# A busy machine must not fail a property by being slow.
settings.register_profile(
    "zero-offload", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("zero-offload")


@pytest.fixture(autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread: tensors are tiny, and on a busy machine idle threads cost more than they give."""
    before = torch.get_num_threads()
    marker = request.node.get_closest_marker("num_threads")
    torch.set_num_threads(marker.args[0] if marker else 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["reference", "cpu_adam"])
def kernel(request: pytest.FixtureRequest) -> Any:
    """The reference kernel, and cpu-adam's where that optional package is installed."""
    return ReferenceKernel() if request.param == "reference" else cpu_adam()
