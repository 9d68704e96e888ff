"""One weight under two names: the output head is the token embedding, or (--untied) a weight of its own."""

import torch
from _gpt import GPT, GPTConfig, batch, next_token_loss
from _report import Report, arguments


def main() -> None:
    parser = arguments(__doc__, steps=5)
    parser.add_argument("--untied", action="store_true")
    args = parser.parse_args()
    report = Report(args)
    config = GPTConfig(tied=not args.untied)
    with torch.device(args.device):
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    report("load")
    for _ in range(args.steps):
        tokens, targets = batch(config, 4, args.device)
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
