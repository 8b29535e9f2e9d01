"""Training loops of accelerate and Fabric on this engine, compared with plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_program
from safetensors.torch import load_file
from torch import nn

from tests.support.script_server import run_script

SCRIPTS = Path(__file__).parent / "scripts"
RANKS = 2
ACCUMULATION, MICRO, LR = 2, 2, 0.05


def _make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


def _train_plain(model: nn.Module, epochs: int, record: dict[str, list[float]]) -> None:
    data = torch.randn(36, 3, generator=torch.Generator().manual_seed(1)).split(MICRO * RANKS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for number, inputs in list(enumerate(data, start=1)) * epochs:
        loss = model(inputs).square().mean()
        (loss / ACCUMULATION).backward()
        record["losses"].append(loss.item())
        # accelerate also steps at the end of an epoch.
        if number % ACCUMULATION == 0 or number == len(data):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            record["norms"].append(norm.item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def _check_accelerate(folder: Path) -> None:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    model, record = _make_model(), {"losses": [], "norms": []}
    _train_plain(model, 2, record)
    saved = load_file(folder / "model" / "model.safetensors")
    assert saved.keys() == found["state"].keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], torch.tensor(found["state"][name]))
        torch.testing.assert_close(saved[name], value)
    _train_plain(model, 1, record)
    assert found["processes"] == RANKS
    assert found["kind"].endswith("DEEPSPEED")
    for key, expected in record.items():
        all_three = found["first"][key] + found["second"][key] + found["anew"][key]
        assert all_three == pytest.approx(expected, rel=1e-4)
    assert found["again"]["losses"] == pytest.approx(found["second"]["losses"], rel=1e-6)
    assert found["again"]["rates"] == found["second"]["rates"]
    assert found["first"]["rates"][-1] < LR
    assert not any(found["first"]["skipped"])


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_accelerates_loop_trains_saves_and_goes_on(stage: int, tmp_path: Path) -> None:
    run_script(SCRIPTS / "accelerate_loop.py", str(stage), str(tmp_path))
    _check_accelerate(tmp_path)


@pytest.mark.slow
def test_launcher_for_several_machines_says_what_to_do_instead(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "variables"))  # accelerate writes this file
    config = tmp_path / "machines.yaml"
    text = (SCRIPTS.parents[1] / "examples" / "accelerate.yaml").read_text(encoding="utf-8")
    config.write_text(
        text.replace("num_machines: 1", "num_machines: 2\nmachine_rank: 0")
        + "main_process_port: 29777\nuse_cpu: false\n"
    )
    options = ("--main_process_ip=127.0.0.1", f"--config_file={config}")
    script = str(SCRIPTS / "accelerate_loop.py")
    done = run_program("run", "accelerate", "launch", *options, script, expected_code=1)
    assert "zero-engine run --nnodes" in done.stderr


def test_fabrics_loop_trains_saves_and_loads(tmp_path: Path) -> None:
    run_script(SCRIPTS / "fabric_loop.py", "3", str(tmp_path))
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    expected = []
    for step in range(5):
        if step in (0, 3):  # the script restarts its random generator here
            seeds = [torch.Generator().manual_seed(rank) for rank in range(RANKS)]
        batches = [torch.randn(4, 9, generator=seed) for seed in seeds]
        losses = [model(batch).square().mean() for batch in batches]
        (sum(losses) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append([loss.item() for loss in losses])
    for rank, of_rank in enumerate(zip(*expected, strict=True)):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found[:5] == pytest.approx(of_rank, rel=1e-5)
        assert found[5:] == found[3:5]
