"""FSDP2 (fully_shard): a rank owns a shard of weights, gradients and optimizer state; --fake-world needs no peers."""

import os

import torch
import torch.distributed as dist
from _gpt import GPT, GPTConfig, batch, next_token_loss
from _report import Report, arguments
from torch.distributed.device_mesh import init_device_mesh

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before 2.6
    from torch.distributed._composable.fsdp import fully_shard


def main() -> None:
    parser = arguments(__doc__, steps=4)
    parser.add_argument(
        "--fake-world", type=int, metavar="N", help="be rank 0 of N with nobody there; only where NCCL needs no peers"
    )
    args = parser.parse_args()
    if args.device == "cuda":
        args.device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    device = torch.device(args.device)
    report = Report(args)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if args.fake_world:
        dist.init_process_group(backend, rank=0, world_size=args.fake_world, store=dist.HashStore())
    else:
        dist.init_process_group(backend)
    config = GPTConfig(layers=4, width=256, vocabulary=8192)
    with device:
        model = GPT(config)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if args.report:
        report.note(shards=[p.to_local().numel() for p in model.parameters()])
    report("load")
    for _ in range(args.steps):
        tokens, targets = batch(config, 2, device)
        report("between")
        logits = model(tokens)
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
