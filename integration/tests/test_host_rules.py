"""The engine with host kernels for every rule, and with states of 8 and 16 bits.

Several ranks are simulated ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cpu_adam
import zero_core
from cpu_adam import reference
from tests.host_optimizers import OPTIMIZERS
from zero_core.testing import SimulatedRanks, batch, make_model, simulate
from zero_offload.rules import codes

STEPS = 4
ORACLES: dict[str, type[torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "SGD": torch.optim.SGD,
}


def make_config(name: str, stage: int, dtype: str, **offload: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": name, "params": OPTIMIZERS[name]},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu", **offload}},
    }


def train(engine: zero_core.Engine, steps: range, rank: int) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(**batch(step, 0, rank))["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def run(
    config: dict[str, Any], rank: int, ranks: SimulatedRanks | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and unrounded weights after `STEPS` steps, all by host kernels."""
    engine = zero_core.build(make_model(), config, process_group=ranks)
    tier: Any = engine.sharded_state.tier
    assert all(part.tier.has_kernel for part in tier.report())
    losses = train(engine, range(STEPS), rank)
    weights = engine.full_state_dict(dtype=torch.float32)
    engine.close()
    return losses, weights


def compare_ratios(ranks: SimulatedRanks) -> list[object]:
    """Which of the runs differs in a bit from the first of its kind."""
    wrong: list[object] = []
    for name in OPTIMIZERS:
        for dtype, others in (("fp32", ((1, 0.0), (3, 0.3))), ("bf16", ((1, 0.3), (2, 0.3)))):
            first = None
            for stage, ratio in ((1, 1.0), *others):
                found = run(make_config(name, stage, dtype, ratio=ratio), ranks.rank, ranks)
                first = found if first is None else first
                same = all(torch.equal(found[1][k], v) for k, v in first[1].items())
                if found[0] != first[0] or not same:
                    wrong.append([name, dtype, stage, ratio])
    return wrong


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_neither_ratio_nor_stage_changes_a_bit_under_any_rule(world_size: int) -> None:
    assert simulate(compare_ratios, world_size) == [[]] * world_size


def lion_in_float64(params: dict[str, nn.Parameter], state: dict[str, torch.Tensor]) -> None:
    """One step of algorithm 2 of Chen et al., 2023."""
    lr, decay = OPTIMIZERS["Lion"]["lr"], OPTIMIZERS["Lion"]["weight_decay"]
    for name, param in params.items():
        if param.grad is None:
            continue
        momentum = state.setdefault(name, torch.zeros_like(param, dtype=torch.float64))
        grad, value = param.grad.double(), param.detach().double()
        update = torch.sign(0.9 * momentum + (1 - 0.9) * grad)
        param.detach().copy_(value - lr * (update + decay * value))
        state[name] = 0.99 * momentum + (1 - 0.99) * grad


def oracle(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same model and batches on one process, with torch.optim or the paper's formula."""
    model = make_model()
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    settings = {k: v for k, v in OPTIMIZERS[name].items() if k != "adam_w_mode"}
    make: Any = ORACLES.get(name)
    optimizer = None if make is None else make(list(params.values()), **settings)
    losses, state = [], dict[str, torch.Tensor]()
    for step in range(STEPS):
        loss = model(**batch(step, 0, 0))["loss"]
        loss.backward()
        if optimizer is None:
            lion_in_float64(params, state)
        else:
            optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses, {n: p.detach() for n, p in params.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_rule_follows_its_definition(name: str) -> None:
    losses, weights = run(make_config(name, 2, "fp32", ratio=0.3), 0)
    expected_losses, expected = oracle(name)
    # A few ulps a step; Lion's sign may turn where its argument is almost zero: two steps of lr.
    atol = 2 * STEPS * OPTIMIZERS[name]["lr"] if name == "Lion" else 2e-6
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=atol)
        assert ((weights[key] - value).abs() > 2e-6).float().mean() < 0.01, key


def test_lion_of_the_engine_is_the_kernels_bit_by_bit() -> None:
    param = nn.Parameter(torch.randn(10_007))
    weights, momentum = param.detach().clone(), torch.zeros(10_007)
    optimizer = zero_core.Lion([param], lr=1e-3, weight_decay=0.1)
    for _ in range(10):
        param.grad = torch.randn(10_007)
        optimizer.step()
        cpu_adam.lion_step(
            weights, param.grad, momentum, lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1
        )
    assert torch.equal(param, weights)
    assert torch.equal(optimizer.state[param]["exp_avg"], momentum)


class Wide(nn.Module):
    """Large enough that blocks and padding do not show in bytes per parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - 0.3).square().mean()


def fit(dtype: str, state_dtype: str, steps: int) -> tuple[float, float]:
    """Final loss, and bytes per parameter that the host tier holds."""
    torch.manual_seed(0)
    engine = zero_core.build(
        Wide(), make_config("AdamW", 2, dtype, state_dtype=state_dtype, ratio=1.0)
    )
    inputs = torch.randn(16, 256).to(engine.config.compute_dtype or torch.float32)
    for _ in range(steps):
        loss = engine(inputs)
        engine.backward(loss)
        engine.step()
    tier: Any = engine.sharded_state.tier
    held = tier.host_bytes / sum(p.numel() for p in Wide().parameters())
    engine.close()
    return loss.item(), held


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 6.07), ("fp32", 6.07)])
def test_8_bit_states_train_as_fp32_states_do_in_6_bytes(dtype: str, width: float) -> None:
    start, _ = fit(dtype, "float32", 1)
    wide, wide_bytes = fit(dtype, "float32", 30)
    for state_dtype, expected in (("int8", width), ("bfloat16", 8.0)):
        found, found_bytes = fit(dtype, state_dtype, 30)
        assert found_bytes == pytest.approx(expected, rel=2e-3)
        assert wide < 0.2 * start
        assert abs(found - wide) < 0.05 * (start - wide)
    assert wide_bytes == pytest.approx(12, rel=2e-3)


def resume(ranks: SimulatedRanks, folder: str) -> list[object]:
    """Train, save, go on; load into a fresh engine, go on: compare."""
    rank = ranks.rank
    wrong: list[object] = []
    for state_dtype in ("int8", "bfloat16"):
        for stage, dtype in ((2, "bf16"), (3, "fp32"), (3, "bf16")):
            config = make_config("AdamW", stage, dtype, state_dtype=state_dtype, ratio=0.5)
            engine = zero_core.build(make_model(), config, process_group=ranks)
            train(engine, range(3), rank)
            place = str(Path(folder) / f"{state_dtype}-{stage}-{dtype}")
            engine.save_checkpoint(place)
            expected = train(engine, range(3, 7), rank), engine.full_state_dict(dtype=torch.float32)
            other = zero_core.build(make_model(), config, process_group=ranks)
            train(other, range(20, 22), rank)
            other.load_checkpoint(place)
            found = train(other, range(3, 7), rank), other.full_state_dict(dtype=torch.float32)
            same = all(torch.equal(found[1][k], v) for k, v in expected[1].items())
            if found[0] != expected[0] or not same:
                wrong.append([state_dtype, stage, dtype])
            plain = zero_core.build(
                make_model(), make_config("AdamW", 1, dtype, ratio=1.0), process_group=ranks
            )
            plain.load_checkpoint(place)
            losses = train(plain, range(3, 7), rank)
            if not np.allclose(losses, expected[0], rtol=0.02):
                wrong.append([state_dtype, stage, dtype, losses, expected[0]])
            for made in (engine, other, plain):
                made.close()
    return wrong


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_resumed_run_with_compact_states_is_bit_identical(world_size: int, tmp_path: Path) -> None:
    """And its checkpoint loads into fp32 states at another stage and ratio."""
    assert simulate(resume, world_size, str(tmp_path)) == [[]] * world_size


def test_codes_are_those_of_the_kernels_definition() -> None:
    torch.manual_seed(0)
    numel = 128 * 500 + 37
    scale = torch.exp(2 * torch.randn(501)).repeat_interleave(128)[:numel]
    exp_avg = torch.randn(numel) * torch.exp(torch.randn(numel)) * scale
    exp_avg_sq = exp_avg.square()
    expected = reference.quantize_moments(exp_avg.numpy(), np.sqrt(exp_avg_sq.numpy()))
    found = (*codes.encode_exp_avg(exp_avg), *codes.encode_exp_avg_sq(exp_avg_sq))
    for one, other in zip((found[0], found[2], found[1], found[3]), expected, strict=True):
        assert torch.equal(one, torch.from_numpy(other))
    first, _, scales, _ = expected
    decoded = codes.decode_exp_avg(found[0], found[1])
    torch.testing.assert_close(
        decoded, torch.from_numpy(reference.dequantize_exp_avg(first, scales)), rtol=2e-7, atol=0
    )
    roots = torch.from_numpy(reference.dequantize_exp_avg_sq_root(expected[1], expected[3]))
    assert torch.equal(codes.decode_exp_avg_sq(found[2], found[3]), roots.square())
    param, remainder = codes.split_master(exp_avg)
    upper, lower = reference.split_master(exp_avg.numpy())
    assert torch.equal(param.view(torch.int16), torch.from_numpy(upper.view(np.int16)))
    assert torch.equal(remainder, torch.from_numpy(lower))


@pytest.mark.parametrize(
    ("optimizer", "offload", "match"),
    [
        ("SGD", {"state_dtype": "int8"}, "state_dtype = 'int8' is served for Adam and AdamW"),
        ("AdamW", {"state_dtype": "int4"}, r"offload_optimizer\.state_dtype"),
        ("AdamW", {"device": "none", "state_dtype": "int8"}, "state_dtype needs device 'cpu'"),
    ],
)
def test_state_dtypes_that_are_not_served_are_refused_by_key(
    optimizer: str, offload: dict[str, Any], match: str
) -> None:
    with pytest.raises(zero_core.ConfigError, match=match):
        zero_core.build(make_model(), make_config(optimizer, 1, "fp32", **offload))


def unfreeze(ranks: SimulatedRanks, folder: str, stage: int, state_dtype: str) -> None:
    """Train all but a block, save; with that block, and without another one, load and go on."""
    dtype = "fp32" if state_dtype == "float32" else "bf16"

    def build(frozen: int, **offload: Any) -> zero_core.Engine:
        model = make_model()
        model.blocks[frozen].requires_grad_(False)
        config = make_config("AdamW", stage, dtype, **offload)
        return zero_core.build(model, config, process_group=ranks)

    host: dict[str, Any] = {"ratio": 0.5, "state_dtype": state_dtype}
    saved = build(0, **host)
    train(saved, range(3), ranks.rank)
    saved.save_checkpoint(folder)
    found = []
    for offload, others in (
        (host, range(20, 22)),
        (host, range(0)),
        ({"device": "none"}, range(0)),
    ):
        engine = build(1, **offload)
        train(engine, others, ranks.rank)  # its states are not the checkpoint's
        engine.load_checkpoint(folder)
        assert engine.states.scalars("blocks.0.up.bias")["num_steps"] == 0
        for number in range(3):  # new, frozen now, trained before and after
            name = f"blocks.{number}.up.weight"
            value = saved.states.get_full(name)
            value = value.bfloat16().float() if (number, dtype) == (1, "bf16") else value
            assert torch.equal(engine.states.get_full(name), value), name
        train(engine, range(3, 6), ranks.rank)
        found.append(engine.full_state_dict(dtype=torch.float32))
        engine.close()
    torch.testing.assert_close(found[0], found[1], rtol=0.0, atol=0.0)
    torch.testing.assert_close(found[0], found[2], rtol=0.0, atol=TOLERANCE[state_dtype])


TOLERANCE = {"float32": 1e-5, "int8": 1e-2}
"""Between host and device. In bf16 sums of gradients round otherwise, too."""


@pytest.mark.parametrize("state_dtype", TOLERANCE)
@pytest.mark.parametrize("stage", [1, 3])
def test_resumed_run_with_other_frozen_parameters_goes_on_as_on_the_device(
    tmp_path: Path, stage: int, state_dtype: str
) -> None:
    simulate(unfreeze, 2, str(tmp_path), stage, state_dtype)
