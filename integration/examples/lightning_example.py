"""Lightning at ZeRO stage 3 with optimizer states on the host: predict the next byte of a text.

python integration/examples/lightning_example.py

It uses all GPUs of the machine, or two CPU processes. On several machines add --nodes 2.
"""

import argparse
import inspect

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zero_engine.lightning  # noqa: F401, gives Lightning zero_stage_1 ... zero_stage_3_offload

WIDTH, CONTEXT = 128, 8


class ByteModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.losses = []

    def configure_model(self):  # a model created here is sharded before it takes memory
        first = [nn.Embedding(256, WIDTH // CONTEXT), nn.Flatten(), nn.Linear(WIDTH, WIDTH)]
        blocks = [nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
        self.net = nn.Sequential(*first, *blocks, nn.Linear(WIDTH, 256))

    def training_step(self, batch, batch_idx):
        (window,) = batch
        loss = nn.functional.cross_entropy(self.net(window[:, :-1]), window[:, -1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1)
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    windows = TensorDataset(text.unfold(0, CONTEXT + 1, 1)[: 128 * 64])
    model = ByteModel()
    trainer = L.Trainer(
        strategy="zero_stage_3_offload",
        devices="auto" if torch.cuda.is_available() else 2,
        num_nodes=parser.parse_args().nodes,
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(windows, batch_size=64, shuffle=True))
    first, last = sum(model.losses[:5]) / 5, sum(model.losses[-5:]) / 5
    assert last < first - 1.0, f"the loss went from {first:.2f} to {last:.2f}"
    if trainer.is_global_zero:
        print(f"loss {first:.2f} -> {last:.2f}")
