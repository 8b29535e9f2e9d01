"""Train, save and resume with Lightning's DeepSpeedStrategy. Arguments: stage, folder."""

import sys

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy

SEEN = []  # the batches of each epoch, which Lightning shuffles


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])

    def training_step(self, batch, batch_idx):
        SEEN.append(batch)
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(epochs, folder, ckpt_path=None):
    data = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    strategy = DeepSpeedStrategy(stage=int(sys.argv[1]), process_group_backend="gloo")
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=ckpt_path)
    return trainer


first = fit(1, sys.argv[2])
first.save_checkpoint(f"{sys.argv[2]}/saved")
again = fit(2, sys.argv[2], ckpt_path=f"{sys.argv[2]}/saved")
assert again.global_step == 4, again.global_step
whole = fit(2, sys.argv[2])
plain = Model()
(optimizer,), (schedule,) = plain.configure_optimizers()
for batch in SEEN[-4:]:
    optimizer.zero_grad()
    plain.training_step(batch, 0).backward()
    optimizer.step()
    schedule["scheduler"].step()
for ours, theirs, expected in zip(
    again.strategy.deepspeed_engine.core.full_state_dict().values(),
    whole.strategy.deepspeed_engine.core.full_state_dict().values(),
    plain.state_dict().values(),
    strict=True,
):
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(ours, expected)
