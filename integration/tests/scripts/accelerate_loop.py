"""A training loop on accelerate's Accelerator, as its examples are; prints what happened as JSON.

Arguments: stage, folder for a saved state. Under `zero-engine run`.
"""

import json
import sys
from pathlib import Path

import torch
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
    accelerator.free_memory()
    # The same model with an optimizer and a schedule that are new, as for a smaller batch.
    optimizer = torch.optim.AdamW(bare.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 * accelerator.num_processes, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(
        bare, optimizer, DataLoader(TensorDataset(make_data()), batch_size=MICRO), scheduler
    )
    anew = train(accelerator, model, optimizer, scheduler, loader, 1)
    if accelerator.is_main_process:
        result = {
            "processes": accelerator.num_processes,
            "first": first,
            "second": second,
            "again": again,
            "anew": anew,
            "state": {name: value.tolist() for name, value in state.items()},
        }
        (folder / "result.json").write_text(json.dumps(result))
    accelerator.free_memory()


main()
