"""Background steps of the host: parameters published early, and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.kernels import TIMEOUT_S, GatedAdam, ReferenceAdam
from support.tiers import ADAM, Space, assert_same, make_tier, offer, snapshot, train, workers

from zero_offload import OffloadError
from zero_offload.tiers.twin import TwinTier
from zero_offload.tiers.worker import Progress


def _in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_first_unit_is_free_while_the_second_is_updated() -> None:
    space, kernel = Space(), GatedAdam(gate_at=1)
    tier = make_tier(space, kernel=kernel)
    offer(tier, space, 0)
    tier.step(ADAM, range(5), grad_scale=1.0)
    tier.wait_params(0, 256)
    assert kernel.reached.wait(TIMEOUT_S)
    assert not torch.equal(space.params[0][1][:253], space.initial[:253])
    tier.wait_params(253, 260)  # only padding, so this does not wait
    assert torch.equal(space.params[1][1], space.initial[256:])
    waiter = _in_thread(lambda: tier.wait_params(256, 360))
    waiter.join(0.05)
    assert waiter.is_alive()
    kernel.gate.set()
    waiter.join(TIMEOUT_S)
    assert not waiter.is_alive()
    tier.wait_params(0, space.numel)
    assert kernel.calls == [253, 1, 64]


@pytest.mark.parametrize(
    "call",
    [
        lambda tier: tier.read_state("exp_avg", 0, 1),
        lambda tier: tier.write_state("exp_avg", 0, torch.zeros(1)),
        lambda tier: tier.read_scalars(0),
        lambda tier: tier.write_scalars(0, {"num_steps": 1}),
        lambda tier: tier.offer_grad(0, torch.zeros(1)),
    ],
)
def test_state_and_gradients_in_use_wait_for_a_step_in_flight(
    call: Callable[[TwinTier], object],
) -> None:
    space, kernel = Space(), GatedAdam(gate_at=0)
    tier = make_tier(space, kernel=kernel)
    offer(tier, space, 0)
    tier.step(ADAM, range(5), grad_scale=1.0)
    waiter = _in_thread(lambda: call(tier))
    waiter.join(0.05)
    assert waiter.is_alive()
    kernel.gate.set()
    waiter.join(TIMEOUT_S)
    assert not waiter.is_alive()
    tier.wait_params(0, space.numel)


def test_nobody_waits_for_steps_that_queue_behind_one_that_failed() -> None:
    class FailsLate(GatedAdam):
        def adam_step(self, *args: Any, **kwargs: Any) -> None:
            super().adam_step(*args, **kwargs)
            raise MemoryError("no memory")

    space, kernel = Space(), FailsLate()
    tier = make_tier(space, kernel=kernel)
    offer(tier, space, 0)
    tier.step(ADAM, [3, 4], grad_scale=1.0)
    assert kernel.reached.wait(TIMEOUT_S)
    for pieces in ([0], [2]):
        tier.step(ADAM, pieces, grad_scale=1.0)
    kernel.gate.set()
    with ThreadPoolExecutor() as pool:
        for call in (
            lambda: tier.read_state("exp_avg", 0, 1),
            lambda: tier.read_scalars(0),
            lambda: tier.wait_params(0, 256),
            lambda: tier.step(ADAM, [1], grad_scale=1.0),
        ):
            error = pool.submit(call).exception(TIMEOUT_S)
            assert isinstance(error, OffloadError)
    assert torch.equal(space.params[0][1], space.initial[:256])  # later runs were not updated


@pytest.mark.parametrize(
    ("ratio", "pieces", "gate_at", "awaited"),
    [(0.5, [0, 1], 0, 0), (1.0, [0, 1], 0, 0), (1.0, range(5), 1, 300)],
)
def test_an_error_in_the_worker_reaches_every_later_call(
    ratio: float, pieces: Sequence[int], gate_at: int, awaited: int
) -> None:
    """Callers that already wait for a run queued after the failed one get the error too."""
    space, cause = Space(), MemoryError("no memory for the moments")
    kernel = GatedAdam(gate_at, cause)
    tier = make_tier(space, ratio=ratio, kernel=kernel, host_share="first")
    offer(tier, space, 0)
    tier.step(ADAM, pieces, grad_scale=1.0)
    with pytest.raises(OffloadError):
        tier.wait_params(awaited, awaited + 10)
    for call in (
        lambda: tier.wait_params(0, 360),
        lambda: tier.step(ADAM, [], grad_scale=1.0),
        lambda: tier.read_state("master_weight", 0, 1),
        lambda: tier.write_state("master_weight", 0, torch.zeros(1)),
        lambda: tier.read_scalars(0),
        lambda: tier.offer_grad(0, torch.zeros(1)),
    ):
        for _ in range(2):
            with pytest.raises(OffloadError, match="no memory for the moments") as caught:
                call()
            assert caught.value.__cause__ is cause


def test_an_error_of_the_device_part_is_raised_by_step_itself() -> None:
    space = Space()
    tier = make_tier(space, ratio=0.0, kernel=GatedAdam(0, OSError("device")))
    offer(tier, space, 0)
    with pytest.raises(OSError, match="device"):
        tier.step(ADAM, range(5), grad_scale=1.0)
    with pytest.raises(OffloadError, match="partly updated"):
        tier.read_state("master_weight", 0, 1)


@pytest.mark.parametrize(("start", "stop"), [(0, 256), (0, 144), (144, 360)])
@pytest.mark.parametrize("ratio", [0.6, 1.0])
def test_a_missing_gradient_is_refused_before_anything_is_updated(
    ratio: float, start: int, stop: int
) -> None:
    """At ratio 0.6 the host has the elements from 144 on. Host or device may lack gradients."""
    space = Space()
    tier = make_tier(space, ratio=ratio, kernel=ReferenceAdam())
    before = snapshot(tier, space)
    tier.offer_grad(start, space.grad(0)[start:stop])
    with pytest.raises(ValueError, match=r"no gradient was offered for \["):
        tier.step(ADAM, range(5), grad_scale=1.0)
    assert_same(snapshot(tier, space), before)
    train(tier, space, steps=range(1))  # the tier still works


def test_the_worker_records_no_gradients_and_ends_with_its_tier() -> None:
    """Grad mode is per thread, so the worker must disable it for kernels that use torch."""
    modes: list[bool] = []

    class Watch(ReferenceAdam):
        def adam_step(self, *args: Any, **kwargs: Any) -> None:
            modes.append(torch.is_grad_enabled())
            super().adam_step(*args, **kwargs)

    space, before = Space(), workers()
    tier = make_tier(space, kernel=Watch())
    train(tier, space, steps=range(1))
    assert modes == [False] * 3
    (worker,) = workers() - before
    del tier
    worker.join(TIMEOUT_S)
    assert not worker.is_alive()


def test_a_run_is_over_when_the_last_step_over_it_is_and_none_has_failed() -> None:
    progress = Progress()
    _, before = progress.begin([(0, 4), (6, 9)])
    assert not before
    (again,), before = progress.begin([(3, 7)])
    for entry in before:
        progress.publish(entry, None)
    assert progress.is_over(0, 3)
    assert not progress.is_over(0, 4)
    assert progress.is_over(7, 9)
    progress.publish(again, None)
    assert progress.is_over(0, 9)
    progress.finish(OSError("disk full"))
    assert not progress.is_over(0, 9), "waiting raises"
