"""Compiled blocks: the same results as uncompiled ones, without graph breaks."""

import itertools

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

import zero_core
from zero_core.testing import Case, assert_same, make_tower, on_processes, rows, simulate, train
from zero_core.testing.training import train_ddp

WHOLE = {"backend": "aot_eager", "fullgraph": True}
ON_HOST = {"cpu_checkpointing": True}
SLOW = pytest.mark.slow


class _Block(torch.nn.Sequential):
    def forward(self, x):  # since torch 2.14, hooks of a module with torch's own forward are traced
        return super().forward(x)


def _reference(ranks):
    model = make_tower(3)
    train_ddp(model, ranks, [rows(step, ranks.rank) for step in range(3)])
    return {name: value.detach() for name, value in model.state_dict().items()}


def _train(engine, rank):
    train(engine, [rows(step, rank) for step in range(3)])
    assert engine.skipped_steps == 0
    return {k.replace("_orig_mod.", ""): v for k, v in engine.full_state_dict().items()}


def _build(how, config):
    model = make_tower(3)
    blocks = [_Block(*block) for block in model.blocks]
    blocks = [torch.compile(b, **WHOLE) if how == "wrapped" else b for b in blocks]
    model.blocks = torch.nn.ModuleList(blocks)
    for block in blocks if how == "before" else ():
        block.compile(**WHOLE)
    engine = zero_core.build(model, config)
    for block in blocks if how == "after" else ():
        block.compile(**WHOLE)
    return engine


@pytest.mark.parametrize(
    ("world_size", "choices"),
    # One rank gathers nothing. Further ranks would not change the graph.
    [(2, ({}, ON_HOST)), pytest.param(2, (None,), marks=SLOW), pytest.param(1, ({},), marks=SLOW)],
    ids=["recomputed", "saved", "alone"],
)
@on_processes()
def test_compiled_blocks_follow_ddp_without_a_graph_break(ranks, choices):
    expected = _reference(ranks)
    # Copies of inputs to the host must stay outside the graph, so `ON_HOST` needs "wrapped" blocks.
    ways = ("before", "after", "wrapped")
    for again, how in ((a, way) for a in choices for way in (ways[2:] if a == ON_HOST else ways)):
        # Stage 0 runs once, because all ways of compiling give the same graphs.
        for stage in (0, 3) if (ranks.size, how, again) == (2, "before", None) else (3,):
            torch._dynamo.reset()
            counters.clear()
            config = Case(stage).config() | {"activation_checkpointing": again}
            engine = _build(how, config)
            names = [u.name.removesuffix("._orig_mod") for u in engine.layout.units[1:]]
            assert names == ["blocks.0", "blocks.1", "blocks.2"]
            assert_same(_train(engine, ranks.rank), expected)
            assert not counters["graph_break"]
            assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@on_processes(2)
def test_a_model_compiled_as_a_whole_or_in_parts_that_are_recomputed_gives_the_same_numbers(ranks):
    expected = _reference(ranks)
    for stage, recompute in itertools.product((0, 3), ("none", "blocks", "reentrant")):
        torch._dynamo.reset()
        counters.clear()
        model = make_tower(3, recompute=recompute)
        model.blocks = torch.nn.ModuleList(_Block(*block) for block in model.blocks)
        for block in model.blocks if recompute != "none" else ():
            block.compile(**WHOLE)
        engine = Case(stage).build(model=model)
        if recompute == "none":
            model.compile(backend="aot_eager")
        train(engine, [rows(step, ranks.rank).requires_grad_() for step in range(3)])
        assert_same(engine.full_state_dict(), expected)
        assert counters["stats"]["unique_graphs"] >= 1


# Dynamo itself triggers the warning in pytest's process.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_an_exception_in_a_compiled_block_does_no_harm():
    engine = _build("before", {**Case().config(), "activation_checkpointing": {}})
    with pytest.raises(RuntimeError):
        engine(torch.ones(5, 5))  # the input has two columns too few
    simulate(lambda ranks: assert_same(_train(engine, 0), _reference(ranks)), 1)
