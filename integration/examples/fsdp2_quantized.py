"""torch's FSDP2 with quantized communication by zero-comm, without the engine.

torchrun --nproc-per-node=2 integration/examples/fsdp2_quantized.py
"""

import argparse
import inspect
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zero_comm.fsdp2

WIDTH, CONTEXT, STEPS = 128, 8, 64


def make_model():
    first = [nn.Embedding(256, WIDTH // CONTEXT), nn.Flatten(), nn.Linear(WIDTH, WIDTH)]
    blocks = [nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    return nn.Sequential(*first, *blocks, nn.Linear(WIDTH, 256))


def main():
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    model = make_model().to(device)
    for part in (*model[3:-1], model):
        fully_shard(part, mesh=mesh)
    # FSDP2 code needs only this additional line.
    zero_comm.fsdp2.apply(model, weights="int8", gradients="int4")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    text = torch.tensor(list(inspect.getsource(argparse).encode()), device=device)
    windows = text.unfold(0, CONTEXT + 1, 1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        window = windows[torch.randint(len(windows), (64,), generator=generator)]
        loss = nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert last < first - 1.0, f"the loss went from {first:.2f} to {last:.2f}"
    if dist.get_rank() == 0:
        print(f"loss {first:.2f} -> {last:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
