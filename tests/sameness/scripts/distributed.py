# same: cases=ddp,no_sync,hook,destroyed; on=cpu
"""Two processes that train together over gloo."""

import os
import socket
import sys
import time

import torch
import torch.distributed
import torch.multiprocessing
from same import bits, case, tell, watch
from torch.nn.parallel import DistributedDataParallel

kept = []  # to the end: with the model goes gloo's group, which joins its threads under the GIL that one may wait for


def work(rank, port, first):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    if rank == 0:
        first.value = os.getpid()  # not by a broadcast: its tensor can deadlock gloo's threads with Python at the end
    torch.distributed.barrier()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)))
    if case == "hook":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters())
    watch(model, optimizer)
    kept.append(model)
    for step in range(8):
        x = torch.randn(4, 8)
        if case == "no_sync" and step % 2 == 0:
            with model.no_sync():
                model(x).square().mean().backward()
            continue
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tell(f"loss of {rank}", loss.item().hex())
    tell(f"weights of {rank}", bits(model.module[0].weight))
    tell(
        f"logging data of {rank}",
        sorted(k for k, v in model._get_ddp_logging_data().items() if not isinstance(v, float)),
    )
    tell(f"names of {rank}", [n for n, _ in model.named_modules()])
    if case == "destroyed":
        torch.distributed.destroy_process_group()
        if rank == 1:
            try:
                while True:  # until the other has ended and was waited for
                    os.kill(first.value, 0)
                    time.sleep(0.01)
            except ProcessLookupError:
                sys.exit(3)
    else:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def main():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    try:
        first = torch.multiprocessing.Value("i", 0)
        torch.multiprocessing.start_processes(work, (port, first), 2, start_method="fork")
    except torch.multiprocessing.ProcessExitedException as error:
        tell("exited", [error.error_index, error.exit_code])


if __name__ == "__main__":
    main()
