from __future__ import annotations

import sys

import pytest
from hypothesis import HealthCheck, settings
from support.kernel_cases import HYPER

import cpu_adam
from cpu_adam import _isa

# No deadlines: a busy machine makes properties slow.
settings.register_profile("cpu-adam", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("cpu-adam")


@pytest.fixture(params=cpu_adam.available_isas())
def isa(request):
    with _isa.use_isa(request.param):
        yield request.param


@pytest.fixture
def hyper():
    return dict(HYPER)


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Run torch on one thread, because waiting threads spin, which slows a busy machine."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
