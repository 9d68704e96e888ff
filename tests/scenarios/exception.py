"""An exception in forward or backward: caught, so that training goes on, or (--fatal) not."""

import torch
from _mlp import INPUTS, batch, perceptron
from _report import Report, arguments
from torch import Tensor, nn
from torch.nn import functional as F


class Refused(ValueError):
    """What the script itself raises."""


class RefuseGradient(torch.autograd.Function):
    """Identity, until its backward is told to refuse."""

    @staticmethod
    def forward(ctx, x, refuse):
        ctx.refuse = refuse
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.refuse:
            raise Refused("this gradient is not wanted")
        return gradient, None


class Fussy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, INPUTS)
        self.rest = perceptron()
        self.refuse = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.refuse == "forward":
            raise Refused("this batch is not wanted")
        return self.rest(RefuseGradient.apply(x, self.refuse == "backward"))


def main() -> None:
    parser = arguments(__doc__, steps=6)
    parser.add_argument("--where", choices=["forward", "backward"], default="forward")
    parser.add_argument("--fatal", action="store_true", help="do not catch it")
    args = parser.parse_args()
    report = Report(args)
    model = Fussy().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report("load")
    for step in range(args.steps):
        inputs, targets = batch(args.device)
        model.refuse = args.where if step % 3 == 1 else ""
        report("between")
        outputs = loss = None
        try:
            outputs = model(inputs)
            report("forward")
            loss = F.mse_loss(outputs, targets)
            loss.backward()
            report("backward")
        except Refused:
            if args.fatal:
                raise
            optimizer.zero_grad()
            continue
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        del inputs, targets, outputs, loss
    report.done()


if __name__ == "__main__":
    main()
