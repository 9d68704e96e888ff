"""Lightning's Trainer with gpumon's callback: `gpumon run examples/lightning_trainer.py`, or without `gpumon run`."""

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gpumon_agent.lightning


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def data(rows):
    return DataLoader(TensorDataset(torch.randn(rows, 64), torch.randint(10, (rows,))), batch_size=32)


L.seed_everything(0, verbose=False)
trainer = L.Trainer(
    max_epochs=2,
    callbacks=[gpumon_agent.lightning.Callback()],  # the one line
    logger=CSVLogger("logs", name="", version=""),
    log_every_n_steps=4,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Net(), data(32 * 12), data(32 * 2))
