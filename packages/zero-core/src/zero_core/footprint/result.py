"""Result of `zero_core.plan`: frozen data, available as JSON or as tables of text.

[Note: placements]
A placement moves parameters to or from host memory (`offload_param`, at stage 3), moves states to
or from NVMe, or stores Adam's moments on the host in 16 or 8 bits. Only the last changes numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from zero_core.comm.meter import Traffic
from zero_core.config import ZeroConfig, as_kind
from zero_core.footprint.forecast import MemoryUse, TrafficChoice

STAGE_3_KEYS = (
    "offload_param",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_hpz_partition_size",
)
"""Keys of ``zero_optimization`` that only stage 3 supports."""
MOST_VARIED = 8
"""Largest number of varied choices in a table, besides one of each further placement."""


@dataclass(frozen=True)
class Placement:
    """Changed keys of ``zero_optimization``. See [Note: placements]."""

    words: str = ""  # description; empty for the configuration itself
    settings: tuple[tuple[str, str, Any], ...] = ()  # ``(block or "", key, value)``
    is_rounding: bool = False  # whether the run's numbers change

    def changes(self, block: str) -> bool:
        return any(name == block for name, _, _ in self.settings)

    def joined(self, other: Placement) -> Placement:
        words = ", ".join(w for w in (self.words, other.words) if w)
        is_rounding = self.is_rounding or other.is_rounding
        return Placement(words, self.settings + other.settings, is_rounding)

    def of(self, zero: ZeroConfig) -> ZeroConfig:
        """Return ``zero``, a resolved block, with this placement."""
        for name, key, value in self.settings:
            if name:
                key, value = name, getattr(zero, name).model_copy(update={key: value})
            zero = zero.model_copy(update={key: value})
        return zero

    def apply(self, zero: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``zero``, a block before resolution, with this placement."""
        found = {**zero}
        for name, key, value in self.settings:
            if name:
                key, value = name, {**(found.get(name) or {}), key: value}
            found[key] = value
        return found


AS_CONFIGURED = Placement()


@dataclass(frozen=True)
class Choice:
    """One configuration of the run, and the bytes per rank that the configuration takes."""

    stage: int  # ZeRO stage
    ratio: float  # share of the optimizer state on the host; 0 is no offload
    device_bytes: int  # bytes on the compute device
    host_bytes: int  # bytes of host memory
    is_fitting: bool  # within the given limits, and no package is missing
    device: str = "none"  # location of the offloaded state: "none", "cpu" or "nvme"
    micro_batch: int = 1  # samples per rank and micro-step
    micro_steps: int = 1  # micro-steps per optimizer step
    is_recomputed: bool = False  # whether activations are recomputed
    is_varied: bool = False  # whether micro-batch, recomputation or placement are not as configured
    placement: Placement = AS_CONFIGURED  # keys that differ from the configuration
    file_bytes: int = 0  # bytes of states on NVMe

    def __str__(self) -> str:
        found = f"stage {self.stage}"
        if self.ratio:
            found += f" with ratio {self.ratio:.2f}"
        return f"{found}, {self.variant}" if self.is_varied else found

    @property
    def variant(self) -> str:
        """Description of micro-batch, recomputation and placement."""
        found = f"micro-batch {self.micro_batch}"
        found += ", activations recomputed" if self.is_recomputed else ""
        return found + (f", {self.placement.words}" if self.placement.words else "")

    @property
    def key(self) -> tuple[float | str, ...]:
        """Unique key of a choice, for sorting."""
        variant = (self.placement.words, self.is_varied, self.micro_batch, self.is_recomputed)
        return (*variant, self.stage, self.ratio)

    @property
    def needs(self) -> str:
        """Description of the bytes that the choice takes."""
        found = f"{format_bytes(self.device_bytes)} on the device"
        if self.host_bytes:
            found += f" and {format_bytes(self.host_bytes)} on the host per rank"
        if self.file_bytes:
            found += f", {format_bytes(self.file_bytes)} on NVMe per rank"
        return found

    def apply(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the user's ``config`` with the settings of this choice."""
        zero = {**(config.get("zero_optimization") or {}), "stage": self.stage}
        offload = {**(zero.get("offload_optimizer") or {}), "device": self.device}
        if self.device != "none":
            for key in ("parameters", "device_budget"):
                offload.pop(key, None)
            zero["offload_optimizer"] = {**offload, "ratio": self.ratio}
        else:
            zero.pop("offload_optimizer", None)
        if self.stage != 3:
            for key in STAGE_3_KEYS:
                zero.pop(key, None)
        found = {
            **config,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.micro_steps,
            "zero_optimization": self.placement.apply(zero),
        }
        block = config.get("activation_checkpointing")
        if not self.is_recomputed:
            found.pop("activation_checkpointing", None)
        elif block is None or not as_kind(block.get("enabled", True), bool):
            found["activation_checkpointing"] = {"enabled": True}
        return found


@dataclass(frozen=True)
class Table:
    """Part of a plan as text: a title, headings, and rows."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Plan:
    """Bytes per rank of a run, and alternatives."""

    world_size: int  # number of ranks
    ranks_per_node: int  # ranks that share a node and its host memory
    num_parameters: int  # elements of all parameters, tied ones once, without padding
    num_trainable: int  # elements of trainable parameters
    configured: Choice  # the configuration as it was given
    memory: MemoryUse  # bytes by kind, as configured
    traffic: tuple[Traffic, ...]  # transfers of one optimizer step, as configured
    # traffic as configured and with other keys. Empty for one rank
    traffic_choices: tuple[TrafficChoice, ...]
    # every stage without offload, with full offload, and with the least offload that fits, and
    # choices with other micro-batches, recomputation or placements
    choices: tuple[Choice, ...]
    best: Choice | None  # smallest change that fits, or None
    advice: str  # whether the configuration fits, and ``best``, in words
    device_memory: int | None  # bytes of one device, or None if not given
    host_memory: int | None  # bytes of one node's memory, or None if not given
    async_save_bytes: int = 0  # largest host memory of `Engine.async_save`
    # estimated device bytes outside of tensors, by kind: see `zero_core.footprint.forecast`
    outside: Mapping[str, int] = field(default_factory=dict)
    # for each missing package, a sentence with the key that needs the package. Bytes of the package
    # are not counted, and choices that need it are left out
    missing: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return json.dumps(asdict(self), indent=2)

    def tables(self) -> tuple[Table, ...]:
        """Return tables of memory, traffic, traffic choices and choices."""
        device, host = self.memory.device, self.memory.host
        rows: list[tuple[str | int, ...]]
        rows = [(k, device.get(k, 0), host.get(k, 0)) for k in dict.fromkeys((*device, *host))]
        rows.append(("in all", self.memory.device_bytes, self.memory.host_bytes))
        rows += [(f"outside of tensors, about: {k}", n, 0) for k, n in self.outside.items() if n]
        rows.append(("during async_save, at most", 0, self.async_save_bytes))
        found = [_table("Memory per rank", ("kind", "device", "host"), rows)]
        rows, ways = [], ("within a node", "between nodes")
        for t in self.traffic:
            sent = (t.within_node_bytes, t.between_nodes_bytes, t.host_link_bytes)
            rows.append((f"{t.collective} of {t.content}", str(t.num_calls), *sent))
        headings: tuple[str, ...] = ("transfer", "calls", *ways, "device and host")
        found.append(_table("Bytes sent per rank and step", headings, rows))
        if self.traffic_choices:
            now, rows = self.traffic_choices[0], []
            for each in self.traffic_choices:
                near, far = each.within_node_bytes, each.between_nodes_bytes
                share = near / max(now.within_node_bytes, 1)
                if now.between_nodes_bytes:  # compare on the slower link
                    share = far / now.between_nodes_bytes
                most = (each.most_between_nodes_bytes, each.kept_bytes)
                rows.append((each.name, near, far, f"{share:.1%}", *most))
            headings = ("choice", *ways, "of now", "between nodes at most", "memory for it")
            found.append(_table("Traffic choices, per rank and step", headings, rows))
        has_limits = self.device_memory is not None or self.host_memory is not None
        words, rows = ("no", "yes") if has_limits else ("-", "-"), []
        is_varied = any(choice.is_varied for choice in self.choices)
        for c in self.shown_choices():
            variant = [c.variant] if is_varied else []
            needs = (c.device_bytes, c.host_bytes, words[c.is_fitting])
            rows.append((str(c.stage), f"{c.ratio:.2f}", *variant, *needs))
        heads = ("stage", "ratio", *(["variant"] if is_varied else []), "device", "host", "fits")
        return (*found, _table("Choices", heads, rows))

    def shown_choices(self) -> list[Choice]:
        """Return unvaried choices, `MOST_VARIED` varied ones, and one per further placement."""
        plain = [c for c in self.choices if not c.is_varied]
        varied = [c for c in self.choices if c.is_varied]
        fitting = [c for c in varied if c.is_fitting]
        first = (fitting or varied)[:MOST_VARIED]
        placed = {c.placement.words: c for c in reversed([*fitting, *varied]) if c.placement.words}
        seen = {c.placement.words for c in first}
        return [*plain, *first, *(c for words, c in placed.items() if words not in seen)]


def _table(title: str, headings: tuple[str, ...], rows: Iterable[tuple[str | int, ...]]) -> Table:
    cells = ([c if isinstance(c, str) else format_bytes(c) for c in row] for row in rows)
    return Table(title, headings, tuple(tuple(row) for row in cells))


def format_bytes(nbytes: int) -> str:
    """Format bytes in decimal units with up to three digits ("24 GB"). 0 is "-"."""
    if nbytes == 0:
        return "-"
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB", "PB", "EB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"
