"""Master weights kept as a bf16 parameter and a remainder: ties are rounded alike by everybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zero_core
from zero_core.testing import SimulatedRanks, seeded, simulate

WIDTH, VOCAB = 13, 29


class _Net(nn.Module):
    """A root and blocks of odd sizes, whose weights lie exactly between two bf16 numbers."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.head = nn.Linear(WIDTH, VOCAB)
        with torch.no_grad():
            for param in self.parameters():
                tie = param.view(torch.int32) & -65536 | 0x8000
                param.copy_(tie.view(torch.float32))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def _weights(engine: Any) -> dict[str, Tensor]:
    """The parameters that a forward pass computes with."""
    found: dict[str, Tensor] = {}

    def note(module: nn.Module, _: Any) -> None:
        own = {id(p): n for n, p in engine.module.named_parameters()}
        for param in module.parameters(recurse=False):
            found[own[id(param)]] = param.detach().clone()

    hooks = [m.register_forward_pre_hook(note) for m in engine.module.modules()]
    engine.backward(engine(torch.arange(12).reshape(2, 6)))
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
    """Learning rate 0 leaves the masters as they were: only a different rounding shows."""
    places: dict[str, Any] = {
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": states, "state_dtype": "int8", "nvme_path": str(tmp_path)},
    }
    if params is not None:
        places["offload_param"] = {"device": params, "nvme_path": str(tmp_path), "max_in_cpu": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage, **places},
    }

    exact = {name: param.detach() for name, param in _Net().named_parameters()}

    def build(ranks: SimulatedRanks) -> Any:
        return zero_core.build(_Net(), config, process_group=ranks)

    def train(ranks: SimulatedRanks) -> list[dict[str, Tensor]]:
        engine = build(ranks)
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
        resumed = build(ranks)
        resumed.load_checkpoint(tmp_path / "saved")
        found.append(_weights(resumed))
        resumed.step()
        unwrapped = resumed.unwrap()
        found.append({name: param.detach() for name, param in unwrapped.named_parameters()})
        return found

    views = [view for of_rank in simulate(train, world_size) for view in of_rank]
    for view in views:
        assert view.keys() == exact.keys()
        for name, weights in view.items():
            assert (weights - exact[name]).abs().min() > 0, "no ties"
            assert torch.equal(weights, views[0][name]), name
