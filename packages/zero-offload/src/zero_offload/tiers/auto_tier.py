"""`AutoTier`: a `TwinTier` that measures its steps and moves its split point to the fastest place.

`zero_offload.tiers.auto_ratio` decides which that is. A step is measured when the first gradient of
the next one is offered, because the host is done with it then and nothing is pending. Each rank
decides alone: the split point changes where an element is updated, not how, so ranks need not
agree.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter

import torch

from zero_offload.flat.geometry import Geometry
from zero_offload.flat.intervals import Intervals
from zero_offload.protocols import Groups
from zero_offload.tiers.auto_ratio import AutoRatio, RatioReport, Sample
from zero_offload.tiers.device_room import DeviceClock, DeviceRoom
from zero_offload.tiers.factory import OffloadTiers
from zero_offload.tiers.part import Part
from zero_offload.tiers.twin import TwinTier

_log = logging.getLogger(__name__)


class AutoTier(TwinTier):
    """A StateTier whose host share starts with everything and ends where steps are fastest.

    Args:
        element_bytes: bytes of an element's state on it.
        controller: chooses the ratios; an `AutoRatio` by default.

    Attributes:
        controller: the search for the fastest ratio.
    """

    def __init__(
        self,
        geometry: Geometry,
        groups: Groups,
        factory: OffloadTiers,
        *,
        device: torch.device,
        element_bytes: int,
        alignment: int = 1,
        controller: AutoRatio | None = None,
    ) -> None:
        everything = Intervals([(0, geometry.numel)])
        super().__init__(geometry, groups, everything, factory, alignment=alignment)
        self.controller = controller or AutoRatio()
        self._room = DeviceRoom(geometry.numel, element_bytes, device)
        self._clock = DeviceClock(device)
        self._host_s = 0.0  # as the host tier counted when the step began
        self._round_stall_s = 0.0
        self._num_updated = {True: 0, False: 0}  # elements, on the host and on the device

    @property
    def ratio_report(self) -> RatioReport | None:
        """The last settled ratio and its reason. None during the first search."""
        return self.controller.report

    def step_part(self, part: Part, active: Sequence[int], grad_scale: float) -> None:
        pieces = part.geometry.pieces
        self._num_updated[part.is_host] += sum(pieces[i].stop - pieces[i].start for i in active)
        if part.is_host:
            super().step_part(part, active, grad_scale)
            return
        with self._clock.measure():
            super().step_part(part, active, grad_scale)

    def wait_part(self, part: Part, start: int, stop: int) -> None:
        started = perf_counter()
        super().wait_part(part, start, stop)
        if part.is_host:
            self._round_stall_s += perf_counter() - started

    def begin_round(self) -> None:
        """Evaluate the last step, and resplit before the first gradient of the next is offered."""
        sample = self._take_sample()
        if not self._fresh:  # else a parameter without a gradient before came first
            before = self.controller.report
            least_ratio = self._room.least_ratio(self.geometry.numel - self.host_numel)
            ratio = self.controller.observe(sample, least_ratio)
            if self.controller.report is not before:
                _log.info("offload_optimizer settled on %s", self.controller.report)
            self.resplit(round(ratio * self.geometry.numel))
        self._host_s = self._drain_host()
        self._round_stall_s = 0.0

    def _take_sample(self) -> Sample:
        started = perf_counter()
        host_s = self._drain_host() - self._host_s  # a host that is not done is late, too
        self._round_stall_s += perf_counter() - started
        sample = Sample(
            host_numel=self._num_updated[True],
            device_numel=self._num_updated[False],
            host_s=host_s,
            device_s=self._clock.take(),
            stall_s=self._round_stall_s,
        )
        self._num_updated = {True: 0, False: 0}
        return sample

    def _drain_host(self) -> float:
        return sum(part.drain() for part in self.parts)
