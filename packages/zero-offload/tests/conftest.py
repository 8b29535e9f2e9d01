"""Fixtures: the Adam kernels under test, and the number of torch's threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from support.kernels import ReferenceKernel, cpu_adam

# No deadline: a busy machine may run an example slowly.
settings.register_profile(
    "zero-offload", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("zero-offload")


@pytest.fixture(autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set torch's number of threads, by default 1, which is the fastest for tiny tensors."""
    before = torch.get_num_threads()
    marker = request.node.get_closest_marker("num_threads")
    torch.set_num_threads(marker.args[0] if marker else 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["reference", "cpu_adam"])
def kernel(request: pytest.FixtureRequest) -> Any:
    """Run a test with the reference kernel, and with cpu-adam if that package is installed."""
    return ReferenceKernel() if request.param == "reference" else cpu_adam()
