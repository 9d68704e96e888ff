"""A steady loop whose peak fills almost the whole of a 1 GiB device; it fits, and only just."""

import torch
from _mlp import INPUTS, OUTPUTS, perceptron
from _report import Report, arguments
from torch.nn import functional as F


def main() -> None:
    parser = arguments(__doc__, steps=20, twin="a quarter of the batch")
    parser.add_argument("--batch", type=int, default=32 * 1024)
    args = parser.parse_args()
    report = Report(args)
    size = args.batch // 4 if args.clean else args.batch
    model = perceptron().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report("load")
    for _ in range(args.steps):
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
