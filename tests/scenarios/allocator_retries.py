"""Batches of changing size near the limit: cached blocks do not fit the next batch, so they are released."""

import random

import torch
from _mlp import INPUTS, OUTPUTS, perceptron
from _report import Report, arguments
from torch.nn import functional as F

LARGEST = 32 * 1024


def main() -> None:
    args = arguments(__doc__, steps=24, twin="every batch is padded to the largest").parse_args()
    report = Report(args)
    draw = random.Random(args.seed)
    model = perceptron().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report("load")
    for _ in range(args.steps):
        size = LARGEST if args.clean else draw.randint(LARGEST // 4, LARGEST)
        inputs = torch.empty(size, INPUTS, device=args.device).normal_()
        targets = torch.empty(size, OUTPUTS, device=args.device).normal_()
        report("between")
        outputs = model(inputs)
        report("forward")
        loss = F.mse_loss(outputs, targets)
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        del inputs, targets, outputs, loss
    report.done()


if __name__ == "__main__":
    main()
