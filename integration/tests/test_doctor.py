"""The doctor reports what is there, and what would cure what is not."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import run_here

from zero_engine import doctor
from zero_engine.machine import available_cores, cache_bytes, memory_limit_bytes
from zero_offload import numa
from zero_offload.numa import Placement


def by_name() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine()}


def test_everything_is_found_where_everything_is_installed() -> None:
    found = by_name()
    for name in ("zero-core", "zero-offload", "zero-comm", "cpu-adam", "torch", "gloo"):
        assert found[name].state == "ok", found[name]
    for group in doctor.ENTRY_POINTS:
        assert found[group].state == "ok", found[group]
    assert found["CPU Adam"].value.split()[0] in {"scalar", "avx2", "avx512", "neon"}


def test_missing_package_is_reported_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "zero-comm":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    finding = by_name()["zero-comm"]
    assert finding.state == "missing"
    assert finding.advice == "pip install zero-comm"


def test_package_that_does_not_import_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.PACKAGES, "cpu-adam", "a_module_that_is_not_there")
    finding = by_name()["cpu-adam"]
    assert finding.state == "missing"
    assert "ModuleNotFoundError" in finding.value


def test_numa_nodes_and_what_is_bound_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {0: frozenset({0, 1, 2, 8}), 1: frozenset({4})}
    found = Placement("cuda:0", 0, "sysfs", nodes[0], "")
    monkeypatch.setattr(numa, "node_cpus", lambda: nodes)
    monkeypatch.setattr(numa, "open_libnuma", lambda: None)
    monkeypatch.setattr(numa, "locate", lambda device: found)
    told = by_name()
    assert told["NUMA nodes"].value == "0: CPUs 0-2,8; 1: CPUs 4"
    assert told["NUMA of cuda:0"].value == "node 0; the host's update is bound to CPUs 0-2,8"
    assert (told["libnuma"].state, "CAP_SYS_NICE" in told["libnuma"].advice) == ("note", True)


def test_why_nothing_is_bound_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Placement("cpu", None, "sysfs", frozenset(), "the machine has one NUMA node")
    monkeypatch.setattr(numa, "locate", lambda device: found)
    value = "unknown node; nothing is bound: the machine has one NUMA node"
    assert by_name()["NUMA of cpu"].value == value


def test_numa_is_unknown_without_zero_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zero_offload.numa", None)
    finding = by_name()["NUMA nodes"]
    assert (finding.state, finding.advice) == ("missing", "pip install zero-offload")


@pytest.mark.parametrize(
    ("has_gpu", "limit", "words"),
    [
        (False, 2**23, ["0.00781 GiB", "for a GPU only"]),
        (True, 2**23, ["0.00781 GiB", "CUDA pins by itself"]),
        (True, None, ["unlimited"]),
    ],
)
def test_locked_memory_says_what_it_means_for_pin_memory(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, limit: int | None, words: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(doctor, "locked_memory_limit_bytes", lambda: limit)
    finding = by_name()["lockable memory"]
    assert all(word in finding.value for word in words)
    assert (finding.state == "note") == (has_gpu and limit is not None)


def test_json_and_table_show_the_same_names() -> None:
    findings = json.loads(run_here("doctor", "--json"))
    assert {"topic", "name", "value", "state", "advice"} == set(findings[0])
    table = run_here("doctor")
    for finding in findings:
        assert finding["name"] in table


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({}, None),
    ],
)
def test_cpu_quota_of_a_container_counts(
    files: dict[str, str], cores: int | None, tmp_path: Path
) -> None:
    (tmp_path / "cpu").mkdir()
    without_quota = available_cores(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert available_cores(tmp_path) == (cores or without_quota)


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_memory_limit_of_a_container_counts(name: str, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    unlimited = memory_limit_bytes(tmp_path)
    (tmp_path / name).write_text("max")
    assert memory_limit_bytes(tmp_path) == unlimited
    (tmp_path / name).write_text("1048576")
    assert memory_limit_bytes(tmp_path) == 1048576


def test_the_largest_cache_is_found(tmp_path: Path) -> None:
    assert cache_bytes(tmp_path) == 0
    for index, size in enumerate(("32K", "1024K", "32M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert cache_bytes(tmp_path) == 32 * 2**20
