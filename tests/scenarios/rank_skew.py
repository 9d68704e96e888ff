"""Under torchrun: the last rank's sequences are six times as long as those of other ranks, and its peak is higher."""

import os

import torch
import torch.distributed as dist
from _gpt import GPT, GPTConfig, batch, next_token_loss
from _report import Report, arguments
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    args = arguments(__doc__, steps=6, twin="equal lengths").parse_args()
    if args.device == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    report = Report(args)
    dist.init_process_group("nccl" if torch.device(args.device).type == "cuda" else "gloo")
    last = dist.get_rank() == dist.get_world_size() - 1
    length = 384 if last and not args.clean else 64
    config = GPTConfig(layers=2, width=128, vocabulary=2048, length=384)
    with torch.device(args.device):
        model = GPT(config)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-4)
    report("load")
    for _ in range(args.steps):
        tokens, targets = batch(config, 8, args.device, length)
        report("between")
        logits = ddp(tokens)
        report("forward")
        loss = next_token_loss(logits, targets)
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        del tokens, targets, logits, loss
    report.done()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
