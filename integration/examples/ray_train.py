"""The engine in Ray Train with two workers, on this machine or with RAY_ADDRESS=auto on a cluster.

python integration/examples/ray_train.py

If a worker is lost, training restarts from the newest checkpoint, if necessary with one worker.
"""

import argparse
import inspect
import os
import sys
import tempfile
from functools import partial

import ray
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig, get_context, report
from ray.train.torch import TorchTrainer
from torch import nn

from zero_engine.ray import ZeroConfig, build

WIDTH, CONTEXT, BATCH, STEPS = 128, 8, 128, 64


def train(folder):  # runs on every worker, in the process group that Ray created
    rank, world_size = get_context().get_world_rank(), get_context().get_world_size()
    torch.manual_seed(0)
    first = [nn.Embedding(256, WIDTH // CONTEXT), nn.Flatten(), nn.Linear(WIDTH, WIDTH)]
    blocks = [nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    engine = build(nn.Sequential(*first, *blocks, nn.Linear(WIDTH, 256)))
    text = torch.tensor(list(inspect.getsource(argparse).encode()), device=engine.device)
    windows = text.unfold(0, CONTEXT + 1, 1)
    losses = (engine.resume(folder) or {"losses": []})["losses"]
    for step in range(len(losses), STEPS):
        # The whole batch is the same for any number of workers.
        seeded = torch.Generator().manual_seed(step)
        window = windows[torch.randint(len(windows), (BATCH,), generator=seeded)[rank::world_size]]
        loss = nn.functional.cross_entropy(engine(window[:, :-1]), window[:, -1])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step % 16 == 15:  # all workers write their shards, and Ray copies the checkpoint
            place = engine.save_checkpoint(folder, client_state={"losses": losses}, keep_last=2)
            means = {"first": sum(losses[:5]) / 5, "last": sum(losses[-5:]) / 5}
            report(means, Checkpoint.from_directory(str(place)) if rank == 0 else None)


if __name__ == "__main__":
    if "RAY_ADDRESS" not in os.environ:
        ray.init(num_cpus=2, object_store_memory=100 * 1000**2, include_dashboard=False)
    zero = {"train_batch_size": BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}}}
    zero["zero_optimization"] = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    # On a cluster, the folder must be shared by all machines.
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    scaling = ScalingConfig(num_workers=(1, 2), use_gpu=torch.cuda.is_available())
    run = RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=3))
    work, zero = partial(train, os.path.join(folder, "checkpoints")), ZeroConfig(zero=zero)
    trainer = TorchTrainer(work, torch_config=zero, scaling_config=scaling, run_config=run)
    metrics = trainer.fit().metrics
    assert metrics["last"] < metrics["first"] - 1.0, metrics
    print(f"loss {metrics['first']:.2f} -> {metrics['last']:.2f}")
