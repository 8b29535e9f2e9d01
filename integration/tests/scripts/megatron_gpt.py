"""Trains a tiny GPT with the arguments of Megatron's scripts, as they use DeepSpeed.

Sizes of the arguments are those of a tutorial's model, and are printed, not used. Rank 0 writes
``result.json`` into the current folder.
"""

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS, VOCABULARY, LENGTH, WIDTH = 4, 32, 8, 16


def parse_arguments():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    sizes = parser.add_argument_group("sizes")
    for name in ("num-layers", "hidden-size", "num-attention-heads", "batch-size"):
        sizes.add_argument(f"--{name}", type=int, required=True)
    for name in ("model-parallel-size", "tensor-model-parallel-size", "seq-length", "zero-stage"):
        sizes.add_argument(f"--{name}", type=int, default=1)
    sizes.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    sizes.add_argument("--fp16", action="store_true")
    sizes.add_argument("--checkpoint-activations", action="store_true")
    sizes.add_argument("--deepspeed-activation-checkpointing", action="store_true")
    sizes.add_argument("--local_rank", type=int, default=None)
    return deepspeed.add_config_arguments(parser).parse_args()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        return x + self.inner(self.norm(x))


class Gpt(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.is_checkpointed = args.checkpoint_activations
        self.checkpoint = (
            deepspeed.checkpointing.checkpoint
            if args.deepspeed_activation_checkpointing
            else lambda block, x: checkpoint(block, x, use_reentrant=False)
        )

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = self.checkpoint(block, x) if self.is_checkpointed else block(x)
        logits = x @ self.embedding.weight.T
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
        )


def main():
    args = parse_arguments()
    deepspeed.init_distributed()
    if args.deepspeed_activation_checkpointing:
        deepspeed.checkpointing.configure(None, deepspeed_config=args.deepspeed_config)
    torch.manual_seed(0)
    model = Gpt(args)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=optimizer)
    rank, losses = deepspeed.comm.get_rank(), []
    ids = (torch.tensor([[2 * rank], [2 * rank + 1]]) + torch.arange(LENGTH)) % VOCABULARY
    for _ in range(STEPS):
        loss = engine(ids.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if rank == 0:
        found = {"losses": losses, "world_size": deepspeed.comm.get_world_size()}
        found["stage"] = engine.zero_optimization_stage()
        Path("result.json").write_text(json.dumps(found))
    engine.destroy()
    torch.distributed.destroy_process_group()


main()
