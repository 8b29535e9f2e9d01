"""Which NUMA node a compute device hangs on, and how the host's work comes to lie there.

[Note: who tells what]
sysfs, the kernel's own interface, tells what is where: a PCI device's node, a node's CPUs. libnuma
reads the same files and knows no more, so it is not asked. Affinity is the standard library's. The
memory policy has no function there or in libc: that is libnuma's part, where it is installed and
the kernel permits it, which containers often don't. Without it memory lies where it is first
touched, and what the bound worker allocates is right anyway.

[Note: what is bound]
The host tier's worker thread, hence the threads that it starts, which inherit its CPUs: torch's
team of that thread, and a kernel's pool, unless another thread has used that before. Masters and
moments, which the caller's thread makes, are made under the policy. No other thread of the process
is touched. A process that was bound from outside (``numactl``, ``taskset``, ``torchrun
--numa-binding``, a cpuset) has been thought about by somebody else, and is left alone.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch

__all__ = [
    "Libnuma",
    "MemoryPolicy",
    "Placement",
    "bind_current_thread",
    "locate",
    "node_cpus",
    "num_usable_threads",
    "open_libnuma",
    "preferring",
    "worker_initializer",
]

SYSFS = Path("/sys")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a device is, and what is to be bound for it.

    Attributes:
        device: the compute device.
        node: its NUMA node; None if that is not known.
        source: where that was read.
        cpus: what to bind to; empty when nothing is to be bound.
        reason: why nothing is; empty when something is.
    """

    device: str
    node: int | None
    source: str
    cpus: frozenset[int]
    reason: str


class MemoryPolicy(Protocol):
    """What is asked of libnuma."""

    def is_set(self) -> bool:
        """Whether this thread has a policy other than the default."""
        ...

    def prefer(self, node: int) -> None:
        """This thread's new pages come from ``node`` while it has some."""
        ...

    def reset(self) -> None:
        """This thread's new pages come from the node that it runs on, as by default."""
        ...


class Libnuma:
    """`MemoryPolicy` over the C library. See numa(3) and mbind(2)."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def is_set(self) -> bool:
        """Whether this thread has a policy other than the default."""
        mode = ctypes.c_int()
        found = self._library.get_mempolicy(ctypes.byref(mode), None, 0, None, 0)
        return bool(found == 0 and mode.value != 0)

    def prefer(self, node: int) -> None:
        """This thread's new pages come from ``node`` while it has some."""
        self._library.numa_set_preferred(node)

    def reset(self) -> None:
        """This thread's new pages come from the node that it runs on."""
        if self._library.set_mempolicy(0, None, 0) != 0:
            raise _last_error("set_mempolicy")


def _last_error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


@cache
def open_libnuma() -> Libnuma | None:
    """libnuma if it is installed and the kernel lets this process set a memory policy."""
    try:
        library: Any = ctypes.CDLL("libnuma.so.1", use_errno=True)
    except OSError:
        return None
    return Libnuma(library) if library.numa_available() >= 0 else None


def locate(
    device: torch.device,
    *,
    sysfs: Path = SYSFS,
    allowed: Set[int] | None = None,
    policy: MemoryPolicy | None = None,
) -> Placement:
    """Where a device is, and what of this process is to be bound there.

    Args:
        device: the compute device; an accelerator without an index is the current one.
        sysfs: root of the kernel's tree.
        allowed: CPUs that the calling thread may run on; asked by default.
        policy: of the calling thread's memory; libnuma's by default.
    """
    nodes = node_cpus(sysfs)
    allowed = _allowed_cpus() if allowed is None else allowed
    policy = open_libnuma() if policy is None else policy
    if device.type == "cpu":
        node, source = _node_of_cpus(nodes, allowed)
    else:
        node, source = _node_of_device(device, sysfs)
    reason = _reason_not_to_bind(device, nodes, node, source, allowed, policy)
    cpus = frozenset() if reason or node is None else nodes[node]
    return Placement(str(device), node, source, cpus, reason)


def node_cpus(sysfs: Path = SYSFS) -> dict[int, frozenset[int]]:
    """The CPUs of every NUMA node; empty where the system does not tell."""
    folder = sysfs / "devices/system/node"
    lists = {int(path.parent.name[4:]): path for path in folder.glob("node[0-9]*/cpulist")}
    return {node: _parse_cpus(_read(path)) for node, path in sorted(lists.items())}


def _parse_cpus(text: str) -> frozenset[int]:
    """``"0-3,8"`` as the kernel writes it."""
    ends = [part.partition("-")[::2] for part in text.split(",") if part]
    return frozenset(cpu for a, b in ends for cpu in range(int(a), int(b or a) + 1))


def _allowed_cpus() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def _node_of_cpus(nodes: Mapping[int, Set[int]], allowed: Set[int]) -> tuple[int | None, str]:
    found = [node for node, cpus in nodes.items() if cpus & allowed]
    source = f"the CPUs that this process may run on, of nodes {found}"
    return (found[0] if len(found) == 1 else None), source


def _node_of_device(device: torch.device, sysfs: Path) -> tuple[int | None, str]:
    address = _pci_address(device)
    if address is None:
        return None, f"torch tells no PCI address of {device}"
    path = sysfs / "bus/pci/devices" / address / "numa_node"
    text = _read(path)
    node = int(text) if text.lstrip("-").isdigit() else -1
    return (node if node >= 0 else None), str(path)


def _pci_address(device: torch.device) -> str | None:
    ask = getattr(getattr(torch, device.type, None), "get_device_properties", None)
    properties = None if ask is None else ask(device)
    parts = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if not all(isinstance(part, int) for part in parts):
        return None
    domain, bus, slot = parts
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def _reason_not_to_bind(
    device: torch.device,
    nodes: Mapping[int, Set[int]],
    node: int | None,
    source: str,
    allowed: Set[int],
    policy: MemoryPolicy | None,
) -> str:
    if len(nodes) < 2:
        return "the machine has one NUMA node" if nodes else "the system tells of no NUMA nodes"
    if device.type == "cpu":
        return "the CPU computes as well: what is bound is the process, from outside"
    if node is None or node not in nodes:
        return f"the node of {device} is not known ({source})"
    if allowed != frozenset().union(*nodes.values()):
        return "this process was bound to some of the machine's CPUs from outside"
    if policy is not None and policy.is_set():
        return "this process was given a memory policy from outside"
    return "" if nodes[node] else f"node {node} has no CPUs"


def bind_current_thread(placement: Placement, *, policy: MemoryPolicy | None = None) -> None:
    """Keep the calling thread, and those that it starts, on the placement's CPUs and memory.

    Nothing happens where nothing is to be bound. If the system refuses, there is a warning.
    """
    if placement.node is None or not placement.cpus:
        return
    policy = open_libnuma() if policy is None else policy
    try:
        os.sched_setaffinity(0, placement.cpus)
        if policy is not None:
            policy.prefer(placement.node)
    except OSError as error:
        _warn(placement, error)


def worker_initializer(placement: Placement | None) -> Callable[[], None] | None:
    """For an executor: what a worker thread does first; None if nothing is to be bound."""
    if placement is None or not placement.cpus:
        return None
    return partial(bind_current_thread, placement)


@contextmanager
def preferring(
    placement: Placement | None, *, policy: MemoryPolicy | None = None
) -> Iterator[None]:
    """Within it, memory that the calling thread touches first, or pins, is on the node."""
    policy = open_libnuma() if policy is None else policy
    if placement is None or policy is None or placement.node is None or not placement.cpus:
        yield
        return
    policy.prefer(placement.node)
    try:
        yield
    finally:
        policy.reset()


def num_usable_threads() -> int:
    """torch's thread count, but no more than the calling thread may have CPUs."""
    cpus = len(_allowed_cpus())
    return min(torch.get_num_threads(), cpus) if cpus else torch.get_num_threads()


def _warn(placement: Placement, error: OSError) -> None:
    warnings.warn(
        f"the host's part of the optimizer could not be bound to NUMA node {placement.node} of "
        f"{placement.device} ({error}); it works from any node, more slowly. Set numa to false to "
        f"leave it unbound",
        RuntimeWarning,
        stacklevel=3,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
