from __future__ import annotations

from typing import Any

from zero_core.optim.device_tier import DeviceTier


class MadeTier(DeviceTier):
    """A `DeviceTier` made from build()'s arguments: ``build(state_tier=MadeTier.made)``."""

    @classmethod
    def made(cls, **given: Any) -> DeviceTier:
        names = ("numel", "pieces", "params", "device", "optimizer_class", "groups")
        return cls(**{name: given[name] for name in names})
