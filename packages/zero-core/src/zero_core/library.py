"""Collectives by the library of the accelerator (NCCL, say).

All-gather and all-to-all are the library's; a reduction is an all-to-all and a local sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zero_core.collectives import all_gather_single, sum_in_rank_order
from zero_core.comm_report import GRADIENTS, PARAMETERS, Meter
from zero_core.direct import DirectCollectives, check_all_to_all, check_subgroup
from zero_core.lanes import Lanes
from zero_core.protocols import EXACT_GRADIENTS, NativeCollectives, Work
from zero_core.traffic import Links

__all__ = ["LibraryCollectives"]


class LibraryCollectives:
    """`zero_core.protocols.NativeCollectives` of an accelerator; see there for the contract."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        rank: int,
        links: Links,
        lanes: Lanes,
        meter: Meter | None = None,
    ) -> None:
        """Every rank of ``group`` must call it.

        Args:
            group: None means the default group.
            rank: this rank within the group.
            links: how many ranks there are, and where.
            lanes: where jobs run.
            meter: counts what is sent.
        """
        self.rank = rank
        self.world_size = links.world_size
        self._group = group
        self._members = dist.get_process_group_ranks(group)
        # Where a block's parameter is unused on one rank only, reductions and gathers interleave
        # differently there: each lane has a group of its own.
        self._reduce_group = _new_group(self._members)
        self._lanes = lanes
        self._links = links
        self._meter = Meter() if meter is None else meter
        self._scratch: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def subgroup(self, ranks: Sequence[int]) -> NativeCollectives:
        """See `zero_core.protocols.NativeCollectives.subgroup`."""
        check_subgroup(ranks, self.rank, self.world_size)
        if len(ranks) == 1:  # nothing to send
            return DirectCollectives(
                None, rank=0, world_size=1, lanes=self._lanes, meter=self._meter
            )
        return LibraryCollectives(
            _new_group([self._members[r] for r in ranks]),
            rank=list(ranks).index(self.rank),
            links=self._links.among(ranks),
            lanes=self._lanes,
            meter=self._meter,
        )

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `zero_core.protocols.NativeCollectives.zeros`."""
        with torch.inference_mode(False):  # it serves training too
            return torch.zeros(numel, dtype=dtype, device=device)

    def launch(self, job: Callable[[], None], *, is_reduction: bool) -> Work:
        """See `zero_core.protocols.NativeCollectives.launch`."""
        return self._lanes.launch(job, is_reduction=is_reduction)

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        """See `zero_core.protocols.Collectives.all_gather`."""
        content = GRADIENTS if version == EXACT_GRADIENTS else PARAMETERS
        self._meter.add("all_gather", content, self._links.gather(shard.nbytes))
        own = out.view(self.world_size, -1)[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        work = all_gather_single(out, shard, group=self._group, async_op=True)
        return cast(Work, work)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        """See `zero_core.protocols.Collectives.reduce_scatter`."""
        sent = self._links.direct(full.nbytes // self.world_size)
        self._meter.add("reduce_scatter", GRADIENTS, sent)
        free = self._scratch.setdefault((full.numel(), full.dtype), [])
        received = free.pop() if free else torch.empty_like(full)
        parts = list(received.view(self.world_size, -1))
        work = self._swap(received, full)

        def finish() -> None:
            sum_in_rank_order(out, parts)
            free.append(received)

        return _Reduction(work, finish, parts)

    def all_to_all(self, out: Tensor, parts: Tensor, *, unit: int) -> Work:
        """See `zero_core.protocols.NativeCollectives.all_to_all`."""
        check_all_to_all(out, parts, self.world_size)
        sent = self._links.direct(parts.nbytes // self.world_size)
        self._meter.add("all_to_all", GRADIENTS, sent)
        return self._swap(out, parts)

    def _swap(self, out: Tensor, parts: Tensor) -> Work:
        work: Any = dist.all_to_all_single(out, parts, group=self._reduce_group, async_op=True)
        return cast(Work, work)


class _Reduction:
    """An all-to-all under way, and the sum that follows it."""

    def __init__(self, work: Work, finish: Callable[[], None], parts: Sequence[Tensor]) -> None:
        self.contributions = parts
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._work.wait()
            finish()


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group of global ``ranks``, in that order; only they call it."""
    order: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
    group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True, **order)
    return group
