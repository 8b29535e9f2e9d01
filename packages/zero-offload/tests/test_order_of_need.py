"""Order of updates and copies, in virtual time and on streams that record their calls."""

from __future__ import annotations

import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.kernels import GatedAdam, ReferenceAdam
from support.tiers import ADAM, CPU, Space, host_tier
from torch import Tensor, optim

from zero_offload.flat.geometry import Geometry
from zero_offload.memory.host_memory import HostMemory
from zero_offload.memory.streams import AcceleratorStreams, block_until
from zero_offload.rules.rule import AdamRule
from zero_offload.steppers.memory_stepper import MemoryStepper
from zero_offload.testing.virtual_time import (
    VirtualStream,
    VirtualStreams,
    VirtualThread,
    VirtualTime,
)
from zero_offload.tiers.flat_tier import HostTier
from zero_offload.transfers.mover import HostMover

NUM_UNITS, UNIT_NUMEL, CHUNK_NUMEL = 20, 120, 40
BACKWARD_S, UPDATE_S, COPY_S = 0.020, 0.015, 0.002  # seconds per unit


class Recorded(ReferenceAdam):
    """Kernel that only records the unit of each call and takes virtual time."""

    def __init__(self, time: VirtualTime, masters: Tensor) -> None:
        super().__init__()
        self.time, self.masters = time, masters
        self.units: list[int] = []

    def adam_step(self, master: Any, *args: Any, **kwargs: Any) -> None:
        at = (master.data_ptr() - self.masters.data_ptr()) // 4
        self.units.append(at // UNIT_NUMEL)
        self.time.work("host", f"unit {self.units[-1]}", UPDATE_S * master.numel() / UNIT_NUMEL)


class Units:
    """A host tier for units of three chunks each, and a device's backward, in virtual time."""

    def __init__(self) -> None:
        self.time = VirtualTime()
        self.compute = VirtualStream(self.time, "compute")
        numel = NUM_UNITS * UNIT_NUMEL
        starts = range(0, numel, UNIT_NUMEL)
        params = torch.zeros(numel)
        geometry = Geometry(
            numel,
            [(start, start + UNIT_NUMEL, 0) for start in starts],
            [(start, params[start : start + UNIT_NUMEL]) for start in starts],
            1,
            published_numel=CHUNK_NUMEL,
        )
        self.thread = VirtualThread(self.time)
        own = VirtualStreams(self.compute, COPY_S / UNIT_NUMEL, COPY_S / UNIT_NUMEL)
        memory = HostMemory(should_pin=False)
        mover = HostMover(geometry, CPU, memory, streams=own, is_staged=True)
        self.kernel = Recorded(self.time, params)
        rule = AdamRule.of(self.kernel, optim.AdamW)
        stepper = MemoryStepper(geometry, rule, ADAM, is_in_place=True, upper=geometry.view)
        self.tier = HostTier(geometry, stepper, mover, self.thread)

    def backward(self, num_ahead: int, *, step_at_end: bool = False) -> None:
        """Compute, offer and update the units from last to first, or update all at the end.

        The caller is ``num_ahead`` units ahead of the device.
        """
        ends: list[float] = []
        for unit in reversed(range(NUM_UNITS)):
            self.compute.enqueue(f"backward {unit}", BACKWARD_S)
            ends.append(self.compute.end)
            if len(ends) > num_ahead:
                self.time.caller = max(self.time.caller, ends[-1 - num_ahead])
            self.tier.offer_grad(unit * UNIT_NUMEL, torch.zeros(UNIT_NUMEL))
            if not step_at_end:
                self.tier.step(ADAM, [unit], grad_scale=1.0)
        if step_at_end:
            self.time.caller = self.compute.end
            self.tier.step(ADAM, range(NUM_UNITS), grad_scale=1.0)


@pytest.mark.parametrize("num_ahead", [1, 4, 8])
def test_updates_in_backward_end_with_it_however_far_the_caller_is_ahead(num_ahead: int) -> None:
    units = Units()
    units.backward(num_ahead)
    units.tier.wait_params(0, NUM_UNITS * UNIT_NUMEL)
    assert units.compute.end < NUM_UNITS * BACKWARD_S + 2 * UPDATE_S


def test_the_newest_gradient_goes_first_and_the_first_unit_before_the_second() -> None:
    units = Units()
    units.time.worker = 1.0  # all gradients have arrived by then
    units.backward(num_ahead=2, step_at_end=True)
    units.tier.drain()
    assert units.kernel.units == [unit for unit in range(NUM_UNITS) for _ in range(3)]

    slow = Units()
    slow.time.worker = 0.055  # two gradients have arrived by then
    slow.backward(num_ahead=1)
    slow.tier.drain()
    last = NUM_UNITS - 1
    assert slow.kernel.units[:4] == [last - 1, last - 1, last - 2, last - 2]
    assert sorted(slow.kernel.units) == [unit for unit in range(NUM_UNITS) for _ in range(3)]


def test_forward_follows_the_updates_from_the_first_unit_on() -> None:
    units = Units()
    units.backward(num_ahead=8, step_at_end=True)
    for unit in range(NUM_UNITS):
        units.tier.wait_params(unit * UNIT_NUMEL, (unit + 1) * UNIT_NUMEL)
        start = NUM_UNITS * BACKWARD_S + COPY_S
        updated = start + (unit + 1) * UPDATE_S + COPY_S
        assert units.compute.end == pytest.approx(updated, abs=UPDATE_S / 2)


def test_a_chunk_waits_for_its_own_part_of_the_gradient_alone() -> None:
    units = Units()
    units.backward(num_ahead=0, step_at_end=False)
    units.tier.drain()
    updates = sorted(span.start for span in units.time.spans if span.lane == "host")
    copies = sorted(span.stop for span in units.time.spans if span.lane == "down")
    assert updates[0] == copies[0] == pytest.approx(BACKWARD_S + COPY_S / 3)


def test_updates_that_queue_run_in_ascending_order_of_offsets() -> None:
    space, kernel = Space(), GatedAdam()
    tier, _ = host_tier(space, kernel)
    grads = space.grad(0)
    tier.offer_grad(272, grads[272:])
    tier.step(ADAM, [4], grad_scale=1.0)  # the worker blocks in this update
    tier.offer_grad(37, grads[37:256])
    tier.step(ADAM, [1, 2], grad_scale=1.0)
    tier.offer_grad(260, grads[260:270])
    tier.step(ADAM, [3], grad_scale=1.0)
    tier.offer_grad(0, grads[:37])
    tier.step(ADAM, [0], grad_scale=1.0)
    kernel.gate.set()
    tier.drain()
    assert kernel.calls == [64, 37, 216, 1]


def test_waiting_for_a_copy_leaves_the_core_to_others() -> None:
    fired = threading.Event()
    event = cast(torch.Event, SimpleNamespace(query=fired.is_set))
    threading.Timer(0.2, fired.set).start()
    cpu_s = time.thread_time()
    block_until(event)
    assert time.thread_time() - cpu_s < 0.1


def test_a_gradient_is_kept_until_it_was_copied_or_released() -> None:
    clock = VirtualTime()
    compute, down = VirtualStream(clock, "compute"), VirtualStream(clock, "down")
    up = VirtualStream(clock, "up")

    class OfTest(AcceleratorStreams):
        def current(self) -> torch.Stream:
            return compute

    streams = OfTest(CPU, down, up)
    target = torch.zeros(4)
    grads: list[weakref.ref[Tensor]] = []

    def offer() -> torch.Event:
        grad = torch.ones(4)
        grads.append(weakref.ref(grad))
        down.enqueue("gradient", 1.0)
        return streams.to_host(target, grad)

    def alive() -> list[bool]:
        return [ref() is not None for ref in grads]

    offer()
    second = offer()
    assert alive() == [True, True]
    streams.release(second)  # copies end in order, so the last release covers all
    assert alive() == [False, False]
    offer()
    clock.caller = 10.0
    offer()
    assert alive() == [False, False, False, True]
