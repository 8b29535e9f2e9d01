"""Settings that all test files share."""

import signal

from hypothesis import HealthCheck, settings

from zero_core.testing import preload
from zero_core.testing.sampled_rows import (  # pytest finds them here
    pytest_collection as pytest_collection,
)
from zero_core.testing.sampled_rows import (
    pytest_collection_modifyitems as pytest_collection_modifyitems,
)
from zero_core.testing.sampled_rows import (
    pytest_runtestloop as pytest_runtestloop,
)

# A busy machine must not fail a property by being slow.
settings.register_profile("zero-core", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("zero-core")

# A shell starts programs in the background without it, and ranks inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Compiling imports it, seconds long; so ranks are forked from a server that has it.
preload("torch._inductor.compile_fx", "torch._dynamo.testing")
