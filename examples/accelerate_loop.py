"""A loop on Accelerate: `gpumon run accelerate launch examples/accelerate_loop.py`.

The marked line adds figures to its tracker.
"""

import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gpumon_agent


class JsonLines(GeneralTracker):
    """Stands for TensorBoard, Weights & Biases and the others, which need packages of their own."""

    name = "jsonl"
    requires_logging_directory = False
    tracker = None

    def store_init_configuration(self, values):
        pass

    @on_main_process
    def log(self, values, step=None, **kwargs):
        with Path("log.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


torch.manual_seed(0)
accelerator = Accelerator(log_with=JsonLines())
accelerator.init_trackers("example")
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(32 * 12, 64), torch.randint(10, (32 * 12,))), batch_size=32)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for batch_idx, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        if batch_idx % 4 == 3:
            step = epoch * len(loader) + batch_idx
            accelerator.log({"loss": loss.item(), **gpumon_agent.figures()}, step=step)  # the one line
accelerator.end_training()
