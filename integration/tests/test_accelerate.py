"""accelerate's own loop over this engine, unchanged, against the same loop in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from safetensors.torch import load_file
from script_server import run_script
from torch import nn

from zero_core.testing import spawn
from zero_engine import deepspeed

SCRIPT = Path(__file__).parent / "scripts" / "accelerate_loop.py"
ACCUMULATION, MICRO, LR = 2, 2, 0.05


def _make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


def _plain(ranks: int) -> dict[str, list[float]]:
    """Two epochs of the same batches in one process of plain torch, and one with all but it new."""
    model = _make_model()
    record: dict[str, list[float]] = {"losses": [], "norms": []}
    for epochs in (2, 1):
        _train_plain(model, ranks, epochs, record)
    return record


def _train_plain(model: nn.Module, ranks: int, epochs: int, record: dict[str, list[float]]) -> None:
    data = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    batches = data.split(MICRO * ranks) * epochs
    for number, inputs in enumerate(batches, start=1):
        loss = model(inputs).square().mean()
        (loss / ACCUMULATION).backward()
        record["losses"].append(loss.item())
        if number % ACCUMULATION == 0:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            record["norms"].append(norm.item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(("stage", "ranks"), [pytest.param(1, 2, marks=pytest.mark.slow), (3, 2)])
def test_loop_trains_saves_and_goes_on_as_in_plain_torch(
    stage: int, ranks: int, tmp_path: Path
) -> None:
    run_script(SCRIPT, str(stage), str(tmp_path), ranks=ranks)
    found: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    expected = _plain(ranks)
    assert found["processes"] == ranks
    for key in ("losses", "norms"):
        all_three = found["first"][key] + found["second"][key] + found["anew"][key]
        assert all_three == pytest.approx(expected[key], rel=1e-4)
    assert found["again"]["losses"] == pytest.approx(found["second"]["losses"], rel=1e-6)
    assert found["again"]["rates"] == found["second"]["rates"]
    assert found["first"]["rates"][-1] < LR
    assert not any(found["first"]["skipped"])
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert saved.keys() == found["state"].keys()
    for name, value in saved.items():
        torch.testing.assert_close(value, torch.tensor(found["state"][name]))


def _plain_models(ranks: int) -> list[float]:
    """Two students and a teacher in plain torch, in one process."""

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))

    students, teacher = [make(0), make(1)], make(2)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LR) for model in students]
    losses = []
    for step in range(6):
        generators = [torch.Generator().manual_seed(10 * step + rank) for rank in range(ranks)]
        inputs = torch.cat([torch.randn(2, 3, generator=one) for one in generators])
        for model, optimizer in zip(students, optimizers, strict=True):
            loss = (model(inputs) - teacher(inputs).detach()).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_several_models_train_and_save_each_by_its_accelerator(tmp_path: Path) -> None:
    run_script(SCRIPT.with_name("several_models.py"), str(tmp_path))
    found = json.loads((tmp_path / "result.json").read_text())
    assert found == pytest.approx(_plain_models(2), rel=1e-4)


def _drive(rank: int, world_size: int) -> None:
    """By the wrapper alone: no step is called, and boundaries are declared."""
    model, reference = _make_model(), _make_model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    wrapper = DeepSpeedEngineWrapper(engine)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for micro in range(6):
        is_last = micro % 3 == 2
        inputs = torch.randn(world_size, 3, generator=torch.Generator().manual_seed(micro))
        wrapper.backward(engine(inputs[rank]).mean(), sync_gradients=is_last)
        (reference(inputs).mean() / 3).backward()
        if is_last:
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), torch.inf)
            assert wrapper.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
            optimizer.step()
            optimizer.zero_grad()
    assert engine.global_steps == 2
    for mine, other in zip(engine.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    engine.destroy()


@pytest.mark.parametrize("world_size", [1, 2])
def test_engine_wrapper_steps_at_declared_boundaries(world_size: int) -> None:
    spawn(_drive, world_size)
