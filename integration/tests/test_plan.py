"""``zero-engine plan``: planned memory and measured memory, the choices, and the printed plan."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_here
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import zero_core
from zero_core import ConfigError
from zero_core.config import load_config
from zero_core.footprint.result import Choice
from zero_core.testing import Case, SimulatedRanks, seeded, simulate, train, wide_blocks
from zero_engine.planning import Calibration, Curve, Rates

GPT2 = GPT2Config(n_layer=3, n_embd=64, n_head=4, vocab_size=300, n_positions=32)
T5 = T5Config(d_model=64, num_layers=2, num_heads=2, d_ff=128, vocab_size=512, dropout_rate=0.0)
T5.decoder_start_token_id = 0


def make_config(stage: int, dtype: str, **zero: Any) -> dict[str, Any]:
    state_dtype = zero.get("offload_optimizer", {}).get("state_dtype", "float32")
    is_compact = state_dtype != "float32"  # only a kernel supports compact states
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": not is_compact}}
    return Case(stage, dtype, zero=zero, top={"optimizer": optimizer}).config()


def offload(ratio: float, state_dtype: str = "float32") -> dict[str, Any]:
    return {"offload_optimizer": {"device": "cpu", "ratio": ratio, "state_dtype": state_dtype}}


def memory_of_tier(engine: zero_core.Engine) -> dict[str, dict[str, int]]:
    tier: Any = engine.sharded_state.tier
    found: dict[str, dict[str, int]] = {"host": {}, "device": {}}
    for part in tier.report():
        place = "host" if part.is_host else "device"
        found[place] = {kind: n for kind, n in part.tier.memory.items() if n}
    return found


DTYPES = ("fp32", "bf16")
TIER_KINDS = ("master weights", "optimizer states", "gradient copies")


def measure_offload(ranks: SimulatedRanks, configs: list[dict[str, Any]]) -> list[Any]:
    found = []
    ids = torch.arange(64).view(2, 32)
    for config in configs:
        with seeded(0):
            model = GPT2LMHeadModel(GPT2)
        engine = zero_core.build(model, config, process_group=ranks)
        inputs = {"input_ids": ids, "labels": ids}
        train(engine, [inputs] * (1 + engine.gradient_accumulation_steps))
        tier = engine.sharded_state.tier
        tier.wait_params(0, engine.layout.local_numel(is_sharded=ranks.size > 1))
        found.append(memory_of_tier(engine))
        engine.close()
    return found


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_offload_takes_what_was_planned(world_size: int) -> None:
    whole = [
        make_config(stage, dtype, **offload(ratio))
        for stage, dtype, ratio in itertools.product(range(4), DTYPES, (0.0, 0.37, 1.0))
    ]
    # An element has 18 bytes: a master weight, two moments, a 16-bit gradient and its fp32 copy.
    whole += [
        make_config(2, "bf16", offload_optimizer={"device": "cpu", "device_budget": n})
        for n in (18_000, 10**6)
    ]
    # The host holds gradients of several micro-steps.
    whole += [{**whole[-1], "gradient_accumulation_steps": steps} for steps in (2, 4, 5)]
    compact = [
        make_config(stage, dtype, **offload(0.37, state_dtype))
        for state_dtype in ("int8", "bfloat16")
        for stage, dtype in ((2, "fp32"), (2, "bf16"), (3, "bf16"))
    ]
    log = {**offload(1.0, "int8")["offload_optimizer"], "update_in_backward": True}
    compact += [
        make_config(3, "bf16", offload_optimizer={**log, "undo_buffer_size": size})
        for size in (None, 5_000)
    ]
    for rank, found in enumerate(simulate(measure_offload, world_size, whole + compact)):
        # The plan describes rank 0. Quantization blocks of other ranks start at other offsets.
        for config, held in zip(whole if rank else whole + compact, found, strict=False):
            memory = zero_core.plan(GPT2, config, world_size, device_type="cpu").memory
            assert memory.host == held["host"], config
            planned = {k: n for k, n in memory.device.items() if k in TIER_KINDS}
            assert planned == held["device"], config


@pytest.mark.parametrize(
    ("make", "given", "labels"), [(GPT2LMHeadModel, GPT2, 32), (T5ForConditionalGeneration, T5, 16)]
)
def test_a_hugging_face_configuration_is_planned_as_its_model(make, given, labels):
    with torch.device("meta"):
        model: nn.Module = make(given)
    sizes = {"input_ids": (2, 32), "labels": (2, labels)}
    inputs = {name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items()}
    expected = zero_core.plan(model, make_config(3, "bf16"), 2, example_inputs=inputs)
    for each in (given, given.to_dict(), {**given.to_dict(), "pad_token_id": 1}):
        found = zero_core.plan(each, make_config(3, "bf16"), 2, example_inputs=inputs)
        assert found == expected
    assert expected.memory.device["activations"] > 0


def test_program_prints_tables_and_writes_json_and_a_picture(tmp_path: Path) -> None:
    GPT2.save_pretrained(tmp_path)
    (tmp_path / "zero.json").write_text(json.dumps(make_config(0, "bf16")))
    said = run_here(
        *("plan", f"--model={tmp_path}", f"--config={tmp_path / 'zero.json'}", "--ranks=4"),
        *("--ranks-per-node=2", "--tokens=32", "--device-memory=24GiB"),
        *(f"--json-file={tmp_path / 'plan.json'}", f"--png={tmp_path / 'plan.png'}"),
    )
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["device_memory"] == 24 * 2**30
    for kind in content["memory"]["device"]:
        assert kind in said
    names = ["as configured", "zero_quantized_gradients", "zero_lossless_gradients"]
    assert [choice["name"] for choice in content["traffic_choices"]] == names
    assert "Traffic choices" in said
    assert re.match(r"[\d,]+ parameters, bf16, micro-batch 2, 4 ranks; simplest that fits:", said)
    assert content["advice"].split(":")[0] in " ".join(said.split())
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_program_ends_with_1_where_nothing_fits() -> None:
    said = run_here("plan", "--ranks=2", "--device-memory=1MB", expected_code=1)
    assert "nothing fits 1 MB of device memory" in " ".join(said.split())


# No dropout, because torch's CPU kernel decomposes attention with dropout and others do not.
STILL = {**GPT2.to_diff_dict(), "n_positions": 64, "vocab_size": 512, "use_cache": False}
STILL |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


@pytest.mark.parametrize(
    ("make", "given"),
    [(GPT2LMHeadModel, GPT2Config(**STILL)), (T5ForConditionalGeneration, T5)],
    ids=["gpt2", "t5"],
)
def test_activations_of_hugging_face_models_are_what_a_forward_saves(make, given):
    ids = torch.arange(2 * 64).view(2, 64)
    model, inputs = make(given), {"input_ids": ids, "labels": ids}
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(**inputs)
    measured = sum(storage.nbytes() for storage in saved.values())
    planned = zero_core.plan(model, Case().config(), 2, example_inputs=inputs)
    assert planned.memory.device["activations"] == pytest.approx(measured, rel=0.02)


def test_program_predicts_times_by_a_device_and_writes_what_fits(tmp_path: Path) -> None:
    GPT2.save_pretrained(tmp_path)
    (tmp_path / "zero.json").write_text(json.dumps(make_config(3, "bf16")))
    said = run_here(
        *("plan", str(tmp_path), f"--config={tmp_path / 'zero.json'}", "--device=h100"),
        *("--world-size=8", "--seq-length=32", "--batch-size=64", f"--fit={tmp_path / 'fit.json'}"),
    )
    assert "Predicted step" in said
    assert "bounds it" in said
    assert "more by --all" in said
    written = json.loads((tmp_path / "fit.json").read_text())
    stage = written["zero_optimization"]["stage"]
    assert f"; fastest that fits: stage {stage} " in " ".join(said.split())
    config = load_config(written, world_size=8)
    assert config.train_batch_size == 64
    assert written["optimizer"] == make_config(3, "bf16")["optimizer"]


def test_program_predicts_times_by_measured_rates(tmp_path: Path) -> None:
    free = Curve(((1.0, 0.0),))
    names = ("memory.float32", "operator", "pass", "step", "update.device.float32")
    curves = {**dict.fromkeys(names, free), "matmul.float32": Curve.of_rate(1e9)}
    curves["update.host.float32"] = free
    found = Calibration("a processor", "by hand", (Rates(1, 1, 1, curves),))
    (tmp_path / "rates.json").write_text(found.to_json())
    said = run_here(
        *("plan", "--layers=2", "--width=32", "--heads=2", "--vocab=64", "--seq-length=16"),
        *(f"--rates={tmp_path / 'rates.json'}", "--micro-batch-size=2", "--json"),
    )
    time = json.loads(said)["configured"]["step_time"]
    assert time["total_s"] == pytest.approx(time["lanes"]["compute"])


HOST = {"device": "cpu"}


def config_of(stage: int, dtype: str = "fp32", **zero: Any) -> dict[str, Any]:
    return Case(stage, dtype, zero=zero).config()


def test_best_choice_needs_the_least_offload_that_fits() -> None:
    model = wide_blocks(4, 1024)
    needed = zero_core.plan(model, config_of(3, "bf16"), 2).memory
    limit = needed.device_bytes - int(0.365 * needed.device["optimizer states"] * 1.5)
    planned = zero_core.plan(model, config_of(0, "bf16"), 2, device_memory=limit)
    best = planned.best
    assert best is not None
    assert best.is_fitting
    assert 0 < best.ratio < 1
    assert best.device_bytes <= limit
    offload = {**HOST, "ratio": best.ratio - 0.01}
    tighter = config_of(best.stage, "bf16", offload_optimizer=offload)
    less = zero_core.plan(model, tighter, 2, device_memory=limit)
    assert not less.configured.is_fitting
    assert less.best == best
    assert f"Stage {best.stage} with ratio {best.ratio:.2f} fits" in planned.advice


def _plan_offloaded(model: nn.Module, **block: Any) -> zero_core.Plan:
    config = config_of(2, "bf16", offload_optimizer={**HOST, **block})
    return zero_core.plan(model, config, 4)


def test_names_are_planned_by_their_share_and_auto_by_where_it_begins() -> None:
    model = wide_blocks(4, 256)
    everything = _plan_offloaded(model).configured
    half = _plan_offloaded(model, parameters=["0.*", "2.*"]).configured
    assert half.ratio == 0.5
    assert _plan_offloaded(model, ratio=0.5).configured == half
    assert _plan_offloaded(model, ratio="auto").configured == everything
    with pytest.raises(ConfigError, match=r"'9\.\*' matches no trainable parameter"):
        _plan_offloaded(model, parameters=["9.*"])


def test_page_locked_buffers_of_a_plan_and_host_memory_of_a_node() -> None:
    model, config = wide_blocks(4, 512), config_of(3, offload_optimizer=HOST)
    use = zero_core.plan(model, config, 4).memory
    enough = 4 * use.host_bytes
    for limit, is_fitting in ((enough, True), (enough - 1, False)):
        planned = zero_core.plan(model, config, 4, host_memory=limit)
        assert planned.configured.is_fitting is is_fitting
    spread = zero_core.plan(model, config, 4, host_memory=enough // 2, ranks_per_node=2)
    assert spread.configured.is_fitting
    config = config_of(3, "bf16", offload_optimizer={**HOST})
    host = zero_core.plan(wide_blocks(1, 160), config, 2).memory.host
    numel = 12 * 160 * 160 // 2
    assert host["gradient copies"] == 2 * numel
    assert host["parameter copies"] == 2 * 2**19 > 2 * 2 * numel > 2 * 2**18  # each a power of 2
    # The bf16 half of a split master weight is uploaded without a staging copy.
    config["zero_optimization"]["offload_optimizer"]["state_dtype"] = "int8"
    host = zero_core.plan(wide_blocks(1, 160), config, 2).memory.host
    assert host["parameter copies"] == 2**19 > 2 * numel > 2**18


def test_a_plan_counts_max_in_cpu_and_the_buffers_of_the_file() -> None:
    def host(**keys: Any) -> Mapping[str, int]:
        rests = {"offload_param": {"nvme_path": "/nowhere", **keys}}
        config = config_of(3, "bf16", **rests, stage3_param_persistence_threshold=0)
        return zero_core.plan(wide_blocks(5, 64), config, 1).memory.host

    block = 12 * 64 * 64
    assert host(device="cpu") == {"parameters": 2 * 5 * block}
    limited = host(device="nvme", max_in_cpu=2 * block, buffer_count=2)
    assert limited == {"parameters": 2 * 2 * block, "parameter buffers": 2 * (2 + 2) * block}
    assert host(device="nvme", max_in_cpu=10**6) == host(device="cpu")


def test_an_optimizer_of_whole_parameters_is_planned_on_the_device_or_on_the_host() -> None:
    config = config_of(2) | {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}
    planned = zero_core.plan(wide_blocks(2, 64), config, 4, device_memory=10**9)
    assert planned.best == planned.configured
    assert {choice.ratio for choice in planned.choices} == {0.0, 1.0}  # Muon is never split


DISK = "/nvme"


def sizes_of(config: dict[str, Any], words: str) -> list[Choice]:
    found = zero_core.plan(wide_blocks(8, 1024), config, 2, device_memory=1, nvme_path=DISK)
    return [choice for choice in found.choices if choice.placement.words == words]


def test_parameters_go_to_the_host_where_nothing_else_fits() -> None:
    config = config_of(3, "bf16")
    limit = min(c.device_bytes for c in sizes_of(config, "")) - 1
    planned = zero_core.plan(wide_blocks(8, 1024), config, 2, device_memory=limit)
    best = planned.best
    assert best is not None
    assert best.placement.words == "parameters in host memory"
    assert "parameters in host memory fits" in planned.advice
    written = best.apply(config)
    assert written["zero_optimization"]["offload_param"] == {"device": "cpu"}


def test_states_go_to_nvme_where_the_host_has_no_room() -> None:
    config = config_of(2, "bf16")
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


def test_moments_of_fewer_bits_are_shown_and_chosen_only_on_request() -> None:
    config = config_of(2, "bf16", offload_optimizer=HOST)
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


LOSSLESS = (
    *("zero_lossless_gradients", "zero_lossless_weights", "lossless weights and gradients"),
    "lossless weights, quantized gradients",
)
"""Names of choices that change the communication."""
ALL = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
FOUR_BIT = {
    **ALL,
    "zero_quantized_weights_format": "int4_difference",
    "zero_quantized_gradients_within_node": "int8",
    "zero_quantized_gradients_between_nodes": "int4",
    "zero_quantized_gradients_hadamard": True,
}


def planned(model: nn.Module, ranks: int, per_node: int, stage: int = 3, **zero: Any) -> Any:
    config = config_of(stage, "bf16", **zero)
    return zero_core.plan(model, config, ranks, ranks_per_node=per_node, device_type="cpu")


def between_nodes(plan: zero_core.Plan) -> int:
    return sum(t.between_nodes_bytes for t in plan.traffic)


def test_choices_of_traffic_are_what_plans_with_those_keys_say() -> None:
    model = wide_blocks(3, 128)
    found = planned(model, 8, 4)
    names = [choice.name for choice in found.traffic_choices]
    assert names == [
        "as configured",
        "zero_hpz_partition_size 4",
        *ALL,
        *LOSSLESS,
        "all of these",
        "4-bit mode",
    ]
    kinds = (
        *("secondary shards", "quantized weights", "published weights", "message buffers"),
        "error feedback",
    )
    for choice in found.traffic_choices:
        changed = planned(model, 8, 4, **choice.settings)
        assert choice.between_nodes_bytes == between_nodes(changed)
        assert choice.traffic == changed.traffic
        assert choice.kept_bytes == sum(changed.memory.device.get(kind, 0) for kind in kinds)
        depends = any(choice.settings.get(f"zero_lossless_{of}") for of in ("weights", "gradients"))
        assert (choice.most_between_nodes_bytes > choice.between_nodes_bytes) == depends
    (table,) = [t for t in found.tables() if t.title.startswith("Traffic choices")]
    assert [row[0] for row in table.rows] == names


def test_choices_of_traffic_fit_the_stage_the_nodes_and_what_is_configured() -> None:
    model = wide_blocks(2, 64)
    assert planned(model, 1, 1).traffic_choices == ()
    on_one_node = planned(model, 4, 4).traffic_choices
    assert [c.name for c in on_one_node] == ["as configured", *ALL, "all of these"]
    assert {c.between_nodes_bytes for c in on_one_node} == {0}
    assert on_one_node[0].within_node_bytes > max(c.within_node_bytes for c in on_one_node[1:])
    at_stage_2 = planned(model, 4, 2, 2).traffic_choices
    names = ["as configured", "zero_quantized_gradients", *LOSSLESS]
    assert [c.name for c in at_stage_2] == names
    alone = planned(model, 4, 1).traffic_choices
    assert not any("partition" in choice.name for choice in alone)
    configured = {**FOUR_BIT, "zero_hpz_partition_size": 2, "zeropp_loco_param": {}}
    given = planned(model, 4, 2, **configured).traffic_choices
    keys = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")
    names = ["as configured", "plain", *(f"without {key}" for key in keys), *LOSSLESS]
    assert [c.name for c in given] == names
    for choice in given:
        assert choice.traffic == planned(model, 4, 2, **{**configured, **choice.settings}).traffic
    assert given[1].between_nodes_bytes == between_nodes(planned(model, 4, 2))
