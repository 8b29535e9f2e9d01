<<<<<<< HEAD
"""A training loop of accelerate's own kind; nothing here knows of DeepSpeed or zero-engine."""

from __future__ import annotations
=======
"""A training loop on accelerate's Accelerator, as its examples are; prints what happened as JSON.

Arguments: stage, folder for a saved state. Under `zero-engine run`.
"""
>>>>>>> c7-script

import json
import sys
from pathlib import Path

import torch
<<<<<<< HEAD
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


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
=======
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DeepSpeedEngineWrapper
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, ACCUMULATION, MICRO, LR = 4, 2, 2, 0.05


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


def make_data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 3, generator=generator)


def make_accelerator(stage):
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": stage,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    plugin = DeepSpeedPlugin(hf_ds_config=config, gradient_accumulation_steps=ACCUMULATION)
    return Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=ACCUMULATION)


def train(accelerator, model, optimizer, scheduler, loader, epochs):
    record = {"losses": [], "norms": [], "rates": [], "skipped": []}
    for _ in range(epochs):
        for (inputs,) in loader:
            with accelerator.accumulate(model):
                loss = model(inputs).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    record["norms"].append(float(norm))
                    record["skipped"].append(accelerator.optimizer_step_was_skipped)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            record["losses"].append(accelerator.gather(loss.detach()).mean().item())
            record["rates"].append(scheduler.get_last_lr()[0])
    return record


def main():
    stage, folder = int(sys.argv[1]), Path(sys.argv[2])
    accelerator = make_accelerator(stage)
    bare = make_model()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 * accelerator.num_processes, 0.5)
    loader = DataLoader(TensorDataset(make_data()), batch_size=MICRO)
    model, optimizer, loader, scheduler = accelerator.prepare(bare, optimizer, loader, scheduler)
    assert isinstance(accelerator.deepspeed_engine_wrapped, DeepSpeedEngineWrapper)
    assert accelerator.unwrap_model(model) is bare
    first = train(accelerator, model, optimizer, scheduler, loader, 1)
    accelerator.save_state(str(folder))
    second = train(accelerator, model, optimizer, scheduler, loader, 1)
    accelerator.load_state(str(folder))
    again = train(accelerator, model, optimizer, scheduler, loader, 1)
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, str(folder / "model"))
    if accelerator.is_main_process:
        result = {
            "processes": accelerator.num_processes,
            "first": first,
            "second": second,
            "again": again,
            "state": {name: value.tolist() for name, value in state.items()},
        }
        (folder / "result.json").write_text(json.dumps(result))
    accelerator.free_memory()


main()
>>>>>>> c7-script
