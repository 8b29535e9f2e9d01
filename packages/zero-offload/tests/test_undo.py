"""Steps that begin before they are decided, with the bits of those that do not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import ReferenceKernel
from support.tiers import Space, assert_same, group_of, make_tier, offer, snapshot
from torch import optim

from zero_offload.errors import OffloadError
from zero_offload.memory.ring import ALIGNMENT, HostRing, RingSpan
from zero_offload.tiers.twin import TwinTier

GROUPS = [group_of(optim.AdamW, lr=1e-2)]
PIECES = range(5)
TIMEOUT_S = 120.0


@given(
    st.integers(0, 20).map(lambda lines: lines * ALIGNMENT),
    st.lists(st.one_of(st.integers(1, 600), st.integers(-5, -1)), max_size=60),
)
@settings(deadline=None)
def test_spans_of_a_ring_lie_in_it_and_apart(capacity: int, calls: list[int]) -> None:
    """A negative number frees the span so many places from the end."""
    ring = HostRing(capacity)
    held: list[RingSpan] = []
    for call in calls:
        if call < 0:
            if len(held) >= -call:
                ring.free(held.pop(call))
            continue
        span = ring.take(call)
        if span is None:
            assert held or call > capacity - ALIGNMENT, "an empty ring has room for what fits"
            continue
        assert call <= span.memory.numel() < call + ALIGNMENT
        assert span.memory.data_ptr() % ALIGNMENT == 0
        assert 0 <= span.start <= span.start + span.memory.numel() <= capacity
        for other in held:
            ends = span.start + span.memory.numel(), other.start + other.memory.numel()
            assert ends[0] <= other.start or ends[1] <= span.start
        held.append(span)


def begin(tier: TwinTier, space: Space, step: int, active: Any = PIECES) -> None:
    """Offer the gradients of a step, and begin it."""
    offer(tier, space, step)
    tier.speculate(GROUPS, active, grad_scale=1.0)


def drain(tier: TwinTier) -> None:
    for part in tier.parts:
        part.drain()


def counts(tier: TwinTier) -> tuple[int, int]:
    """Return the elements that were kept and undone, once the host has done so."""
    drain(tier)
    reports = [part.tier for part in tier.report() if part.tier is not None]
    return sum(r.num_kept for r in reports), sum(r.num_undone for r in reports)


def _tiers(
    dtype: torch.dtype = torch.float32, **block: Any
) -> tuple[tuple[Space, TwinTier], tuple[Space, TwinTier]]:
    """Return a tier that speculates, after a step, and a plain one."""
    made = []
    for _ in range(2):
        space = Space(dtype=dtype)
        tier = make_tier(space, optim.AdamW, GROUPS, kernel=ReferenceKernel(), **block)
        made.append((space, tier))
    assert made[0][1].enable_undo()
    for space, tier in made:
        offer(tier, space, 0)
        tier.step(GROUPS, PIECES, grad_scale=1.0)
        tier.wait_params(0, space.numel)
    return made[0], made[1]


NUMEL = 318
BLOCKS: list[dict[str, Any]] = [
    {},
    {"state_dtype": "int8"},
    {"ratio": 0.5},
    {"dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "state_dtype": "bfloat16"},
]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("scale", "is_kept"), [(1.0, True), (0.25, False)])
def test_a_step_goes_on_with_what_was_begun_or_undoes_it(
    block: dict[str, Any], scale: float, is_kept: bool
) -> None:
    (space, tier), (other, plain) = _tiers(**block)
    before = space.flat_params().clone()
    begin(tier, space, 1)
    drain(tier)
    assert torch.equal(space.flat_params(), before), "no shard has new values"
    offer(plain, other, 1)
    for each in (tier, plain):
        each.step(GROUPS, PIECES, grad_scale=scale)
    assert_same(snapshot(tier, space), snapshot(plain, other))
    assert torch.equal(space.flat_params(), other.flat_params())
    kept, undone = counts(tier)
    assert (kept > 0) == is_kept == (undone == 0)
    first = space.numel - tier.host_numel
    on_host = [stop - max(start, first) for start, stop, _ in space.pieces if stop > first]
    assert max(kept, undone) == sum(on_host)


ENDS: dict[str, Callable[[TwinTier, Space], object]] = {
    "dropped": lambda tier, space: tier.discard_grads(),
    "offered again": lambda tier, space: tier.offer_grad(0, space.grad(2)[:256]),
    "state read": lambda tier, space: tier.read_state("exp_avg", 0, 5),
    "scalars read": lambda tier, space: tier.read_scalars(0),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("is_done", [True, False])
def test_whatever_else_follows_finds_the_state_of_before(end: str, is_done: bool) -> None:
    (space, tier), (other, plain) = _tiers()
    begin(tier, space, 1)
    if is_done:
        drain(tier)
    ENDS[end](tier, space)
    assert_same(snapshot(tier, space), snapshot(plain, other))
    kept, undone = counts(tier)
    assert kept == 0
    assert undone == NUMEL or not is_done


def test_other_pieces_and_other_settings_are_another_step() -> None:
    (space, tier), (other, plain) = _tiers()
    rates = [group_of(optim.AdamW, lr=3e-2)]
    begin(tier, space, 1)
    offer(plain, other, 1)
    for each in (tier, plain):
        each.step(rates, PIECES, grad_scale=1.0)
    begin(tier, space, 2)
    offer(plain, other, 2)
    for each in (tier, plain):
        each.step(GROUPS, [0, 3], grad_scale=1.0)
    begin(tier, space, 3, [1, 2])
    offer(plain, other, 3)
    for each in (tier, plain):  # these two and more
        each.step(GROUPS, PIECES, grad_scale=1.0)
    assert_same(snapshot(tier, space), snapshot(plain, other))
    assert torch.equal(space.flat_params(), other.flat_params())


class GatedKernel(ReferenceKernel):
    """A kernel that waits in its ``gate_at``-th call from `arm` on."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_at = -1
        self.gate, self.reached = threading.Event(), threading.Event()

    def arm(self, gate_at: int) -> None:
        self.gate_at = len(self.calls) + gate_at

    def adam_step(self, *args: Any, **kwargs: Any) -> None:
        if len(self.calls) == self.gate_at:
            self.reached.set()
            assert self.gate.wait(TIMEOUT_S)
        super().adam_step(*args, **kwargs)


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("gate_at", [0, 1])
def test_a_decision_that_comes_in_the_middle_leaves_the_rest_to_the_step(
    gate_at: int, scale: float
) -> None:
    space, other = Space(), Space()
    kernel = GatedKernel()
    tier = make_tier(space, optim.AdamW, GROUPS, kernel=kernel)
    plain = make_tier(other, optim.AdamW, GROUPS, kernel=ReferenceKernel())
    assert tier.enable_undo()
    kernel.arm(gate_at)
    begin(tier, space, 0)
    assert kernel.reached.wait(TIMEOUT_S)
    stepping = threading.Thread(target=lambda: tier.step(GROUPS, PIECES, grad_scale=scale))
    stepping.start()
    stepping.join(TIMEOUT_S if scale == 1.0 else 0.05)
    assert stepping.is_alive() == (scale != 1.0), "only an undo waits for the chunk under way"
    kernel.gate.set()
    stepping.join(TIMEOUT_S)
    offer(plain, other, 0)
    plain.step(GROUPS, PIECES, grad_scale=scale)
    assert_same(snapshot(tier, space), snapshot(plain, other))
    assert counts(tier)[1 if scale != 1.0 else 0] < NUMEL


def test_without_room_nothing_is_begun() -> None:
    (space, tier), (other, plain) = _tiers(undo_buffer_size=64)
    assert tier.undo_bytes == 64
    begin(tier, space, 1)
    offer(plain, other, 1)
    for each in (tier, plain):
        each.step(GROUPS, PIECES, grad_scale=1.0)
    assert_same(snapshot(tier, space), snapshot(plain, other))
    assert counts(tier) == (0, 0)


def test_updates_of_torch_and_in_a_file_cannot_be_undone(tmp_path: Any) -> None:
    assert not make_tier(Space(), optim.NAdam, [group_of(optim.NAdam)]).enable_undo()
    block = {"device": "nvme", "nvme_path": str(tmp_path)}
    tier = make_tier(Space(), optim.AdamW, GROUPS, kernel=ReferenceKernel(), **block)
    assert not tier.enable_undo()
    with pytest.raises(RuntimeError, match="without enable_undo"):
        tier.speculate(GROUPS, [0], grad_scale=1.0)


def test_a_step_that_is_refused_at_its_begin_changes_nothing() -> None:
    (space, tier), (other, plain) = _tiers()
    with pytest.raises(ValueError, match="no gradient was offered"):
        tier.speculate(GROUPS, PIECES, grad_scale=1.0)
    assert_same(snapshot(tier, space), snapshot(plain, other))
    assert counts(tier) == (0, 0)


class FailingKernel(ReferenceKernel):
    def adam_step(self, *args: Any, **kwargs: Any) -> None:
        raise ArithmeticError("broken on purpose")


def test_an_error_of_an_update_that_was_begun_ends_the_tier() -> None:
    space = Space()
    tier = make_tier(space, optim.AdamW, GROUPS, kernel=FailingKernel())
    assert tier.enable_undo()
    begin(tier, space, 0)
    with pytest.raises(OffloadError, match="broken on purpose"):
        drain(tier)
    with pytest.raises(OffloadError, match="broken on purpose"):
        tier.read_state("exp_avg", 0, 5)
    with pytest.raises(OffloadError, match="broken on purpose"):
        tier.step(GROUPS, PIECES, grad_scale=1.0)
