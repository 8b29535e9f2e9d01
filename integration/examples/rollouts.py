"""Rollouts from another process: a transformers model that follows a training by patches.

torchrun --nproc-per-node=2 integration/examples/rollouts.py runs/rollouts

The trainer is sharded at stage 3. Rank 0 starts the rollout process, which keeps a plain model, as
the inference side of TRL or OpenRLHF does. After every update it is sent a patch, and generates.
"""

import multiprocessing
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import zero_core

ROUNDS, STEPS = 4, 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3},
    "weight_patches": {},  # the one key
}


def make_model():
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=256, **ids))


def rollouts(patches, texts):
    """Generate after each patch, until there is none."""
    model = make_model().bfloat16().eval()
    version = 0  # the model that the trainer began with
    for path in iter(patches.get, None):
        version = zero_core.apply_patch(model, path, version=version)
        prompt = torch.full((4, 8), version)
        tokens = model.generate(prompt, max_new_tokens=16, do_sample=True)
        texts.put((tokens.tolist(), {n: v.float().numpy() for n, v in model.state_dict().items()}))


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    patches, texts = context.Queue(), context.Queue()
    if os.environ["RANK"] == "0":
        process = context.Process(target=rollouts, args=(patches, texts), daemon=True)
        process.start()
    dist.init_process_group()
    engine = zero_core.build(make_model(), CONFIG)
    nbytes = sum(2 * spec.numel for spec in engine.layout.params)
    tokens = [torch.randint(256, (4, 32)).tolist()]
    for number in range(ROUNDS):
        for _ in range(STEPS):  # a reward-weighted loss in earnest; here the tokens' likelihood
            batch = torch.tensor(tokens[0])
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
        path = folder / f"patch-{number}.safetensors"
        patch = engine.weight_patch(since=engine.patch_version, path=path)
        expected = engine.full_state_dict(rank=0)
        tokens = [None]
        if engine.rank == 0:
            patches.put(path)
            tokens[0], found = texts.get(timeout=300)
            for name, value in expected.items():
                assert torch.equal(torch.from_numpy(found[name]), value.float()), name
            share = f"{patch.nbytes} bytes, {patch.nbytes / nbytes:.1%} of the model"
            print(f"version {patch.version}: {share}; same bits")
        dist.broadcast_object_list(tokens)
    if engine.rank == 0:
        patches.put(None)
        process.join()
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
