"""``zero-engine run accelerate launch`` with accelerate's DeepSpeed configuration file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_program
from torch import nn
from torch.utils.data import DataLoader

SCRIPT = Path(__file__).parents[1] / "scripts" / "launched_loop.py"
LAUNCH = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  gradient_accumulation_steps: 2
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
mixed_precision: 'no'
num_machines: 1
num_processes: 2
main_process_port: 0
use_cpu: false
"""


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("launched_loop", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the same training in plain torch, all ranks' samples in a batch."""
    script = _script()
    model = script.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    loader = DataLoader(script.make_data(), batch_size=8)
    losses = []
    for _ in range(2):
        for number, (inputs, targets) in enumerate(loader, start=1):
            loss = nn.functional.mse_loss(model(inputs), targets)
            (loss / 2).backward()
            losses.append(loss.item())
            if number % 2 == 0 or number == len(loader):  # accelerate steps at the end, too
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return losses, model.state_dict()


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script wrote."""
    folder = tmp_path_factory.mktemp("accelerate")
    config = folder / "deepspeed.yaml"
    config.write_text(LAUNCH, encoding="utf-8")
    run_program("run", "accelerate", "launch", f"--config_file={config}", str(SCRIPT), str(folder))
    found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found


def test_launched_ranks_train_as_plain_torch(launched: dict[str, Any]) -> None:
    losses, weights = _plain()
    assert launched["losses"] == pytest.approx(losses, rel=1e-4)
    for name, value in weights.items():
        torch.testing.assert_close(torch.tensor(launched["weights"][name]), value)


def test_accelerate_sees_all_ranks_and_deepspeed(launched: dict[str, Any]) -> None:
    assert launched["processes"] == 2
    assert launched["kind"].endswith("DEEPSPEED")


def test_launcher_for_several_machines_says_what_to_do_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "variables"))  # accelerate writes there
    config = tmp_path / "machines.yaml"
    text = LAUNCH.replace("num_machines: 1", "num_machines: 2\nmachine_rank: 0")
    config.write_text(text.replace("main_process_port: 0", "main_process_port: 29777"))
    options = ("--main_process_ip=127.0.0.1", f"--config_file={config}")
    done = run_program("run", "accelerate", "launch", *options, str(SCRIPT), expected_code=1)
    assert "zero-engine run --nnodes" in done.stderr
