"""A loop on Lightning Fabric: `gpumon run examples/fabric_loop.py`. The marked line adds figures to its logger."""

import lightning as L
import torch
from lightning.fabric.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gpumon_agent

L.seed_everything(0, verbose=False)
fabric = L.Fabric(loggers=CSVLogger("logs", name="", version=""))
fabric.launch()
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(32 * 12, 64), torch.randint(10, (32 * 12,))), batch_size=32)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
for epoch in range(2):
    for batch_idx, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        if batch_idx % 4 == 3:
            step = epoch * len(loader) + batch_idx
            fabric.log_dict({"loss": loss, **gpumon_agent.figures()}, step=step)  # the one line
for logger in fabric.loggers:
    logger.save()
