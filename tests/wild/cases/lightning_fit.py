"""Lightning's Trainer: sanity check, validation, clipping, precision, accumulation, one or two devices, a checkpoint."""

import argparse

import _count
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--precision", default="32-true")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--clip", type=float)
parser.add_argument("--devices", type=int, default=1)
args = parser.parse_args()
L.seed_everything(0, verbose=False)


class Net(L.LightningModule):
    def __init__(self, width=512):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(784, 4 * width), nn.ReLU(), nn.Linear(4 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 10)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def data(rows):
    return DataLoader(TensorDataset(torch.randn(rows, 784), torch.randint(10, (rows,))), batch_size=64)


model = Net()
_count.root(model)
trainer = L.Trainer(
    accelerator="gpu",
    devices=args.devices,
    strategy="ddp" if args.devices > 1 else "auto",
    max_epochs=3,
    precision=args.precision,
    accumulate_grad_batches=args.accumulate,
    gradient_clip_val=args.clip,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir="out",
    num_sanity_val_steps=2,
)
trainer.fit(model, data(64 * 6 * args.accumulate * args.devices), data(128 * args.devices))
if trainer.is_global_zero:
    _count.said(f"steps {trainer.global_step}")
_count.write(rank=trainer.global_rank)
