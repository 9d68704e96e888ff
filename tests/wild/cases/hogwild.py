"""Hogwild: processes that update one model in shared memory of the host, each with a copy on its device."""

import os

import _count
import torch
import torch.multiprocessing as mp
from torch import nn


def build():
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def train(rank, shared):
    torch.manual_seed(rank)
    device = f"cuda:{rank}"
    torch.cuda.set_device(device)
    local = build().to(device)
    _count.root(local)
    optimizer = torch.optim.SGD(local.parameters(), lr=0.01, momentum=0.5)
    for _ in range(12):
        local.load_state_dict(shared.state_dict())
        x, y = torch.randn(64, 1024).to(device), torch.randint(10, (64,)).to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(local(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(local.parameters(), shared.parameters(), strict=True):
                theirs.copy_(mine)
    _count.write(rank=rank, pid=os.getpid())


if __name__ == "__main__":
    mp.set_start_method("spawn")
    shared = build().share_memory()
    workers = [mp.Process(target=train, args=(rank, shared)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    _count.said(f"codes {[worker.exitcode for worker in workers]}")
