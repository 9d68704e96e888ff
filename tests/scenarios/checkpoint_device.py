"""Under torchrun: torch.load without map_location puts every rank's copy on the device it was saved from."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from _mlp import batch, perceptron
from _report import Report, arguments
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def wait_for_all() -> None:
    """A barrier over gloo, whichever backend the device has."""
    dist.all_reduce(torch.zeros(1))


def main() -> None:
    args = arguments(__doc__, steps=6, twin="map_location is this rank's own device").parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    if args.device == "cuda":
        args.device = f"cuda:{rank}"
    report = Report(args)
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.device(args.device).type == "cuda" else "gloo")
    path = Path(tempfile.gettempdir()) / f"checkpoint-{os.environ['MASTER_PORT']}-{os.getppid()}.pt"
    model = perceptron().to(args.device)
    if rank == 0:
        torch.save(model.state_dict(), path)
    wait_for_all()
    weights = torch.load(path, map_location=args.device if args.clean else None, weights_only=True)
    model.load_state_dict(weights)
    if args.clean:
        del weights
    wait_for_all()
    if rank == 0:
        path.unlink()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    if report.wanted and report.device.type == "cuda":
        report.note(on_device_0=torch.cuda.memory_allocated(0))
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
    report.done()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
