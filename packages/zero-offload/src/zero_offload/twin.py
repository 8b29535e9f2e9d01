"""Twin-Flow: one optimizer state, of which the host holds and updates ``[0, k)``, the device the
rest, at the same time (DeepSpeed ZeRO-Offload++, Twin-Flow).

The cut is an element. A piece that straddles it is one parameter in two halves whose scalars stay
equal, so a checkpoint knows nothing of ``k`` and loads at any other ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_offload.geometry import Geometry, check_active
from zero_offload.grads import GradLedger
from zero_offload.protocols import StateTier
from zero_offload.storage import BlockFile

__all__ = ["TwinTier"]


@dataclass(frozen=True, slots=True)
class _Part:
    """One tier over ``[lo, hi)`` of the flat space, and its indices of the pieces in it."""

    tier: StateTier
    lo: int
    hi: int
    local: Mapping[int, int]

    def clip(self, start: int, stop: int) -> tuple[int, int]:
        a = min(max(start, self.lo), self.hi)
        return a, max(a, min(stop, self.hi))


class TwinTier:
    """A StateTier made of a host tier over ``[0, cut)`` and a device tier over the rest.

    Args:
        geometry: the whole flat space.
        cut: first element of the device's part.
        host: tier over ``[0, cut)`` with its piece indices; None when that is empty. It must
            return from ``step`` before the work is done for the two to run at the same time.
        device: likewise over ``[cut, numel)``.
    """

    def __init__(
        self,
        geometry: Geometry,
        cut: int,
        host: tuple[StateTier, Mapping[int, int]] | None,
        device: tuple[StateTier, Mapping[int, int]] | None,
    ) -> None:
        self.geometry = geometry
        self.cut = cut
        self._offered = GradLedger()
        self._parts: list[_Part] = []
        if host is not None:
            self._parts.append(_Part(host[0], 0, cut, host[1]))
        if device is not None:
            self._parts.append(_Part(device[0], cut, geometry.numel, device[1]))

    @property
    def bytes_d2h(self) -> int:
        """Gradient bytes copied to the host so far."""
        return sum(getattr(part.tier, "bytes_d2h", 0) for part in self._parts)

    @property
    def bytes_h2d(self) -> int:
        """Parameter bytes brought from the host so far; complete after ``wait_params``."""
        return sum(getattr(part.tier, "bytes_h2d", 0) for part in self._parts)

    @property
    def file(self) -> BlockFile | None:
        """Where the host's part of the state lies if not in memory, with its counters."""
        return next((f for p in self._parts if (f := getattr(p.tier, "file", None))), None)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that master weights and state take, transfer buffers apart."""
        return sum(getattr(part.tier, "host_bytes", 0) for part in self._parts)

    def offer_grad(self, start: int, grad: Tensor) -> None:
        """Take the gradient of ``[start, start + grad.numel())``; each part gets its share."""
        stop = start + grad.numel()
        self.geometry.check_range(start, stop)
        for part in self._parts:
            a, b = part.clip(start, stop)
            if a < b:
                part.tier.offer_grad(a - part.lo, grad[a - start : b - start])
        self._offered.add(start, stop, grad, start)

    def discard_grads(self) -> None:
        """Forget what was offered."""
        self._offered = GradLedger()
        for part in self._parts:
            part.tier.discard_grads()

    def step(
        self, groups: Sequence[Mapping[str, Any]], active: Sequence[int], *, grad_scale: float
    ) -> None:
        """Update the pieces in ``active``: the host starts first, in its worker, then the device.

        Raises:
            ValueError: ``active`` is not sorted or names no piece, or a gradient is missing.
        """
        indices = check_active(self.geometry, active)
        for i in indices:  # a half must not have moved on when the other refuses
            self._offered.segments(self.geometry.pieces[i].start, self.geometry.pieces[i].stop)
        self._offered = GradLedger()
        for part in self._parts:
            local = [part.local[i] for i in indices if i in part.local]
            part.tier.step(groups, local, grad_scale=grad_scale)

    def wait_params(self, start: int, stop: int) -> None:
        """Return once the parameter shards in ``[start, stop)`` hold their new values."""
        for part in self._parts:
            a, b = part.clip(start, stop)
            if a < b:
                part.tier.wait_params(a - part.lo, b - part.lo)

    def state_names(self) -> Sequence[str]:
        """``master_weight``, then each elementwise state that either part has."""
        return tuple(dict.fromkeys(n for part in self._parts for n in part.tier.state_names()))

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of one state over ``[start, stop)``: 1-D, on the CPU, zero where there is none.

        Raises:
            KeyError: neither part has such a state.
        """
        self.geometry.check_range(start, stop)
        owners = [part for part in self._parts if name in part.tier.state_names()]
        if not owners:
            raise KeyError(f"the optimizer has no state {name!r}, only {self.state_names()}")
        spans = [(part, *part.clip(start, stop)) for part in owners]
        found = [(a, part.tier.read_state(name, a - part.lo, b - part.lo)) for part, a, b in spans]
        if len(found) == len(self._parts):
            return torch.cat([values for _, values in found])
        whole = torch.zeros(stop - start, dtype=found[0][1].dtype, device="cpu")
        for a, values in found:  # a part that has not made this state yet reads as zero
            whole[a - start : a - start + values.numel()] = values
        return whole

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite one state; ``master_weight`` reaches the parameter shards as well.

        Raises:
            KeyError: the optimizer has no such state.
        """
        stop = start + values.numel()
        self.geometry.check_range(start, stop)
        for part in self._parts:
            a, b = part.clip(start, stop)
            if a < b:
                part.tier.write_state(name, a - part.lo, values[a - start : b - start])

    def read_scalars(self, piece: int) -> Mapping[str, float]:
        """``num_steps`` and the optimizer's scalars; the halves of a cut piece agree."""
        part = next(part for part in self._parts if piece in part.local)
        return part.tier.read_scalars(part.local[piece])

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Restore what `read_scalars` gave, in both halves of a cut piece."""
        for part in self._parts:
            if piece in part.local:
                part.tier.write_scalars(part.local[piece], scalars)
