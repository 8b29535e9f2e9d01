"""Agreement on the lengths of weight messages right after a step."""

from __future__ import annotations

from collections.abc import Iterable

from zero_core.comm.communicator import Communicator
from zero_core.core.extension import Extension
from zero_core.core.params import FlatParams
from zero_core.optim.device_tier import DeviceTier
from zero_core.sharded.sharded_state import ShardedState


class WeightLengths(Extension):
    """Extension that announces all changed weights, for messages that vary in length.

    Without an announcement the host waits for the lengths in every gather. On a CPU this wait costs
    nothing. Tiers other than `DeviceTier` update shards later, so their lengths are not known yet.
    """

    def __init__(self, communicator: Communicator, params: Iterable[FlatParams]) -> None:
        self._communicator = communicator
        exchanged = (flat for flat in params if flat.is_exchanged and flat.segment.is_trainable)
        self._params = [flat for flat in exchanged if flat.source.is_on_device]

    @classmethod
    def wanted(cls, communicator: Communicator, state: ShardedState) -> list[Extension]:
        is_early = state.device.type != "cpu" and isinstance(state.tier, DeviceTier)
        if not (is_early and communicator.announcing):
            return []
        return [cls(communicator, state.params)]

    def values_changed(self) -> None:
        if self._params:
            self._communicator.announce(
                [
                    (f.segment.index, f.version, f.full if f.is_kept else None, f.source.read())
                    for f in self._params
                ]
            )
