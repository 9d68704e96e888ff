"""An exponential moving average of the weights, kept as a second model on the device: exactly one more copy."""

import copy

import torch
from _mlp import batch, perceptron
from _report import Report, arguments
from torch.nn import functional as F


@torch.no_grad()
def update(average: torch.nn.Module, model: torch.nn.Module, decay: float = 0.999) -> None:
    for kept, current in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(current, 1 - decay)


def main() -> None:
    args = arguments(__doc__, steps=5, twin="no average").parse_args()
    report = Report(args)
    model = perceptron().to(args.device)
    average = None if args.clean else copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report("load")
    for _ in range(args.steps):
        inputs, targets = batch(args.device)
        report("between")
        outputs = model(inputs)
        report("forward")
        loss = F.mse_loss(outputs, targets)
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        if average is not None:
            update(average, model)
        del inputs, targets, outputs, loss
    report.done()


if __name__ == "__main__":
    main()
