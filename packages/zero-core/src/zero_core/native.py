"""The collectives of an engine: its own, and the part that the configuration puts over them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import cast

from zero_core.collectives import ControlGroup
from zero_core.comm_report import Meter
from zero_core.config import Config
from zero_core.direct import DirectCollectives
from zero_core.errors import ConfigError
from zero_core.lanes import lanes_of
from zero_core.layout import Layout
from zero_core.library import LibraryCollectives
from zero_core.parts import COLLECTIVES, load_part
from zero_core.protocols import Collectives, CollectivesFactory, NativeCollectives
from zero_core.shared_memory import SharedMemory
from zero_core.topology import Ranks
from zero_core.traffic import Links

__all__ = ["make_collectives", "make_native", "private_bytes", "share_memory"]

_log = logging.getLogger(__name__)


def share_memory(control: ControlGroup, ranks: Ranks, per_node: int) -> SharedMemory | None:
    """Memory that the ranks of this node read from each other, if they are hosts and can."""
    if ranks.device.type != "cpu" or ranks.size == 1:
        return None
    shared = SharedMemory(control, ranks_per_node=per_node)
    num_far = per_node - 1 - len(shared.peers)
    if num_far:
        _log.info(
            "rank %d: %d of the %d other ranks of its node cannot share memory with it (another "
            "host, user or namespace of processes): what they exchange travels through "
            "torch.distributed",
            ranks.rank,
            num_far,
            per_node - 1,
        )
    return shared if shared.peers else None


def make_native(
    ranks: Ranks, per_node: int, shared: SharedMemory | None, meter: Meter
) -> NativeCollectives:
    """The engine's own collectives; every rank must call it."""
    lanes = lanes_of(ranks.device)
    if ranks.size == 1 or ranks.device.type == "cpu":
        return DirectCollectives(
            ranks.group,
            rank=ranks.rank,
            world_size=ranks.size,
            shared=shared,
            ranks_per_node=per_node,
            lanes=lanes,
            meter=meter,
        )
    links = Links(ranks.size, per_node, is_ring=True)
    return LibraryCollectives(ranks.group, rank=ranks.rank, links=links, lanes=lanes, meter=meter)


def make_collectives(
    given: Collectives | CollectivesFactory | None,
    native: NativeCollectives,
    config: Config,
    layout: Layout,
    per_node: int,
) -> Collectives:
    """What is ``given``, or what the configuration asks for, over ``native``.

    Raises:
        MissingPartError: the configuration asks for a package that is not installed.
        ConfigError: it does not serve a setting.
    """
    if isinstance(given, Collectives):
        return given
    zero = config.zero_optimization
    if given is None:
        asked = _asked(config)
        if asked is None:
            return native
        if native.world_size == 1:
            _log.warning("%s has no effect with one rank: nothing is sent", asked)
        given = load_part(COLLECTIVES, "quantized", asked_by=asked, distribution="zero-comm")
    make = cast(CollectivesFactory, given)
    try:
        return make(
            native,
            rank=native.rank,
            world_size=native.world_size,
            config=zero.model_dump(mode="json"),
            ranks_per_node=per_node,
            frozen=frozenset(s.index for s in layout.segments if not s.is_trainable),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _asked(config: Config) -> str | None:
    """The first key that asks for collectives that send fewer bytes."""
    zero = config.zero_optimization
    keys = {
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
    }
    return next((f"zero_optimization.{key}" for key, is_set in keys.items() if is_set), None)


def private_bytes(collectives: Collectives) -> Mapping[str, int]:
    """What collectives hold on this rank by kind, if they tell."""
    found = getattr(collectives, "private_nbytes", None)
    return found if isinstance(found, Mapping) else {}
