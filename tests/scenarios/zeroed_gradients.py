"""zero_grad(set_to_none=False): gradients of zeros stay through the next forward, one copy of the weights too many."""

import torch
from _mlp import batch, perceptron
from _report import Report, arguments
from torch.nn import functional as F


def main() -> None:
    args = arguments(__doc__, steps=50, twin="set_to_none=True, the default").parse_args()
    report = Report(args)
    model = perceptron().to(args.device)
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
        optimizer.zero_grad(set_to_none=args.clean)
        del inputs, targets, outputs, loss
    report.done()


if __name__ == "__main__":
    main()
