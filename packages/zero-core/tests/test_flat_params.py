"""States of flat parameters, and what each of them permits."""

import pytest
import torch
from torch import nn

from zero_core.core import access
from zero_core.core.params import FlatParams, ShardSource
from zero_core.core.pool import BufferPool, SegmentViews, allocator
from zero_core.errors import CollectiveError
from zero_core.layout.arithmetic import Segment, Slot
from zero_core.protocols import EXACT_PARAMETERS

CPU = torch.device("cpu")
SEGMENT = Segment(
    0, 1, torch.float32, True, (Slot(0, 0, 4), Slot(1, 4, 7)), shard_numel=4, world_size=2
)


class _Source(ShardSource):
    """A shard source of rank 0 whose gathers return 0, 1, 2, ... plus 10 per version."""

    def __init__(self):
        self.span = (0, 4)
        self.gathers = []
        self.waits = 0
        self.is_ready = True
        self.shard = torch.zeros(4)
        self.full = None
        self.failure = None

    def is_updated(self):
        return self.is_ready

    def wait_update(self):
        self.waits += 1

    def gather(self, full, *, version, backward):
        self.gathers.append((version, backward))
        self.full, self._brought = full, torch.arange(8.0) + 10 * max(version, 0)
        return self

    def wait(self):
        assert self.full is not None
        if self.failure is not None:
            raise self.failure
        self.full.copy_(self._brought)

    def read(self):
        return self.shard

    def write(self, start, values):
        self.shard[start : start + values.numel()] = values

    def synchronize(self):
        self.waits += 1


def _make(*, is_kept=False, has_remote_updates=True):
    source = _Source()
    params = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(3))]
    flat = FlatParams(
        SEGMENT,
        access.ShownParams(params, SegmentViews(SEGMENT, params, CPU), ["weight", "bias"], rank=0),
        rank=0,
        device=CPU,
        source=source,
        kept=torch.zeros(8) if is_kept else None,
        pool=BufferPool(allocator(CPU), 32),
        has_remote_updates=has_remote_updates,
    )
    flat.adopt()
    return flat, source


def test_a_gather_says_its_version_and_direction():
    flat, source = _make()
    flat.gather()
    flat.release()  # gathered ahead and not needed
    flat.gather(backward=True)
    flat.release()
    flat.gather(exact=True)
    assert source.gathers == [(0, False), (0, True), (EXACT_PARAMETERS, False)]


def test_kept_values_wait_for_the_state_tier_when_no_rank_updates_a_part():
    flat, source = _make(is_kept=True, has_remote_updates=False)
    assert not flat.is_exchanged
    flat.invalidate()
    assert flat.is_current
    source.is_ready = False
    flat.invalidate()
    assert not flat.is_current
    flat.gather()
    assert (source.gathers, source.waits) == ([], 2)
    flat.wait()
    assert flat.is_current
    flat.invalidate()
    flat.refresh()
    assert flat.is_current


def test_a_copy_goes_with_its_last_holder():
    flat, _ = _make()
    copy = flat.shown.hold(1, torch.ones(3))
    assert flat.shown.hold(1, None) is copy
    assert flat.params[1].tolist() == [1.0, 1.0, 1.0]
    assert flat.has_values_of(1)
    flat.shown.drop(1)
    flat.gather()
    flat.wait()
    assert flat.params[1].tolist() == [4.0, 5.0, 6.0]  # the gathered values come first
    flat.release()
    assert flat.params[1].tolist() == [1.0, 1.0, 1.0]
    flat.shown.drop(1)
    assert access.is_refused(flat.params[1])


def test_replaced_data_is_found_and_restored():
    flat, _ = _make()
    flat.gather()
    flat.wait()
    assert flat.shown.misplaced() is None
    flat.params[1].data = torch.zeros(3)
    assert flat.shown.misplaced() == 1
    flat.shown.restore(1)
    assert flat.shown.misplaced() is None
    assert flat.params[1].tolist() == [4.0, 5.0, 6.0]


def test_a_failed_gather_leaves_no_values_behind():
    flat, source = _make()
    source.failure = CollectiveError("rank 0: all_gather of unit 0 failed")
    for _ in range(2):
        flat.gather()
        with pytest.raises(CollectiveError, match="unit 0 failed"):
            flat.wait()
        assert not flat.is_current
        assert all(map(access.is_refused, flat.params))
    source.failure = None
    flat.gather()
    flat.wait()
    assert flat.is_current
    assert torch.equal(flat.params[1], torch.arange(4.0, 7.0))


def test_a_failed_gather_that_nobody_needed_raises_and_its_buffer_is_lent_no_more():
    flat, source = _make()
    source.failure = CollectiveError("rank 0: all_gather of unit 0 failed")
    flat.gather()
    lost = source.full
    with pytest.raises(CollectiveError, match="unit 0 failed"):
        flat.release()
    assert flat.full is None
    source.failure = None
    flat.gather()
    assert lost is not None
    assert source.full is not None
    assert source.full.data_ptr() != lost.data_ptr(), "late bytes may still arrive there"
