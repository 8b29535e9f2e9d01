"""Names of the parameters and ranks at fault where a step's gradient is not finite."""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch

from zero_core.comm.control import ControlGroup
from zero_core.layout.arithmetic import Layout
from zero_core.sharded.grads import FlatGrads

_MAX_NAMED = 3
_MAX_RANKS = 8


def explain_nonfinite(gradients: Iterable[FlatGrads], layout: Layout, control: ControlGroup) -> str:
    """Name the parameters whose gradient is not finite, and the ranks whose batches did it.

    Every rank must call it, before gradients are discarded. A segment in which several batches
    gave values that are not finite names them all.
    """
    own = [found for grads in gradients for found in _nonfinite_params(grads, layout, control)]
    by_name: dict[str, set[int | None]] = {}
    for row in control.gather_bytes(json.dumps(own).encode()):
        for name, ranks in json.loads(row):
            by_name.setdefault(name, set()).update([None] if ranks is None else ranks)
    named = [_describe(name, ranks) for name, ranks in list(by_name.items())[:_MAX_NAMED]]
    if len(by_name) > len(named):
        named.append(f"and {len(by_name) - len(named)} more")
    return "; ".join(named) or "no element by itself, their norm overflows"


def _nonfinite_params(
    grads: FlatGrads, layout: Layout, control: ControlGroup
) -> list[tuple[str, list[int] | None]]:
    """Return the parameters of this rank's shard that are not finite, with the ranks at fault."""
    bad = torch.nonzero(~torch.isfinite(grads.values())).flatten()
    if not bad.numel():
        return []
    low, _ = grads.segment.shard_range(control.rank)
    at = bad.cpu() + low
    ranks = grads.nonfinite_ranks()
    return [
        (layout.params[slot.param].name, ranks)
        for slot in grads.segment.slots
        if bool(((at >= slot.start) & (at < slot.stop)).any())
    ]


def _describe(name: str, ranks: set[int | None]) -> str:
    known = sorted(rank for rank in ranks if rank is not None)
    if not known and None in ranks:
        return f"{name}: which rank's batch did it is not known"
    if not known:
        return f"{name}: each rank's part is finite, their sum is not"
    batches = "batch of rank" if len(known) == 1 else "batches of ranks"
    more = f" and {len(known) - _MAX_RANKS} more" if len(known) > _MAX_RANKS else ""
    return f"{name}: {batches} {', '.join(map(str, known[:_MAX_RANKS]))}{more}"
