"""A program drops engines without ``close()``: nothing of them stays."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import torch

import zero_core
from zero_core.testing import Case, batch, make_model, spawn


def _held() -> tuple[int, int, int]:
    """Return descriptors, threads and bytes of tensors of this process."""
    gc.collect()
    tensors = (t for t in gc.get_objects() if issubclass(type(t), torch.Tensor))
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    # The thread of heartbeats ends with the next beat.
    is_watched = any(t.name == "zero_core watch" for t in threading.enumerate())
    threads = len(os.listdir("/proc/self/task")) - is_watched
    return len(os.listdir("/proc/self/fd")), threads, sum(sizes.values())


def _drop(rank: int, world_size: int, stage: int, is_on_host: bool) -> None:
    zero = {"offload_optimizer": {"device": "cpu"}} if is_on_host else {}

    def use() -> None:
        engine = zero_core.build(make_model(), Case(stage, zero=zero).config())
        engine.backward(engine(**batch(0, 0, rank))["loss"])
        engine.step()

    for _ in range(2):
        use()
    before = _held()
    for _ in range(20):
        use()
    deadline = time.monotonic() + 30.0
    # A thread that was told to end takes a moment.
    while any(now > then for now, then in zip(_held(), before, strict=True)):
        assert time.monotonic() < deadline, f"held {_held()}, {before} before"
        time.sleep(0.1)


@pytest.mark.parametrize("is_on_host", [False, True], ids=["on the device", "offloaded"])
@pytest.mark.parametrize("stage", range(4))
def test_twenty_engines_that_are_dropped_leave_nothing(stage: int, is_on_host: bool) -> None:
    if is_on_host and not stage:
        pytest.skip("offload_optimizer needs stage 1 or more")
    spawn(_drop, 2, stage, is_on_host)
