"""Small batches, large layers: AdamW's foreach step needs one more copy of the weights, and that is the peak."""

import torch
from _report import Report, arguments
from torch import nn


def main() -> None:
    args = arguments(__doc__, steps=10, twin="fused=True").parse_args()
    report = Report(args)
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True if args.clean else None)
    report("load")
    for _ in range(args.steps):
        inputs = torch.randn(2, 2048).to(args.device)
        report("between")
        outputs = model(inputs)
        report("forward")
        loss = outputs.square().mean()
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        del inputs, outputs, loss
    report.done()


if __name__ == "__main__":
    main()
