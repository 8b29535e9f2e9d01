"""Plans compared with the bytes that an engine allocates and sends, and with ZeRO's formulas."""

import dataclasses
import json
import sys
import time

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import zero_core
from zero_core import ConfigError, MissingPartError
from zero_core.footprint.result import format_bytes
from zero_core.layout.discovery import MIN_TAIL_NUMEL
from zero_core.testing.models import Tower, batch, make_model, rows, wide_blocks
from zero_core.testing.oracle import Case
from zero_core.testing.ranks import PeakMemory, alone, run_on_processes
from zero_core.testing.simulated import simulate
from zero_core.testing.training import train


class Frozen(Tower):
    def __init__(self):
        super().__init__(4, 23)
        for number, inner in ((1, 115), (2, 69)):
            self.blocks[number] = nn.Sequential(nn.Linear(23, inner), nn.Linear(inner, 23))
        self.blocks[1].requires_grad_(False)
        self.register_buffer("shift", torch.zeros(23))


class Tailed(Frozen):
    """A `Frozen` with a head that forms a tail unit larger than the root."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(23, MIN_TAIL_NUMEL // 23 + 1, bias=False)


def make_config(stage=0, dtype="fp32", **further):
    return Case(stage, dtype, top=further).config()


CONFIGS = [
    *[make_config(stage, dtype) for stage in range(4) for dtype in ("fp32", "bf16")],
    *[make_config(stage, "bf16", gradient_accumulation_steps=2) for stage in range(4)],
    *[make_config(stage, "bf16", communication_data_type="fp32") for stage in (0, 1, 2)],
    make_config(2, "bf16", data_types={"grad_accum_dtype": "bf16"}),
    make_config(3, optimizer={"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}),
    make_config(3, "bf16", optimizer={"type": "SGD", "params": {"lr": 1e-3}}),
]
# Three ranks have uneven shards. They run bf16 with accumulation at each stage, and SGD.
CASES_OF = {
    1: [(Frozen, config) for config in CONFIGS],
    2: [*((Frozen, config) for config in CONFIGS), *((Tailed, c) for c in CONFIGS[1:8:2])],
    3: [(Frozen, config) for config in (*CONFIGS[8:12], *CONFIGS[-2:])],
}
PASSING = {"parameter gradient", "micro-step gradient"}


def _tier_bytes(engine):
    tier = engine.sharded_state.tier
    published = {t.untyped_storage().data_ptr() for _, t in tier._published.chunks}
    masters = [
        t for _, t in tier._masters.chunks if t.untyped_storage().data_ptr() not in published
    ]
    states = [t for name in tier.state_names()[1:] for _, t in tier._flat[name].chunks]
    return {
        "master weights": sum(t.nbytes for t in masters),
        "optimizer states": sum(t.nbytes for t in states),
        "widened gradients": sum(t.nbytes for t in tier._widened.values()),
    }


def _check_all(ranks, plans):
    for (model, config), planned in zip(CASES_OF[ranks.size], plans, strict=True):
        engine = zero_core.build(model(), config, process_group=ranks)
        num_micro_steps = 2 * engine.gradient_accumulation_steps
        train(engine, [rows(n, ranks.rank, 23) for n in range(num_micro_steps)])
        held = {**engine.memory_report(), **_tier_bytes(engine)}
        held["model buffers"] = sum(b.nbytes for b in engine.module.buffers())
        kept = {k: n for k, n in planned.memory.device.items() if k not in PASSING}
        assert kept == {kind: n for kind, n in held.items() if n}, config
        assert planned.memory.host == {}
        assert engine.comm_report() == planned.traffic, config
        engine.close()


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_plan_is_what_a_real_engine_holds_and_sends(world_size):
    with torch.device("meta"):
        plans = [
            zero_core.plan(model(), config, world_size, device_type="cpu")
            for model, config in CASES_OF[world_size]
        ]
    # Processes share memory, as the plan assumes. Simulated ranks do not.
    run = simulate if world_size == 1 else run_on_processes
    run(_check_all, world_size, plans)


def saved_by_autograd(model, inputs):
    """Count the bytes that autograd saves, each storage once, except parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(**inputs)
    return sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in own)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(32, 32)
        self.heads = nn.Linear(32, 16)

    def forward(self, x):
        attend = nn.functional.scaled_dot_product_attention
        q = self.project(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k = self.heads(x).unflatten(-1, (2, 8)).transpose(1, 2)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        masked = attend(q, q, q, attn_mask=mask)
        y = masked + attend(q, k, k, is_causal=True, enable_gqa=True)
        return y.sum()


@pytest.mark.parametrize(
    ("make", "inputs", "dtype", "tolerance"),
    [
        (make_model, batch(0, 0, 0), "fp32", 0.0),
        # bf16 LayerNorm saves its statistics in bf16 on a CPU, in fp32 on meta and on accelerators.
        (make_model, batch(0, 0, 0), "bf16", 0.05),
        (Attention, {"x": torch.ones(2, 64, 32)}, "fp32", 0.0),
        (Attention, {"x": torch.ones(2, 64, 32, dtype=torch.bfloat16)}, "bf16", 0.0),
    ],
)
def test_activations_are_what_autograd_saves(make, inputs, dtype, tolerance):
    model = make()
    before = {n: (p.dtype, p.device) for n, p in model.named_parameters()}
    planned = zero_core.plan(model, make_config(3, dtype), 2, example_inputs=inputs)
    assert {n: (p.dtype, p.device) for n, p in model.named_parameters()} == before
    if dtype == "bf16":
        model.bfloat16()
    saved = saved_by_autograd(model, inputs)
    assert planned.memory.device["activations"] == pytest.approx(saved, rel=tolerance)


@pytest.mark.parametrize("stage", [0, 3])
def test_casts_of_weights_that_autocast_keeps_are_counted(stage):
    # A trained matrix, a frozen norm that autocast runs in fp32, and a frozen matrix.
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 24))
    x = torch.ones(3, 8)
    model[1:].requires_grad_(False)
    weights = {(8, 16), (16, 8), (16, 24), (24, 16)}
    config = {**make_config(stage), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    cast, plain = (
        zero_core.plan(model, given, 2, example_inputs=[x]).memory.device
        for given in (config, make_config(stage))
    )
    engine = zero_core.build(model, config)
    with _Casts() as casts:
        loss = engine(x).sum()
    made = [nbytes for shape, ref, nbytes in casts.made if shape in weights and not ref.expired()]
    assert cast["activations"] - plain["activations"] == sum(made)
    engine.backward(loss)
    engine.close()


class _Casts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            storage = made.untyped_storage()
            self.made.append((tuple(made.shape), StorageWeakRef(storage), storage.nbytes()))
        return made


@pytest.mark.parametrize("stage", range(4))
def test_traffic_is_that_of_the_paper(stage):
    # A rank sends about two model sizes, or three at stage 3: all units but one are gathered twice.
    depth, width, ranks = 40, 1024, 64
    size = 2 * 12 * width * width * depth
    config = make_config(stage, "bf16", data_types={"grad_accum_dtype": "bf16"})
    planned = zero_core.plan(wide_blocks(depth, width), config, ranks, ranks_per_node=8)
    share = size * (ranks - 1) // ranks
    (reduced,) = [t for t in planned.traffic if t.collective == "reduce_scatter"]
    # A rank sends 8 bf16 slices to each of its node's 7 other ranks, then an fp32 sum to 7 nodes.
    assert reduced.within_node_bytes == 8 * 7 * size // ranks
    assert reduced.between_nodes_bytes == 7 * 2 * size // ranks
    gathers = [t for t in planned.traffic if t.collective == "all_gather"]
    sent = sum(t.sent_bytes for t in gathers)
    assert sent == (share if stage < 3 else 2 * share - share // depth)
    for gathered in gathers:
        # One of a node's eight ranks forwards all shards to the next node.
        assert gathered.between_nodes_bytes == gathered.sent_bytes // 8


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@alone
def test_a_trillion_parameters_on_4096_ranks_are_planned_within_a_gigabyte():
    start = time.thread_time()
    with PeakMemory() as peak:
        model = wide_blocks(128, 25600)
        limits = {"device_memory": 141 * 10**9, "host_memory": 2 * 10**12}
        planned = zero_core.plan(model, make_config(0, "bf16"), 4096, **limits)
    seconds = time.thread_time() - start
    assert planned.num_parameters == 128 * 12 * 25600**2 > 10**12
    sharded = zero_core.plan(model, make_config(1, "bf16"), 4096).memory.device
    assert sharded["gradient shards"] == 4 * planned.num_parameters // 4096
    # 2 bytes per parameter for the reduced gradient and 4 bytes for the accumulated sum
    assert planned.memory.device["gradients"] == 6 * planned.num_parameters
    assert peak.nbytes < 10**9
    assert seconds < 10
    assert str(planned.best) == "stage 3"


def test_advice_raises_the_stage_before_it_offloads_and_has_numbers_where_nothing_fits():
    fits = zero_core.plan(wide_blocks(2, 256), make_config(1), 2, device_memory=10**9)
    assert fits.best == fits.configured
    assert fits.advice.startswith("stage 1 fits 1 GB of device memory as configured")
    whole = zero_core.plan(wide_blocks(8, 256), make_config(0), 4)
    less = {"device_memory": whole.memory.device_bytes - 1}
    found = zero_core.plan(wide_blocks(8, 256), make_config(0), 4, **less)
    assert (found.best.stage, found.best.ratio) == (1, 0.0)
    none = zero_core.plan(wide_blocks(4, 1024), make_config(0), 2, device_memory=10**6)
    assert none.best is None
    assert not any(choice.is_fitting for choice in none.choices)
    assert "nothing fits 1 MB of device memory" in none.advice
    assert format_bytes(min(choice.device_bytes for choice in none.choices)) in none.advice


def _plan_tower(config, world_size=2, **how):
    with torch.device("meta"):
        model, x = Tower(4, 64), torch.zeros(config["train_micro_batch_size_per_gpu"], 32, 64)
    return zero_core.plan(model, config, world_size, example_inputs=[x], **how)


def test_recomputation_and_smaller_micro_batches_are_proposed_where_no_stage_fits():
    off = {"zero_optimization": {"stage": 3, "offload_optimizer": None}}
    off["activation_checkpointing"] = {"enabled": "false"}
    config = make_config(3, train_micro_batch_size_per_gpu=64, **off)
    free = _plan_tower(config)
    least = min(choice.device_bytes for choice in free.choices)
    found = _plan_tower(config, device_memory=least - 1)
    assert (found.best.is_recomputed, found.best.micro_batch) == (True, 64)
    assert "activations recomputed fits" in found.advice
    least = min(choice.device_bytes for choice in found.choices)
    smaller = _plan_tower(config, device_memory=least - 1)
    assert smaller.best.micro_batch < 64
    assert smaller.best.micro_batch * smaller.best.micro_steps == 64
    for best in (found.best, smaller.best):
        again = dataclasses.replace(_plan_tower(best.apply(config)).configured, is_fitting=True)
        assert dataclasses.replace(again, is_varied=True) == best


def test_a_choice_takes_the_same_whatever_stage_is_configured():
    # Only at stage 3 does "auto" choose the vertical schedule, which keeps more activations.
    block = {"gradient_accumulation_steps": 4, "activation_checkpointing": {}}
    plans = [_plan_tower(make_config(n, accumulation_schedule="auto", **block)) for n in (0, 3)]
    zero, three = ({c.key: c.device_bytes for c in p.choices if not c.is_varied} for p in plans)
    assert zero == three


def test_memory_outside_of_tensors_grows_with_peers():
    plans = (zero_core.plan(wide_blocks(2, 256), make_config(3), size) for size in (1, 8, 16))
    one, eight, far = (planned.outside["NCCL"] for planned in plans)
    assert 0 == one < eight < far
    cpu = zero_core.plan(wide_blocks(2, 256), make_config(3), 2, device_type="cpu")
    assert not cpu.outside


def test_on_a_cpu_everything_counts_as_host_memory():
    use = zero_core.plan(wide_blocks(2, 256), make_config(3), 2, device_type="cpu").memory
    enough = 2 * use.device_bytes
    for limit, is_fitting in ((enough, True), (enough - 1, False)):
        limits = {"device_type": "cpu", "host_memory": limit}
        planned = zero_core.plan(wide_blocks(2, 256), make_config(3), 2, **limits)
        assert planned.configured.is_fitting is is_fitting


def test_json_and_tables_hold_the_same_plan():
    planned = zero_core.plan(wide_blocks(2, 256), make_config(3), 4, device_memory=10**9)
    content = json.loads(planned.to_json())
    assert content["memory"]["device"] == planned.memory.device
    assert content["best"]["stage"] == 3
    memory, traffic, *_, choices = planned.tables()  # zero-comm may add another table
    assert list(planned.outside) == ["allocator", "cuBLAS", "NCCL", "CUDA context"]
    outside = [f"outside of tensors, about: {kind}" for kind in planned.outside]
    kinds = [*planned.memory.device, "in all", *outside, "during async_save, at most"]
    assert [row[0] for row in memory.rows] == kinds
    assert len(traffic.rows) == len(content["traffic"]) == len(planned.traffic)
    assert {row[choices.headings.index("fits")] for row in choices.rows} == {"yes"}
    for table in planned.tables():
        assert all(len(row) == len(table.headings) for row in table.rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size = 0: must be at least 1"),
        ({"world_size": 8, "ranks_per_node": 3}, "must divide world_size = 8"),
        ({"world_size": 12}, "ranks_per_node = 8: must divide"),
        ({"world_size": 2, "device_memory": 0}, "device_memory = 0: must be a positive"),
        ({"world_size": 2, "host_memory": "1GB"}, "host_memory = '1GB': must be a positive number"),
        ({"world_size": 2, "host_memory": -5}, "host_memory = -5: must be a positive"),
        ({"world_size": 2, "device_type": "tpu"}, "must be 'accelerator' or 'cpu'"),
        ({"world_size": 2, "device_type": "cpu", "device_memory": 5}, "give host_memory alone"),
        ({"world_size": 2, "model": 3}, "found int"),
        ({"world_size": 2, "example_inputs": {"x": "text"}}, "does not run on the meta device"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    model = arguments.pop("model", wide_blocks(1, 32))
    with pytest.raises(ConfigError, match=message):
        zero_core.plan(model, make_config(1), **arguments)


def test_a_hugging_face_configuration_without_transformers_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPartError, match="pip install transformers"):
        zero_core.plan({"model_type": "gpt2"}, make_config(1), 2)


@pytest.mark.parametrize(
    ("stage", "zero", "package", "uncounted"),
    [
        (
            *(2, {"offload_optimizer": {"device": "cpu"}}, "zero-offload"),
            {"master weights", "optimizer states", "gradient copies", "to_host"},
        ),
        (3, {"offload_param": {"device": "cpu"}}, "zero-offload", set()),
        (
            *(3, {"zero_quantized_weights": True}, "zero-comm"),
            {"message buffers", "all_gather", "reduce_scatter"},
        ),
    ],
    ids=["state", "parameters", "quantized"],
)
def test_what_needs_a_package_that_is_missing_is_named_and_not_counted(
    stage, zero, package, uncounted, monkeypatch
):
    monkeypatch.setattr("zero_core.parts.entry_points", lambda **kwargs: ())
    monkeypatch.setattr("zero_core.parts.FOUND", {})
    config = make_config(stage, "bf16")
    alone = zero_core.plan(wide_blocks(2, 256), config, 4, device_memory=10**9)
    config["zero_optimization"] |= zero
    planned = zero_core.plan(wide_blocks(2, 256), config, 4, device_memory=10**9)
    (said,) = [text for text in planned.missing if f"needs the package {package}" in text]
    assert f"{next(iter(zero))}" in said
    assert "device = 'cpu'" in said or "zero_quantized_weights" in said
    assert f"pip install packages/{package} (in a clone" in said
    assert not planned.memory.host
    assert planned.traffic_choices == ()
    assert not planned.configured.is_fitting
    counted = {*planned.memory.device, *(t.collective for t in planned.traffic)}
    assert not uncounted & counted
    if "offload_optimizer" in zero:
        assert {c.ratio for c in alone.choices} == {0.0}
        assert planned.best == alone.configured
