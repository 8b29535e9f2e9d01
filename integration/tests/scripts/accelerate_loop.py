"""Accelerate's training loop. Arguments: stage, and a folder for the state and ``result.json``."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DeepSpeedEngineWrapper
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATION, MICRO, LR = 2, 2, 0.05


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


def make_loader():
    data = torch.randn(36, 3, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(data), batch_size=MICRO)


def make_accelerator(stage):
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero = {"stage": int(stage), "stage3_gather_16bit_weights_on_model_save": True}
    config = {**dict.fromkeys(auto, "auto"), "zero_optimization": zero}
    plugin = DeepSpeedPlugin(hf_ds_config=config, gradient_accumulation_steps=ACCUMULATION)
    return Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=ACCUMULATION)


def prepare(accelerator, bare):
    optimizer = torch.optim.AdamW(bare.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 * accelerator.num_processes, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(
        bare, optimizer, make_loader(), scheduler
    )
    return model, optimizer, scheduler, loader


def train(accelerator, model, optimizer, scheduler, loader):
    record = {"losses": [], "norms": [], "rates": [], "skipped": []}
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
    folder = Path(sys.argv[2])
    accelerator = make_accelerator(sys.argv[1])
    bare = make_model()
    prepared = prepare(accelerator, bare)
    assert isinstance(accelerator.deepspeed_engine_wrapped, DeepSpeedEngineWrapper)
    assert accelerator.unwrap_model(prepared[0]) is bare
    first = train(accelerator, *prepared)
    accelerator.save_state(str(folder))
    second = train(accelerator, *prepared)
    accelerator.load_state(str(folder))
    again = train(accelerator, *prepared)
    state = accelerator.get_state_dict(prepared[0])
    accelerator.save_model(prepared[0], str(folder / "model"))
    accelerator.free_memory()
    # Prepare the same model again with a new optimizer and schedule.
    anew = train(accelerator, *prepare(accelerator, bare))
    if accelerator.is_main_process:
        result = {
            "processes": accelerator.num_processes,
            "kind": str(accelerator.distributed_type),
            "first": first,
            "second": second,
            "again": again,
            "anew": anew,
            "state": {name: value.tolist() for name, value in state.items()},
        }
        (folder / "result.json").write_text(json.dumps(result))
    accelerator.free_memory()


main()
