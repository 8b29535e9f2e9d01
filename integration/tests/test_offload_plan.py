"""Plans with offloaded states and resting parameters: closed forms, choices and placements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import zero_core
from zero_core import ConfigError
from zero_core.config import load_config
from zero_core.plan.result import Choice
from zero_core.testing import Case, wide_blocks


def make_config(stage: int, dtype: str = "fp32", **top: Any) -> dict[str, Any]:
    return Case(stage, dtype, top=top).config()


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ratio", [0.25, 1.0])
def test_closed_forms_of_zero_offload(stage: int, ratio: float) -> None:
    """The paper's section 5 counts 2 bytes per parameter, 2 per gradient and 12 of state.

    With offload the state tier keeps the gradients, and the device those of three units at a time.
    """
    depth, width, ranks = 10, 4096, 64
    psi = 12 * width * width * depth
    config = make_config(stage, "bf16", data_types={"grad_accum_dtype": "bf16"})
    offload = {"device": "cpu", "ratio": ratio, "pin_memory": False}
    config["zero_optimization"] = {"stage": stage, "offload_optimizer": offload}
    planned = zero_core.plan(wide_blocks(depth, width), config, ranks)
    device, host = planned.memory.device, planned.memory.host
    own = psi // ranks
    state = own if stage >= 1 else psi
    assert device["parameters"] == 2 * (own if stage >= 3 else psi)
    whole = 0 if stage >= 2 else 2 * psi
    unit = own // depth
    kept = 3 * 2 * unit if stage else 2 * own
    assert device["gradient shards"] + device.get("gradients", 0) == kept + whole
    cut = round(ratio * state)
    assert device.get("master weights", 0) == 4 * (state - cut)
    assert device.get("optimizer states", 0) == 8 * (state - cut)
    assert host.get("master weights", 0) == 4 * cut
    assert host.get("optimizer states", 0) == 8 * cut
    assert host.get("gradient copies", 0) == 2 * cut
    assert device.get("gradient copies", 0) == 2 * (state - cut)
    sent = min(unit if stage else psi // depth, 2**24)  # two buffers of at most 16 Mi elements
    assert host["parameter copies"] == 2 * 2 * sent


def test_best_choice_needs_the_least_offload_that_fits() -> None:
    model = wide_blocks(4, 1024)
    needed = zero_core.plan(model, make_config(3, "bf16"), 2).memory
    limit = needed.device_bytes - int(0.365 * needed.device["optimizer states"] * 1.5)
    planned = zero_core.plan(model, make_config(0, "bf16"), 2, device_memory=limit)
    best = planned.best
    assert best is not None
    assert best.is_fitting
    assert 0 < best.ratio < 1
    assert best.device_bytes <= limit
    tighter = make_config(best.stage, "bf16")
    tighter["zero_optimization"]["offload_optimizer"] = {
        "device": "cpu",
        "ratio": best.ratio - 0.01,
    }
    less = zero_core.plan(model, tighter, 2, device_memory=limit)
    assert not less.configured.is_fitting
    assert less.best == best
    assert f"Stage {best.stage} with ratio {best.ratio:.2f} fits" in planned.advice


def _plan_offloaded(model: nn.Module, **block: Any) -> zero_core.Plan:
    config = make_config(2, "bf16")
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", **block}
    return zero_core.plan(model, config, 4)


def test_a_budget_is_planned_to_the_element() -> None:
    """An element has 18 bytes: an fp32 master, two moments, a 16-bit gradient and its fp32 copy."""
    model = wide_blocks(2, 256)
    numel = 2 * 12 * 256 * 256 // 4
    for num_on_device in (0, 1000, numel // 2, numel):
        memory = _plan_offloaded(model, device_budget=18 * num_on_device).memory
        found = memory.device.get("optimizer states", 0) / 8
        assert num_on_device - numel / 1e6 - 1 <= found <= num_on_device
        assert memory.device.get("master weights", 0) == 4 * found


def test_names_are_planned_by_their_share_and_auto_by_where_it_begins() -> None:
    model = wide_blocks(4, 256)
    everything = _plan_offloaded(model).configured
    half = _plan_offloaded(model, parameters=["0.*", "2.*"]).configured
    assert half.ratio == 0.5
    assert _plan_offloaded(model, ratio=0.5).configured == half
    assert _plan_offloaded(model, ratio="auto").configured == everything
    with pytest.raises(ConfigError, match=r"'9\.\*' matches no trainable parameter"):
        _plan_offloaded(model, parameters=["9.*"])


def test_host_memory_is_shared_by_the_ranks_of_a_node() -> None:
    model, config = wide_blocks(4, 512), make_config(3)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    use = zero_core.plan(model, config, 4).memory
    enough = 4 * use.host_bytes
    for limit, is_fitting in ((enough, True), (enough - 1, False)):
        planned = zero_core.plan(model, config, 4, host_memory=limit)
        assert planned.configured.is_fitting is is_fitting
    spread = zero_core.plan(model, config, 4, host_memory=enough // 2, ranks_per_node=2)
    assert spread.configured.is_fitting


def test_page_locked_buffers_are_powers_of_two() -> None:
    config = make_config(3, "bf16")
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    host = zero_core.plan(wide_blocks(1, 160), config, 2).memory.host
    numel = 12 * 160 * 160 // 2
    assert host["gradient copies"] == 2 * numel  # as powers of two
    assert host["parameter copies"] == 2 * 2**19 > 2 * 2 * numel > 2 * 2**18
    # The bf16 half of a split master weight is sent as it is: no staging.
    config["zero_optimization"]["offload_optimizer"]["state_dtype"] = "int8"
    host = zero_core.plan(wide_blocks(1, 160), config, 2).memory.host
    assert host["parameter copies"] == 2**19 > 2 * numel > 2**18


def test_a_plan_counts_max_in_cpu_and_the_buffers_of_the_file() -> None:
    def host(**keys: Any) -> Mapping[str, int]:
        config = make_config(3, "bf16")
        rests = {"offload_param": {"nvme_path": "/nowhere", **keys}}
        config["zero_optimization"] |= rests | {"stage3_param_persistence_threshold": 0}
        return zero_core.plan(wide_blocks(5, 64), config, 1).memory.host

    block = 12 * 64 * 64
    assert host(device="cpu") == {"parameters": 2 * 5 * block}
    limited = host(device="nvme", max_in_cpu=2 * block, buffer_count=2)
    assert limited == {"parameters": 2 * 2 * block, "parameter buffers": 2 * (2 + 2) * block}
    assert host(device="nvme", max_in_cpu=10**6) == host(device="cpu")


def test_an_optimizer_of_whole_parameters_is_planned_on_the_device_or_on_the_host() -> None:
    config = make_config(2, optimizer={"type": "Muon", "params": {"lr": 1e-3}})
    planned = zero_core.plan(wide_blocks(2, 64), config, 4, device_memory=10**9)
    assert planned.best == planned.configured
    assert {choice.ratio for choice in planned.choices} == {0.0, 1.0}  # nothing in between


DISK = "/nvme"


def sizes_of(config: dict[str, Any], words: str) -> list[Choice]:
    """Return all choices of a placement, of a plan that nothing fits."""
    found = zero_core.plan(wide_blocks(8, 1024), config, 2, device_memory=1, nvme_path=DISK)
    return [choice for choice in found.choices if choice.placement.words == words]


def same_as_configured(choice: Choice, again: Choice) -> bool:
    return replace(again, is_varied=True, placement=choice.placement) == choice


def test_parameters_go_to_the_host_where_nothing_else_fits() -> None:
    config = make_config(3, "bf16")
    limit = min(c.device_bytes for c in sizes_of(config, "")) - 1
    planned = zero_core.plan(wide_blocks(8, 1024), config, 2, device_memory=limit)
    best = planned.best
    assert best is not None
    assert best.placement.words == "parameters in host memory"
    assert "parameters in host memory fits" in planned.advice
    written = best.apply(config)
    assert written["zero_optimization"]["offload_param"] == {"device": "cpu"}
    again = zero_core.plan(wide_blocks(8, 1024), written, 2, device_memory=limit)
    assert same_as_configured(best, again.configured)


def test_states_go_to_nvme_where_the_host_has_no_room() -> None:
    config = make_config(2, "bf16")
    device = min(c.device_bytes for c in sizes_of(config, ""))
    on_host = [*sizes_of(config, ""), *sizes_of(config, "parameters in host memory")]
    host = 2 * min(c.host_bytes for c in on_host if c.device_bytes <= device) - 1
    limits: dict[str, Any] = {"device_memory": device, "host_memory": host}
    without = zero_core.plan(wide_blocks(8, 1024), config, 2, **limits)
    assert without.best is None
    assert "name a folder on an NVMe disk" in without.advice
    planned = zero_core.plan(wide_blocks(8, 1024), config, 2, nvme_path=DISK, **limits)
    best = planned.best
    assert best is not None
    assert best.device == "nvme"
    assert "states on NVMe" in best.placement.words
    assert best.file_bytes > 0
    assert "on NVMe per rank" in planned.advice
    written = best.apply(config)
    load_config(written, world_size=2)
    assert written["zero_optimization"]["offload_optimizer"]["nvme_path"] == DISK
    again = zero_core.plan(wide_blocks(8, 1024), written, 2, **limits)
    assert same_as_configured(best, again.configured)


def test_moments_of_fewer_bits_are_shown_and_chosen_only_on_request() -> None:
    config = make_config(2, "bf16")
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    eight = sizes_of(config, "8-bit moments")
    host = 2 * max(c.host_bytes for c in eight if c.stage == 3)
    device = min(c.device_bytes for c in sizes_of(config, ""))
    limits: dict[str, Any] = {"device_memory": device, "host_memory": host}
    planned = zero_core.plan(wide_blocks(8, 1024), config, 2, **limits)
    assert planned.best is None
    assert "or allow rounding: " in planned.advice
    assert any("8-bit moments" in row[2] for row in planned.tables()[-1].rows)
    allowed = zero_core.plan(wide_blocks(8, 1024), config, 2, allow_rounding=True, **limits).best
    assert allowed is not None
    assert allowed.placement.words == "8-bit moments"
    assert allowed.placement.is_rounding
