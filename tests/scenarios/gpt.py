"""A small GPT in fp32, bf16 (autocast) or fp16 (autocast and GradScaler), gradients clipped, the rate scheduled."""

import torch
from _gpt import GPT, GPTConfig, batch, next_token_loss
from _report import Report, arguments
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    parser = arguments(__doc__, steps=5)
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    report = Report(args)
    device = torch.device(args.device)
    config = GPTConfig(layers=args.layers, width=args.width)
    with device:
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=args.steps)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    report("load")
    for _ in range(args.steps):
        tokens, targets = batch(config, args.batch, device)
        report("between")
        with torch.autocast(device.type, DTYPES[args.precision], enabled=args.precision != "fp32"):
            logits = model(tokens)
            report("forward")
            loss = next_token_loss(logits, targets)
        scaler.scale(loss).backward()
        report("backward")
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        report("optimizer")
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        del tokens, targets, logits, loss
    report.done()


if __name__ == "__main__":
    main()
