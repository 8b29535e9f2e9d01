"""Training of a small network with the calls of DeepSpeedExamples' cifar10_deepspeed.py.

It uses deepspeed's command-line options, ``--local_rank``, a configuration in the program, and the
data loader that ``initialize`` returns.
"""

from __future__ import annotations

import argparse

import deepspeed
import measured
import texts
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import nn


def add_argument():
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stage", default=0, type=int, choices=[0, 1, 2, 3])
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def get_ds_config(args):
    return {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": False},
        "fp16": {
            "enabled": False,
            "fp16_master_weights_and_grads": False,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": args.stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    }


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1, self.fc2 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x))).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def main(args) -> None:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=parameters,
        training_data=texts.Rows(texts.images(320)),
        config=get_ds_config(args),
    )
    device = get_accelerator().device_name(engine.local_rank)
    assert not engine.bfloat16_enabled()
    assert not engine.fp16_enabled()
    criterion = nn.CrossEntropyLoss()
    for data in loader:
        inputs, labels = data[0].to(device), data[1].to(device)
        with measured.step() as step:
            loss = criterion(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
            step.loss = loss


if __name__ == "__main__":
    main(add_argument())
