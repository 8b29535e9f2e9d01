"""`AutoTier`: a `TwinTier` that measures its steps and moves its cut to where they are fastest.

What is decided, and when, is in `zero_offload.auto_ratio`; here it is measured and carried out. A
step is looked at when the first gradient of the next one comes, so that the host is done with it
and nothing is pending. Each rank decides for itself: a cut changes where an element is updated, not
how, so ranks need not agree.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol, cast

import torch

from zero_offload.auto_ratio import AutoRatio, RatioReport, Sample
from zero_offload.device_room import DeviceClock, DeviceRoom, read_memory
from zero_offload.geometry import Geometry
from zero_offload.intervals import Intervals
from zero_offload.moving import Part
from zero_offload.twin import PartFactory, TwinTier

__all__ = ["AutoTier"]

_log = logging.getLogger(__name__)


class _Timed(Protocol):
    @property
    def seconds(self) -> float: ...


class AutoTier(TwinTier):
    """A StateTier whose host share starts with everything and ends where it is fastest.

    Args:
        geometry: the whole flat space.
        groups: as for `TwinTier`.
        make_host: makes the host tier, whose ``seconds`` are those of its worker.
        make_device: makes the device tier.
        device: the compute device.
        element_bytes: what an element takes on it.
        alignment: as for `TwinTier`.
    """

    def __init__(
        self,
        geometry: Geometry,
        groups: Sequence[Mapping[str, Any]],
        *,
        make_host: PartFactory,
        make_device: PartFactory,
        device: torch.device,
        element_bytes: int,
        alignment: int = 1,
    ) -> None:
        super().__init__(
            geometry,
            groups,
            Intervals([(0, geometry.numel)]),
            make_host=make_host,
            make_device=make_device,
            alignment=alignment,
        )
        self._controller = AutoRatio(self._tell)
        self._room = DeviceRoom(geometry.numel, element_bytes, lambda: read_memory(device))
        self._clock = DeviceClock(device)
        self._host_s = 0.0  # as the host tier counted when the step began
        self._stall_s = 0.0
        self._num_updated = {True: 0, False: 0}  # elements, on the host and on the device

    @property
    def ratio_report(self) -> RatioReport | None:
        """What was settled last, and why; None while the first search is under way."""
        return self._controller.report

    def _tell(self, report: RatioReport) -> None:
        _log.info("offload_optimizer settled on %s", report)

    def _step_part(self, part: Part, active: Sequence[int], grad_scale: float) -> None:
        pieces = part.geometry.pieces
        self._num_updated[part.is_host] += sum(pieces[i].stop - pieces[i].start for i in active)
        if part.is_host:
            super()._step_part(part, active, grad_scale)
            return
        with self._clock.measure():
            super()._step_part(part, active, grad_scale)

    def _wait_part(self, part: Part, start: int, stop: int) -> None:
        started = perf_counter()
        super()._wait_part(part, start, stop)
        if part.is_host:
            self._stall_s += perf_counter() - started

    def _begin_round(self) -> None:
        """Look at the step that is over, and recut before the first gradient of the next is in."""
        super()._begin_round()
        sample = self._take_sample()
        if not self._fresh:  # else a gradient is in already, of a parameter that had none before
            least_ratio = self._room.least_ratio(self.geometry.numel - self.cut)
            ratio = self._controller.observe(sample, least_ratio)
            self.recut(round(ratio * self.geometry.numel))
        self._host_s = self._host_seconds()
        self._stall_s = 0.0

    def _take_sample(self) -> Sample:
        started = perf_counter()
        host_s = self._host_seconds() - self._host_s  # a host that is not done yet is late, too
        self._stall_s += perf_counter() - started
        sample = Sample(
            host_numel=self._num_updated[True],
            device_numel=self._num_updated[False],
            host_s=host_s,
            device_s=self._clock.take(),
            stall_s=self._stall_s,
        )
        self._num_updated = {True: 0, False: 0}
        return sample

    def _host_seconds(self) -> float:
        return sum(cast(_Timed, part.tier).seconds for part in self._parts if part.is_host)
