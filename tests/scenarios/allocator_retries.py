"""Growing batches near the edge: cudaMalloc fails, the cache is emptied, and it is tried again, step on step."""

import torch
from _mlp import INPUTS, OUTPUTS, perceptron
from _report import Report, arguments
from torch.nn import functional as F

STEP = 2048


def main() -> None:
    args = arguments(__doc__, steps=16, twin="the largest batch first, later ones fit what is cached").parse_args()
    report = Report(args)
    model = perceptron().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sizes = [STEP * (n + 1) for n in range(args.steps)]
    if args.clean:
        sizes.reverse()
    report("load")
    for size in sizes:
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
