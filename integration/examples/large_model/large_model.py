"""Train a GPT-2 as large as this machine's memory, or disk, allows. A repeated start continues.

torchrun --nproc-per-node 2 integration/examples/large_model/large_model.py --size 4e6 --steps 12
"""

import argparse
import inspect
import math
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from wide_products import has_16_bit_products, widen_products

import zero_core
from zero_core.footprint import format_bytes
from zero_engine.launch.ranks import from_first_rank, join_ranks, leave_ranks
from zero_engine.machine import memory_limit_bytes, used_bytes

CONTEXT = 128
DEPTHS = {125e6: 12, 1.3e9: 24, 2.7e9: 32, 13e9: 40, 30e9: 48, 66e9: 64, 175e9: 96}


def shape_of(num_params):
    """Return a GPT-2 config of about ``num_params``, with the depth of GPT-3 (arXiv 2005.14165)."""
    depth = DEPTHS[min(DEPTHS, key=lambda known: abs(math.log(known / num_params)))]
    heads = math.ceil(math.sqrt(num_params / (12 * depth)) / 128)
    width = 128 * heads
    layers = math.ceil(num_params / (12 * width**2))
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": CONTEXT}
    return GPT2Config(**sizes, vocab_size=256, bos_token_id=None, eos_token_id=None)


def config_of(folder, width):
    """Return the engine's configuration. With a folder, values and states are in files there."""
    param, optimizer = {"device": "cpu"}, {"device": "cpu", "state_dtype": "int8"}
    if folder is not None:
        place = {"device": "nvme", "nvme_path": folder}
        # Each buffer must hold a block, or the parameters outside the blocks.
        param = {**place, "buffer_size": max(12 * width + 13, 256 + CONTEXT + 2) * width}
        optimizer |= place
    zero = {"stage": 3, "stage3_max_live_parameters": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "activation_checkpointing": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-4}},
        "zero_optimization": {**zero, "offload_param": param, "offload_optimizer": optimizer},
    }


def fits(shape, config, num_ranks, device):
    """Print the planned memory. Return whether this machine has enough, by rank 0's view."""
    kind = "cpu" if device.type == "cpu" else "accelerator"
    ids = torch.zeros(1, CONTEXT, dtype=torch.int64, device="meta")
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    plan = zero_core.plan(shape, config, num_ranks, example_inputs=inputs, device_type=kind)
    memory = plan.memory.host_bytes + plan.memory.device_bytes * (kind == "cpu")
    needed = num_ranks * (memory + used_bytes(torch.device("cpu")))
    place = config["zero_optimization"]["offload_param"]["device"]
    print(f"{plan.num_parameters:,} parameters, {place}: {format_bytes(needed)} in all")
    is_held = needed <= (memory_limit_bytes() or math.inf)
    return from_first_rank(str(is_held), device) == "True"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=float, default=350e6, help="parameters, as 2.2e9")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", help="on a disk, for what memory does not hold")
    parser.add_argument("--output", default="runs/large_model", help="folder for checkpoints")
    given = parser.parse_args()
    device, num_ranks = join_ranks(), int(os.environ.get("WORLD_SIZE", "1"))
    shape = shape_of(given.size)
    config = config_of(None, shape.n_embd)
    if not fits(shape, config, num_ranks, device):
        assert given.folder, "memory does not hold it: give --folder on a disk"
        config = config_of(given.folder, shape.n_embd)
        assert fits(shape, config, num_ranks, device), "choose a smaller --size"
    torch.manual_seed(0)
    with zero_core.deferred_init():  # no rank ever holds the whole model
        model = GPT2LMHeadModel(shape)
    if device.type == "cpu" and not has_16_bit_products():
        widen_products(model)
    engine = zero_core.build(model, config)
    text = list(inspect.getsource(argparse).encode())
    ids = torch.tensor(text).unfold(0, CONTEXT, CONTEXT)[engine.rank][None].to(device)
    checkpoints = os.path.join(given.output, f"{given.size:g}")  # a folder for each size
    first = (engine.resume(checkpoints) or {"step": 0})["step"]
    losses = []
    for _ in range(given.steps):
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    print(f"rank {engine.rank}, from step {first}: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    assert losses[-1] < losses[0]
    state = {"step": first + given.steps}
    engine.save_checkpoint(checkpoints, client_state=state, keep_last=1)
    engine.close()
    leave_ranks()


if __name__ == "__main__":
    main()
