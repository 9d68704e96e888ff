"""Ray Train's TorchTrainer: `gpumon run examples/ray_train.py`. The marked line adds figures to its reports."""

import sys

import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch import nn

import gpumon_agent


def train():
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device = ray.train.torch.get_device()
    for epoch in range(3):
        for _ in range(4):
            x, y = torch.randn(32, 64, device=device), torch.randint(10, (32,), device=device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        ray.train.report({"epoch": epoch, "loss": loss.item(), **gpumon_agent.figures()})  # the one line


class Print(ray.train.UserCallback):
    def after_report(self, run_context, metrics, checkpoint):
        print(metrics[0], flush=True)


TorchTrainer(
    train,
    scaling_config=ray.train.ScalingConfig(num_workers=1, use_gpu="--gpu" in sys.argv),
    run_config=ray.train.RunConfig(callbacks=[Print()]),
).fit()
