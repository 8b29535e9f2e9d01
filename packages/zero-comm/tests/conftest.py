"""Settings for all tests: a busy machine must not fail a property by being slow."""

import os

import plugin_ranks
import pytest
from hypothesis import settings

settings.register_profile("zero-comm", deadline=None)
settings.load_profile("zero-comm")


@pytest.fixture(scope="session", autouse=True)
def shared_outcomes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What real ranks saw is kept in one place for all of xdist's workers."""
    base = tmp_path_factory.getbasetemp()
    plugin_ranks.keep_in(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)
