"""A vocabulary of 120,000 on a narrow model: the embedding owns almost every parameter."""

import torch
from _gpt import GPT, GPTConfig, batch, next_token_loss
from _report import Report, arguments


def main() -> None:
    args = arguments(__doc__, steps=10, twin="a vocabulary of 512").parse_args()
    report = Report(args)
    config = GPTConfig(vocabulary=512 if args.clean else 120_000, layers=2, width=128, length=32)
    with torch.device(args.device):
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    report("load")
    for _ in range(args.steps):
        tokens, targets = batch(config, 2, args.device)
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
