"""A steady loop whose weights, gradients, optimizer state and batch fill almost the whole of a 1 GiB device."""

import torch
from _report import Report, arguments
from torch import nn
from torch.nn import functional as F

WIDTH = 3072
LAYERS = 3


def main() -> None:
    parser = arguments(__doc__, steps=20, twin="an eighth of the batch")
    parser.add_argument("--batch", type=int, default=1344)
    args = parser.parse_args()
    report = Report(args)
    size = args.batch // 8 if args.clean else args.batch
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    report("load")
    for _ in range(args.steps):
        inputs = torch.empty(size, WIDTH, device=args.device).normal_()
        report("between")
        outputs = model(inputs)
        report("forward")
        loss = F.mse_loss(outputs, inputs)
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        del inputs, outputs, loss
    report.done()


if __name__ == "__main__":
    main()
