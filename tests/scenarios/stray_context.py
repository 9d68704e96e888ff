"""Under torchrun: a rank that touches "cuda" before it chose its device leaves a context on device 0."""

import os

import torch
import torch.distributed as dist
from _mlp import batch, perceptron
from _report import Report, arguments, device_used
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

COUNTED = torch.zeros(1)
"""Kept to the end: gloo's thread, were it the last to hold it, would need the GIL to free it, and in torch 2.4 `ddp`
joins that thread with the GIL held as it frees the group: on a loaded machine a run in some twenty hung."""


def wait_for_all() -> None:
    """A barrier over gloo, whichever backend the device has."""
    dist.all_reduce(COUNTED)


def main() -> None:
    args = arguments(__doc__, steps=6, twin="choose the device first").parse_args()
    if args.device == "cuda":
        if not args.clean:
            torch.ones(1, device="cuda")
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    report = Report(args)
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.device(args.device).type == "cuda" else "gloo")
    model = perceptron().to(args.device)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    report("load")
    for _ in range(args.steps):
        inputs, targets = batch(args.device)
        report("between")
        outputs = ddp(inputs)
        report("forward")
        loss = F.mse_loss(outputs, targets)
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        del inputs, targets, outputs, loss
    wait_for_all()
    if report.wanted and report.device.type == "cuda":
        report.note(device_0=device_used("cuda:0"), own_reserved=torch.cuda.memory_reserved(args.device))
    report.done()
    wait_for_all()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
