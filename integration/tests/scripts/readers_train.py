"""A training script with DeepSpeed's interface, as readers of the documentation may have."""

import argparse

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed")
parser.add_argument("--deepspeed_config")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--local_rank", type=int)
args, _ = parser.parse_known_args()
config = args.deepspeed or args.deepspeed_config
if config is None:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
engine, *_ = deepspeed.initialize(model=model, config=config)
losses = []
for _ in range(args.epochs):
    batch = torch.ones(4, 8, device=engine.device)
    loss = engine(batch).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
assert losses[-1] < losses[0]
