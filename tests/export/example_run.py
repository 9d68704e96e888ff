"""The training run behind the examples of docs/json.md: ten iterations, then a batch that needs more than there is."""

import time

import torch
from torch import nn

import gpumon_agent


def main() -> None:
    model = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    gpumon_agent.watch(model, optimizer)
    time.sleep(2)  # for the viewer to come
    for step in range(11):
        batch = torch.zeros(64 if step < 10 else 1 << 15, 2048, device="cuda")
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.25)


if __name__ == "__main__":
    main()
