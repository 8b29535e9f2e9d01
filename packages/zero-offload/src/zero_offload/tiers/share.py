"""Elements that the host holds, by ratio, parameter names or device budget."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch

from zero_offload.flat.geometry import Geometry
from zero_offload.flat.intervals import Intervals
from zero_offload.protocols import Groups, OptimizerClass
from zero_offload.rules.elementwise import check_elementwise
from zero_offload.settings import HostShare, OffloadSettings
from zero_offload.steppers.torch_stepper import probe_entry

WIDENED_NUMEL = 1 << 26
"""Elements of 16-bit gradients that a tier on an accelerator widens at once."""


def host_share(
    settings: OffloadSettings,
    geometry: Geometry,
    names: Sequence[str],
    optimizer_class: OptimizerClass,
    groups: Groups,
    *,
    is_accelerated: bool,
) -> Intervals | None:
    """Return the elements that the host updates, or None if measurements choose (``"auto"``)."""
    if settings.parameters is not None:
        if len(names) != len(geometry.pieces):
            raise ValueError(
                f"parameters needs the name of each of the {len(geometry.pieces)} "
                f"pieces, got {len(names)}: pass names to the factory, or named parameters "
                f"(model.named_parameters()) to the optimizer"
            )
        chosen = [i for i, name in enumerate(names) if is_chosen(name, settings.parameters)]
        return geometry.padded_spans(chosen)
    if settings.device_budget is not None:
        nbytes = state_bytes(optimizer_class, groups, geometry.master_dtype)
        budget, end = settings.device_budget, settings.host_share
        return within_budget(geometry, budget, nbytes, end, is_accelerated=is_accelerated)
    if settings.ratio == "auto":
        return None
    return end_share(geometry.numel, round(settings.ratio * geometry.numel), settings.host_share)


def end_share(numel: int, num_host: int, end: HostShare) -> Intervals:
    """Return the ``num_host`` elements at one end of a flat space of ``numel``."""
    start = 0 if end == "first" else numel - num_host
    return Intervals([(start, start + num_host)])


def is_chosen(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of the patterns of `fnmatchcase`: ``*`` matches dots too."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise ValueError for a pattern that matches none of all the parameters' names."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
            raise ValueError(
                f"parameters: {pattern!r} matches no parameter; near it are {list(near)}"
            )


def within_budget(
    geometry: Geometry,
    budget: int,
    element_state_bytes: int,
    end: HostShare,
    *,
    is_accelerated: bool,
    adds_grads: bool = False,
) -> Intervals:
    """Return as few elements of one end as leave at most ``budget`` bytes on the device."""
    low, high = 0, geometry.numel
    while low < high:  # fewer on the host are more bytes on the device
        middle = (low + high) // 2
        rest = end_share(geometry.numel, middle, end).complement(geometry.numel)
        held = device_bytes(
            geometry,
            rest,
            element_state_bytes,
            is_accelerated=is_accelerated,
            adds_grads=adds_grads,
        )
        if held <= budget:
            high = middle
        else:
            low = middle + 1
    return end_share(geometry.numel, low, end)


def device_bytes(
    geometry: Geometry,
    share: Intervals,
    element_state_bytes: int,
    *,
    is_accelerated: bool,
    adds_grads: bool = False,
) -> int:
    """Return the bytes of a share on the device: states, master weights, one gradient.

    Master weights take nothing if all shards there are their own. A gradient has its shard's dtype:
    where master weights are wider, an accelerator's tier widens `WIDENED_NUMEL` elements at once.
    A sum of micro-steps' gradients has the dtype of the master weights.
    """
    views = [view for span in share.spans for _, _, view in geometry.overlaps(*span)]
    master = geometry.master_dtype
    is_in_place = all(view.dtype == master for view in views)
    if adds_grads:
        grads = share.numel * master.itemsize
    else:
        grads = sum(view.numel() * view.element_size() for view in views)
    kept = share.numel * element_state_bytes + grads
    if is_in_place:
        return kept
    widened = min(share.numel, WIDENED_NUMEL) if is_accelerated and not adds_grads else 0
    return kept + (share.numel + widened) * master.itemsize


def state_bytes(optimizer_class: OptimizerClass, groups: Groups, dtype: torch.dtype) -> int:
    """Return the bytes of one element's optimizer states, without its master weight."""
    check_elementwise(optimizer_class)
    dtypes: dict[str, torch.dtype] = {}
    for group in groups:
        on_host = {**group, "capturable": False} if group.get("capturable") else group
        entry = probe_entry(optimizer_class, on_host, torch.device("cpu"), dtype)
        dtypes.update(entry.elementwise())
    return sum(found.itemsize for found in dtypes.values())
