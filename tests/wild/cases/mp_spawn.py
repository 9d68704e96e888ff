"""DistributedDataParallel started by torch.multiprocessing.spawn, as PyTorch's examples do; no torchrun."""

import os
import socket

import _count
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(rank, world, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)).to(
        rank
    )
    _count.root(model)
    model = DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(32 * 12 * world, 1024), torch.randint(10, (32 * 12 * world,)))
    sampler = DistributedSampler(data, world, rank)
    for epoch in range(1):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(rank)), y.to(rank))
            loss.backward()
            optimizer.step()
    if rank == 0:
        _count.said(f"loss {loss.item():.4f}")
    _count.write(rank=rank, pid=os.getpid())
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(main, (2, port), nprocs=2)
