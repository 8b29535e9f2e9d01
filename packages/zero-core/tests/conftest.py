import signal

from hypothesis import HealthCheck, settings

from zero_core.testing import preload
from zero_core.testing.sampled_rows import (  # re-exported so that pytest finds the hook
    pytest_collection as pytest_collection,
)
from zero_core.testing.sampled_rows import (
    pytest_collection_modifyitems as pytest_collection_modifyitems,
)
from zero_core.testing.sampled_rows import (
    pytest_runtestloop as pytest_runtestloop,
)

# Hypothesis must not fail a test because a busy machine is slow.
settings.register_profile("zero-core", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("zero-core")

# Shells start background programs with SIGINT ignored, and the ranks inherit that setting.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Importing these takes seconds, so ranks fork from a server process that has imported them.
preload("torch._inductor.compile_fx", "torch._dynamo.testing")
