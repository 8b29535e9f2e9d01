"""Parameter shards that are kept off the compute device.

A shard in host memory receives its new values from the update itself, without staging and without a
copy to the device. A shard on the meta device stands for one that only a `ParamStore` can write.
Its new values wait in a buffer of one run's length until the store has taken them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry
from zero_offload.flat.intervals import Intervals
from zero_offload.protocols import ParamStore


class OffloadedShards:
    """The shards of a flat space that are kept off the device.

    Args:
        geometry: the flat space, whose shards lie on ``device``, on the CPU or on meta.
        device: the compute device.
        store: receives new values of shards on meta.

    Raises:
        ValueError: there is such a shard and no store.
    """

    def __init__(
        self, geometry: Geometry, device: torch.device, store: ParamStore | None = None
    ) -> None:
        self._geometry = geometry
        self._is_host_apart = device.type != "cpu"
        self._store = store
        self._rounded: dict[int, Tensor] = {}  # by start
        if store is None and any(t.is_meta for _, t in geometry.shards):
            raise ValueError(
                "params holds a shard on the meta device, which says that it is kept elsewhere: "
                "pass param_store, which takes its new values"
            )

    def out(self, start: int, stop: int) -> Tensor | None:
        """Return memory for the new values of a run, or None if its shard is on the device."""
        view = self._geometry.view(start, stop)
        if view.is_meta:
            self._rounded[start] = torch.empty(stop - start, dtype=view.dtype, device="cpu")
            return self._rounded[start]
        return view if self._is_offloaded(view) else None

    def publish(self, start: int, stop: int) -> bool:
        """Store what was written to `out`. Returns False if the shard is on the device."""
        view = self._geometry.view(start, stop)
        if view.is_meta:
            assert self._store is not None, "checked at construction"
            self._store.write(start, self._rounded.pop(start))
        return self._is_offloaded(view)

    def _is_offloaded(self, shard: Tensor) -> bool:
        return shard.is_meta or (shard.is_cpu and self._is_host_apart)


class _PartStore:
    """`ParamStore` for the flat space of a part."""

    def __init__(self, store: ParamStore, share: Intervals) -> None:
        self._store = store
        self._share = share

    def write(self, start: int, values: Tensor) -> None:
        self._store.write(self._share.element(start), values)


def store_of_part(store: ParamStore | None, share: Intervals) -> ParamStore | None:
    """Return ``store`` for the flat space of a part's elements. A run is in one span."""
    return None if store is None else _PartStore(store, share)
