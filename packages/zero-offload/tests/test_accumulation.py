"""Gradients of several micro-steps: the tier's sum equals torch's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from support.kernels import ReferenceKernel, cpu_adam
from support.streams import LateStreams
from support.tiers import (
    ADAM,
    BF16,
    FP16,
    FP32,
    Space,
    assert_same,
    host_tier,
    make_tier,
    snapshot,
    trained,
)
from torch import Tensor

from zero_offload.flat.grads import add_up
from zero_offload.steppers.torch_stepper import TorchStepper
from zero_offload.testing.virtual_time import VirtualThread, VirtualTime
from zero_offload.tiers.twin import TwinTier
from zero_offload.transfers.mover import HostMover

SEGMENTS = ((256, 360), (0, 256))  # in the order of backward
RATIOS = (0.0, 0.3, 1.0)


def _grads(space: Space, step: int, count: int) -> list[Tensor]:
    """Return one gradient per micro-step. The bits of their sum depend on the order."""
    return [space.grad(10 * step + k) * 8.0 ** (k % 3) for k in range(count)]


def _plain_sum(grads: Sequence[Tensor]) -> Tensor:
    total = grads[0].float()
    for grad in grads[1:]:
        total = total + grad.float()
    return total


def _add(tier: TwinTier, grads: Sequence[Tensor]) -> None:
    for micro_step, grad in enumerate(grads, start=1):
        for a, b in SEGMENTS:
            tier.add_grad(a, grad[a:b].clone(), is_last=micro_step == len(grads))


def _tier(space: Space, count: int, **options: Any) -> TwinTier:
    return make_tier(space, micro_steps=count, **options)


def _train(
    count: int, dtype: torch.dtype = BF16, *, is_by_unit: bool = False, **block: Any
) -> dict[str, Tensor]:
    """Train three steps. Update all units at the end, or each unit after its last gradient."""
    space = Space(dtype)
    tier = _tier(space, count, **block)
    for step in range(3):
        *first, last = _grads(space, step, count)
        for grad in first:
            for a, b in SEGMENTS:
                tier.add_grad(a, grad[a:b].clone(), is_last=False)
        for (a, b), pieces in zip(SEGMENTS, ([3, 4], [0, 1, 2]), strict=True):
            tier.add_grad(a, last[a:b].clone(), is_last=True)
            if is_by_unit:
                tier.step(ADAM, pieces, grad_scale=0.5)
        if not is_by_unit:
            tier.step(ADAM, range(5), grad_scale=0.5)
        tier.discard_grads()
    tier.wait_params(0, space.numel)
    return snapshot(tier, space)


class _Summed(Space):
    """Space whose gradients are torch's sums over the micro-steps."""

    def __init__(self, dtype: torch.dtype, count: int) -> None:
        super().__init__(dtype)
        self.count = count

    def grad(self, step: int) -> Tensor:
        return _plain_sum(_grads(Space(self.dtype), step, self.count))


def _train_on_sums(count: int, dtype: torch.dtype = BF16, **block: Any) -> dict[str, Tensor]:
    return trained(space=_Summed(dtype, count), steps=range(3), grad_scale=0.5, **block)


@pytest.fixture(params=["torch", "one gradient", "cpu_adam"])
def kernel(request: pytest.FixtureRequest) -> Any:
    """Provide None (torch updates), a kernel that takes one gradient, or one that takes several."""
    makers = {"torch": lambda: None, "one gradient": ReferenceKernel, "cpu_adam": cpu_adam}
    return makers[request.param]()


@pytest.mark.parametrize(
    ("dtype", "count"),
    [(FP32, 1), (FP32, 3), (BF16, 2), (BF16, 4), (BF16, 5), (FP16, 3), (FP16, 7)],
)
def test_the_update_is_that_of_the_sum_at_every_ratio(
    kernel: Any, dtype: torch.dtype, count: int
) -> None:
    """Units are updated together at the end, or one by one during the last micro-step."""
    expected = _train_on_sums(count, dtype, kernel=kernel)
    for ratio in RATIOS:
        for is_by_unit in (False, True):
            found = _train(count, dtype, ratio=ratio, kernel=kernel, is_by_unit=is_by_unit)
            assert_same(found, expected)


@pytest.mark.parametrize("make", [ReferenceKernel, cpu_adam])
@pytest.mark.parametrize(("state_dtype", "count"), [("int8", 3), ("bfloat16", 6), ("int8", 6)])
def test_compact_states_take_several_gradients(make: Any, state_dtype: str, count: int) -> None:
    block: dict[str, Any] = {"kernel": make(), "state_dtype": state_dtype}
    expected = _train_on_sums(count, **block)
    for ratio in RATIOS:
        assert_same(_train(count, ratio=ratio, **block), expected)


@pytest.mark.parametrize("count", [2, 6])
def test_square_sums_do_not_depend_on_the_ratio_and_show_what_is_not_finite(
    kernel: Any, count: int
) -> None:
    space = Space(BF16)
    grads = _grads(space, 0, count)
    found = []
    for ratio in RATIOS:
        tier = _tier(space, count, ratio=ratio, kernel=kernel)
        _add(tier, grads)
        found.append([tier.square_sum(a, b)().item() for a, b in SEGMENTS])
        tier.discard_grads()
        grads[0][300] = torch.inf
        _add(tier, grads)
        assert not tier.square_sum(*SEGMENTS[0])().isfinite()
        assert tier.square_sum(*SEGMENTS[1])().item() == pytest.approx(found[-1][1], rel=1e-14)
        grads[0][300] = space.grad(0)[300]
    total = _plain_sum(grads).double()
    expected = [total[a:b].square().sum().item() for a, b in SEGMENTS]
    for sums in found:
        assert sums == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("count", [1, 3, 6])
def test_sums_begin_anew_after_an_offer_a_discard_and_a_step(ratio: float, count: int) -> None:
    space = Space(BF16)
    tier = _tier(space, count, ratio=ratio)
    grads = _grads(space, 0, 11)  # more than the expected count
    _add(tier, grads)
    assert torch.equal(tier.read_grad(0, space.numel), _plain_sum(grads))
    given = torch.linspace(-1, 1, 104)
    tier.offer_grad(256, given)
    assert torch.equal(tier.read_grad(256, 360), given)
    tier.add_grad(256, grads[0][256:].clone(), is_last=True)
    assert torch.equal(tier.read_grad(256, 360), given + grads[0][256:].float())
    assert torch.equal(tier.read_grad(0, 256), _plain_sum(grads)[:256])
    _add(tier, grads[:2])
    tier.discard_grads()
    with pytest.raises(ValueError, match="no gradient was offered"):
        tier.read_grad(0, space.numel)
    for step in (1, 2):
        grads = _grads(space, step, count)
        _add(tier, grads)
        assert torch.equal(tier.read_grad(0, space.numel), _plain_sum(grads))
        # The next micro-step must not add to the gradients that this step does not use.
        tier.step(ADAM, [1, 3], grad_scale=1.0)


@pytest.mark.parametrize("count", [3, 6])
def test_copies_that_come_late_are_waited_for(count: int) -> None:
    space = Space(BF16)
    tier, _ = host_tier(space, None, streams=LateStreams(), is_staged=True)
    tier.expect_micro_steps(count)
    for step in range(2):
        grads = _grads(space, step, count)
        expected = _plain_sum(grads)
        buffer = torch.empty(space.numel, dtype=BF16)
        for micro_step, grad in enumerate(grads, start=1):
            buffer.copy_(grad)
            release = tier.add_grad(0, buffer, is_last=micro_step == count)
            assert release is not None
            release()
        square_sum = tier.square_sum(0, space.numel).result()
        assert square_sum == pytest.approx(expected.double().square().sum().item(), rel=1e-14)
        assert torch.equal(tier.read_grad(0, space.numel), expected)
        tier.discard_grads()


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_an_error_while_adding_is_raised_by_the_next_call_and_changes_nothing(
    ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room")

    space = Space(BF16)
    tier = _tier(space, 5, ratio=ratio)
    before = snapshot(tier, space)
    with monkeypatch.context() as patched:
        patched.setattr("zero_offload.transfers.mover.add_up", fail)
        for call in (
            lambda: tier.add_grad(0, space.grad(1), is_last=False),
            lambda: tier.step(ADAM, range(5), grad_scale=1.0),
        ):
            tier.add_grad(0, space.grad(0), is_last=False)
            with pytest.raises(MemoryError, match="no room"):
                call()
            tier.discard_grads()
    assert_same(snapshot(tier, space), before)
    _add(tier, _grads(space, 0, 5))
    tier.step(ADAM, range(5), grad_scale=1.0)
    assert {tier.read_scalars(i)["num_steps"] for i in range(5)} == {1}


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("count", [2, 5])
def test_a_range_without_a_gradient_is_refused(ratio: float, count: int) -> None:
    """A gradient that the device still holds from before a step or discard does not count."""
    space = Space(BF16)
    tier = _tier(space, count, ratio=ratio)

    def check(start: int, stop: int) -> None:
        for read in (tier.square_sum, tier.read_grad):
            with pytest.raises(ValueError, match="no gradient was offered"):
                read(start, stop)

    check(0, space.numel)
    tier.add_grad(0, space.grad(0)[:300].clone(), is_last=False)
    check(250, 301)
    tier.discard_grads()
    check(0, 300)
    _add(tier, _grads(space, 0, count))
    tier.step(ADAM, [0, 4], grad_scale=1.0)
    check(0, 2)
    check(350, 360)
    assert tier.square_sum(50, 60)().item() > 0  # a piece that the step did not update


@pytest.mark.parametrize("count", [5, 7])
def test_a_step_waits_for_the_sums_of_units_that_the_last_micro_step_left_out(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_up_late(*args: Any) -> None:
        time.sleep(0.05)
        add_up(*args)

    monkeypatch.setattr("zero_offload.transfers.mover.add_up", add_up_late)
    space = Space(BF16)
    tier = _tier(space, count, ratio=1.0)
    for grad in _grads(space, 0, 2):
        tier.add_grad(0, grad.clone(), is_last=False)
    tier.step(ADAM, range(5), grad_scale=1.0)
    assert_same(snapshot(tier, space), trained(space=_Summed(BF16, 2), steps=range(1)))


class _SlowSums(TorchStepper):
    """Stepper with slow square sums that records the order of square sums and updates."""

    order: ClassVar[list[str]] = []

    def square_sum(self, terms: list[Tensor]) -> float:
        time.sleep(0.05)
        self.order.append("square sum")
        return super().square_sum(terms)

    def update(self, *args: Any) -> None:
        self.order.append("update")
        super().update(*args)


@pytest.mark.parametrize("is_discarded", [False, True])
def test_a_square_sum_under_way_is_of_the_gradients_before(is_discarded: bool) -> None:
    space = Space(BF16)
    tier, _ = host_tier(space, None, torch_stepper=_SlowSums)
    tier.expect_micro_steps(2)
    tier.add_grad(0, space.grad(0), is_last=True)
    found = tier.square_sum(0, space.numel)
    if is_discarded:
        tier.discard_grads()
        tier.add_grad(0, space.grad(1), is_last=False)
    else:
        tier.offer_grad(0, space.grad(1))
    expected = space.grad(0).double().square().sum().item()
    assert found.result() == pytest.approx(expected, rel=1e-14)


def test_gradients_are_added_only_where_that_was_announced() -> None:
    space = Space()
    tier = make_tier(space)
    with pytest.raises(RuntimeError, match="call that once before"):
        tier.add_grad(0, space.grad(0), is_last=False)


def test_waits_do_not_count_as_updates() -> None:
    """`AutoTier` would underestimate the host's speed if `drain` counted waits."""
    clock = VirtualTime()

    class Timed(TorchStepper):
        def update(self, *args: Any) -> None:
            clock.work("host", "update", 1.0)
            super().update(*args)

    class Waiting(HostMover):
        def make_way(self) -> None:
            clock.worker += 10.0

        def open_spans(self, spans: Sequence[tuple[int, int]]) -> None:
            clock.worker += 100.0
            super().open_spans(spans)

    space, keys = Space(BF16), {"torch_stepper": Timed, "mover_class": Waiting}
    tier, _ = host_tier(space, None, thread=VirtualThread(clock), **keys)
    clock.worker = 0.0
    tier.offer_grad(0, space.grad(0))
    tier.step(ADAM, range(5), grad_scale=1.0)
    assert tier.drain() == len(clock.spans) == clock.worker / 111


def test_square_sums_go_before_updates() -> None:
    """The caller waits for square sums at the end of backward, when all updates are queued."""
    order = _SlowSums.order
    order.clear()
    space = Space(BF16)
    tier, _ = host_tier(space, None, torch_stepper=_SlowSums)
    tier.expect_micro_steps(2)
    for (a, b), pieces in zip(SEGMENTS, ([3, 4], [0, 1, 2]), strict=True):
        for is_last in (False, True):
            tier.add_grad(a, space.grad(0)[a:b].clone(), is_last=is_last)
        tier.square_sum(a, b)
        tier.step(ADAM, pieces, grad_scale=1.0)
    tier.wait_params(0, space.numel)
    assert order[0] == "square sum"
    assert order.count("square sum") == order.count("update") == 2
