"""Functions of torch.distributed whose names differ between releases, from torch 2.10 on.

torch 2.13 renamed ``all_gather_into_tensor`` to ``all_gather_single`` and ``reduce_scatter_tensor``
to ``reduce_scatter_single``. The old names may warn and are used only if the new ones are missing.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def all_gather_single(
    out: Tensor, shard: Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False
) -> dist.Work | None:
    """Gather equal, contiguous shards into ``out`` in rank order."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(out, shard, group=group, async_op=async_op)
    return work


def count_groups() -> int:
    """Return the number of process groups that include this rank, with the default group."""
    return len(dist.distributed_c10d._world.pg_names)


def reduce_scatter_single(
    out: Tensor, full: Tensor, op: Any, group: dist.ProcessGroup | None, *, async_op: bool = False
) -> dist.Work | None:
    """Reduce this rank's slice of every rank's ``full`` into ``out``."""
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = reduce(out, full, op=op, group=group, async_op=async_op)
    return work


def premultiplier(op: Any) -> float:
    """Return a ``ReduceOp.PREMUL_SUM``'s factor, which torch exposes only in the pickled state."""
    return float(op.__getstate__()[1])
