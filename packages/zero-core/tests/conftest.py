import signal

import torch
from hypothesis import HealthCheck, settings

from zero_core.testing import preload
from zero_core.testing.sampled_rows import (  # re-exported so that pytest finds the hook
    pytest_collection as pytest_collection,
)
from zero_core.testing.sampled_rows import (
    pytest_collection_modifyitems as pytest_collection_modifyitems,
)
from zero_core.testing.sampled_rows import pytest_runtestloop as pytest_runtestloop

# Hypothesis must not fail a test because a busy machine is slow.
settings.register_profile("zero-core", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("zero-core")

# A shell may have started pytest with SIGINT ignored, which ranks would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Ranks fork from a server process that imports these modules once, because that takes seconds.
# Their import in torch 2.10 queries CUDA, after which forked processes cannot use a GPU.
if not torch.accelerator.is_available():
    preload("torch._inductor.compile_fx", "torch._dynamo.testing")
