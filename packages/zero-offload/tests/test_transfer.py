"""Bytes that cross between device and host, their buffers, and their order.

No accelerator is needed: `LateStreams` is a device whose copies run in threads of their own, late,
as an accelerator's may. Whoever forgets to wait reads or overwrites the wrong numbers here too.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from support import CPU, RATIOS, ReferenceAdam, Space, group_of, make_tier, train
from torch import Tensor, optim

from zero_offload.adam_rules import AdamRule
from zero_offload.flat_tier import HostTier
from zero_offload.geometry import Geometry
from zero_offload.kernel_stepper import KernelStepper
from zero_offload.streams import HostStreams
from zero_offload.transfer import HostMover

GROUPS = [group_of(optim.AdamW, lr=1e-2)]


class _Queue:
    """A stream: one thread that does what it is given in order, each item a little late."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (item := self._items.get()) is not None:
            time.sleep(0.002)
            item()

    def put(self, item: Callable[[], None]) -> threading.Event:
        done = threading.Event()
        self._items.put(item)
        self._items.put(done.set)
        return done

    def close(self) -> None:
        self._items.put(None)
        self._thread.join()


class LateStreams(HostStreams):
    """Copies run late in a down and an up queue; the caller's stream is the caller itself."""

    def __init__(self) -> None:
        self.down, self.up = _Queue(), _Queue()
        self._last_down = self._last_up = threading.Event()
        self._last_down.set()

    def to_host(self, target: Tensor, source: Tensor) -> None:
        self._last_down = self.down.put(lambda: cast(None, target.copy_(source)))

    def release_sources(self) -> None:
        self._last_down.wait()

    def wait_host(self) -> None:
        self._last_down.wait()
        self._last_up.wait()

    def to_device(self, target: Tensor, source: Tensor) -> torch.Event | None:
        self._last_up = self.up.put(lambda: cast(None, target.copy_(source)))
        return cast(torch.Event, self._last_up)

    def arrive(self, event: torch.Event) -> None:
        cast(threading.Event, event).wait()


def _late_tier(space: Space, streams: LateStreams) -> HostTier:
    geometry = Geometry(space.numel, space.pieces, space.params, 1)
    rule = AdamRule.of(ReferenceAdam(), optim.AdamW)
    stepper = KernelStepper(geometry, rule, GROUPS, is_in_place=False)
    mover = HostMover(geometry, CPU, pin_memory=False, streams=streams, is_staged=True)
    tier = HostTier(geometry, stepper, mover)
    tier.write_state("master_weight", 0, space.initial)
    return tier


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_late_copies_change_no_number(dtype: torch.dtype) -> None:
    space, plain = Space(dtype=dtype), Space(dtype=dtype)
    streams = LateStreams()
    tier = _late_tier(space, streams)
    for step in range(6):
        grad = space.grad(step)
        tier.offer_grad(256, grad[256:])
        tier.offer_grad(0, grad[:256])
        tier.step(GROUPS, range(5), grad_scale=1.0)
        grad.fill_(float("nan"))  # the caller may, now that step has returned
        if step % 2:
            tier.wait_params(0, space.numel)
    tier.wait_params(0, space.numel)
    other = make_tier(plain, optim.AdamW, GROUPS, kernel=ReferenceAdam())
    train(other, plain, GROUPS, range(6))
    assert torch.equal(space.flat_params(), plain.flat_params())
    tier.write_state("master_weight", 10, torch.ones(300))
    assert torch.equal(space.flat_params()[10:310], torch.ones(300, dtype=dtype))
    streams.down.close()
    streams.up.close()


def test_late_copies_of_discarded_gradients_do_no_harm() -> None:
    space, plain = Space(), Space()
    streams = LateStreams()
    tier = _late_tier(space, streams)
    bad = torch.full((256,), float("nan"))
    tier.offer_grad(0, bad)
    tier.discard_grads()
    train(tier, space, GROUPS)
    train(make_tier(plain, optim.AdamW, GROUPS, kernel=ReferenceAdam()), plain, GROUPS)
    assert torch.equal(space.flat_params()[:253], plain.flat_params()[:253])
    streams.down.close()
    streams.up.close()


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_offloaded_element_goes_down_and_up_once_a_step(
    ratio: float, dtype: torch.dtype
) -> None:
    space = Space(dtype=dtype)
    tier = make_tier(space, optim.AdamW, GROUPS, ratio=ratio, kernel=ReferenceAdam())
    down, up = tier.bytes_d2h, tier.bytes_h2d
    assert down == 0
    train(tier, space, GROUPS, range(3))
    offloaded = round(ratio * space.numel)
    updated = int(space.covered()[:offloaded].sum())
    assert tier.bytes_d2h - down == 3 * offloaded * dtype.itemsize
    assert tier.bytes_h2d - up == 3 * updated * dtype.itemsize


def test_sixteen_bit_gradients_stay_sixteen_bit_on_the_host() -> None:
    seen: list[torch.dtype] = []

    class Watch(ReferenceAdam):
        def adam_step(self, master: Any, grad: Any, *args: Any, **kwargs: Any) -> None:
            seen.extend((grad.dtype, kwargs["out"].dtype))
            super().adam_step(master, grad, *args, **kwargs)

    space = Space(dtype=torch.bfloat16)
    train(make_tier(space, optim.AdamW, GROUPS, kernel=Watch()), space, GROUPS, range(1))
    assert set(seen) == {torch.bfloat16}


def test_gradients_of_two_dtypes_share_a_step() -> None:
    space, plain = Space(), Space()
    tier = make_tier(space, optim.AdamW, GROUPS, kernel=ReferenceAdam())
    other = make_tier(plain, optim.AdamW, GROUPS, kernel=ReferenceAdam())
    grad = space.grad(0)
    grad[100:256] = grad[100:256].bfloat16().float()
    tier.offer_grad(0, grad[:100])
    tier.offer_grad(100, grad[100:256].bfloat16())  # the dtype changes within a piece
    tier.offer_grad(256, grad[256:].double())
    other.offer_grad(0, grad)
    for each in (tier, other):
        each.step(GROUPS, range(5), grad_scale=1.0)
        each.wait_params(0, space.numel)
    assert torch.equal(space.flat_params(), plain.flat_params())


def test_buffers_are_made_once() -> None:
    space = Space(dtype=torch.bfloat16)
    geometry = Geometry(space.numel, space.pieces, space.params, 1)
    mover = HostMover(geometry, CPU, pin_memory=True)
    first, _ = mover.offer(0, space.grad(0)[:10])
    second, base = mover.offer(300, space.grad(1)[:10])
    assert first is second
    assert base == 0
    assert first.dtype == torch.bfloat16
    assert first.numel() == space.numel


def test_memory_that_cannot_be_pinned_is_used_pageable_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a machine without locked memory, or a torch without an accelerator, does."""
    space = Space()
    geometry = Geometry(space.numel, space.pieces, space.params, 1)
    empty = torch.empty

    def refuse(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("cannot lock")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)
    meta = torch.device("meta")
    with pytest.warns(RuntimeWarning, match="pageable") as caught:
        mover = HostMover(geometry, meta, pin_memory=True, streams=HostStreams())
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer, _ = mover.offer(0, torch.ones(3, dtype=torch.float16))
        HostMover(geometry, meta, pin_memory=False, streams=HostStreams())
    assert buffer.device.type == "cpu"
