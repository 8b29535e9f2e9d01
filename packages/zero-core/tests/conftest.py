import signal

import torch
from hypothesis import HealthCheck, settings

from zero_core.testing import preload
from zero_core.testing.sampled_rows import (  # re-exported, so that pytest finds these hooks
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

# Importing these modules takes seconds. So a server process imports them, and ranks fork from it.
# In torch 2.10 the import queries CUDA, after which forked processes cannot use a GPU.
if not torch.accelerator.is_available():
    preload("torch._inductor.compile_fx", "torch._dynamo.testing")
