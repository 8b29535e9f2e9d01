"""Parameters on the host or in files: restarts, and rounding of ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zero_core
from zero_core.testing import (
    Case,
    SimulatedRanks,
    batch,
    make_model,
    make_tower,
    rows,
    simulate,
    train,
)
from zero_offload.steppers import file_stepper

pytestmark = pytest.mark.filterwarnings("ignore:the file system of .* has no direct I/O")
HOST = {"offload_optimizer": {"device": "cpu"}}
BATCHES = [batch(step, 0, 0) for step in range(6)]


def _engine(folder: Path, **keys: Any) -> zero_core.Engine:
    files = {"device": "nvme", "nvme_path": str(folder)}
    zero = {
        "offload_optimizer": files,
        "offload_param": {**files, "max_in_cpu": 0, **keys},
        "stage3_param_persistence_threshold": 0,
    }
    return zero_core.build(make_model(), Case(3, "bf16", zero=zero).config())


def test_a_run_on_a_file_resumes_from_its_checkpoint_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(file_stepper, "BLOCK_NUMEL", 100)  # several blocks per shard
    engine = _engine(tmp_path)
    train(engine, BATCHES[:3])
    engine.save_checkpoint(tmp_path / "kept")
    expected = train(engine, BATCHES[3:])
    host, device = (
        zero_core.build(make_model(), Case(2, "bf16", zero=zero).config()) for zero in (HOST, {})
    )
    for other in (host, device):
        other.load_checkpoint(tmp_path / "kept")
    host.save_checkpoint(tmp_path / "of the host")
    assert train(host, BATCHES[3:]) == expected
    # The host receives gradients in bf16, the device tier in fp32.
    assert train(device, BATCHES[3:]) == pytest.approx(expected, abs=0.07)
    for name, max_in_cpu in (("kept", 900), ("of the host", 0)):
        other = _engine(tmp_path, max_in_cpu=max_in_cpu)
        train(other, BATCHES[:1])
        other.load_checkpoint(tmp_path / name)
        assert train(other, BATCHES[3:]) == expected
    report = engine.memory_report()
    assert report["file parameters"] > report["host parameters"] == 0


def _tied() -> nn.Module:
    """Return a model whose weights are halfway between two bf16 numbers."""
    model = make_tower(3, 13)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_((param.view(torch.int32) & -65536 | 0x8000).view(torch.float32))
    return model


def _weights(engine: Any) -> dict[str, Tensor]:
    """Run forward and backward. Return the parameter values that modules see in forward."""
    found: dict[str, Tensor] = {}

    def note(module: nn.Module, _: Any) -> None:
        own = {id(p): n for n, p in engine.module.named_parameters()}
        for param in module.parameters(recurse=False):
            found[own[id(param)]] = param.detach().clone()

    hooks = [m.register_forward_pre_hook(note) for m in engine.module.modules()]
    engine.backward(engine(rows(0, 0, 13).bfloat16()))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("stage", "states", "params"),
    [
        (1, "cpu", None),
        (2, "nvme", None),
        (3, "cpu", None),
        (3, "nvme", None),
        (3, "cpu", "cpu"),
        (3, "nvme", "nvme"),
    ],
)
def test_ranks_steps_loads_and_exports_round_ties_alike(
    stage: int, states: str, params: str | None, world_size: int, tmp_path: Path
) -> None:
    """With a learning rate of 0 the master weights are constant, so only rounding can differ."""
    places: dict[str, Any] = {
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": states, "state_dtype": "int8", "nvme_path": str(tmp_path)},
    }
    if params is not None:
        places["offload_param"] = {"device": params, "nvme_path": str(tmp_path), "max_in_cpu": 0}
    optimizer = {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}}
    config = Case(stage, "bf16", zero=places, top={"optimizer": optimizer}).config()
    exact = {name: param.detach() for name, param in _tied().named_parameters()}

    def train(ranks: SimulatedRanks) -> list[dict[str, Tensor]]:
        engine, resumed = (zero_core.build(_tied(), config, process_group=ranks) for _ in range(2))
        found = [_weights(engine)]
        engine.step()
        found.append(engine.full_state_dict())
        for name, master in engine.full_state_dict(dtype=torch.float32).items():
            assert torch.equal(master, exact[name]), name
        folder = engine.export_safetensors(tmp_path / "exported")
        found += [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
        found.append(_weights(engine))
        engine.step()
        engine.save_checkpoint(tmp_path / "saved")
        resumed.load_checkpoint(tmp_path / "saved")
        found.append(_weights(resumed))
        resumed.step()
        found.append({name: p.detach() for name, p in resumed.unwrap().named_parameters()})
        return found

    views = [view for of_rank in simulate(train, world_size) for view in of_rank]
    for view in views:
        assert view.keys() == exact.keys()
        for name, weights in view.items():
            assert (weights - exact[name]).abs().min() > 0, "no ties"
            assert torch.equal(weights, views[0][name]), name
