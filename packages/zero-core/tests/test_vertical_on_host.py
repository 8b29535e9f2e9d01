"""Host memory of the vertical schedule's activations and gradients, compared with its plan."""

import pytest
import torch
from support import fake_cuda
from support.fake_cuda.simulated import on_device_rank, simulate_on_devices
from torch import accelerator, nn

import zero_core
from zero_core.testing import Case, alone, assert_same, seeded, simulate

VOCAB, WIDTH, DEPTH, ROWS, STEPS = 2500, 16, 3, 1500, 4
GRADIENT_BYTES, INPUT_BYTES = VOCAB * WIDTH * 4, ROWS * WIDTH * 4  # 160,000 and 96,000 bytes


class _Net(nn.Module):
    """A model with tied weights. ``is_shared``: the blocks use the embedding's weight too."""

    def __init__(self, *, is_shared=False):
        super().__init__()
        with seeded(3):
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))
                for _ in range(DEPTH)
            )
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.is_shared = is_shared

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) + self.embed(ids) if self.is_shared else block(x)
        return self.head(x[:50]).square().mean()


def _config(stage=3, steps=STEPS, **further):
    top = {"activation_checkpointing": {"cpu_checkpointing": True}, **further}
    return Case(
        stage, accumulation=steps, top={"train_micro_batch_size_per_gpu": ROWS, **top}
    ).config()


def _batches(step, ranks, steps=STEPS):
    generator = torch.Generator().manual_seed(10 * step + ranks.rank)
    ids = [torch.randint(0, VOCAB, (ROWS,), generator=generator) for _ in range(steps)]
    return [one.to(ranks.device) for one in ids]


def _train(ranks, is_shared, config):
    engine = zero_core.build(_Net(is_shared=is_shared), config, process_group=ranks)
    losses = [engine.train_batch(_batches(step, ranks)).item() for step in range(2)]
    values = {name: value.cpu() for name, value in engine.full_state_dict().items()}
    engine.close()
    return losses, values


@pytest.mark.cuda
@alone
def test_bits_on_a_device_that_is_late_are_those_of_the_horizontal_schedule_on_the_cpu():
    on_device = {"activation_checkpointing": {}}
    cases = [*((1, 3, False, {}), (2, 1, False, {}), (2, 3, True, {})), (2, 3, True, on_device)]
    for seed, (world_size, stage, is_shared, further) in enumerate(cases):
        config = _config(stage, **further)
        expected = simulate(_train, world_size, is_shared, config)
        fake_cuda.set_delays(seed=seed, kernel_s=5e-5, copy_s=2e-3)
        config = config | {"accumulation_schedule": "vertical"}
        assert_same(simulate_on_devices(_train, world_size, is_shared, config), expected)


@pytest.mark.cuda
@on_device_rank
def test_host_memory_is_what_was_planned(ranks):
    config = _config(accumulation_schedule="vertical")
    with torch.device("meta"):
        plan = zero_core.plan(
            _Net(), config, 1, example_inputs=[torch.zeros(ROWS, dtype=torch.long)]
        )
    engine = zero_core.build(_Net(), config, process_group=ranks)
    fake_cuda.start_trace()
    for step in range(3):
        engine.train_batch(_batches(step, ranks))
    trace = fake_cuda.stop_trace()
    blocks = [r.writes[0] for r in trace if r.kind == "pinned_alloc"]
    taken = sum(stop - start for start, stop in blocks if stop - start >= INPUT_BYTES)
    planned = plan.memory.host["activations"] + plan.memory.host["gradients of tied weights"]
    # Pinned buffers have power-of-two sizes, so they take more than their tensors.
    least = STEPS * (DEPTH * INPUT_BYTES + GRADIENT_BYTES)
    assert least <= taken <= planned <= 1.7 * least
    copies = [r for r in trace if r.kind == "launch" and r.name == "copy up"]
    sizes = [stop - start for r in copies for start, stop in r.writes]
    assert sizes.count(GRADIENT_BYTES) == 3 * STEPS
    assert sizes.count(INPUT_BYTES) == 3 * STEPS * DEPTH
    engine.close()


def _rise(ranks, steps):
    config = _config(steps=steps, accumulation_schedule="vertical")
    engine = zero_core.build(_Net(), config, process_group=ranks)
    batches = _batches(1, ranks, steps)
    for _ in range(2):
        accelerator.synchronize(ranks.device)
        accelerator.reset_peak_memory_stats(ranks.device)
        before = accelerator.memory_allocated(ranks.device)
        engine.train_batch(batches)
    found = accelerator.max_memory_allocated(ranks.device) - before
    engine.close()
    return found


@pytest.mark.cuda
@alone
def test_device_has_two_gradients_however_many_micro_batches():
    fake_cuda.set_delays(seed=1, copy_s=1e-2)  # copies are slower than kernels
    (few,), (many,) = (simulate_on_devices(_rise, 1, steps) for steps in (4, 8))
    # Each further micro-batch may keep one gradient of a block's input, but none of weights.
    assert many - few < 4 * INPUT_BYTES + GRADIENT_BYTES / 2


def _plan(schedule, model=None, *, inputs=None, is_on_host=False, **further):
    with torch.device("meta"):
        model = model or _Net()
        inputs = torch.zeros(ROWS, dtype=torch.long) if inputs is None else inputs
    again = {"cpu_checkpointing": is_on_host}
    config = _config(accumulation_schedule=schedule, activation_checkpointing=again)
    return zero_core.plan(model, config, 1, example_inputs=[inputs], **further)


def _on_device(schedule, **further):
    return _plan(schedule, device_type="accelerator", **further).memory.device


def test_plan_counts_gradients_of_all_micro_batches_or_two_beside_the_host():
    here, away = (_on_device("vertical", is_on_host=on) for on in (False, True))
    assert here["gradients of tied weights"] == STEPS * GRADIENT_BYTES
    assert away["gradients of tied weights"] == 2 * GRADIENT_BYTES
    assert "gradients of tied weights" not in _on_device("horizontal")
    here, away = (
        _plan("vertical", is_on_host=on, device_type="cpu").memory for on in (False, True)
    )
    assert here == away, "the host is the device"


class _Narrowing(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64 >> n, 32 >> n) for n in range(3))

    def forward(self, x):
        x = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](x)).sum() + x.square().sum()


@pytest.mark.parametrize(
    ("schedule", "freed", "fetched"),
    [("horizontal", 64 + 16, 64 + 32), ("vertical", STEPS * (64 + 16), 2 * 64)],
)
def test_plan_counts_inputs_of_different_sizes(schedule, freed, fetched):
    found = []
    for is_on_host in (False, True):
        with torch.device("meta"):
            model, x = _Narrowing(), torch.zeros(ROWS, 64, requires_grad=True)
        plan = _plan(schedule, model, inputs=x, is_on_host=is_on_host)
        found.append(plan.memory.device["activations"])
    assert found[0] - found[1] == (freed - fetched) * ROWS * 4
