"""Gradients of several micro-batches accumulated before one optimizer step: forward and backward repeat in a step."""

import torch
from _gpt import GPT, GPTConfig, batch, next_token_loss
from _report import Report, arguments


def main() -> None:
    parser = arguments(__doc__, steps=5)
    parser.add_argument("--micro", type=int, default=4, help="micro-batches in a step (4)")
    args = parser.parse_args()
    report = Report(args)
    config = GPTConfig()
    with torch.device(args.device):
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    report("load")
    for _ in range(args.steps):
        for _ in range(args.micro):
            tokens, targets = batch(config, 2, args.device)
            report("between")
            logits = model(tokens)
            report("forward")
            loss = next_token_loss(logits, targets) / args.micro
            loss.backward()
            report("backward")
            del tokens, targets, logits, loss
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
    report.done()


if __name__ == "__main__":
    main()
