"""The tier that chooses its own ratio: its measurements, and bit-identical results."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernels import ReferenceAdam
from support.models import loop, make_model, weights
from support.tiers import (
    BF16,
    CPU,
    Space,
    assert_same,
    group_of,
    make_tier,
    offer,
    offload_tiers,
    snapshot,
    train,
    trained,
)
from torch import optim

from zero_offload import OffloadedOptimizer
from zero_offload.testing.virtual_time import VirtualStream, VirtualThread, VirtualTime
from zero_offload.tiers.auto_tier import (
    STEPS_PER_PROBE,
    AutoRatio,
    AutoTier,
    DeviceRoom,
    MemoryReading,
    Sample,
    read_memory,
)
from zero_offload.tiers.factory import DeviceClock
from zero_offload.tiers.twin import TwinTier

GROUPS = [group_of(optim.AdamW, lr=1e-2, weight_decay=0.1)]
RATIOS = (0.5, 0.25, 0.9, 0.0, 1.0, 0.999, 0.3)


class Scripted(AutoRatio):
    """Controller that returns given ratios and records the samples that it receives."""

    def __init__(self, ratios: tuple[float, ...]) -> None:
        super().__init__()
        self._left = list(ratios)
        self.samples: list[Sample] = []

    def observe(self, sample: Sample, least_ratio: float = 0.0) -> float:
        self.samples.append(sample)
        self.ratio = self._left.pop(0) if self._left else self.ratio
        return self.ratio


class LateThread(VirtualThread):
    """Thread whose jobs run only when the caller waits for them."""

    def catch_up(self) -> None:
        """Leave the jobs queued."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """Replace the tier's clocks by virtual time that only kernels advance."""
    made = VirtualTime()
    monkeypatch.setattr("zero_offload.tiers.factory.perf_counter", made.now)
    monkeypatch.setattr("zero_offload.tiers.flat_tier.HostThread", lambda _: LateThread(made))
    return made


class TimedAdam(ReferenceAdam):
    """Kernel that takes given virtual seconds per call, on the host and on the device."""

    def __init__(self, clock: VirtualTime, host_s: float, device_s: float) -> None:
        super().__init__()
        self.clock, self.host_s, self.device_s = clock, host_s, device_s

    def adam_step(self, *args: Any, **kwargs: Any) -> None:
        seconds = self.host_s if self.clock.is_worker else self.device_s
        self.clock.work("host" if self.clock.is_worker else "device", "update", seconds)
        super().adam_step(*args, **kwargs)


def make_auto(space: Space, kernel: Any = None, script: AutoRatio | None = None) -> AutoTier:
    geometry = space.geometry()
    tiers = offload_tiers(geometry, kernel, groups=GROUPS)
    tier = AutoTier(geometry, GROUPS, tiers, element_bytes=12, controller=script)
    tier.write_state("master_weight", 0, space.initial)
    return tier


def test_each_step_is_measured(clock: VirtualTime) -> None:
    """Per run the kernel takes 20 ms on the host, 5 ms on the device. The caller waits at once."""
    space, script = Space(), Scripted((1.0, 0.5, 0.5))
    tier = make_auto(space, TimedAdam(clock, 0.02, 0.005), script)
    train(tier, space, GROUPS, range(4), active=[0, 1, 2])  # pieces 0 to 2 are one run
    whole, _, half = script.samples
    assert (whole.host_numel, whole.device_numel) == (253, 0)
    assert (half.host_numel, half.device_numel) == (73, 180)
    assert (whole.host_s, whole.device_s, whole.stall_s) == pytest.approx((0.02, 0.0, 0.02))
    assert (half.host_s, half.device_s, half.stall_s) == pytest.approx((0.02, 0.005, 0.015))


def test_a_stall_is_the_hosts_lateness_alone(clock: VirtualTime) -> None:
    """A caller that waits only after the host has finished does not stall."""
    space, script = Space(), Scripted(())
    tier = make_auto(space, TimedAdam(clock, 0.02, 0.005), script)
    train(tier, space, GROUPS, range(1))
    for step in range(1, 8):
        offer(tier, space, step)
        tier.step(GROUPS, range(5), grad_scale=1.0)
        tier.file_traffic()  # waits for the host
        tier.wait_params(0, space.numel)
    train(tier, space, GROUPS, range(8, 9))
    assert [sample.stall_s for sample in script.samples[1:7]] == [0.0] * 6


def test_units_updated_one_by_one_are_one_step() -> None:
    """Each unit is updated before the next one's gradient, as in updates during backward."""
    space, script = Space(), Scripted((0.5, 0.2, 0.9))
    tier = make_auto(space, ReferenceAdam(), script)
    for step in range(4):
        grad = space.grad(step)
        for start, stop, active in ((256, 360, [3, 4]), (0, 256, [0, 1, 2])):
            tier.offer_grad(start, grad[start:stop])
            tier.step(GROUPS, active, grad_scale=1.0)
        tier.wait_params(0, space.numel)
    assert_same(snapshot(tier, space), trained(groups=GROUPS, kernel=ReferenceAdam()))
    assert [s.host_numel + s.device_numel for s in script.samples] == [253 + 65] * 3


def test_a_skipped_step_is_not_measured_twice() -> None:
    space, script = Space(), Scripted((0.5, 0.3))
    tier = make_auto(space, ReferenceAdam(), script)
    train(tier, space, GROUPS, range(1))
    for _ in range(3):
        tier.offer_grad(0, space.grad(1)[:256])
        tier.discard_grads()
    assert len(script.samples) == 1
    train(tier, space, GROUPS, range(1, 3))
    assert len(script.samples) == 2


def test_a_parameter_that_comes_first_and_had_no_gradient_before_is_not_lost() -> None:
    """A parameter's first gradient does not show that a step began: the tier must not resplit."""
    results, script = [], Scripted(RATIOS)
    for is_auto in (True, False):
        space, kernel = Space(), ReferenceAdam()
        tier: TwinTier = make_tier(space, groups=GROUPS, kernel=kernel)
        if is_auto:
            tier = make_auto(space, kernel, script)
        for step in range(6):
            grad = space.grad(step)
            active = [1, 2, 3, 4] if step % 3 == 0 else [0, 1, 2, 3, 4]
            for i in active:
                a, b, _ = space.pieces[i]
                tier.offer_grad(a, grad[a:b])
            tier.step(GROUPS, active, grad_scale=1.0)
            tier.wait_params(0, 360)
        results.append(snapshot(tier, space))
    assert_same(*results)
    assert len(script.samples) == 3  # the starts of steps 1 and 4 go unnoticed


def test_a_host_that_is_always_late_gives_all_to_the_device(
    clock: VirtualTime, caplog: pytest.LogCaptureFixture
) -> None:
    """The host takes 4 ms for any share, so the search ends at ratio 0 and logs it once."""
    caplog.set_level(logging.INFO, logger="zero_offload")
    space = Space()
    # The last piece fills the space, so that any share has elements to update.
    space.pieces[-1] = (272, 360, 0)
    tier = make_auto(space, TimedAdam(clock, 0.004, 1e-5))
    assert tier.ratio_report is None
    train(tier, space, GROUPS, range(10 * (STEPS_PER_PROBE + 1)))
    report = tier.ratio_report
    assert report is not None
    assert tier.host_numel == round(report.ratio * 360) == 0
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.message == f"offload_optimizer settled on {report}"
    assert "the host is late with any share" in record.message


def test_an_optimizer_with_auto_trains_as_one_without() -> None:
    plain, ours = make_model(), make_model()
    expected = loop(plain, optim.AdamW(plain.parameters(), lr=1e-2), steps=range(30))
    optimizer = OffloadedOptimizer(optim.AdamW, ours.parameters(), ratio="auto", lr=1e-2)
    assert loop(ours, optimizer, steps=range(30)) == expected
    assert torch.equal(weights(ours), weights(plain))


def test_ratio_auto_makes_a_tier_that_searches_also_without_elements() -> None:
    space = Space()
    space.numel, space.pieces, space.params = 0, [], []
    space.initial = torch.zeros(0)
    tier = make_tier(space, ratio="auto")
    assert isinstance(tier, AutoTier)
    assert tier.ratio_report is None
    for _ in range(5):
        tier.step(GROUPS, [], grad_scale=1.0)
        tier.wait_params(0, 0)
    assert tier.host_numel == 0


def test_a_device_clock_waits_for_nothing() -> None:
    """Reading the clock must not synchronize with the device. Unfinished work counts later."""
    time = VirtualTime()
    compute = VirtualStream(time, "compute")

    class OfTest(DeviceClock):
        def mark(self) -> torch.Event:
            event: torch.Event = compute.record_event()
            return event

    clock = OfTest(CPU)
    for seconds in (1.0, 2.0):
        with clock.measure():
            compute.enqueue("update", seconds)
    assert clock.take() == 0.0
    time.caller = 1.5
    assert clock.take() == 1.0
    assert time.caller == 1.5
    time.caller = 3.0
    assert clock.take() == 2.0


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [(1.0, (60, 20, 80)), (0.75, (60, 20, 60)), (0.4, (32, 20, 32)), (None, (60, 20, 80))],
)
def test_room_is_what_this_process_may_take_of_the_device(
    monkeypatch: pytest.MonkeyPatch, fraction: float | None, expected: tuple[int, int, int]
) -> None:
    module = SimpleNamespace()
    if fraction is not None:
        module.get_per_process_memory_fraction = lambda _: fraction
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (50, 80))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda _: 10)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda _: 20)
    found = read_memory(torch.device("cuda", 0))
    assert found == MemoryReading(*expected)


@given(
    st.integers(0, 10**9),
    st.lists(st.tuples(st.integers(0, 10**9), st.floats(0, 1)), min_size=1, max_size=6),
    st.integers(10**6, 4 * 10**9),
)
def test_room_is_what_the_peak_without_the_state_leaves(
    reserved: int, steps: list[tuple[int, float]], total: int
) -> None:
    """Each step needs ``taken`` bytes, and 14 bytes for each element with state on the device."""
    numel, element_bytes = 10**7, 14
    peak = others = 0
    room = DeviceRoom(numel, element_bytes)
    for taken, share in steps:
        device_numel = round(share * numel)
        if taken + device_numel * element_bytes > peak:
            peak, others = taken + device_numel * element_bytes, taken
        found = room.bound(MemoryReading(total, peak, total), device_numel)
        fitting = (0.95 * total - others) / element_bytes
        assert found == pytest.approx(min(max(1 - fitting / numel, 0.0), 1.0), abs=1e-9)


@pytest.mark.parametrize("num_calls", [1, 2])
def test_room_counts_sums_of_micro_steps_once(
    num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    class Bounded(AutoRatio):
        def observe(self, sample: Sample, least_ratio: float = 0.0) -> float:
            found.append(least_ratio)
            return 1.0

    reading = MemoryReading(available=3800, peak=1000, total=0)
    monkeypatch.setattr("zero_offload.tiers.auto_tier.read_memory", lambda _: reading)
    space = Space(BF16)
    tier = make_auto(space, script=Bounded())
    for _ in range(num_calls):
        tier.expect_micro_steps(2)
    for step in range(2):
        tier.add_grad(0, space.grad(step), is_last=True)
        tier.step(GROUPS, range(5), grad_scale=1.0)
    assert found[-1] == pytest.approx(1 - 2800 / (12 + 2) / space.numel)
