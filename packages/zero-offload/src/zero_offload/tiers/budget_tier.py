"""`BudgetTier`: a `TwinTier` whose device part takes no more than a number of bytes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zero_offload.flat.geometry import Geometry
from zero_offload.flat.intervals import Intervals
from zero_offload.protocols import Groups
from zero_offload.tiers.factory import OffloadTiers
from zero_offload.tiers.share import within_budget
from zero_offload.tiers.twin import TwinTier


class BudgetTier(TwinTier):
    """A StateTier that gives the host what does not fit in a budget of device memory."""

    def __init__(
        self,
        geometry: Geometry,
        groups: Groups,
        host: Intervals,
        factory: OffloadTiers,
        *,
        element_state_bytes: int,
    ) -> None:
        super().__init__(geometry, groups, host, factory)
        self._element_state_bytes = element_state_bytes
        self._has_state = False

    def expect_micro_steps(self, count: int) -> None:
        """Make room in the budget for sums of gradients, which are wider than one gradient."""
        if self._has_state or self._offered or self._closed:
            raise RuntimeError(
                "expect_micro_steps after state was written or a gradient offered: with "
                "device_budget it decides on the host's share, so call it before"
            )
        factory = self._factory
        assert factory.device_budget is not None, "this tier is made for one"
        share = within_budget(
            self.geometry,
            factory.device_budget,
            self._element_state_bytes,
            factory.end,
            is_accelerated=factory.device.type != "cpu",
            adds_grads=True,
        )
        self._num_micro_steps = count
        self.make_parts(self.geometry.align(share, self._alignment))

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        self._has_state = True
        super().write_state(name, start, values)

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        self._has_state = True
        super().write_scalars(piece, scalars)
