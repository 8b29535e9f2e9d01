"""Bytes copied between device and host, their buffers, and their order.

No accelerator is needed: see `support.streams`.
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.kernels import ReferenceAdam
from support.streams import LateStreams
from support.tiers import (
    ADAM,
    BF16,
    CPU,
    FP16,
    FP32,
    Space,
    assert_same,
    host_tier,
    make_tier,
    snapshot,
    train,
    trained,
)
from torch import Tensor

from zero_offload.flat.grads import GradLedger
from zero_offload.memory.host_memory import HostMemory
from zero_offload.transfers.mover import HostMover


def test_gradients_of_two_dtypes_share_a_step() -> None:
    class Rounded(Space):
        def grad(self, step: int) -> Tensor:
            grad = super().grad(step)
            grad[100:256] = grad[100:256].bfloat16().float()
            return grad

    space = Rounded()
    tier, grad = make_tier(space, kernel=ReferenceAdam()), space.grad(0)
    tier.offer_grad(0, grad[:100])
    tier.offer_grad(100, grad[100:256].bfloat16())  # the dtype changes inside a piece
    tier.offer_grad(256, grad[256:].double())
    tier.step(ADAM, range(5), grad_scale=1.0)
    expected = trained(space=Rounded(), steps=range(1), kernel=ReferenceAdam())
    assert_same(snapshot(tier, space), expected)


def test_pinned_landing_memory_is_no_larger_than_it_must_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch rounds each page-locked tensor up to a power of two."""
    monkeypatch.setattr("zero_offload.memory.host_memory.SMALL_BYTES", 64)
    locked = _refuse_to_lock(monkeypatch, limit=1 << 20)
    space, ledger = Space(BF16), GradLedger()
    mover = HostMover(space.geometry(), CPU, HostMemory(should_pin=True))
    grad = space.grad(0)
    mover.offer(256, grad[256:], ledger)
    mover.offer(0, grad[:256], ledger)
    assert locked == [512, 128, 64, 16]
    assert all(nbytes.bit_count() == 1 for nbytes in locked)
    parts = ledger.segments(3, 357)
    assert torch.equal(torch.cat([part for _, _, (part,) in parts]), grad[3:357])


def test_memory_that_cannot_be_pinned_is_used_pageable_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _refuse_to_lock(monkeypatch)
    memory, direct = HostMemory(should_pin=True), HostMemory(should_pin=True)
    with pytest.warns(RuntimeWarning, match="pageable") as caught:
        buffer = memory.empty(3, FP16)
    with pytest.warns(RuntimeWarning, match="cannot lock") as also_caught:
        buffers = [direct.buffer(100) for _ in range(2)]  # buffers for direct I/O
    assert len(caught) == len(also_caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory.empty(4, FP32)
        HostMemory(should_pin=False).empty(4, FP32)
    assert buffer.device.type == "cpu"
    assert (memory.pinned_bytes, memory.pageable_bytes) == (0, 22)
    assert [b.numel() for b in buffers] == [100, 100]
    assert direct.num_bytes == 200


def test_a_budget_of_pinned_bytes_is_kept_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = _refuse_to_lock(monkeypatch, limit=100)
    memory = HostMemory(should_pin=True, limit_bytes=20)
    memory.empty(4, torch.float32)
    with pytest.warns(RuntimeWarning, match=r"pin_memory_bytes = 20") as caught:
        memory.empty(3, torch.float32)
    assert len(caught) == 1
    memory.empty(3, torch.float32)  # no second warning
    memory.empty(2, torch.float16)  # locked, because this still fits
    assert (memory.pinned_bytes, memory.pageable_bytes) == (20, 24)
    assert sum(locked) == 20


def test_packed_tensors_waste_little_of_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = _refuse_to_lock(monkeypatch, limit=1 << 30)
    shapes = [(3 * 10**5 + 7 * i, torch.bfloat16) for i in range(100)]
    tensors = HostMemory(should_pin=True).tensors(shapes)
    assert [(t.numel(), t.dtype) for t in tensors] == shapes
    taken = sum(1 << (nbytes - 1).bit_length() for nbytes in locked)  # bytes that torch page-locks
    assert taken <= 1.2 * sum(t.nbytes for t in tensors)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_staging_is_two_buffers_of_the_largest_chunk() -> None:
    space, streams = Space(BF16), LateStreams()
    keys: dict[str, Any] = {"streams": streams, "is_staged": True, "published_numel": 50}
    memory = HostMemory(should_pin=False)
    tier, _ = host_tier(space, ReferenceAdam(), memory=memory, **keys)
    train(tier, space, steps=range(3))
    landing, staging = 2 * space.numel, 2 * 2 * 50
    assert memory.pageable_bytes == landing + staging
    streams.close()


def _refuse_to_lock(monkeypatch: pytest.MonkeyPatch, *, limit: int = 0) -> list[int]:
    """Limit torch's locked memory to ``limit`` bytes. Return a list that gets each lock's bytes."""
    empty, locked = torch.empty, list[int]()

    def lock(numel: int, *, dtype: torch.dtype, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        if pin_memory:
            locked.append(numel * dtype.itemsize)
            if sum(locked) > limit:
                raise RuntimeError("cannot lock")
        return empty(numel, dtype=dtype, **kwargs)

    monkeypatch.setattr(torch, "empty", lock)
    return locked
