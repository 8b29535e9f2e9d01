"""A training loop of accelerate's own kind; nothing here knows of DeepSpeed or zero-engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 8, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())


def main() -> None:
    folder = Path(sys.argv[1])
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(make_data(), batch_size=8 // accelerator.num_processes)
    )
    losses = []
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        accelerator.save_state(folder / "state")
    accelerator.load_state(folder / "state")
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        result = {
            "losses": losses,
            "processes": accelerator.num_processes,
            "kind": str(accelerator.distributed_type),
            "weights": {name: value.tolist() for name, value in weights.items()},
        }
        (folder / "result.json").write_text(json.dumps(result))
    accelerator.end_training()


if __name__ == "__main__":
    main()
