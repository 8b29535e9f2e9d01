"""Settings of Triton and hypothesis, which has no deadlines because machines may be busy."""

import os

import torch
from hypothesis import HealthCheck, settings

# Without an accelerator Triton interprets its kernels. It reads this variable at import.
if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "zero-comm", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("zero-comm")
