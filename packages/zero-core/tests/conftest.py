"""Settings that all test files share."""

import gc
import signal

import pytest
from hypothesis import HealthCheck, settings

from zero_core.testing import preload
from zero_core.testing.sampled_rows import mark_rows_slow

# A busy machine must not fail a property by being slow.
settings.register_profile("zero-core", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("zero-core")

# A shell starts programs in the background without it, and ranks inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Compiling imports it, seconds long; so ranks are forked from a server that has it.
preload("torch._inductor.compile_fx", "torch._dynamo.testing")


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Disable garbage collection while test files import libraries.

    Little of what imports make is garbage.
    """
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the rows of long grids that the gate leaves out, before ``-m`` deselects any."""
    mark_rows_slow(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Enable garbage collection, except of the objects that imports made."""
    gc.freeze()
    gc.enable()
