"""Four ranks train one model, wrapped anew: over NCCL and gloo, with and without bucket views. Writes figures."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS, STEPS, PAUSE_S = 4, 9, 0.05


def requested() -> int:
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def train(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "GLOO_SOCKET_IFNAME": "lo"}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    groups = {"nccl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    with device:
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
        inputs = torch.zeros(16, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    step = 0
    for backend, group in groups.items():
        for view in (False, True):
            ddp = DistributedDataParallel(
                model, device_ids=[rank], process_group=group, gradient_as_bucket_view=view, bucket_cap_mb=2
            )
            for _ in range(STEPS):
                loss = ddp(inputs).square().mean()
                loss.backward()
                held = requested() - loss.nbytes
                optimizer.step()
                step += 1
                time.sleep(PAUSE_S)
                optimizer.zero_grad()
                del loss
            logged = ddp._get_ddp_logging_data()
            weights = sum(p.nbytes for p in model.parameters())
            told.append(
                {
                    "backend": backend,
                    "view": view,
                    "step": step - 1,
                    "weights": weights,
                    "beside": held - weights - inputs.nbytes,
                    "buckets": [int(size) for size in logged["rebuilt_bucket_sizes"].split(",")],
                    "first": [int(size) for size in logged["bucket_sizes"].split(",")],
                }
            )
            del ddp
            gc.collect()
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    dist.barrier(group=groups["gloo"])
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, (sys.argv[1],), nprocs=RANKS)
