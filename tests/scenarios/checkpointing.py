"""Activation checkpointing of every block, reentrant or not: less kept in forward, recomputed inside backward."""

import torch
from _gpt import GPT, GPTConfig, batch, next_token_loss
from _report import Report, arguments


def main() -> None:
    parser = arguments(__doc__, steps=5)
    parser.add_argument("--form", choices=["none", "reentrant", "non-reentrant"], default="non-reentrant")
    args = parser.parse_args()
    report = Report(args)
    config = GPTConfig(layers=6)
    with torch.device(args.device):
        model = GPT(config, checkpointing="" if args.form == "none" else args.form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    report("load")
    for _ in range(args.steps):
        tokens, targets = batch(config, 8, args.device)
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
