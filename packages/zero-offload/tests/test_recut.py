"""The cut moves between steps, and not a bit changes."""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from support import (
    CPU,
    ReferenceAdam,
    Space,
    assert_same,
    group_of,
    make_tier,
    offer,
    snapshot,
    train,
)
from torch import optim

from zero_offload import OffloadError, moving
from zero_offload.tier import create_tier, make_device_tier

CUTS = (180, 41, 0, 360, 255, 1, 359)
ROUTES = [
    pytest.param(optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}, True, id="kernel"),
    pytest.param(optim.AdamW, {"lr": 1e-2}, False, id="adamw"),
    pytest.param(optim.NAdam, {"lr": 1e-2}, False, id="nadam"),
    pytest.param(optim.ASGD, {"t0": 2}, False, id="asgd"),
    pytest.param(optim.Adagrad, {"initial_accumulator_value": 0.1}, False, id="adagrad"),
    pytest.param(optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}, False, id="sgd"),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """State moves in several blocks."""
    monkeypatch.setattr(moving, "BLOCK_NUMEL", 50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cls", "settings", "has_kernel"), ROUTES)
def test_a_moving_cut_changes_no_bit(
    cls: Any, settings: dict[str, Any], has_kernel: bool, dtype: torch.dtype
) -> None:
    """Pieces that were never updated move too: the second is left out of the first steps."""
    groups = [group_of(cls, **settings)]
    results = []
    for moves in (False, True):
        space = Space(dtype=dtype)
        kernel = ReferenceAdam() if has_kernel else None
        tier = make_tier(space, cls, groups, ratio=1.0, kernel=kernel)
        for step, cut in enumerate(CUTS):
            active = [0, 2, 3, 4] if step < 3 else range(5)
            train(tier, space, groups, range(step, step + 1), active=active, grad_scale=0.5)
            if moves:
                before = snapshot(tier, space)
                tier.recut(cut)
                assert tier.cut == cut
                assert_same(snapshot(tier, space), before)
        train(tier, space, groups, range(7, 9))
        results.append(snapshot(tier, space))
    assert_same(results[1], results[0])


def test_the_host_updates_what_is_below_the_cut_and_no_more() -> None:
    space, kernel = Space(), ReferenceAdam()
    groups = [group_of(optim.AdamW, lr=1e-2)]
    tier = make_tier(space, optim.AdamW, groups, kernel=kernel)
    for cut in (100, 300, 0):
        tier.recut(cut)
        before = tier.bytes_d2h
        train(tier, space, groups, range(1))
        assert tier.bytes_d2h - before == 4 * cut


def test_a_recut_waits_for_the_step_under_way() -> None:
    gate = threading.Event()

    class Gated(ReferenceAdam):
        def adam_step(self, *args: Any, **kwargs: Any) -> None:
            assert gate.wait(20)
            super().adam_step(*args, **kwargs)

    space, same = Space(), Space()
    groups = [group_of(optim.AdamW, lr=1e-2)]
    tier = make_tier(space, optim.AdamW, groups, kernel=Gated())
    expected = make_tier(same, optim.AdamW, groups, kernel=ReferenceAdam())
    train(expected, same, groups, range(1))
    offer(tier, space, 0)
    tier.step(groups, range(5), grad_scale=1.0)
    threading.Timer(0.1, gate.set).start()
    tier.recut(180)
    assert_same(snapshot(tier, space), snapshot(expected, same))


def test_offered_gradients_forbid_a_recut() -> None:
    space = Space()
    groups = [group_of(optim.SGD, lr=0.1)]
    tier = make_tier(space, optim.SGD, groups, ratio=0.5)
    offer(tier, space, 0)
    with pytest.raises(RuntimeError, match="between offer_grad and step"):
        tier.recut(3)
    tier.discard_grads()
    tier.recut(3)
    train(tier, space, groups, range(1))
    tier.recut(4)
    with pytest.raises(ValueError, match="not within the flat space"):
        tier.recut(361)


def test_settings_switched_on_since_construction_are_kept() -> None:
    """Momentum from 0 to 0.9: the tiers that a recut makes must know its state."""
    results = []
    for moves in (False, True):
        space = Space()
        groups = [group_of(optim.SGD, lr=0.1, momentum=0.5)]
        tier = make_tier(space, optim.SGD, groups)
        train(tier, space, groups, range(2))
        groups[0] = {**groups[0], "momentum": 0.9, "nesterov": True, "lr": 0.3}
        train(tier, space, groups, range(2, 4))
        if moves:
            tier.recut(100)
        train(tier, space, groups, range(4, 6))
        results.append(snapshot(tier, space))
    assert_same(results[1], results[0])


def test_the_old_tiers_are_gone_before_the_device_has_a_new_one() -> None:
    """Their memory is the device's: two at once might not fit."""
    space = Space()
    groups = [group_of(optim.AdamW, lr=1e-2)]
    tier = make_tier(space, optim.AdamW, groups, ratio=0.5, kernel=ReferenceAdam())
    train(tier, space, groups, range(2))
    old = weakref.ref(tier._parts[1].tier)
    make = tier._make_device
    alive: list[bool] = []

    def watched(*args: Any) -> Any:
        gc.collect()
        alive.append(old() is not None)
        return make(*args)

    tier._make_device = watched
    for cut in (250, 100):
        tier.recut(cut)
        old = weakref.ref(tier._parts[1].tier)
    assert alive == [False, False]


def test_state_lost_on_the_way_is_never_read_as_zeros() -> None:
    space = Space()
    groups = [group_of(optim.AdamW, lr=1e-2)]
    tier = make_tier(space, optim.AdamW, groups, ratio=0.5, kernel=ReferenceAdam())
    train(tier, space, groups, range(2))

    def fail(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    tier._make_device = fail
    with pytest.raises(torch.OutOfMemoryError):
        tier.recut(100)
    for use in (
        lambda: tier.read_state("master_weight", 0, 360),
        lambda: tier.read_scalars(0),
        lambda: tier.wait_params(0, 360),
        lambda: offer(tier, space, 2),
    ):
        with pytest.raises(OffloadError, match="load a checkpoint into a new tier"):
            use()


def test_a_share_chosen_by_name_is_not_cut() -> None:
    space = Space()
    tier = create_tier(
        numel=space.numel,
        pieces=space.pieces,
        params=space.params,
        device=CPU,
        optimizer_class=optim.SGD,
        groups=[group_of(optim.SGD)],
        config={"offload_optimizer": {"parameters": ["b"]}},
        adam_kernel=None,
        device_tier=make_device_tier,
        names="abcde",
    )
    with pytest.raises(ValueError, match="chosen by name"):
        tier.recut(3)


def test_a_recut_without_room_for_the_new_share_leaves_the_old_one() -> None:
    space, groups = Space(), [group_of(optim.AdamW, lr=1e-2)]
    tier = make_tier(space, optim.AdamW, groups, ratio=0.3, kernel=ReferenceAdam())
    train(tier, space, groups, range(2))
    before = snapshot(tier, space)
    make_host = tier._make_host

    def refuse(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "no room")

    tier._make_host = refuse
    with pytest.raises(OSError, match="no room"):
        tier.recut(300)
    assert_same(snapshot(tier, space), before)
    tier._make_host = make_host
    tier.recut(300)
    train(tier, space, groups, range(2, 4))
    plain = Space()
    other = make_tier(plain, optim.AdamW, groups, ratio=0.3, kernel=ReferenceAdam())
    train(other, plain, groups, range(4))
    assert torch.equal(space.flat_params(), plain.flat_params())
