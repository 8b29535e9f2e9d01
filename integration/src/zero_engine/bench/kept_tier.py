"""zero-offload's tier where a benchmark can ask it what it counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import cpu_adam
import zero_offload
from zero_core.protocols import StateTier

__all__ = ["KeptTier"]


class KeptTier:
    """A `zero_core.protocols.StateTierFactory`: the tier and the kernel that ``"device": "cpu"``
    names, kept in reach.

    Attributes:
        tier: the tier that was made, or None before.
    """

    def __init__(self) -> None:
        self.tier: StateTier | None = None
        self._numel = 0

    def __call__(self, **parts: Any) -> StateTier:
        """As `zero_offload.create_tier`."""
        self._numel = parts["numel"]
        self.tier = zero_offload.create_tier(**{**parts, "adam_kernel": cpu_adam})
        return self.tier

    def bytes_moved(self) -> Mapping[str, int]:
        """``bytes_d2h``: gradients brought to the host so far; ``bytes_h2d``: parameters back.

        Waits for an update under way, so that it is counted.
        """
        if self.tier is not None:
            self.tier.wait_params(0, self._numel)
        return {name: getattr(self.tier, name, 0) for name in ("bytes_d2h", "bytes_h2d")}

    def ratio_report(self) -> Mapping[str, Any] | None:
        """What ``"ratio": "auto"`` chose and why, as plain builtins; None if nothing was chosen."""
        report = getattr(self.tier, "ratio_report", None)
        return None if report is None else asdict(report)

    def host_share(self) -> float | None:
        """Share of the elements that the host updates now; None before there is a tier.

        A tier that is not cut in two has all of them.
        """
        if self.tier is None:
            return None
        cut: int = getattr(self.tier, "cut", self._numel)
        return cut / self._numel if self._numel else 0.0

    def io_seconds(self) -> Mapping[str, float]:
        """``io_s``: seconds in which a file was read or written; ``waited_s``: seconds that updates
        waited for it; ``stall_s``: seconds that the caller was blocked because an update was not
        done. Empty if the tier has no file.
        """
        file: Any = getattr(self.tier, "file", None)
        if file is None:
            return {}
        stall_s = getattr(self.tier, "stall_s", 0.0)
        return {"io_s": file.io_s, "waited_s": file.waited_s, "stall_s": stall_s}
