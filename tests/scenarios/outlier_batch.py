"""One batch in twenty is eight times as long as the rest, and alone decides the peak."""

import torch
from _gpt import GPT, GPTConfig, batch, next_token_loss
from _report import Report, arguments

USUAL, OUTLIER = 64, 512


def main() -> None:
    args = arguments(__doc__, steps=50, twin="every batch as long as the rest").parse_args()
    report = Report(args)
    config = GPTConfig(layers=2, width=128, vocabulary=2048, length=OUTLIER)
    with torch.device(args.device):
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    report("load")
    for step in range(args.steps):
        length = OUTLIER if step % 20 == 15 and not args.clean else USUAL
        tokens, targets = batch(config, 8, args.device, length)
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
