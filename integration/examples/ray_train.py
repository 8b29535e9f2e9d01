"""The engine in Ray Train: two workers here; with RAY_ADDRESS=auto, wherever Ray has them.

python integration/examples/ray_train.py
"""

import argparse
import inspect
import os
import tempfile

import ray
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig, get_context, report
from ray.train.torch import TorchTrainer
from torch import nn

import zero_core

WIDTH, CONTEXT, STEPS = 128, 8, 64


def train(settings):  # on every worker, within the process group that Ray has made
    rank = get_context().get_world_rank()
    first = [nn.Embedding(256, WIDTH // CONTEXT), nn.Flatten(), nn.Linear(WIDTH, WIDTH)]
    blocks = [nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    model = nn.Sequential(*first, *blocks, nn.Linear(WIDTH, 256))
    engine = zero_core.build(model, settings["zero"])
    text = torch.tensor(list(inspect.getsource(argparse).encode()), device=engine.device)
    windows = text.unfold(0, CONTEXT + 1, 1)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        window = windows[torch.randint(len(windows), (64,), generator=generator)]
        loss = nn.functional.cross_entropy(engine(window[:, :-1]), window[:, -1])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    place = engine.save_checkpoint(settings["folder"])  # by all ranks, in shards
    metrics = {"first": sum(losses[:5]) / 5, "last": sum(losses[-5:]) / 5}
    report(metrics, checkpoint=Checkpoint.from_directory(str(place)) if rank == 0 else None)


if __name__ == "__main__":
    if "RAY_ADDRESS" not in os.environ:
        ray.init(num_cpus=2, object_store_memory=100 * 1000**2, include_dashboard=False)
    zero = {
        "train_micro_batch_size_per_gpu": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }
    folder = tempfile.mkdtemp()  # on a cluster: one that all of its machines share
    trainer = TorchTrainer(
        train,
        train_loop_config={"zero": zero, "folder": folder},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=folder),
    )
    metrics = trainer.fit().metrics
    assert metrics["last"] < metrics["first"] - 1.0, metrics
    print(f"loss {metrics['first']:.2f} -> {metrics['last']:.2f}")
