"""The batch grows by the same number of samples each step until a 1 GiB device cannot hold it and training fails."""

import torch
from _mlp import INPUTS, OUTPUTS, perceptron
from _report import Report, arguments
from torch.nn import functional as F


def main() -> None:
    parser = arguments(__doc__, steps=60, twin="the batch stays as it is")
    parser.add_argument("--growth", type=int, default=2048, help="samples added each step (2048)")
    args = parser.parse_args()
    report = Report(args)
    model = perceptron().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report("load")
    for step in range(args.steps):
        size = args.growth * (1 if args.clean else step + 1)
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
