"""A loss without the model's forward(): it is computed by model.encode(), and from the weights alone."""

import torch
from _gpt import GPT, GPTConfig, batch
from _report import Report, arguments


def main() -> None:
    args = arguments(__doc__, steps=5).parse_args()
    report = Report(args)
    config = GPTConfig()
    with torch.device(args.device):
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    report("load")
    for step in range(args.steps):
        tokens, _ = batch(config, 4, args.device)
        loss = model.head.weight.square().mean() if step % 2 else model.encode(tokens).square().mean()
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        del tokens, loss
    report.done()


if __name__ == "__main__":
    main()
