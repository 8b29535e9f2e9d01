"""The ``activation_checkpointing`` config block: recomputation changes no result."""

import pytest
import torch
from support import fake_cuda
from support.fake_cuda.simulated import on_device_rank
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import zero_core
from zero_core.runtime.host_inputs import HostInputs
from zero_core.testing import Case, assert_same, make_tower, on_processes, seeded

BLOCKS = ({}, {"cpu_checkpointing": True})


def _config(stage, block):
    return Case(stage=stage).config() | {"activation_checkpointing": block}


def _penalized(model, x):
    loss = model(x)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.square().sum()


@pytest.mark.parametrize("loss_of", [lambda model, x: model(x, (0, 1, 0)), _penalized])
def test_block_that_is_used_again_right_after_the_next_one_gets_its_whole_gradient(loss_of):
    """Also if a loss has a gradient in it, so that each backward recomputes the blocks."""
    x, expected = torch.randn(4, 7, requires_grad=True), make_tower(2)
    torch.autograd.backward(loss_of(expected, x))
    engine = zero_core.build(make_tower(2), _config(3, {}))
    engine.backward(loss_of(engine, x))
    for name, param in expected.named_parameters():
        torch.testing.assert_close(engine.states.get_full(name, "grad"), param.grad)


class _Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.own = nn.Parameter(torch.ones(8))
        self.num_calls = 0
        self.kept = []

    def forward(self, x, *, scale):
        self.num_calls += 1
        y = torch.tanh(self.inner(x) * self.own)
        self.kept.append(StorageWeakRef(y.untyped_storage()))
        return nn.functional.dropout(y, 0.5) * scale + x, None


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        with seeded(5):
            self.blocks = nn.ModuleList(_Watched() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x, _ = block(x, scale=torch.tensor(2.0))
        return x.square().mean()


@on_processes(2)
def test_blocks_keep_no_activations_and_repeat_their_dropout(ranks):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(ranks.rank))
    for stage in (0, 3):
        finals = []
        for block in (None, {"enabled": False}, *BLOCKS):
            is_on = block is not None and block.get("enabled", True)
            engine = zero_core.build(_Net(), _config(stage, block))
            torch.manual_seed(ranks.rank)
            loss = engine(x)
            alive = [not ref.expired() for b in engine.module.blocks for ref in b.kept]
            assert alive == [not is_on] * 3
            engine.backward(loss)
            engine.step()
            assert [b.num_calls for b in engine.module.blocks] == [2 if is_on else 1] * 3
            with torch.no_grad():
                engine(x)
            assert engine.module.blocks[0].num_calls == (3 if is_on else 2)
            finals.append(engine.full_state_dict())
            engine.close()
            assert all("forward" not in vars(b) for b in engine.module.blocks)
        for final in finals[1:]:
            assert_same(final, finals[0])


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a second memory")
def test_cpu_checkpointing_frees_the_accelerators_memory():
    allocated = []
    for block in BLOCKS:
        engine = zero_core.build(_Net(), _config(0, block))
        x = torch.randn(100_000, 8, device=engine.device)
        before = torch.accelerator.memory_allocated()
        loss = engine(x)
        allocated.append(torch.accelerator.memory_allocated() - before)
        engine.backward(loss)
        engine.step()
    # The second and third blocks' inputs are not on the device. The caller holds the first one.
    assert allocated[0] - allocated[1] >= 2 * 100_000 * 8 * 4


DEPTH, ROWS = 6, 1360
# One input is 43,520 bytes. Torch pins 65,536 bytes for one alone, but 131,072 for three.
INPUT_BYTES = ROWS * 8 * 4


def _deep(ranks):
    config = _config(0, {"cpu_checkpointing": True})
    engine = zero_core.build(make_tower(DEPTH, 8), config, process_group=ranks)
    return engine, torch.randn(ROWS, 8, device=ranks.device)


@pytest.mark.cuda
@on_device_rank
def test_inputs_on_the_host_fill_the_planned_memory_and_come_up_one_block_ahead(ranks):
    engine, x = _deep(ranks)
    model, config = make_tower(DEPTH, 8), _config(0, {"cpu_checkpointing": True})
    planned = zero_core.plan(model, config, 1, example_inputs=[x.cpu()]).memory.device
    fake_cuda.start_trace()
    for _ in range(2):
        engine.backward(engine(x))
        engine.step()
    trace = fake_cuda.stop_trace()
    blocks = [r.writes[0] for r in trace if r.kind == "pinned_alloc"]
    sizes = [stop - start for start, stop in blocks if stop - start >= INPUT_BYTES]
    assert DEPTH * INPUT_BYTES <= sum(sizes) <= 1.01 * DEPTH * INPUT_BYTES
    fake_cuda.reset_counters()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    with fake_cuda.held("copies"):
        loss = engine(x)
        grown = torch.cuda.memory_stats()["active_bytes.all.peak"] - before
    assert grown <= planned["activations"]
    fake_cuda.start_trace()
    engine.backward(loss)
    trace = fake_cuda.stop_trace()
    assert fake_cuda.counters().syncs.get("copy", 0) == 0
    launched = [(r.name, r.stream) for r in trace if r.kind == "launch"]
    up = [n for n, (name, _) in enumerate(launched) if name == "copy up"]
    assert len(up) == DEPTH
    assert all(launched[n][1] != 0 for n in up)
    # The copies of the last two inputs are launched before anything is recomputed.
    between = [n - up[0] for n in up[:3]]
    assert between[:2] == [0, 1]
    assert between[2] > 2
    engine.close()


@pytest.mark.cuda
@on_device_rank
def test_page_locked_memory_that_was_lent_while_its_size_was_dropped_is_dropped_later(ranks):
    host = HostInputs(ranks.device)

    def save(numel, times=1):
        x = torch.ones(numel, device=ranks.device, requires_grad=True)
        for _ in range(times):
            with host.context():
                out = x.square()
        return out

    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    lent = save(2000)
    save(64, 1100)
    save(4000)  # discards all idle buffers, and the lent buffer once ``lent`` is deleted
    del lent
    save(64, 1100)
    save(8000)
    torch.cuda.synchronize()
    torch._C._host_emptyCache()  # makes torch's allocator free buffers whose copies ended
    grown = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    # The 8,192 bytes of ``lent`` are freed. The last save's 32,000 bytes take 32,768.
    assert 32768 <= grown < 32768 + 8192, grown


def test_a_forward_that_was_set_on_the_object_comes_back():
    model = _Net()
    own = model.blocks[1].forward
    model.blocks[1].forward = own
    engine = zero_core.build(model, _config(0, {}))
    assert model.blocks[1].forward is not own
    engine.close()
    assert model.blocks[1].forward is own
