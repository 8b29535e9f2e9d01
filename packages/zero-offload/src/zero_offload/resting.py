"""New values of parameter shards that rest off the compute device: written where they rest.

A shard on the host takes them from the update itself, with no staging and no copy to the device. A
shard on the meta device stands for one that rests where only a `ParamStore` can write; its new
values wait in a buffer of one run's length until the store takes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_offload.geometry import Geometry
from zero_offload.host_memory import HostMemory
from zero_offload.intervals import Intervals
from zero_offload.protocols import ParamStore
from zero_offload.transfer import DeviceMover, HostMover

__all__ = ["Rest", "RestingDeviceMover", "RestingHostMover", "store_of_part"]


class Rest:
    """The shards of a flat space that rest off the device.

    Args:
        geometry: the flat space, whose shards lie on ``device``, on the CPU or on meta.
        device: the compute device.
        store: takes new values of shards on meta.

    Raises:
        ValueError: there is such a shard and no store.
    """

    def __init__(self, geometry: Geometry, device: torch.device, store: ParamStore | None) -> None:
        self._geometry = geometry
        self._is_host_apart = device.type != "cpu"
        self._store = store
        self._rounded: dict[int, Tensor] = {}  # by start
        if store is None and any(t.is_meta for _, t in geometry.shards):
            raise ValueError(
                "params holds a shard on the meta device, which says that it rests elsewhere: "
                "pass param_store, which takes its new values"
            )

    def _is_apart(self, shard: Tensor) -> bool:
        return shard.is_meta or (shard.is_cpu and self._is_host_apart)

    def out(self, start: int, stop: int) -> Tensor | None:
        """Memory for the new values of a run; None if its shard is on the device."""
        view = self._geometry.view(start, stop)
        if view.is_meta:
            self._rounded[start] = torch.empty(stop - start, dtype=view.dtype, device="cpu")
            return self._rounded[start]
        return view if self._is_apart(view) else None

    def publish(self, start: int, stop: int) -> bool:
        """Bring what was written to `out` to where it rests; False if that is the device."""
        view = self._geometry.view(start, stop)
        if view.is_meta:
            assert self._store is not None, "checked at construction"
            self._store.write(start, self._rounded.pop(start))
        return self._is_apart(view)


class RestingHostMover(HostMover):
    """`HostMover`, but for the shards that rest off the device.

    Args:
        geometry: as there.
        device: as there.
        rest: says which they are.
        memory: as there.
    """

    def __init__(
        self, geometry: Geometry, device: torch.device, rest: Rest, memory: HostMemory
    ) -> None:
        self._rest = rest
        super().__init__(geometry, device, memory)

    def _must_stage(self, shard: Tensor) -> bool:
        return super()._must_stage(shard) and not shard.is_meta

    def out(self, start: int, stop: int) -> Tensor:
        """Where it rests, if it does."""
        own = self._rest.out(start, stop)
        return super().out(start, stop) if own is None else own

    def publish(self, start: int, stop: int) -> torch.Event | None:
        """Nothing travels to the device for what rests."""
        return None if self._rest.publish(start, stop) else super().publish(start, stop)


class RestingDeviceMover(DeviceMover):
    """`DeviceMover`, but for the shards that rest off the device; arguments as there."""

    def __init__(self, geometry: Geometry, device: torch.device, rest: Rest) -> None:
        super().__init__(geometry, device)
        self._rest = rest

    def out(self, start: int, stop: int) -> Tensor:
        """Where it rests, if it does; written by a blocking copy from the device."""
        own = self._rest.out(start, stop)
        return super().out(start, stop) if own is None else own

    def publish(self, start: int, stop: int) -> torch.Event | None:
        """Mark the stream, or hand over what rests."""
        return None if self._rest.publish(start, stop) else super().publish(start, stop)


class _PartStore:
    def __init__(self, store: ParamStore, share: Intervals) -> None:
        self._store = store
        self._share = share

    def write(self, start: int, values: Tensor) -> None:
        self._store.write(self._share.element(start), values)


def store_of_part(store: ParamStore | None, share: Intervals) -> ParamStore | None:
    """``store`` for the flat space that some elements of its own make; a run is in one stretch."""
    return None if store is None else _PartStore(store, share)
