"""Fixtures of all tests."""

from __future__ import annotations

import sys

import pytest
from kernel_cases import HYPER

import cpu_adam
from cpu_adam import _isa


@pytest.fixture(params=cpu_adam.available_isas())
def isa(request):
    with _isa.use_isa(request.param):
        yield request.param


@pytest.fixture
def hyper():
    return dict(HYPER)


@pytest.fixture(autouse=True)
def one_torch_thread():
    """torch's threads spin while they wait: on a busy machine that takes most of the time."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
