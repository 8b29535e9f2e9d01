"""torch is optional: behaviour without torch, and settings taken from torch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from support.kernel_cases import copies, make_arrays
from support.rule_cases import run

import cpu_adam
from cpu_adam import _scalars

NUMEL = 300_001  # threads share 37 grains of 8192 elements


def test_the_default_is_the_number_of_usable_cpus_without_torch():
    code = (
        "import os, cpu_adam._scalars as t; import sys; assert 'torch' not in sys.modules; "
        "n = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count();"
        "assert t.resolve_num_threads(None) == n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_default_is_torchs_count_with_torch():
    torch = pytest.importorskip("torch", reason="torch is an extra")
    assert _scalars.resolve_num_threads(None) == torch.get_num_threads()


def test_the_package_is_importable_and_usable_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, cpu_adam\n"
        "a = np.ones((4, 5), np.float32)\n"
        "cpu_adam.adam_step(*a, step=1, lr=0.1, beta1=0.9, beta2=0.9, eps=0.1, weight_decay=0)\n"
        "try: cpu_adam.CPUAdam\n"
        "except ImportError as e: assert 'pip install torch' in str(e), e\n"
        "else: raise AssertionError\n"
        "try: cpu_adam.nothing\n"
        "except AttributeError: pass\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_flush_to_zero_of_the_caller_holds_on_every_thread(hyper):
    torch = pytest.importorskip("torch", reason="torch sets the mode")
    arrays = make_arrays(NUMEL)
    arrays["exp_avg"][:] = 1e-39  # subnormal: kept only if flush-to-zero is off
    arrays["grad"][:] = 0
    kept, flushed = copies(arrays), copies(arrays)
    run(cpu_adam.adam_step, kept, num_threads=4, **hyper)
    if not torch.set_flush_denormal(True):
        pytest.skip("the CPU has no such mode")
    try:
        run(cpu_adam.adam_step, flushed, num_threads=4, **hyper)
    finally:
        torch.set_flush_denormal(False)
    assert (kept["exp_avg"] != 0).all()
    assert (flushed["exp_avg"].view(np.uint32) << 1 == 0).all()
