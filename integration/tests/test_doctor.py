"""The doctor reports what is there, and what would cure what is not."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch
from conftest import run_here

from zero_engine import doctor
from zero_engine.machine import available_cores, memory_limit_bytes


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


def test_optional_library_that_is_missing_is_a_note_and_a_broken_package_is_missing(monkeypatch):
    monkeypatch.setitem(doctor.OPTIONAL, "a-library-of-few", "rare scripts")
    monkeypatch.setitem(doctor.PACKAGES, "cpu-adam", "a_module_that_is_not_there")
    found = by_name()
    optional, broken = found["a-library-of-few"], found["cpu-adam"]
    assert optional.state == "note"
    assert optional.advice == "pip install a-library-of-few, for rare scripts"
    assert broken.state == "missing"
    assert "ModuleNotFoundError" in broken.value


def test_devices_of_ranks_and_a_single_hardware_queue_are_reported(monkeypatch):
    assert "device of a rank" not in by_name() or torch.accelerator.device_count() > 1
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    found = by_name()
    expected = "8 devices: each rank takes the one of its LOCAL_RANK"
    assert found["device of a rank"].value == expected
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"].advice == "unset it, or set it to 8"


def test_numa_nodes_are_listed_with_the_way_to_bind_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_NODES", tmp_path)
    assert by_name()["NUMA nodes"].value == "the system lists none"
    for node, cpus in enumerate(("0-2,8", "4")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    finding = by_name()["NUMA nodes"]
    assert finding.value == "0: CPUs 0-2,8; 1: CPUs 4"
    assert (finding.state, "torchrun --numa-binding" in finding.advice) == ("note", True)
    (tmp_path / "node2" / "cpulist").mkdir(parents=True)  # not readable, not even for root
    finding = by_name()["NUMA nodes"]
    assert finding.value.startswith("not readable: ")
    assert finding.state == "note"


@pytest.mark.parametrize(
    ("has_gpu", "limit", "words"),
    [
        (False, 2**23, ["0.00781 GiB", "for a GPU only"]),
        (True, 2**23, ["0.00781 GiB", "CUDA pins by itself"]),
        (True, None, ["unlimited"]),
    ],
)
def test_locked_memory_says_what_it_means_for_pin_memory(monkeypatch, has_gpu, limit, words):
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
def test_cpu_quota_of_a_container_counts(files, cores, tmp_path):
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


def test_segments_that_grow_are_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    advice = by_name()["device allocator"].advice
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in advice
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments: True")
    assert not by_name()["device allocator"].advice
