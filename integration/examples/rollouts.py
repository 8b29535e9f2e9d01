"""Rollouts in another process, as for TRL or OpenRLHF, whose model is updated by weight patches.

torchrun --nproc-per-node=2 integration/examples/rollouts.py runs/rollouts
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context
from transformers import GPT2Config, GPT2LMHeadModel

import zero_core

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3},
    "weight_patches": {},  # the only key that patches need
}


def make_model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=128, n_head=4))


def rollouts(patches, texts):
    model, version = make_model().bfloat16().eval(), 0  # the same initial weights as the trainer's
    for path in iter(patches.get, None):
        version = zero_core.apply_patch(model, path, version=version)
        tokens = model.generate(torch.full((4, 8), version), min_length=32, max_length=32)
        texts.put((tokens, model.state_dict()))


def main(folder):
    os.makedirs(folder, exist_ok=True)
    dist.init_process_group()
    engine = zero_core.build(make_model(), CONFIG)
    tokens = torch.randint(256, (4, 32), device=engine.device)
    spawn = get_context("spawn")
    patches, texts = spawn.Queue(), spawn.Queue()
    if engine.rank == 0:
        spawn.Process(target=rollouts, args=(patches, texts), daemon=True).start()
    for path in [f"{folder}/patch-{number}.safetensors" for number in range(4)]:
        # A real program would use rewards.
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        patch = engine.weight_patch(since=engine.patch_version, path=path)
        expected = engine.full_state_dict(rank=0)
        if engine.rank == 0:
            patches.put(path)
            written, found = texts.get(timeout=300)
            tokens.copy_(written)
            assert all(torch.equal(found[name], value) for name, value in expected.items())
            print(f"version {patch.version}: {patch.nbytes} bytes, the same bits there")
        dist.broadcast(tokens, src=0)


if __name__ == "__main__":
    main(sys.argv[1])
