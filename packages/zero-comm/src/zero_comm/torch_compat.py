"""The one place that knows which names torch gives its collectives (torch 2.10 and newer).

torch 2.13 renamed ``all_gather_into_tensor`` to ``all_gather_single``; using the old name will
warn some day, so it is looked up only where the new one is missing.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gather_single"]


def all_gather_single(out: Tensor, shard: Tensor, group: dist.ProcessGroup | None) -> None:
    """Gather equal, contiguous shards into ``out`` in rank order, under whichever name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, shard, group=group)
