"""Fixtures: the Adam kernels to test with."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
from support import ReferenceAdam


@pytest.fixture
def reference() -> ReferenceAdam:
    return ReferenceAdam()


@pytest.fixture(params=["reference", "cpu_adam"])
def kernel(request: pytest.FixtureRequest) -> Any:
    """The reference kernel, and cpu-adam's where that optional package is installed."""
    if request.param == "reference":
        return ReferenceAdam()
    if importlib.util.find_spec("cpu_adam") is None:
        pytest.skip("the optional cpu-adam is not installed")
    return importlib.import_module("cpu_adam")
