"""A two-layer perceptron in fp32 with AdamW: the smallest loop, every byte of it derived by hand in the tests."""

import torch
from _report import Report, arguments
from torch import nn
from torch.nn import functional as F


def main() -> None:
    args = arguments(__doc__, steps=5).parse_args()
    report = Report(args)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report("load")
    for _ in range(args.steps):
        inputs = torch.randn(32, 1024, device=args.device)
        targets = torch.randn(32, 1024, device=args.device)
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
