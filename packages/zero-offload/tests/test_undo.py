"""Speculation: updating before a step is confirmed changes no bit of the results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import TIMEOUT_S, GatedAdam, ReferenceKernel
from support.tiers import (
    ADAM,
    BF16,
    Space,
    assert_same,
    group_of,
    make_tier,
    offer,
    snapshot,
    train,
)
from torch import optim

from zero_offload.errors import OffloadError
from zero_offload.steppers.memory_stepper import ALIGNMENT, UndoMemory
from zero_offload.tiers.twin import TwinTier

PIECES, NUMEL = range(5), 318


@given(st.integers(0, 9), st.lists(st.integers(1, 600), min_size=1, max_size=20))
@settings(deadline=None)
def test_records_are_apart_until_all_are_freed(num_lines: int, sizes: list[int]) -> None:
    memory, last = UndoMemory(capacity := num_lines * ALIGNMENT), 0
    for _ in range(2):
        taken = [found for size in sizes if (found := memory.take(size)) is not None]
        assert bool(taken) == any(size <= capacity for size in sizes)
        for found in taken:
            assert found.data_ptr() % ALIGNMENT == 0 == found.numel() % ALIGNMENT
        starts = [found.data_ptr() for found in taken]
        ends = [start + found.numel() for start, found in zip(starts, taken, strict=True)]
        assert starts[1:] == ends[:-1]
        assert last in (0, *starts[:1]), "the memory is reused from its start"
        last = starts[0] if starts else 0
        for _ in taken:
            memory.free()


class Pair:
    """A tier that speculates and a tier that does not, after one step each."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, kernel: Any = None, **block: Any
    ) -> None:
        self.space, self.other = Space(dtype), Space(dtype)
        self.tier, self.plain = (
            make_tier(space, kernel=each, **block)
            for space, each in (
                (self.space, kernel or ReferenceKernel()),
                (self.other, ReferenceKernel()),
            )
        )
        assert self.tier.enable_undo()
        for tier, space in ((self.tier, self.space), (self.plain, self.other)):
            train(tier, space, steps=range(1))

    def begin(self, step: int, active: Any = PIECES) -> None:
        """Offer a step's gradients to the first tier, and update there speculatively."""
        offer(self.tier, self.space, step)
        self.tier.speculate(ADAM, active, grad_scale=1.0)

    def step(self, step: int, groups: Any = ADAM, active: Any = PIECES, scale: float = 1.0) -> None:
        """Complete a step of the first tier, and run the same step in the other tier."""
        offer(self.plain, self.other, step)
        for each in (self.tier, self.plain):
            each.step(groups, active, grad_scale=scale)

    def drain(self) -> None:
        self.tier.file_traffic()  # waits for the host

    def counts(self) -> tuple[int, int]:
        """Wait for the host, and return the numbers of elements that were kept and undone."""
        self.drain()
        reports = [part.tier for part in self.tier.report() if part.tier is not None]
        return sum(r.num_kept for r in reports), sum(r.num_undone for r in reports)

    def check(self) -> None:
        assert_same(snapshot(self.tier, self.space), snapshot(self.plain, self.other))


@pytest.mark.parametrize(
    "block",
    [
        {},
        {"state_dtype": "int8"},
        {"ratio": 0.5},
        {"dtype": BF16},
        {"dtype": BF16, "state_dtype": "bfloat16"},
    ],
)
@pytest.mark.parametrize(("scale", "is_kept"), [(1.0, True), (0.25, False)])
def test_a_step_goes_on_with_what_was_begun_or_undoes_it(
    block: dict[str, Any], scale: float, is_kept: bool
) -> None:
    pair = Pair(**block)
    before = pair.space.flat_params().clone()
    pair.begin(1)
    pair.drain()
    assert torch.equal(pair.space.flat_params(), before), "no shard has new values"
    pair.step(1, scale=scale)
    pair.check()
    kept, undone = pair.counts()
    assert (kept > 0) == is_kept == (undone == 0)
    first = pair.space.numel - pair.tier.host_numel
    on_host = [stop - max(start, first) for start, stop, _ in pair.space.pieces if stop > first]
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
    pair = Pair()
    pair.begin(1)
    if is_done:
        pair.drain()
    ENDS[end](pair.tier, pair.space)
    pair.check()
    kept, undone = pair.counts()
    assert kept == 0
    assert undone == NUMEL or not is_done


def test_other_pieces_and_other_settings_are_another_step() -> None:
    pair = Pair()
    pair.begin(1)
    pair.step(1, groups=[group_of(optim.AdamW, lr=3e-2)])
    pair.begin(2)
    pair.step(2, active=[0, 3])
    pair.begin(3, [1, 2])
    pair.step(3)  # completes pieces 1 and 2, and updates all others
    pair.check()


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("gate_at", [0, 1])
def test_a_decision_that_comes_in_the_middle_leaves_the_rest_to_the_step(
    gate_at: int, scale: float
) -> None:
    kernel = GatedAdam(gate_at=3 + gate_at)  # the previous step calls the kernel three times
    pair = Pair(kernel=kernel)
    pair.begin(1)
    assert kernel.reached.wait(TIMEOUT_S)
    stepping = threading.Thread(target=lambda: pair.step(1, scale=scale))
    stepping.start()
    stepping.join(TIMEOUT_S if scale == 1.0 else 0.05)
    assert stepping.is_alive() == (scale != 1.0), "only an undo waits for the chunk under way"
    kernel.gate.set()
    stepping.join(TIMEOUT_S)
    pair.check()
    assert pair.counts()[1 if scale != 1.0 else 0] < NUMEL


def test_updates_of_torch_and_in_a_file_cannot_be_undone(tmp_path: Any) -> None:
    assert not make_tier(Space(), optim.NAdam, [group_of(optim.NAdam)]).enable_undo()
    block = {"device": "nvme", "nvme_path": str(tmp_path)}
    tier = make_tier(Space(), kernel=ReferenceKernel(), **block)
    assert not tier.enable_undo()
    with pytest.raises(RuntimeError, match="without enable_undo"):
        tier.speculate(ADAM, [0], grad_scale=1.0)


def test_a_step_that_is_refused_at_its_begin_changes_nothing() -> None:
    pair = Pair()
    with pytest.raises(ValueError, match="no gradient was offered"):
        pair.tier.speculate(ADAM, PIECES, grad_scale=1.0)
    pair.check()
    assert pair.counts() == (0, 0)


def test_an_error_of_an_update_that_was_begun_ends_the_tier() -> None:
    pair = Pair(kernel=GatedAdam(3, ArithmeticError("broken on purpose")))
    pair.begin(1)
    for call in (
        pair.drain,
        lambda: pair.tier.read_state("exp_avg", 0, 5),
        lambda: pair.tier.step(ADAM, PIECES, grad_scale=1.0),
    ):
        with pytest.raises(OffloadError, match="broken on purpose"):
            call()
