"""Buffer pools: their number of buffers, and the same buffer for the same use in each step."""

from collections import defaultdict

import pytest
import torch

import zero_core
from zero_core.blueprint import Blueprint
from zero_core.config import load_config
from zero_core.sharded.memory import Memory
from zero_core.testing import Case, RootAndBlocks, on_ranks, seeded, train

CPU = torch.device("cpu")
WIDTH = 16
ROOT, BLOCK = 512, 160  # elements of the shard that each of two ranks has, with padding


def net(num_blocks):
    with seeded(0):
        return RootAndBlocks(WIDTH, num_blocks, 4.0)


def config(stage, **zero):
    return Case(stage, zero=zero).config()


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 5])
@on_ranks(2)
def test_a_unit_has_the_same_memory_in_every_step(ranks, num_blocks):
    model = net(num_blocks)
    found = defaultdict(list)
    engine = zero_core.build(model, config(stage=3), process_group=ranks)
    for number, block in enumerate(model.blocks):
        weight = block.weight
        name = f"forward {number}"
        block.register_forward_pre_hook(lambda *_, n=name, w=weight: found[n].append(w.data_ptr()))
        weight.register_post_accumulate_grad_hook(
            lambda w, n=number: found[f"backward {n}"].append(w.data_ptr())
        )
    steps = []
    for _ in range(4):
        train(engine, [torch.ones(2, WIDTH)])
        steps.append(dict(found))
        found.clear()
    # If an address changed, torch.compile(mode="reduce-overhead") would record a new CUDA graph.
    assert steps[1] == steps[2] == steps[3]


def test_the_root_has_no_spare_gradient():
    # The root's gradient is used once a step, and its copy to the host ends before the next step.
    asked = config(stage=2, offload_optimizer={"device": "cpu"})
    planned = zero_core.plan(net(1), asked, 2, device_type="accelerator").memory.device
    assert planned["gradient shards"] == 4 * (ROOT + BLOCK)


def test_a_pool_grows_to_what_was_planned():
    resolved = load_config(config(stage=2, offload_optimizer={"device": "cpu"}), world_size=2)
    drawn = Blueprint.draw(net(5), resolved, 2)
    layout = drawn.layout
    memory = Memory(drawn.found, layout, resolved, rank=0, device=CPU, is_accelerated=True)
    buffers = memory.allocate_gradients(owns_grads=True, adds_grads=False)
    for _ in range(4):
        for segment in reversed(layout.segments):
            pool = buffers[segment.index].shard_pool
            lent = pool.acquire(segment.shard_numel, torch.float32, segment.index)
            pool.release(lent, lambda: None)
    report, expected = memory.report(), memory.expected_blocks()
    assert report["gradient shards"] == sum(expected["gradient shards"])
    assert report["gradient shards"] == 4 * (ROOT + 3 * BLOCK)
