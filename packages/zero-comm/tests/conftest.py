"""Settings for all tests: a busy machine must not fail a property by being slow."""

import os

import torch
from hypothesis import HealthCheck, settings

# Without an accelerator Triton's kernels are interpreted. It reads this when it is imported.
if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "zero-comm", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("zero-comm")
