"""Result of `zero_core.plan`: plain frozen data, as JSON or as tables of text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from zero_core.comm.meter import Traffic
from zero_core.plan.choices import TrafficChoice
from zero_core.plan.forecast import MemoryUse


@dataclass(frozen=True)
class Choice:
    """One configuration of the same run, and the bytes it takes per rank.

    Attributes:
        stage: ZeRO stage.
        ratio: share of the optimizer state on the host; 0 is no offload.
        device_bytes: bytes on the compute device.
        host_bytes: bytes of host memory besides.
        is_fitting: whether both are within the memory that was given.
    """

    stage: int
    ratio: float
    device_bytes: int
    host_bytes: int
    is_fitting: bool

    def __str__(self) -> str:
        if self.ratio == 0:
            return f"stage {self.stage}"
        return f"stage {self.stage} with ratio {self.ratio:.2f}"


@dataclass(frozen=True)
class Table:
    """Part of a plan as text: a title, headings, and rows."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Plan:
    """Bytes that a run takes per rank.

    Attributes:
        world_size: number of ranks.
        ranks_per_node: how many of them share a node and its host memory.
        num_parameters: elements of all parameters, tied ones once, padding not counted.
        num_trainable: those that an optimizer updates.
        configured: the configuration as it was given.
        memory: its bytes by kind.
        traffic: its transfers in one optimizer step.
        traffic_choices: what it would send between nodes with other keys; empty on one node.
        choices: every stage without offload, with all of it, and with the least that fits.
        best: the smallest change that fits, ``configured`` itself if it does; None if none does.
        advice: the same in one sentence.
        device_memory: bytes of one device, or None if not given.
        host_memory: bytes of one node's memory, or None if not given.
        async_save_bytes: the most host memory that `Engine.async_save` takes meanwhile.
        missing: for each package that is needed and not installed, a sentence that names the key
            and the package. Its bytes are not counted, and choices that need it are left out.
    """

    world_size: int
    ranks_per_node: int
    num_parameters: int
    num_trainable: int
    configured: Choice
    memory: MemoryUse
    traffic: tuple[Traffic, ...]
    traffic_choices: tuple[TrafficChoice, ...]
    choices: tuple[Choice, ...]
    best: Choice | None
    advice: str
    device_memory: int | None
    host_memory: int | None
    async_save_bytes: int = 0
    missing: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return everything as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def tables(self) -> tuple[Table, ...]:
        """Return memory by kind, traffic by collective, its choices between nodes, and choices."""
        saving = (self._saving_table(),) if self.traffic_choices else ()
        return self._memory_table(), self._traffic_table(), *saving, self._choice_table()

    def _memory_table(self) -> Table:
        device, host = self.memory.device, self.memory.host
        kinds = dict.fromkeys((*device, *host))
        rows = [(kind, device.get(kind, 0), host.get(kind, 0)) for kind in kinds]
        rows.append(("in all", self.memory.device_bytes, self.memory.host_bytes))
        rows.append(("during async_save, at most", 0, self.async_save_bytes))
        return _table("Memory per rank", ("kind", "device", "host"), rows)

    def _traffic_table(self) -> Table:
        rows = [
            (
                f"{t.collective} of {t.content}",
                str(t.num_calls),
                t.within_node_bytes,
                t.between_nodes_bytes,
                t.host_link_bytes,
            )
            for t in self.traffic
        ]
        headings = ("transfer", "calls", "within a node", "between nodes", "device and host")
        return _table("Bytes sent per rank and step", headings, rows)

    def _saving_table(self) -> Table:
        now = max(self.traffic_choices[0].between_nodes_bytes, 1)
        rows = [
            (c.name, c.between_nodes_bytes, f"{c.between_nodes_bytes / now:.1%}", c.kept_bytes)
            for c in self.traffic_choices
        ]
        headings = ("choice", "between nodes", "of now", "memory for it")
        return _table("Traffic choices, per rank and step", headings, rows)

    def _choice_table(self) -> Table:
        has_limits = self.device_memory is not None or self.host_memory is not None
        words = ("no", "yes") if has_limits else ("-", "-")
        rows = [
            (str(c.stage), f"{c.ratio:.2f}", c.device_bytes, c.host_bytes, words[c.is_fitting])
            for c in self.choices
        ]
        return _table("Choices", ("stage", "ratio", "device", "host", "fits"), rows)


def _table(title: str, headings: tuple[str, ...], rows: Iterable[tuple[str | int, ...]]) -> Table:
    """Return a table of ``rows``, in which numbers are bytes."""
    cells = ([c if isinstance(c, str) else format_bytes(c) for c in row] for row in rows)
    return Table(title, headings, tuple(tuple(row) for row in cells))


def format_bytes(nbytes: int) -> str:
    """Format bytes in decimal units with three digits ("24 GB"), and none as "-"."""
    if nbytes == 0:
        return "-"
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB", "PB", "EB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"
