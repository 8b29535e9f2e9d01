"""Changes of a configuration that a plan tries: traffic between ranks, and placements.

Each choice is the configuration with a few keys changed; nothing else about the run changes.

[Note: placements]
parameters  in host memory (`offload_param`), at stage 3 on an accelerator
states      on NVMe in place of host memory, where a folder on such a disk is known
bits        Adam's moments in 16 or 8 bits on the host, which alone changes numbers
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zero_core.comm.meter import Links, Traffic
from zero_core.config import Config, ZeroConfig
from zero_core.layout.arithmetic import Layout
from zero_core.plan.footprints import Footprints
from zero_core.plan.forecast import collectives_memory
from zero_core.plan.traffic import step_traffic

_WEIGHTS = {"zero_quantized_weights": True}
_LOSSLESS = {"zero_lossless_weights": True, "zero_quantized_weights": False}
_ROUNDED = {"zero_lossless_weights": False}
"""With quantized weights: they round what the other key sends exactly."""
_GRADIENTS = {"zero_quantized_gradients": True}
_CODED = {
    "zero_lossless_gradients": True,
    "zero_quantized_gradients": False,
    "zeropp_loco_param": None,
}
_NOT_CODED = {"zero_lossless_gradients": False}
"""With quantized gradients."""
_PLAIN = {
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_hpz_partition_size": 1,
    "zero_lossless_weights": False,
    "zero_lossless_gradients": False,
    "zero_quantized_gradients": False,
    "zeropp_loco_param": None,
}
_FOUR_BIT = {
    "zero_quantized_weights_format": "int4_difference",
    "zero_quantized_gradients_within_node": "int8",
    "zero_quantized_gradients_between_nodes": "int4",
    "zero_quantized_gradients_hadamard": True,
}
"""SDP4Bit (arXiv 2410.15526): differences of weights, gradients in 8 and 4 bits, rotated."""


_STATES, _PARAMS = "offload_optimizer", "offload_param"
MOMENTS = {"bfloat16": "bf16 moments", "int8": "8-bit moments"}


@dataclass(frozen=True)
class TrafficChoice:
    """One configuration of the traffic, per rank and optimizer step."""

    name: str  # "as configured", "plain", or what is turned on
    settings: Mapping[str, Any]  # keys of ``zero_optimization`` that make it
    traffic: tuple[Traffic, ...]  # expected, without copies between a device and its host
    within_node_bytes: int  # bytes that a rank sends within its node
    between_nodes_bytes: int  # bytes that a rank sends to other nodes
    most_between_nodes_bytes: int  # the most that it may send to them
    kept_bytes: int  # memory for it: secondary shards, messages and errors


def traffic_choices(layout: Layout, config: Config, links: Links) -> tuple[TrafficChoice, ...]:
    """Return the configuration as it is, and with each key that would change its traffic.

    One rank has nothing to choose, and stage 0 has a choice for gradients alone. Choices that need
    a package which is not installed are left out; all are if the configuration does.
    """
    if links.world_size == 1:
        return ()
    footprints = Footprints()  # what a choice alone would need is not missing
    found: list[TrafficChoice] = []
    for name, settings in _choices(config.zero_optimization, links):
        zero = config.zero_optimization.model_copy(update=settings)
        changed = config.model_copy(update={"zero_optimization": zero})
        if settings and changed == config:
            continue
        traffic, kept = [], {}
        for is_worst_case in (False, True):
            footprint = footprints.collectives(
                changed, layout.world_size, links.ranks_per_node, is_worst_case=is_worst_case
            )
            traffic.append(step_traffic(layout, changed, links, footprint))
            kept = collectives_memory(footprint, layout, changed)
        if footprint is None and zero.quantized_key is not None:
            if not settings:
                return ()
            continue
        near = sum(t.within_node_bytes for t in traffic[0])
        far = sum(t.between_nodes_bytes for t in traffic[0])
        most = sum(t.between_nodes_bytes for t in traffic[1])
        kept_bytes = sum(kept.values())
        found.append(TrafficChoice(name, settings, traffic[0], near, far, most, kept_bytes))
    return tuple(found) if len(found) > 1 else ()


def _choices(zero: ZeroConfig, links: Links) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each flag turned on, or off where it is on, and all of them."""
    yield "as configured", {}
    yield "plain", _PLAIN
    has_nodes = links.num_nodes > 1
    every: dict[str, Any] = {}
    if zero.stage == 3 and has_nodes and links.ranks_per_node > 1:
        every = {"zero_hpz_partition_size": links.ranks_per_node}
    every |= {**_WEIGHTS, **_GRADIENTS} if zero.stage == 3 else _GRADIENTS
    for key, value in every.items():
        settings = {key: value, **(_ROUNDED if key in _WEIGHTS else {})}
        settings |= _NOT_CODED if key in _GRADIENTS else {}
        yield (f"{key} {value}" if value is not True else key), settings
        if getattr(zero, key) != _PLAIN[key]:
            loco = {"zeropp_loco_param": None} if key in _GRADIENTS else {}
            yield f"without {key}", {key: _PLAIN[key], **loco}
    if has_nodes:
        yield "zero_lossless_gradients", _CODED
    if zero.stage > 0 and has_nodes:
        yield "zero_lossless_weights", _LOSSLESS
        yield "lossless weights and gradients", {**_LOSSLESS, **_CODED}
        yield "lossless weights, quantized gradients", {**_LOSSLESS, **_GRADIENTS, **_NOT_CODED}
    if zero.zero_lossless_gradients:
        yield "without zero_lossless_gradients", _NOT_CODED
    if zero.zero_lossless_weights:
        yield "without zero_lossless_weights", _ROUNDED
    rounded = {**every, **_ROUNDED, **_NOT_CODED}
    if zero.stage == 3:
        yield "all of these", rounded
    if zero.stage == 3 and has_nodes:
        yield "4-bit mode", {**rounded, **_FOUR_BIT}


@dataclass(frozen=True)
class Placement:
    """Keys that differ from the configuration. See [Note: placements]."""

    words: str = ""  # the difference in words; empty for the configuration itself
    settings: tuple[tuple[str, str, Any], ...] = ()  # ``(block or , key, value)``
    is_rounding: bool = False  # whether the numbers of a run change

    @property
    def device(self) -> str | None:
        """Device of the host's part of the states, where it differs."""
        return next((v for b, k, v in self.settings if (b, k) == (_STATES, "device")), None)

    @property
    def needs_offload(self) -> bool:
        """Whether it says something about states on the host."""
        return any(block == _STATES for block, _, _ in self.settings)

    @property
    def needs_stage_3(self) -> bool:
        """Whether it says something about offloaded parameters."""
        return any(block == _PARAMS for block, _, _ in self.settings)

    def joined(self, other: Placement) -> Placement:
        words = ", ".join(w for w in (self.words, other.words) if w)
        is_rounding = self.is_rounding or other.is_rounding
        return Placement(words, self.settings + other.settings, is_rounding)

    def of(self, zero: ZeroConfig) -> ZeroConfig:
        """Return a resolved block changed to this."""
        for name, key, value in self.settings:
            if name:
                key, value = name, getattr(zero, name).model_copy(update={key: value})
            zero = zero.model_copy(update={key: value})
        return zero

    def apply(self, zero: Mapping[str, Any]) -> dict[str, Any]:
        """Return a block, as it was given, with the keys changed."""
        found = {**zero}
        for name, key, value in self.settings:
            if name:
                key, value = name, {**found.get(name, {}), key: value}
            found[key] = value
        return found


AS_CONFIGURED = Placement()


def placements(zero: ZeroConfig, nvme_path: str | None, *, is_accelerated: bool) -> list[Placement]:
    """Return the other places of parameters and states, the smaller change before the larger."""
    params, states = [AS_CONFIGURED], [AS_CONFIGURED]
    if zero.offload_param.device != "none":
        words = "parameters on the device"
        params.append(Placement(words, ((_PARAMS, "device", "none"),)))
    elif is_accelerated:
        words = "parameters in host memory"
        params.append(Placement(words, ((_PARAMS, "device", "cpu"),)))
    if zero.offload_optimizer.device == "nvme":
        words = "states in host memory"
        states.append(Placement(words, ((_STATES, "device", "cpu"),)))
    elif nvme_path is not None:
        keys = (_STATES, "device", "nvme"), (_STATES, "nvme_path", nvme_path)
        states.append(Placement("states on NVMe", keys))
    pairs = [of_states.joined(p) for of_states, p in itertools.product(states, params)]
    return pairs[1:]


def roundings(zero: ZeroConfig) -> list[Placement]:
    """Return the bits of Adam's moments on the host that are fewer than the configured ones."""
    order = ["float32", *MOMENTS]
    fewer = order[order.index(zero.offload_optimizer.state_dtype) + 1 :]
    return [
        Placement(MOMENTS[dtype], ((_STATES, "state_dtype", dtype),), is_rounding=True)
        for dtype in fewer
    ]
