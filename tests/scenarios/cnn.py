"""A small residual network: convolutions, batch norms with their buffers, SGD with momentum."""

import torch
from _report import Report, arguments
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(out)))


class Net(nn.Module):
    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.stem(images))).mean((2, 3)))


def main() -> None:
    args = arguments(__doc__, steps=5).parse_args()
    report = Report(args)
    model = Net(channels=64, blocks=4).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    report("load")
    for _ in range(args.steps):
        images = torch.randn(16, 3, 32, 32).to(args.device)
        labels = torch.randint(10, (16,)).to(args.device)
        report("between")
        logits = model(images)
        report("forward")
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        del images, labels, logits, loss
    report.done()


if __name__ == "__main__":
    main()
