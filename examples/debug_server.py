"""DistributedDataParallel with torch's debug server: `torchrun --nproc-per-node 2 examples/debug_server.py`.

The marked line adds a page of gpumon's figures: http://localhost:25999/gpumon. On GPUs: `--backend nccl`.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.debug import start_debug_server, stop_debug_server
from torch.nn.parallel import DistributedDataParallel

import gpumon_agent.debug_server


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--port", type=int, default=25999)
    parser.add_argument("--dump-dir", help="of a text file every minute")
    parser.add_argument("--steps", type=int, default=1200)
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if args.backend == "nccl" else torch.device("cpu")
    if args.backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(args.backend)
    start_debug_server(
        args.port,
        start_method="spawn",
        dump_dir=args.dump_dir,
        enabled_dumps={"stacks", "gpumon"},
        handlers=gpumon_agent.debug_server.handlers(),  # the one line
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    for _ in range(args.steps):
        x = torch.randn(64 * (1 + rank), 256, device=device)
        loss = nn.functional.cross_entropy(ddp(x), torch.randint(10, (len(x),), device=device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
    dist.barrier()
    if rank == 0:
        stop_debug_server()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
