"""Where a device is told to be, and what is bound for it: threads, memory, or nothing."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import ReferenceAdam, Space, group_of, snapshot, train
from torch import nn, optim

from zero_offload import OffloadedOptimizer, numa
from zero_offload.geometry import Geometry
from zero_offload.intervals import Intervals
from zero_offload.numa import Placement
from zero_offload.tier import make_device_tier, make_twin
from zero_offload.twin import TwinTier

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="this system binds no threads"
)

CUDA = torch.device("cuda", 1)
ALL = frozenset(range(8))
NODES = {0: frozenset({0, 1, 4, 5}), 1: frozenset({2, 3, 6, 7})}
ADDRESS = "0001:3b:00.0"
UNBOUND = Placement("cuda:0", 1, "told", frozenset(), "the machine has one NUMA node")


class FakePolicy:
    """Remembers what it is asked for."""

    def __init__(self, *, is_set: bool = False, error: OSError | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._is_set = is_set
        self._error = error

    def is_set(self) -> bool:
        return self._is_set

    def prefer(self, node: int) -> None:
        self.calls.append(("prefer", node, threading.get_ident()))

    def reset(self) -> None:
        self.calls.append(("reset", threading.get_ident()))

    def move(self, address: int, num_bytes: int, node: int) -> None:
        if self._error is not None:
            raise self._error
        self.calls.append(("move", address, num_bytes, node))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tells a PCI address of every CUDA device."""
    told = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)


def _tree(root: Path, nodes: Sequence[str], device_node: str | None = None) -> Path:
    """sysfs of a machine with these nodes, each told by its list of CPUs."""
    for node, cpus in enumerate(nodes):
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    if device_node is not None:
        folder = root / "bus/pci/devices" / ADDRESS
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{device_node}\n")
    return root


TWO = ("0-1,4-5", "2-3,6-7")


@pytest.mark.parametrize("node", [0, 1])
def test_a_device_is_bound_to_the_cpus_of_its_node(tmp_path: Path, gpu: None, node: int) -> None:
    sysfs = _tree(tmp_path, TWO, str(node))
    assert numa.node_cpus(sysfs) == NODES
    found = numa.locate(CUDA, sysfs=sysfs, allowed=ALL, policy=FakePolicy())
    source = str(sysfs / "bus/pci/devices" / ADDRESS / "numa_node")
    assert found == Placement("cuda:1", node, source, NODES[node], "")


@pytest.mark.parametrize(
    ("nodes", "device_node", "allowed", "reason"),
    [
        (("0-7",), "0", ALL, "one NUMA node"),
        ((), None, ALL, "no NUMA nodes"),
        (TWO, "-1", ALL, "not known.*numa_node"),
        (TWO, None, ALL, "not known.*numa_node"),
        (TWO, "1", ALL - {3}, "bound to some of the machine's CPUs from outside"),
        (("0-7", ""), "1", ALL, "node 1 has no CPUs"),
    ],
)
def test_nothing_is_bound_where_it_is_not_known_or_no_use(
    tmp_path: Path,
    gpu: None,
    nodes: Sequence[str],
    device_node: str | None,
    allowed: frozenset[int],
    reason: str,
) -> None:
    sysfs = _tree(tmp_path, nodes, device_node)
    found = numa.locate(CUDA, sysfs=sysfs, allowed=allowed, policy=FakePolicy())
    assert not found.cpus
    assert re.search(reason, found.reason), found.reason
    assert numa.worker_initializer(found) is None


def test_a_memory_policy_from_outside_is_left_alone(tmp_path: Path, gpu: None) -> None:
    sysfs = _tree(tmp_path, TWO, "1")
    found = numa.locate(CUDA, sysfs=sysfs, allowed=ALL, policy=FakePolicy(is_set=True))
    assert (found.node, found.cpus) == (1, frozenset())
    assert "memory policy" in found.reason


def test_a_device_without_a_pci_address_is_not_located(tmp_path: Path) -> None:
    sysfs = _tree(tmp_path, TWO, "1")
    found = numa.locate(torch.device("meta"), sysfs=sysfs, allowed=ALL, policy=FakePolicy())
    assert found.node is None
    assert "no PCI address of meta" in found.reason


@pytest.mark.parametrize(("allowed", "node"), [(NODES[1], 1), (ALL, None), ({2}, 1)])
def test_a_cpu_is_where_its_process_may_run_and_is_never_bound(
    tmp_path: Path, allowed: frozenset[int], node: int | None
) -> None:
    sysfs = _tree(tmp_path, TWO)
    found = numa.locate(torch.device("cpu"), sysfs=sysfs, allowed=allowed, policy=FakePolicy())
    assert (found.node, found.cpus) == (node, frozenset())
    assert "from outside" in found.reason


def _one_cpu() -> frozenset[int]:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one CPU: there is nothing to be bound to")
    return frozenset({max(allowed)})


class Watch(ReferenceAdam):
    """Notes where its callers, and the threads that they start, may run."""

    def __init__(self) -> None:
        super().__init__()
        self.cpus: list[set[int]] = []
        self.num_threads: list[int | None] = []

    def adam_step(self, *args: Any, **kwargs: Any) -> None:
        self.cpus.append(os.sched_getaffinity(0))
        helper = threading.Thread(target=lambda: self.cpus.append(os.sched_getaffinity(0)))
        helper.start()
        helper.join()
        self.num_threads.append(kwargs["num_threads"])
        super().adam_step(*args, **kwargs)


def _tier(space: Space, kernel: ReferenceAdam, placement: Placement | None) -> TwinTier:
    return make_twin(
        Geometry(space.numel, space.pieces, space.params, 1),
        Intervals([(0, space.numel)]),
        pin_memory=False,
        placement=placement,
        device=torch.device("cpu"),
        optimizer_class=optim.AdamW,
        groups=[group_of(optim.AdamW)],
        adam_kernel=kernel,
        device_tier=make_device_tier,
    )


@pytest.mark.num_threads(2)
def test_the_worker_and_its_threads_run_on_the_nodes_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus, policy = _one_cpu(), FakePolicy()
    monkeypatch.setattr(numa, "open_libnuma", lambda: policy)
    before = os.sched_getaffinity(0)
    space, kernel = Space(), Watch()
    tier = _tier(space, kernel, Placement("cuda:0", 1, "told", cpus, ""))
    groups = [group_of(optim.AdamW)]
    train(tier, space, groups)
    assert kernel.cpus
    assert all(found == cpus for found in kernel.cpus)
    assert set(kernel.num_threads) == {1}  # more than it has CPUs would wait for each other
    assert os.sched_getaffinity(0) == before
    (worker,) = tier._parts[0].tier._worker._threads  # type: ignore[attr-defined]
    assert ("prefer", 1, worker.ident) in policy.calls
    own = [call[0] for call in policy.calls if call[-1] == threading.get_ident()]
    assert own == ["prefer", "reset"]

    other, free = Space(), Watch()
    unbound = _tier(other, free, None)
    train(unbound, other, groups)
    assert all(found == before for found in free.cpus)
    assert set(free.num_threads) == {2}
    found, expected = snapshot(tier, space), snapshot(unbound, other)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_nothing_is_done_for_a_placement_that_binds_nothing() -> None:
    policy, before = FakePolicy(), os.sched_getaffinity(0)
    numa.bind_current_thread(UNBOUND, policy=policy)
    with numa.preferring(UNBOUND, policy=policy):
        pass
    assert policy.calls == []
    assert os.sched_getaffinity(0) == before


def test_a_refusal_by_the_system_is_one_warning() -> None:
    told = Placement("cuda:0", 1, "told", frozenset({1 << 20}), "")  # no such CPU
    with pytest.warns(RuntimeWarning, match="NUMA node 1 of cuda:0") as caught:
        numa.bind_current_thread(told, policy=FakePolicy())
    assert len(caught) == 1


def test_the_installed_libnuma_sets_policies() -> None:
    policy = numa.open_libnuma()
    if policy is None:
        pytest.skip("no libnuma here, or the kernel permits no memory policy")
    node = min(numa.node_cpus())
    assert not policy.is_set()
    told = Placement("cuda:0", node, "told", ALL, "")
    with numa.preferring(told):
        assert policy.is_set()
    assert not policy.is_set()


def test_the_optimizer_asks_unless_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def locate(device: torch.device) -> Placement:
        asked.append(device)
        return UNBOUND

    monkeypatch.setattr("zero_offload.optimizer.locate", locate)
    weight = nn.Parameter(torch.ones(3))
    OffloadedOptimizer(optim.SGD, [weight], lr=0.1, numa=False)
    assert not asked
    OffloadedOptimizer(optim.SGD, [weight], lr=0.1)
    assert asked == [torch.device("cpu")]
