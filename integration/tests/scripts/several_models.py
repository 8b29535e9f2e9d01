"""A student and its teacher, then two trained models, each by an Accelerator of its own.

As accelerate documents several models under DeepSpeed. Argument: a folder for saved states. Under
`zero-engine run`; writes the losses there.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from torch import nn

STEPS, LR = 3, 0.05


def make_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))


def plugin(stage):
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    return DeepSpeedPlugin(
        hf_ds_config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    )


def train(accelerators, models, optimizers, teacher, first):
    losses = []
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(10 * step + accelerators[0].process_index)
        inputs = torch.randn(2, 3, generator=generator)
        with torch.no_grad():
            wanted = teacher(inputs)
        for accelerator, model, optimizer in zip(accelerators, models, optimizers, strict=True):
            loss = (model(inputs) - wanted).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


def main():
    folder = Path(sys.argv[1])
    plugins = {"small": plugin(2), "large": plugin(3), "teacher": plugin(3)}
    first = Accelerator(deepspeed_plugins=plugins)
    accelerators, models, optimizers = [], [], []
    for name, seed in (("small", 0), ("large", 1)):
        AcceleratorState().select_deepspeed_plugin(name)
        accelerator = first if name == "small" else Accelerator()
        bare = make_model(seed)
        optimizer = torch.optim.AdamW(bare.parameters(), lr=LR)
        model, optimizer = accelerator.prepare(bare, optimizer)
        accelerators.append(accelerator)
        models.append(model)
        optimizers.append(optimizer)
    AcceleratorState().select_deepspeed_plugin("teacher")
    teacher = Accelerator().prepare(make_model(2))
    losses = train(accelerators, models, optimizers, teacher, 0)
    for number, accelerator in enumerate(accelerators):
        accelerator.save_state(str(folder / str(number)))
    further = train(accelerators, models, optimizers, teacher, STEPS)
    for number, accelerator in enumerate(accelerators):
        accelerator.load_state(str(folder / str(number)))
    again = train(accelerators, models, optimizers, teacher, STEPS)
    assert again == further, (again, further)
    if first.is_main_process:
        (folder / "result.json").write_text(json.dumps(losses + further))


if __name__ == "__main__":
    main()
