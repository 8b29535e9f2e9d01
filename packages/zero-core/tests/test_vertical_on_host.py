"""The vertical schedule with blocks' inputs and tied weights' gradients in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core.plan.rates import Calibration, Curve, Rates
from zero_core.runtime.host_inputs import HostInputs
from zero_core.testing import SimulatedRanks, late_device, run_alone, seeded, simulate

VOCAB, WIDTH, DEPTH, ROWS, STEPS = 2500, 16, 3, 1500, 4
GRADIENT_BYTES, INPUT_BYTES = VOCAB * WIDTH * 4, ROWS * WIDTH * 4  # 160,000 and 96,000


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded(3):
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))
                for _ in range(DEPTH)
            )
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:50]).square().mean()


class _SharedByBlocks(_Net):
    """The blocks, too, compute with the embedding, so that each brings a part of its gradient."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) + self.embed(ids)
        return self.head(x[:50]).square().mean()


def _config(stage: int = 3, **further: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": STEPS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "activation_checkpointing": {"cpu_checkpointing": True},
        **further,
    }


def _batches(step: int, ranks: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + ranks.rank)
    ids = [torch.randint(0, VOCAB, (ROWS,), generator=generator) for _ in range(STEPS)]
    return [one.to(ranks.device) for one in ids]


def _train(
    ranks: SimulatedRanks, kind: type[_Net], config: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    engine = zero_core.build(kind(), config, process_group=ranks)
    losses = [engine.train_batch(_batches(step, ranks)).item() for step in range(3)]
    values = {name: value.cpu() for name, value in engine.full_state_dict().items()}
    engine.close()
    return losses, values


def _follow_the_cpu() -> None:
    late_device.load()
    cases = [(1, 3, _Net), (2, 3, _Net), (2, 1, _Net), (2, 3, _SharedByBlocks)]
    for seed, (world_size, stage, kind) in enumerate(cases):
        expected = simulate(_train, world_size, kind, _config(stage))
        late_device.set_delays(seed=seed, kernel_s=5e-5, copy_s=2e-3)
        config = _config(stage, accumulation_schedule="vertical")
        found = simulate(_train, world_size, kind, config, device="late")
        for (losses, values), (exact_losses, exact_values) in zip(found, expected, strict=True):
            assert losses == exact_losses
            torch.testing.assert_close(values, exact_values, rtol=0.0, atol=0.0)


def test_bits_on_a_device_that_is_late_are_those_of_the_horizontal_schedule_on_the_cpu():
    run_alone(_follow_the_cpu)


def _take_what_was_planned(ranks: SimulatedRanks) -> None:
    config = _config(accumulation_schedule="vertical")
    with torch.device("meta"):
        plan = zero_core.plan(
            _Net(), config, 1, example_inputs=[torch.zeros(ROWS, dtype=torch.long)]
        )
    engine = zero_core.build(_Net(), config, process_group=ranks)
    late_device.start_trace()
    for step in range(3):
        engine.train_batch(_batches(step, ranks))
    trace = late_device.stop_trace()
    blocks = [r.writes[0] for r in trace if r.kind == "pinned_alloc"]
    taken = sum(stop - start for start, stop in blocks if stop - start >= INPUT_BYTES)
    planned = plan.memory.host["activations"] + plan.memory.host["gradients of tied weights"]
    # Page-locked are powers of two. Here that is what buffers, and pieces of several, fill.
    least = STEPS * (DEPTH * INPUT_BYTES + GRADIENT_BYTES)
    assert least <= taken <= planned <= 1.7 * least
    copies = [r for r in trace if r.kind == "launch" and r.name == "copy up"]
    sizes = [stop - start for r in copies for start, stop in r.writes]
    assert sizes.count(GRADIENT_BYTES) == 3 * STEPS
    assert sizes.count(INPUT_BYTES) == 3 * STEPS * DEPTH
    engine.close()


def test_host_memory_is_what_was_planned():
    run_alone(_run_late, _take_what_was_planned)


def _fetch_one_turn_ahead(ranks: SimulatedRanks) -> None:
    host = HostInputs(ranks.device)
    host.begin_turns(STEPS)
    outputs = []
    for number in range(DEPTH * STEPS):
        x = torch.full((100,), float(number), device=ranks.device, requires_grad=True)
        with host.context():
            outputs.append((x, x.square()))
        x.data = torch.empty(0, device=ranks.device)  # the graph alone has the values
    late_device.start_trace()
    order = [n * STEPS + turn for n in reversed(range(DEPTH)) for turn in range(STEPS)]
    num_fetched = []
    for number in order:
        x, y = outputs[number]
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert grad.tolist() == [2.0 * number] * 100
        launched = [r.name for r in late_device.stop_trace() if r.kind == "launch"]
        num_fetched.append(launched.count("copy up"))
        late_device.start_trace()
    late_device.stop_trace()
    # Two at first, then the one of the next turn, and none in the last turn.
    assert num_fetched == [2, *[1] * (len(order) - 2), 0]


def test_inputs_come_up_one_turn_ahead():
    run_alone(_run_late, _fetch_one_turn_ahead)


def _run_late(program: Any) -> None:
    late_device.load()
    simulate(program, 1, device="late")


def _plan(schedule: str, *, is_on_host: bool, device_type: Any = "accelerator") -> zero_core.Plan:
    block = {"cpu_checkpointing": is_on_host}
    config = _config(accumulation_schedule=schedule, activation_checkpointing=block)
    with torch.device("meta"):
        model, inputs = _Net(), [torch.zeros(ROWS, dtype=torch.long)]
    return zero_core.plan(model, config, 1, device_type=device_type, example_inputs=inputs)


def test_device_has_two_blocks_inputs_and_two_tied_gradients_at_a_time():
    here, away = (_plan("vertical", is_on_host=on).memory.device for on in (False, True))
    moved = STEPS * DEPTH * INPUT_BYTES
    assert here["activations"] - away["activations"] == moved - 2 * INPUT_BYTES
    assert here["gradients of tied weights"] == STEPS * GRADIENT_BYTES
    assert away["gradients of tied weights"] == 2 * GRADIENT_BYTES
    here, away = (_plan("horizontal", is_on_host=on).memory.device for on in (False, True))
    assert here["activations"] - away["activations"] == (DEPTH - 2) * INPUT_BYTES


def test_host_that_is_the_device_has_nothing_besides():
    here, away = (
        _plan("vertical", is_on_host=on, device_type="cpu").memory for on in (False, True)
    )
    assert here == away


def _rates(copies: float) -> Calibration:
    """Everything is free but copies at so many bytes per second, and forward and backward."""
    free, copy = Curve(((1.0, 0.0),)), Curve.of_rate(copies)
    names = ("memory.float32", "matmul.float32", "pass", "step")
    curves = {
        **dict.fromkeys(names, free),
        **dict.fromkeys(("update.host.float32", "update.device.float32"), free),
        **dict.fromkeys(("copy.to_host", "copy.to_device"), copy),
        "operator": Curve(((1.0, 1e-3),)),
    }
    return Calibration("an accelerator", "by hand", (Rates(1, 1, None, curves),))


@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
def test_time_counts_the_copies_of_inputs_which_run_beside_computation(schedule: str):
    def step_time(rate: float, *, is_on_host: bool = True) -> Any:
        block = {"cpu_checkpointing": is_on_host}
        config = _config(accumulation_schedule=schedule, activation_checkpointing=block)
        with torch.device("meta"):
            model, inputs = _Net(), [torch.zeros(ROWS, dtype=torch.long)]
        plan = zero_core.plan(model, config, 1, example_inputs=inputs, calibration=_rates(rate))
        return plan.configured.step_time

    moved = STEPS * DEPTH * INPUT_BYTES
    quick, slow = step_time(1e10), step_time(1e6)
    assert quick.lanes["copies"] == pytest.approx(2 * moved / 1e10)
    assert slow.lanes["copies"] == pytest.approx(2 * moved / 1e6)
    without = step_time(1e6, is_on_host=False)
    assert without.lanes["copies"] == 0
    assert quick.total_s == pytest.approx(without.total_s, rel=0.01)  # all but the last block's
    assert slow.total_s > moved / 1e6 > 2 * without.total_s  # each way is a lane
