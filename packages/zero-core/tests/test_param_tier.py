"""Parameter shards outside device memory, fetched ahead of use."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zero_core
from zero_core.protocols import ParamTier
from zero_core.testing.models import Hard, make_model, make_tower, rows
from zero_core.testing.oracle import Case, run_ddp, run_engine
from zero_core.testing.ranks import on_processes
from zero_core.testing.simulated import on_ranks, simulate
from zero_core.testing.training import assert_same, train

EVERYTHING = {"stage3_param_persistence_threshold": 0}


class _Late:
    def __init__(self, out, source):
        self._out, self._source = out, source
        out.fill_(float("nan"))

    def wait(self):
        self._out.copy_(self._source)


class Shelf:
    """A `ParamTier` that fills a buffer only in wait(), so that an early read gives NaN."""

    def __init__(self, *, shards, device, config, has_homes=False):
        self.shards = {s: torch.full((n,), float("nan"), dtype=d) for s, n, d in shards}
        self.has_homes = has_homes
        self.log = []
        self.expected = []

    def expect(self, segments):
        self.expected = list(segments)

    def fetch(self, segment, out):
        self.log.append(("fetch", segment))
        return _Late(out, self.shards[segment])

    def write(self, segment, start, values):
        self.log.append(("write", segment))
        self.shards[segment][start : start + values.numel()] = values

    def home(self, segment):
        return self.shards[segment] if self.has_homes else None

    def report(self):
        return {"host parameters": sum(t.nbytes for t in self.shards.values())}


def _case(dtype="fp32", **zero):
    return Case(stage=3, dtype=dtype, zero={**EVERYTHING, **zero})


@on_processes(2)
def test_offloaded_shards_follow_ddp_where_ranks_share_memory(ranks):
    expected = run_ddp(Case(), ranks.rank, 4, ranks)
    found = run_engine(_case(), ranks.rank, 4, param_tier=Shelf, process_group=ranks)
    assert found.losses == expected.losses
    assert_same(found.values, expected.values)


def _tower(dtype="fp32", process_group=None, **zero):
    made = []

    def make(**given):
        made.append(Shelf(**given))
        assert isinstance(made[0], ParamTier)
        return made[0]

    return _case(dtype, **zero).build(process_group, make_tower(5), param_tier=make), made


def test_the_next_unit_is_fetched_before_the_one_in_use_is_computed():
    engine, (shelf,) = _tower()
    seen = {}
    for index, block in enumerate(engine.module.blocks, 1):

        def note(module, args, output, index=index):
            shelf.log.append(("forward", index))
            seen[index] = shelf.expected

        block.register_forward_hook(note)
        block.register_full_backward_hook(
            lambda module, grads, outputs, index=index: shelf.log.append(("backward", index))
        )
    shelf.log.clear()
    engine.backward(engine(torch.ones(2, 7, requires_grad=True)))
    forward, backward = [1, 2, 3, 4, 5], [4, 3, 2, 1]
    assert seen == {index: forward[index:] + backward for index in forward}
    assert shelf.expected == []
    order = {event: place for place, event in reversed(list(enumerate(shelf.log)))}
    for index in range(1, 5):
        assert order["fetch", index + 1] < order["forward", index]
    again = shelf.log[order["forward", 5] :]
    assert ("fetch", 5) not in again  # the last block stays gathered after forward
    for index in range(1, 4):
        assert again.index(("fetch", index)) < again.index(("backward", index + 1))
    with torch.no_grad():
        engine(torch.ones(2, 7))
    assert seen == {index: forward[index:] for index in forward}


ROOT, BLOCK = 80, 142
"""Elements of the tower's root and of a block."""


@pytest.mark.parametrize(
    ("threshold", "model_threshold", "resting"),
    [
        (ROOT - 1, 10**9, [0, 1, 2, 3, 4, 5]),
        (ROOT, 10**9, [1, 2, 3, 4, 5]),
        (BLOCK, 10**9, []),
        (BLOCK, ROOT + 2 * BLOCK, [3, 4, 5]),
    ],
)
def test_small_segments_stay_on_the_device(threshold, model_threshold, resting):
    engine, made = _tower(
        stage3_param_persistence_threshold=threshold,
        stage3_model_persistence_threshold=model_threshold,
    )
    assert [list(s.shards) for s in made] == ([resting] if resting else [])
    kept = [s for s in engine.layout.segments if s.index not in resting]
    held = engine.memory_report().get("parameters", 0)
    assert held == sum(4 * s.padded_numel for s in kept)


def _deferred():
    with zero_core.deferred_init():
        return make_model()


def _construct(ranks, folder, models):
    plain = Case(stage=3).build(ranks)
    plain.export_safetensors(folder)
    expected = load_file(Path(folder) / "model.safetensors")
    with torch.device("meta"):
        empty = Hard()
    for model, keys in ((models[ranks.rank], {}), (empty, {"pretrained": folder})):
        engine = _case().build(ranks, model, param_tier=Shelf, **keys)
        engine.export_safetensors(Path(folder) / "again")
        assert_same(load_file(Path(folder) / "again" / "model.safetensors"), expected)
        assert engine.memory_report()["gathered units"] == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_deferred_and_pretrained_models_never_lie_on_the_device(world_size, tmp_path):
    # Make the models before the simulated ranks start, because deferred_init() sets global hooks.
    models = [_deferred() for _ in range(world_size)]
    simulate(_construct, world_size, str(tmp_path), models)


def test_a_shard_that_cannot_be_read_fails_the_forward_with_the_tiers_error():
    engine, (shelf,) = _tower()

    def fail(segment, out):
        raise OSError(5, "the disk is gone", "/some/file")

    shelf.fetch = fail
    with pytest.raises(OSError, match="/some/file"):
        engine(torch.ones(2, 7))


def test_a_param_tier_below_stage_3_is_refused():
    with pytest.raises(zero_core.ConfigError, match="stage 3, found 2"):
        Case(stage=2).build(model=make_tower(), param_tier=Shelf)


def test_on_a_cpu_shards_are_used_where_they_lie(caplog):
    with caplog.at_level("INFO"):
        engine = _case(offload_param={"device": "cpu"}).build(model=make_tower())
    assert caplog.text.count("are used there") == 1
    engine.backward(engine(torch.ones(2, 7)))
    report = engine.memory_report()
    assert report["parameters"] == 4 * sum(s.padded_numel for s in engine.layout.segments)
    assert report["gathered units"] == 0


@pytest.mark.parametrize("has_homes", [False, True])
def test_the_only_rank_closes_with_its_values_in_the_model(*, has_homes):
    engine = _case().build(model=make_tower(), param_tier=partial(Shelf, has_homes=has_homes))
    train(engine, [rows(0, 0)])
    expected = engine.full_state_dict()
    engine.close()
    assert_same(dict(engine.module.state_dict()), expected)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
@on_ranks()
def test_a_plan_counts_what_rests_and_what_travels(ranks):
    offload = {"device": "nvme", "nvme_path": "/nowhere"}
    for dtype in ("fp32", "bf16"):
        for threshold in (0, 20):
            zero = {"stage3_param_persistence_threshold": threshold, "offload_param": offload}
            config = Case(stage=3, dtype=dtype, zero=zero).config()
            plan = zero_core.plan(make_tower(5), config, ranks.size, device_type="cpu")
            engine, (shelf,) = _tower(dtype, ranks, **zero)
            for _ in range(2):
                shelf.log.clear()
                train(engine, [torch.ones(2, 7)])
            held = {k: n for k, n in engine.memory_report().items() if n}
            del held["host parameters"]
            held.pop("exchange buffers", None)  # simulated ranks share no memory
            assert held == {k: plan.memory.device[k] for k in held}
            root, block, *_ = engine.layout.segments
            if not threshold:
                whole = [root.padded_numel, block.padded_numel, block.padded_numel]
                assert held["gathered units"] == block.dtype.itemsize * sum(whole)

            zero = {**zero, "offload_param": {"device": "cpu"}}
            config = Case(stage=3, dtype=dtype, zero=zero).config()
            traffic = zero_core.plan(make_tower(5), config, ranks.size).traffic
            up = next(t.host_link_bytes for t in traffic if t.collective == "to_device")
            fetched = [s for kind, s in shelf.log if kind == "fetch"]
            assert up == sum(shelf.shards[s].nbytes for s in fetched)
            down = next(t.host_link_bytes for t in traffic if t.collective == "to_host")
            written = [s for kind, s in shelf.log if kind == "write"]
            assert down == sum(shelf.shards[s].nbytes for s in written)
