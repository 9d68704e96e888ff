"""Sequences of changing length: activations, and so the peak, follow the batch's shape."""

import torch
from _gpt import GPT, GPTConfig, batch, next_token_loss
from _report import Report, arguments

LENGTHS = (48, 96, 64, 128, 32, 80)


def main() -> None:
    args = arguments(__doc__, steps=12).parse_args()
    report = Report(args)
    config = GPTConfig()
    with torch.device(args.device):
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    report("load")
    for step in range(args.steps):
        tokens, targets = batch(config, 8, args.device, LENGTHS[step % len(LENGTHS)])
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


if __name__ == "__main__":
    main()
