"""Parameter shards that rest off the device, and how they come to it ahead of use.

ZeRO-Infinity (Rajbhandari et al., arXiv 2104.07857), section 5.1: at stage 3 a shard is needed on
the device only while its unit is gathered. Where it rests in between, in host memory or in a file,
is the business of a `zero_core.protocols.ParamTier`.

[Note: the lane]
On an accelerator resting values arrive on a stream of their own, the *lane*, while the caller's
current stream computes the unit before.
1. The lane waits for the update of the shard (`StateTier.wait_params`, called on the lane).
2. The lane waits for the last reader of the buffer that it fills (`Lane.after_readers`).
3. The gather is launched on the lane: it waits for the fetch and for nothing else.
4. The caller's stream waits for the gather (`Work.wait`), as for any other.
5. A shard's new values overwrite it on the host after the fetches of it: an update because the
   gradient that it needs was computed from what was fetched and has reached the host; everything
   else because it is preceded by `Lane.synchronize`.
On a CPU there are no streams: a fetch is there when its ``wait`` returns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from zero_core.arena import Allocate, BufferPool
from zero_core.collectives import call_named
from zero_core.config import Config
from zero_core.layout import Layout, Segment
from zero_core.protocols import Collectives, ParamTier, Work

__all__ = ["Lane", "LocalStore", "Outlook", "Resting", "RestingShard", "resting_segments"]

_MAX_EXPECTED_UNITS = 16


def resting_segments(layout: Layout, config: Config, *, is_apart: bool) -> tuple[Segment, ...]:
    """The segments whose shards rest off the device, in the order of their use.

    Small ones stay: those of at most ``stage3_param_persistence_threshold`` elements, as far as
    ``stage3_model_persistence_threshold`` elements in all allow.

    Args:
        layout: the model's arithmetic.
        config: the resolved configuration.
        is_apart: whether shards can rest elsewhere than in the device's memory.
    """
    zero = config.zero_optimization
    if not is_apart or zero.stage < 3:
        return ()
    rest, num_kept = [], 0
    for segment in layout.segments:
        numel = sum(slot.stop - slot.start for slot in segment.slots)
        is_small = numel <= zero.stage3_param_persistence_threshold
        if is_small and num_kept + numel <= zero.stage3_model_persistence_threshold:
            num_kept += numel
        else:
            rest.append(segment)
    return tuple(rest)


@dataclass(frozen=True)
class Resting:
    """The segments whose shards rest off the device, and the tier that holds them."""

    segments: tuple[Segment, ...]
    tier: ParamTier


class Lane:
    """The queue on which resting values arrive; see [Note: the lane]. Enter it to use it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        has_streams = device.type not in ("cpu", "meta")
        self._stream = torch.Stream(device) if has_streams else None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._stream is not None:
            self._stream.__exit__(*error)

    def after_readers(self) -> Callable[[], None] | None:
        """Called where the last reader of a buffer is enqueued: what makes the lane wait for it."""
        stream = self._stream
        if stream is None:
            return None
        event = torch.accelerator.current_stream(self._device).record_event()
        return lambda: stream.wait_event(event)

    def filled_by(self, allocate: Allocate) -> Allocate:
        """``allocate`` for memory that the lane writes to and the current stream reads."""

        def act(numel: int, dtype: torch.dtype) -> Tensor:
            tensor = allocate(numel, dtype)
            wait_for_past = self.after_readers()  # the memory may have had other users
            if wait_for_past is not None:
                wait_for_past()
            return tensor

        return act

    def synchronize(self) -> None:
        """Block until everything on the lane is done."""
        if self._stream is not None:
            self._stream.synchronize()


class RestingShard:
    """This rank's shard of one segment, where it rests."""

    def __init__(
        self,
        segment: Segment,
        tier: ParamTier,
        lane: Lane,
        *,
        staging: BufferPool,
    ) -> None:
        """Prepare.

        Args:
            segment: the arithmetic.
            tier: what holds the shard.
            lane: what it arrives on.
            staging: where it arrives if it is then gathered with other ranks' shards.
        """
        self.lane = lane
        self._segment = segment
        self._tier = tier
        self._staging = staging

    def gather(
        self,
        full: Tensor,
        collectives: Collectives,
        what: Callable[[], str],
        *,
        version: int,
        backward: bool,
    ) -> Work:
        """Start to fill ``full`` with the unit's values; the lane must be entered.

        A collective that fails says ``what()`` it was; a fetch raises the tier's own error.
        """
        index = self._segment.index
        if self._segment.world_size == 1:
            return self._tier.fetch(index, full)
        # Not into this rank's slice of full: collectives that are not exact refuse that.
        staged = self._staging.acquire(self._segment.shard_numel, self._segment.dtype)
        try:
            self._tier.fetch(index, staged).wait()  # 3: the lane waits for the fetch
            work = call_named(
                lambda: collectives.all_gather(
                    full, staged, unit=index, version=version, backward=backward
                ),
                what,
            )
        except Exception:
            self._release(staged)
            raise
        return _Gather(work, lambda: self._release(staged))

    def _release(self, staged: Tensor) -> None:
        self._staging.release(staged, self.lane.after_readers())

    def read(self) -> Tensor:
        """The values: [shard_numel], on the CPU, not to be changed."""
        home = self._tier.home(self._segment.index)
        if home is None:
            home = torch.empty(self._segment.shard_numel, dtype=self._segment.dtype, device="cpu")
            self._tier.fetch(self._segment.index, home).wait()
        return home

    def write(self, start: int, values: Tensor) -> None:
        """Overwrite elements from ``start`` on, once nothing is read any more."""
        self.lane.synchronize()
        self._tier.write(self._segment.index, start, values)

    def published(self) -> Tensor:
        """Where a state tier writes new values: the shard itself, or one on the meta device."""
        home = self._tier.home(self._segment.index)
        if home is not None:
            return home
        return torch.empty(self._segment.shard_numel, dtype=self._segment.dtype, device="meta")


class _Gather:
    """A gather under way, whose staging buffer is free when it ends."""

    def __init__(self, work: Work, release: Callable[[], None]) -> None:
        self._work = work
        self._release = release

    def wait(self) -> None:
        self._work.wait()
        self._release()


class LocalStore:
    """`zero_core.protocols.ParamStore` over the shards of a tier."""

    def __init__(self, tier: ParamTier, spans: Sequence[tuple[int, int]]) -> None:
        """``spans``: start in the local flat space and segment of each shard, sorted."""
        self._tier = tier
        self._spans = list(spans)
        self._starts = [start for start, _ in spans]

    def write(self, start: int, values: Tensor) -> None:
        """See the protocol."""
        first, segment = self._spans[bisect_right(self._starts, start) - 1]
        self._tier.write(segment, start - first, values)


class Outlook:
    """Tells a tier what is going to be fetched, in the order of the module tree."""

    def __init__(self, tier: ParamTier, segments_of: Sequence[Sequence[int]]) -> None:
        """``segments_of``: the resting segments of each unit, the root first."""
        self._tier = tier
        self._segments_of = [list(segments) for segments in segments_of]

    def announce(self, unit: int, *, backward: bool) -> None:
        """``unit`` is in use: say what comes after it."""
        last = len(self._segments_of) - 1
        back_from = unit if backward else last
        to_come = range(0) if backward else range(unit + 1, last + 1)
        has_backward = backward or torch.is_grad_enabled()
        # Backward begins with the last unit, which is still gathered then; the root is, too.
        returning = range(back_from - 1, 0, -1) if has_backward else range(0)
        units = islice(chain(to_come, returning), _MAX_EXPECTED_UNITS)
        self._tier.expect([s for u in units for s in self._segments_of[u]])
