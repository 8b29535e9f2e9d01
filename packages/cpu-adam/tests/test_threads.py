"""Updates on several threads give the same results, also after a fork and in concurrent calls."""

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
from support.kernel_cases import HYPER, assert_same_bits, copies, make_arrays
from support.rule_cases import narrow, run

import cpu_adam

# Threads share 37 grains of 8192 elements, of which the last is shorter.
NUMEL = 300_001
TIMEOUT_S = 300
"""Maximum wait for another thread or process, long enough for a busy machine."""


@pytest.fixture(scope="module")
def big():
    return make_arrays(NUMEL)


@pytest.fixture(scope="module")
def expected(big):
    result = copies(big)
    run(cpu_adam.adam_step, result, num_threads=1, **HYPER)
    return result


def assert_all_same(actual, expected):
    for name in expected:
        assert_same_bits(actual[name], expected[name])


@pytest.mark.parametrize("out_dtype", [np.float32, np.float16, np.uint16])
def test_a_copy_too_large_for_the_caches_is_the_same(isa, out_dtype, hyper):
    # Large copies use non-temporal stores if they are aligned, and ordinary stores otherwise.
    numel = 4 * 2**20 + 5
    arrays = {name: np.ones(numel, np.float32) for name in ("master", "exp_avg", "exp_avg_sq")}
    arrays["grad"] = np.ones(numel, np.float16)
    arrays["master"] *= np.arange(numel) % 60_000  # finite in float16
    out = np.zeros(numel + 64, out_dtype)
    aligned = -(out.ctypes.data // out.itemsize) % (64 // out.itemsize)
    for start in (aligned, aligned + 1):
        out[:] = 0
        view = out[start : start + numel]
        run(cpu_adam.adam_step, {**arrays, "out": view}, num_threads=2, **hyper)
        expected = narrow(arrays["master"], out_dtype)
        assert view.tobytes() == expected.tobytes()
        assert not out[:start].any()
        assert not out[start + numel :].any()


def test_concurrent_calls_from_several_threads_are_correct(big, expected, hyper):
    problems = []

    def work(count):
        try:
            for _ in range(4):
                actual = copies(big)
                run(cpu_adam.adam_step, actual, num_threads=count, **hyper)
                assert_all_same(actual, expected)
        except BaseException as problem:  # the assertion below reports it
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
    run(cpu_adam.adam_step, copies(big), num_threads=4, **hyper)  # creates the parent's pool

    def child(levels):
        actual = copies(big)
        run(cpu_adam.adam_step, actual, num_threads=4, **hyper)
        assert_all_same(actual, expected)
        if levels > 1:
            assert fork_and_wait(levels - 1) == 0

    def fork_and_wait(levels):
        with warnings.catch_warnings():
            # The test forks a process with threads on purpose.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process == 0:
            status = 1
            try:
                child(levels)
                status = 0
            finally:
                os._exit(status)
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        return "hung"

    assert fork_and_wait(depth) == 0
    run(cpu_adam.adam_step, copies(big), num_threads=4, **hyper)  # the parent's pool still works


def test_the_gil_is_released(hyper):
    # The call must last several time slices, in case the ticker runs on the same core.
    arrays = {name: np.ones(8_000_000, np.float32) for name in make_arrays(0)}
    ticks, stop = [0], threading.Event()

    def tick():
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0)

    ticker = threading.Thread(target=tick)
    ticker.start()
    most = 0
    try:
        deadline = time.monotonic() + TIMEOUT_S
        # If the call held the GIL, the ticker would run only before and after the call.
        while most < 20 and time.monotonic() < deadline:
            before = ticks[0]
            run(cpu_adam.adam_step, arrays, num_threads=1, **hyper)
            most = max(most, ticks[0] - before)
    finally:
        stop.set()
        ticker.join()
    assert most >= 20


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


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads have no affinity here")
def test_workers_may_run_wherever_the_process_may(big, hyper):
    # A worker changes its affinity only for a moment, to leave its caller's CPU.
    arrays = copies(big)
    for _ in range(300):
        run(cpu_adam.adam_step, arrays, num_threads=2, **hyper)
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    assert len(threads) > 1
    allowed = os.sched_getaffinity(0)
    deadline = time.monotonic() + TIMEOUT_S
    while not all(os.sched_getaffinity(thread) == allowed for thread in threads):
        assert time.monotonic() < deadline, "a worker stays away from a processor"
        time.sleep(0.01)
