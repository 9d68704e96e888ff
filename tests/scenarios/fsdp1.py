"""FSDP1 (FullyShardedDataParallel): a rank owns shards of weights, gradients, state; --fake-world needs no peers."""

import os

import torch
import torch.distributed as dist
from _gpt import GPT, GPTConfig, batch, next_token_loss
from _report import Report, arguments
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


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
    unit = ModuleWrapPolicy({type(model.blocks[0])})
    model = FullyShardedDataParallel(model, auto_wrap_policy=unit, device_id=device, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if args.report:
        report.note(shards=[p.numel() for p in model.parameters()])
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
