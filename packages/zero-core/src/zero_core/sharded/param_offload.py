"""Offloaded parameter shards, and their copies to the device ahead of use.

ZeRO-Infinity (Rajbhandari et al., arXiv 2104.07857), section 5.1: at stage 3 the device needs a
shard only while its unit is gathered. A `zero_core.protocols.ParamTier` holds the shard in host
memory or in a file.

[Note: the copy stream]
On an accelerator a separate stream, the *copy stream*, copies offloaded values to the device, while
the caller's current stream computes the previous unit.
1. The copy stream waits for the update of the shard (`StateTier.wait_params`, called on it).
2. It waits for the last reader of the buffer that it fills (`CopyStream.after_readers`).
3. The gather is launched on the copy stream, and waits only for the copy (the *fetch*).
4. The caller's stream waits for the gather (`Work.wait`), as for any other gather.
5. A shard on the host is overwritten only after its fetches have ended. An update needs the
   gradient that was computed from the fetched values, so it follows the fetch. All other writes
   follow a call of `CopyStream.synchronize`.
On a CPU there are no streams: a fetch has ended when its ``wait`` returns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice, takewhile

import torch
from torch import Tensor

from zero_core.comm.communicator import Communicator
from zero_core.config import Config
from zero_core.core.params import FlatParams, Shard
from zero_core.core.pool import BufferPool, CopyStream
from zero_core.layout.arithmetic import Layout, Segment
from zero_core.protocols import ParamTier, StateTier, Work

_MAX_EXPECTED = 16


def offloaded_segments(layout: Layout, config: Config, *, is_apart: bool) -> tuple[Segment, ...]:
    """Return the segments whose shards are offloaded, in the order of their use.

    Small segments are not offloaded: those of at most ``stage3_param_persistence_threshold``
    elements, up to ``stage3_model_persistence_threshold`` elements in all. ``is_apart``: whether
    there is memory for offloaded shards. If not, or below stage 3, returns none.
    """
    zero = config.zero_optimization
    if not is_apart or zero.stage < 3:
        return ()
    offloaded, num_kept = [], 0
    for segment in layout.segments:
        numel = sum(slot.stop - slot.start for slot in segment.slots)
        is_small = numel <= zero.stage3_param_persistence_threshold
        if is_small and num_kept + numel <= zero.stage3_model_persistence_threshold:
            num_kept += numel
        else:
            offloaded.append(segment)
    return tuple(offloaded)


class OffloadedShard(Shard):
    """This rank's shard of one segment, held by a `ParamTier`."""

    def __init__(
        self,
        segment: Segment,
        param_tier: ParamTier,
        stream: CopyStream,
        staging: BufferPool,
        communicator: Communicator,
        tier: StateTier | None,
        span: tuple[int, int] | None,
    ) -> None:
        """``stream`` copies the shard into a buffer of ``staging``, which is then gathered."""
        super().__init__(segment, None, communicator, tier, span)
        self._param_tier = param_tier
        self._stream = stream
        self._staging = staging

    def gather(
        self, full: Tensor, *, version: int, backward: bool, is_beside: bool = False
    ) -> Work:
        with self._stream:
            self.wait_update(is_beside=is_beside)
            index = self._segment.index
            if self._segment.world_size == 1:
                return self._param_tier.fetch(index, full)
            # Do not fetch into this rank's slice of ``full``: quantizing collectives reject that.
            staged = self._staging.acquire(self._segment.shard_numel, self._segment.dtype, index)
            try:
                self._param_tier.fetch(index, staged).wait()  # step 3 of [Note: the copy stream]
                work = self._communicator.all_gather(
                    full, staged, index, version=version, backward=backward
                )
            except Exception:
                self._staging.release(staged)
                raise
            return _StagedGather(work, self._staging, staged)

    def read(self) -> Tensor:
        with self._stream:
            self.wait_update()
        self._stream.synchronize()
        index = self._segment.index
        home = self._param_tier.home(index)
        if home is None:
            home = torch.empty(self._segment.shard_numel, dtype=self._segment.dtype, device="cpu")
            self._param_tier.fetch(index, home).wait()
        return home

    def write(self, start: int, values: Tensor) -> None:
        self._stream.synchronize()
        self._param_tier.write(self._segment.index, start, values)

    def synchronize(self) -> None:
        self._stream.synchronize()


@dataclass(eq=False)
class _StagedGather:
    """A pending gather. `wait` releases its staging buffer."""

    work: Work
    staging: BufferPool
    staged: Tensor

    def wait(self) -> None:
        self.work.wait()  # after a failure peers may still read the buffer, so it is not released
        self.staging.release(self.staged)


class LocalStore:
    """Implementation of `zero_core.protocols.ParamStore` for the shards of a tier."""

    def __init__(self, tier: ParamTier, spans: Sequence[tuple[int, int]]) -> None:
        """``spans``: sorted pairs of start in the local flat space, and segment index."""
        self._tier = tier
        self._spans = list(spans)
        self._starts = [start for start, _ in spans]

    def write(self, start: int, values: Tensor) -> None:
        first, segment = self._spans[bisect_right(self._starts, start) - 1]
        self._tier.write(segment, start - first, values)


class PrefetchHints:
    """Announcements of upcoming fetches to a parameter tier."""

    def __init__(
        self, tier: ParamTier, params_of: Sequence[Sequence[FlatParams]], last_block: int
    ) -> None:
        """``params_of``: the offloaded flat parameters of each unit."""
        self._tier = tier
        self._last_block = last_block
        self._params_of = [list(params) for params in params_of]

    def announce(self, unit: int, *, backward: bool) -> None:
        """Announce up to `_MAX_EXPECTED` shards to be fetched next, while ``unit`` is in use.

        Shards that are already gathered are announced only if backward fetches them again. The
        announcement ends before the first shard with a pending update, because the tier would read
        old values.
        """
        last = len(self._params_of) - 1
        back_from = unit if backward else self._last_block
        to_come = range(0) if backward else range(unit + 1, last + 1)
        has_backward = backward or torch.is_grad_enabled()
        # Backward begins with the last block, which is still gathered, like root and tail.
        returning = range(back_from - 1, 0, -1) if has_backward else range(0)
        ahead = (p for u in to_come for p in self._params_of[u] if not p.is_gather_launched)
        again = (p for u in returning for p in self._params_of[u])
        found = takewhile(lambda p: p.source.is_updated(), chain(ahead, again))
        self._tier.expect([p.segment.index for p in islice(found, _MAX_EXPECTED)])
