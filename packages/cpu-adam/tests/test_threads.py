"""Threads change the time, never the result; they survive fork and concurrent callers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
from kernel_cases import (
    assert_kernel_is_reference,
    assert_same_bits,
    copies,
    make_arrays,
    run_kernel,
)

import cpu_adam
from cpu_adam import _threads, reference

# Several grains of work, the last one odd.
NUMEL = 300_001


@pytest.fixture(scope="module")
def big():
    return make_arrays(NUMEL)


@pytest.fixture(scope="module")
def expected(big):
    from kernel_cases import HYPER

    result = copies(big)
    run_kernel(result, num_threads=1, **HYPER)
    return result


def assert_all_same(actual, expected):
    for name in expected:
        assert_same_bits(actual[name], expected[name])


def test_many_threads_match_the_reference(big, hyper):
    assert_kernel_is_reference(big, np.float16, num_threads=3, **hyper)


@pytest.mark.parametrize("out_dtype", [np.float32, np.float16, np.uint16])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_copy_too_large_for_the_caches_is_the_same(isa, out_dtype, shift, hyper):
    """Such a copy is written past the caches, where its alignment allows."""
    numel = 4 * 2**20 + 5
    ones = np.ones(numel, np.float32)
    arrays = {name: ones.copy() for name in ("master", "grad", "exp_avg", "exp_avg_sq")}
    arrays["master"] *= np.arange(numel, dtype=np.float32)
    out = np.zeros(numel + 64, out_dtype)
    start = -(out.ctypes.data // out.itemsize) % (64 // out.itemsize) + shift
    view = out[start : start + numel]
    run_kernel(arrays, view, num_threads=2, **hyper)
    master = arrays["master"]
    with np.errstate(over="ignore"):
        rounded = reference.float32_to_bfloat16(master) if out_dtype is np.uint16 else master
        assert_same_bits(view, rounded.astype(out_dtype))
    assert not out[:start].any()
    assert not out[start + numel :].any()


@pytest.mark.parametrize("num_threads", [2, 3, 5, 16, 64])
def test_the_thread_count_does_not_change_the_bits(big, expected, hyper, num_threads):
    for _ in range(3):
        actual = copies(big)
        run_kernel(actual, num_threads=num_threads, **hyper)
        assert_all_same(actual, expected)


def test_concurrent_calls_from_several_threads_are_correct(big, expected, hyper):
    problems = []

    def work(count):
        try:
            for _ in range(4):
                actual = copies(big)
                run_kernel(actual, num_threads=count, **hyper)
                assert_all_same(actual, expected)
        except BaseException as problem:  # shown by the assertion below
            problems.append(problem)

    workers = [threading.Thread(target=work, args=(count,)) for count in (1, 2, 2, 3, 4, 8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert problems == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_forked_child_gets_threads_of_its_own(big, expected, hyper, depth):
    run_kernel(copies(big), num_threads=4, **hyper)  # the parent's pool exists

    def child(levels):
        actual = copies(big)
        run_kernel(actual, num_threads=4, **hyper)
        assert_all_same(actual, expected)
        if levels > 1:
            assert fork_and_wait(levels - 1) == 0

    def fork_and_wait(levels):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads exist: that is the point
            process = os.fork()
        if process == 0:
            status = 1
            try:
                child(levels)
                status = 0
            finally:
                os._exit(status)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        return "hung"

    assert fork_and_wait(depth) == 0
    run_kernel(copies(big), num_threads=4, **hyper)  # and the parent's still works


def test_the_gil_is_released(hyper):
    arrays = make_arrays(4_000_000)
    ticks, stop = [0], threading.Event()

    def tick():
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0)

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        before = ticks[0]
        deadline = time.monotonic() + 20
        # One call holding the lock would let the ticker run only between calls.
        while ticks[0] < before + 50 and time.monotonic() < deadline:
            run_kernel(arrays, num_threads=1, **hyper)
        assert ticks[0] >= before + 50
    finally:
        stop.set()
        ticker.join()


def test_the_default_is_the_number_of_usable_cpus_without_torch():
    code = (
        "import os, cpu_adam._threads as t; import sys; assert 'torch' not in sys.modules; "
        "n = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count();"
        "assert t.default_num_threads() == n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_default_is_torchs_count_with_torch():
    torch = pytest.importorskip("torch", reason="torch is an extra")
    assert _threads.default_num_threads() == torch.get_num_threads()


def test_no_openmp_runtime_is_loaded():
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("needs /proc")
    code = (
        "import numpy as np, cpu_adam; a = np.ones((4, 10**6), np.float32);"
        "before = open('/proc/self/maps').read();"
        "cpu_adam.adam_step(*a, step=1, lr=0.1, beta1=0.9, beta2=0.9, eps=0.1, weight_decay=0,"
        " num_threads=2);"
        "maps = open('/proc/self/maps').read();"
        "assert 'libgomp' not in maps and 'libomp' not in maps and 'libiomp' not in maps"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_is_importable_and_usable_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, cpu_adam\n"
        "a = np.ones((4, 5), np.float32)\n"
        "cpu_adam.adam_step(*a, step=1, lr=0.1, beta1=0.9, beta2=0.9, eps=0.1, weight_decay=0)\n"
        "try: cpu_adam.CPUAdam\n"
        "except ImportError as e: assert \"pip install 'cpu-adam[torch]'\" in str(e), e\n"
        "else: raise AssertionError\n"
        "try: cpu_adam.nothing\n"
        "except AttributeError: pass\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_package_does_not_load_torch():
    code = "import sys, cpu_adam; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_flush_to_zero_of_the_caller_holds_on_every_thread(hyper):
    torch = pytest.importorskip("torch", reason="torch sets the mode")
    arrays = make_arrays(NUMEL)
    arrays["exp_avg"][:] = 1e-39  # subnormal, and stays so in the default mode
    arrays["grad"][:] = 0
    kept, flushed = copies(arrays), copies(arrays)
    run_kernel(kept, num_threads=4, **hyper)
    if not torch.set_flush_denormal(True):
        pytest.skip("the CPU has no such mode")
    try:
        run_kernel(flushed, num_threads=4, **hyper)
    finally:
        torch.set_flush_denormal(False)
    assert (kept["exp_avg"] != 0).all()
    assert (flushed["exp_avg"].view(np.uint32) << 1 == 0).all()


def test_available_isas_is_a_tuple():
    assert isinstance(cpu_adam.available_isas(), tuple)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads have no affinity here")
def test_workers_may_run_wherever_the_process_may(big, hyper):
    """They leave their caller's processor, but only for the moment."""
    arrays = copies(big)
    for _ in range(300):
        run_kernel(arrays, num_threads=2, **hyper)
    time.sleep(0.3)
    allowed = os.sched_getaffinity(0)
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    assert len(threads) > 1
    for thread in threads:
        assert os.sched_getaffinity(thread) == allowed


def test_a_small_job_does_not_wake_a_large_pool(big, hyper):
    arrays = copies(big)
    run_kernel(arrays, num_threads=64, **hyper)

    def processor_time():
        time.sleep(0.1)
        before = time.process_time()
        for _ in range(100):
            run_kernel(arrays, num_threads=2, **hyper)
        return time.process_time() - before

    # 62 workers that look for work for 0.1 ms after each of 100 calls would take half a second.
    assert min(processor_time() for _ in range(3)) < 0.3
