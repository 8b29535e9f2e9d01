"""Split points that move between steps without changing a bit."""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from support.kernels import GatedAdam, ReferenceAdam
from support.tiers import (
    ADAM,
    BF16,
    FP32,
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

from zero_offload import OffloadError
from zero_offload.flat.geometry import Geometry, Intervals
from zero_offload.protocols import StateTier
from zero_offload.tiers.factory import OffloadTiers
from zero_offload.tiers.flat_tier import HostTier
from zero_offload.tiers.twin import TwinTier

SPLITS = (180, 41, 0, 360, 255, 1, 359)
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
    monkeypatch.setattr("zero_offload.tiers.shares.BLOCK_NUMEL", 50)


@pytest.mark.parametrize(("dtype", "end"), [(FP32, "last"), (BF16, "first")])
@pytest.mark.parametrize(("cls", "settings", "has_kernel"), ROUTES)
def test_a_moving_split_point_changes_no_bit(
    cls: Any, settings: dict[str, Any], has_kernel: bool, dtype: torch.dtype, end: str
) -> None:
    """Pieces without any update move too: the first steps skip the second piece."""
    groups = [group_of(cls, **settings)]
    results = []
    for moves in (False, True):
        space = Space(dtype)
        kernel = ReferenceAdam() if has_kernel else None
        tier = make_tier(space, cls, groups, kernel=kernel, host_share=end)
        for step, split in enumerate(SPLITS):
            active = [0, 2, 3, 4] if step < 3 else range(5)
            train(tier, space, groups, range(step, step + 1), active=active, grad_scale=0.5)
            if moves:
                before = snapshot(tier, space)
                tier.resplit(split)
                assert tier.host_numel == split
                assert_same(snapshot(tier, space), before)
        train(tier, space, groups, range(7, 9))
        results.append(snapshot(tier, space))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("end", ["last", "first"])
def test_the_host_updates_the_elements_of_its_end_and_no_more(end: str) -> None:
    space = Space()
    tier = make_tier(space, kernel=ReferenceAdam(), host_share=end)
    for split in (100, 300, 0):
        tier.resplit(split)
        span = (360 - split, 360) if end == "last" else (0, split)
        held = [part.spans for part in tier.report() if part.is_host]
        assert held == ([(span,)] if split else [])
        before = tier.bytes_d2h
        train(tier, space, steps=range(1))
        assert tier.bytes_d2h - before == 4 * split


def test_a_resplit_waits_for_the_step_under_way() -> None:
    space, kernel = Space(), GatedAdam()
    tier = make_tier(space, kernel=kernel)
    offer(tier, space, 0)
    tier.step(ADAM, range(5), grad_scale=1.0)
    threading.Timer(0.1, kernel.gate.set).start()
    tier.resplit(180)
    assert_same(snapshot(tier, space), trained(steps=range(1), kernel=ReferenceAdam()))


def test_offered_gradients_forbid_a_resplit() -> None:
    space = Space()
    groups = [group_of(optim.SGD, lr=0.1)]
    tier = make_tier(space, optim.SGD, groups, ratio=0.5)
    offer(tier, space, 0)
    with pytest.raises(RuntimeError, match="between offer_grad and step"):
        tier.resplit(3)
    tier.discard_grads()
    tier.resplit(3)
    train(tier, space, groups, range(1))
    tier.resplit(4)
    with pytest.raises(ValueError, match="not within the flat space"):
        tier.resplit(361)


def test_settings_switched_on_since_construction_are_kept() -> None:
    """Nesterov momentum is enabled after construction. Tiers made by a resplit must use it."""
    results = []
    for moves in (False, True):
        space = Space()
        groups = [group_of(optim.SGD, lr=0.1, momentum=0.5)]
        tier = make_tier(space, optim.SGD, groups)
        train(tier, space, groups, range(2))
        groups[0] = {**groups[0], "momentum": 0.9, "nesterov": True, "lr": 0.3}
        train(tier, space, groups, range(2, 4))
        if moves:
            tier.resplit(100)
        train(tier, space, groups, range(4, 6))
        results.append(snapshot(tier, space))
    assert_same(results[1], results[0])


class WatchedTiers:
    """Factory that records whether an old device tier is still alive when it creates one.

    It raises ``error`` when it creates the host's tier (OSError) or the device's (out of memory).
    """

    def __init__(self, tiers: OffloadTiers) -> None:
        self.tiers = tiers
        self.end, self.alignment = tiers.end, tiers.alignment
        self.error: Exception | None = None
        self.devices: list[weakref.ref[StateTier]] = []
        self.alive: list[bool] = []

    def make_host(self, part: Geometry, share: Intervals, groups: Any) -> HostTier:
        if isinstance(self.error, OSError):
            raise self.error
        return self.tiers.make_host(part, share, groups)

    def make_device(self, part: Geometry, share: Intervals, groups: Any) -> StateTier:
        if isinstance(self.error, torch.OutOfMemoryError):
            raise self.error
        gc.collect()
        self.alive.append(any(device() is not None for device in self.devices))
        made = self.tiers.make_device(part, share, groups)
        self.devices.append(weakref.ref(made))
        return made


def _watched(space: Space, split: int) -> tuple[TwinTier, WatchedTiers]:
    geometry = space.geometry()
    watched = WatchedTiers(offload_tiers(geometry, ReferenceAdam()))
    tier = TwinTier(geometry, ADAM, Intervals([(space.numel - split, space.numel)]), watched)
    tier.write_state("master_weight", 0, space.initial)
    return tier, watched


def test_the_old_tiers_are_gone_before_the_device_has_a_new_one() -> None:
    """Device memory may not have room for two tiers."""
    space = Space()
    tier, watched = _watched(space, 180)
    train(tier, space, steps=range(2))
    for split in (250, 100):
        tier.resplit(split)
    assert watched.alive == [False, False, False]


def test_state_lost_on_the_way_is_never_read_as_zeros() -> None:
    space = Space()
    tier, watched = _watched(space, 180)
    train(tier, space, steps=range(2))
    watched.error = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError):
        tier.resplit(100)
    for use in (
        lambda: tier.read_state("master_weight", 0, 360),
        lambda: tier.read_scalars(0),
        lambda: tier.wait_params(0, 360),
        lambda: offer(tier, space, 2),
    ):
        with pytest.raises(OffloadError, match="load a checkpoint into a new tier"):
            use()


def test_a_share_chosen_by_name_is_not_split() -> None:
    with pytest.raises(ValueError, match="chosen by name"):
        make_tier(Space(), names="abcde", parameters=["b"]).resplit(3)


def test_a_resplit_without_room_for_the_new_share_leaves_the_old_one() -> None:
    space = Space()
    tier, watched = _watched(space, 108)
    train(tier, space, steps=range(2))
    before = snapshot(tier, space)
    watched.error = OSError(errno.ENOSPC, "no room")
    with pytest.raises(OSError, match="no room"):
        tier.resplit(300)
    assert_same(snapshot(tier, space), before)
    watched.error = None
    tier.resplit(300)
    train(tier, space, steps=range(2, 4))
    assert_same(snapshot(tier, space), trained(kernel=ReferenceAdam()))
