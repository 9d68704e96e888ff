"""DistributedDataParallel under torchrun: without --bucket-view its buckets hold one more copy of every gradient."""

import os

import torch
import torch.distributed as dist
from _gpt import GPT, GPTConfig, batch, next_token_loss
from _report import Report, arguments
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = arguments(__doc__, steps=4)
    parser.add_argument(
        "--bucket-view", "--clean", action="store_true", dest="bucket_view", help="gradients are views into the buckets"
    )
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="nccl on cuda, else gloo")
    parser.add_argument("--large", action="store_true", help="six layers of GPT-2's width, 312.5 MiB of parameters")
    args = parser.parse_args()
    if args.device == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    device = torch.device(args.device)
    report = Report(args)
    dist.init_process_group(args.backend or ("nccl" if device.type == "cuda" else "gloo"))
    config = GPTConfig(vocabulary=50257, length=1024, layers=6, width=768, heads=12) if args.large else GPTConfig()
    with device:
        model = GPT(config)
    ddp = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=args.bucket_view,
    )
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-4)
    report("load")
    for _ in range(args.steps):
        tokens, targets = batch(config, 2, device, length=128)
        report("between")
        logits = ddp(tokens)
        report("forward")
        loss = next_token_loss(logits, targets)
        loss.backward()
        if report.wanted:
            data = ddp._get_ddp_logging_data()
            report.note(buckets=data.get("rebuilt_bucket_sizes") or data["bucket_sizes"], first=data["bucket_sizes"])
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        del tokens, targets, logits, loss
    report.done()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
