"""An embedding with sparse gradients, of only the rows looked up (--dense: of the whole table)."""

import torch
from _report import Report, arguments
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, BATCH, BAG = 50_000, 64, 256, 8


class Recommender(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.items = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        return self.score(self.items(items).mean(1)).squeeze(1)


def main() -> None:
    parser = arguments(__doc__, steps=5)
    parser.add_argument("--dense", action="store_true", help="an ordinary embedding")
    args = parser.parse_args()
    report = Report(args)
    model = Recommender(sparse=not args.dense).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report("load")
    for _ in range(args.steps):
        items = torch.randint(ROWS, (BATCH, BAG)).to(args.device)
        clicks = torch.rand(BATCH).to(args.device)
        report("between")
        scores = model(items)
        report("forward")
        loss = F.binary_cross_entropy_with_logits(scores, clicks)
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        del items, clicks, scores, loss
    report.done()


if __name__ == "__main__":
    main()
