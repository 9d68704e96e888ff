"""A gradient penalty: the gradient is itself part of the loss, so backward runs twice through one graph."""

import torch
from _report import Report, arguments
from torch import nn


def main() -> None:
    args = arguments(__doc__, steps=5).parse_args()
    report = Report(args)
    critic = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 1)).to(args.device)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4)
    report("load")
    for _ in range(args.steps):
        points = torch.randn(64, 512).to(args.device).requires_grad_()
        report("between")
        scores = critic(points)
        report("forward")
        (slope,) = torch.autograd.grad(scores.sum(), points, create_graph=True)
        report("backward")
        loss = scores.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        del points, scores, slope, loss
    report.done()


if __name__ == "__main__":
    main()
